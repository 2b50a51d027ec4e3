"""The process of ``yolofleet tune``: it chooses trials, trains them on groups of devices, and writes the report.

The trials of a generation are chosen together, from the results of earlier generations only, and their results are told to the
study in the order of their numbers. So the trials do not depend on how many run at a time, on which one ends
first, or on when a process was killed. A resumed study goes on from these files, in this order:

1. ``study.journal``: trials that have ended, and the values of those that have not.
2. ``trials/NNN/results.json``: the trial has ended, and its result is read.
3. ``trials/NNN/checkpoints``: the training of the trial is resumed.
4. Otherwise the training of the trial begins again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from yolofleet.config.recipe import recipe_of
from yolofleet.config.resolve import Resolved, training_of
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.stored.job import dump_config
from yolofleet.config.stored.resume_options import options_to_repeat
from yolofleet.data.datasets.sources import is_generated, load_dataset
from yolofleet.data.input.cache import shared_memory
from yolofleet.families.family import Family
from yolofleet.families.networks.description import ModelDescription
from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.launch.machines import host_options, resume_options
from yolofleet.fleet.launch.plan import counted_fleet, is_worker, rehearse, with_commits, with_gpus_counted
from yolofleet.fleet.launch.run_on_hosts import check_hosts
from yolofleet.measure.tune.space import Space, Value, default_space, read_space
from yolofleet.measure.tune.study import Result, Study, Trial, TuneFolder, best_of, write_figures
from yolofleet.measure.tune.trials import PAUSE_S, DeviceGroup, TrialRun, base_arguments, local_groups
from yolofleet.runs.report.console import Console, NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import make_folder, write_text
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.support.errors import ConfigError, NumericsError, Stopped
from yolofleet.support.system.signals import handling, request_name
from yolofleet.support.terminal import duration
from yolofleet.support.text import quoted

POLL_S = 0.1
LOCK_WAIT_S = 120.0  # for processes of an earlier start that was killed
SHOWN_VALUES = 6  # in a line about a trial


@dataclass(frozen=True)
class TuneResult:
    """The result of a study.

    Attributes:
        best: the trial with the highest fitness.
        default_fitness: of the first trial, which has the values of the recipe; None: it failed.
        recipe: file of the best recipe, for ``--recipe``.
        importances: share of each value in the differences of fitness, the largest first.
    """

    folder: Path
    best: Trial
    default_fitness: float | None
    recipe: Path
    importances: Mapping[str, float]


def tune(config: Resolved[TuneConfig], recipe: Resolved[Recipe]) -> TuneResult:
    """Run a study to its end, or go on with the one that ``resume`` names.

    Args:
        config, recipe: as :func:`yolofleet.config.load.resolve_tune` returns them.

    Raises:
        Stopped: on a request to stop; the study can be resumed.
        ConfigError: a setting is wrong, Optuna is not installed, or several trials in a row failed.
        YolofleetError: another expected failure.
    """
    if is_worker():
        raise ConfigError(
            "tune starts its processes itself, but another launcher already started this one as one of several",
            hint="run the command once, without torchrun, srun or mpirun",
        )
    config = with_commits(config)
    training = training_of(config, TrainConfig)
    fleet, options = counted_fleet(training), tuple(resume_options(training.value))
    resumed = TuneFolder(Path(config.value.resume), options) if config.value.resume else None
    if resumed is None:
        rehearse(training, recipe)
    family, described = _network(training.value)
    recipe = recipe_of(recipe, family, described)
    if given := resumed.space if resumed else config.value.space:
        space = read_space(given, family)
    else:
        space = default_space(family)
    groups = _groups(config, fleet)
    if fleet is not None:
        check_hosts(training, fleet)
    elif not (is_generated(training.value.data) or training.value.recipe_class):
        load_dataset(training.value.data).sources("val")  # trials are compared by their accuracy
    folder = resumed or _new_folder(config, recipe, space, options)
    stop = StopSignals()
    with (
        RunFolder(folder.path).locked(),
        Console(folder.logs / "tune.log") as console,
        handling(stop.on_signal),
        shared_memory() as memory,
    ):
        c = config.value
        write_text(folder.config, dump_config(config, recipe))
        study = Study(folder.journal, space, c.seed, c.generation)
        return StudyRun(config, recipe.value, folder, study, groups, console, stop, memory).run()


def _network(config: TrainConfig) -> tuple[Family, ModelDescription]:
    """Return the family and the description of the network that the trials train.

    Raises:
        ConfigError: the code or the network cannot be read, or results.csv will lack a figure of the fitness.
    """
    from yolofleet.families.build import family_of
    from yolofleet.families.recipe_class import load_recipe_class
    from yolofleet.training.network import description_and_weights

    recipe_class = load_recipe_class(config.recipe_class)
    described = description_and_weights(config, None, recipe_class.description)[0]
    family = family_of(described)
    if family.task and (without := family.task.fitness_of.keys() - family.task.columns.values()):
        raise ConfigError(
            f"tune compares trials by results.csv, which has no column of {', '.join(sorted(without))}",
            source=f"the attribute columns of {type(family.task).__name__}",
            hint="add a column for each figure of fitness_of",
        )
    return family, described


def _new_folder(
    config: Resolved[TuneConfig], recipe: Resolved[Recipe], space: Space, options: tuple[str, ...]
) -> TuneFolder:
    settings = config.value
    made = RunFolder.create("tune", project=settings.project, name=settings.name)
    folder = TuneFolder(made.path, options)
    make_folder(folder.logs)
    write_text(folder.space, write_yaml({name: part.listed() for name, part in space.items()}))
    write_text(folder.recipe, write_yaml(recipe.value.model_dump(mode="json")))
    return folder


def _groups(config: Resolved[TuneConfig], fleet: Fleet | None) -> list[DeviceGroup]:
    if fleet is not None:  # a trial trains on all hosts, and its launcher finds their devices
        names = ", ".join(host.name for host in fleet.hosts)
        return [DeviceGroup(names, tuple(host_options(config.value)), has_hosts=True)]
    config = with_gpus_counted(config)
    gpus, cores = 0, os.cpu_count() or 1
    if config.value.device == "auto":
        from yolofleet.support.devices import ONLY_WHEN_NAMED, accelerator, device_count

        gpus = device_count() if accelerator() not in ("", *ONLY_WHEN_NAMED) else 0
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return local_groups(config.value, gpus, cores)


@dataclass
class StopSignals:
    """A request to stop by a signal.

    Attributes:
        source: of the request, or "".
        at_once: Ctrl-C came twice.
    """

    source: str = ""
    at_once: bool = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.at_once = self.at_once or (bool(self.source) and number == signal.SIGINT)
        self.source = self.source or request_name(number)


@dataclass
class StudyRun:
    """Runs the trials of a study on groups of devices."""

    config: Resolved[TuneConfig]
    recipe: Recipe
    folder: TuneFolder
    study: Study
    groups: list[DeviceGroup]
    console: NullConsole
    stop: StopSignals
    memory: Mapping[str, str]  # environment of trials on this machine: they share one cache of images
    waiting: list[TrialRun] = field(default_factory=list)
    running: list[TrialRun] = field(default_factory=list)
    ended: dict[int, Result] = field(default_factory=dict)  # results that the study does not know yet
    finished: int = 0  # trials, also of earlier starts
    failed_in_a_row: int = 0

    def run(self) -> TuneResult:
        """Run all trials. Raises as :func:`tune`."""
        self._begin()
        try:
            while True:
                self._poll()
                if not self.waiting and not self.running:
                    self._tell()
                if self.stop.source:
                    raise Stopped(
                        f"stopped on request; {self._count('open')} trials have not ended",
                        source=self.stop.source,
                        hint=self.folder.resume_command,
                    )
                if not self.waiting and not self.running:
                    self._choose()
                    if not self.waiting:
                        break
                self._start()
                time.sleep(POLL_S)
        finally:
            self._end_processes()
        return self._finish()

    # -- the trials of the study ---------------------------------------------------------------------

    def _begin(self) -> None:
        c, trials = self.config.value, self.study.trials()
        open_trials = [trial for trial in trials if trial.result.state == "open"]
        self.finished = len(trials) - len(open_trials)
        self.waiting = [self._run_of(trial) for trial in open_trials]
        for run in self.waiting:
            run.wait_for_last_process(LOCK_WAIT_S)
        self.console.header(
            "yolofleet tune",
            {
                "trials": f"{c.trials}, {self.finished} of them have ended",
                "values": ", ".join(self.study.space),
                "order": f"generations of {c.generation} trials, the same on all devices and after a resume",
                "devices": f"{len(self.groups)} trials at a time: "
                + ", ".join(dict.fromkeys(group.text for group in self.groups)),
                "results": str(self.folder.path),
            },
        )
        at_a_time = min(c.generation, c.trials)
        if at_a_time < len(self.groups):
            self.console.warn(
                f"{len(self.groups) - at_a_time} of {len(self.groups)} groups of devices have no work: "
                f"a generation has {at_a_time} trials (--generation)"
            )
        if c.reduce != "exact":
            self.console.note(
                f"--reduce {c.reduce}: figures of a trial are equal up to rounding, so other trials may follow elsewhere"
            )

    def _run_of(self, trial: Trial) -> TrialRun:
        log = self.folder.logs / f"trial-{trial.number:04}.log"
        base = base_arguments(self.config, self.folder.recipe)
        each_start = options_to_repeat(self.config.value)
        run = self.folder.trial(trial.number)
        return TrialRun(trial.number, trial.values, run, log, base, each_start, self.memory)

    def _choose(self) -> None:
        """Add the rest of a generation to the study; nothing after the last trial."""
        c, count = self.config.value, len(self.study.trials())
        for _ in range(min(self.study.first_of_generation(count) + c.generation, c.trials) - count):
            values = self.study.suggest() if self.study.trials() else self._recipe_values()
            self.waiting.append(self._run_of(self.study.add(values)))

    def _recipe_values(self) -> dict[str, Value]:
        """Return the values of the recipe that lie in the space; the first trial has them."""
        values = self.recipe.model_dump()
        return {name: values[name] for name, part in self.study.space.items() if values[name] in part}

    def _tell(self) -> None:
        """Tell the study results, in the order of numbers, and write the report. Raise ConfigError after too many failures."""
        if not self.ended:
            return
        trials = self.study.trials()
        for number in sorted(self.ended):
            self.study.tell(trials[number], self.ended[number])
            is_failure = self.ended.pop(number).state == "failed"
            self.failed_in_a_row = self.failed_in_a_row + 1 if is_failure else 0
            if self.failed_in_a_row >= self.config.value.failures:
                self._report()
                raise ConfigError(
                    f"the last {self.failed_in_a_row} trials failed, trial {number} with: "
                    f"{self.study.trials()[number].result.reason}",
                    source=str(self.folder.logs / f"trial-{number:04}.log"),
                    hint=f"narrow the space, or go on with: {self.folder.resume_command}",
                )
        self._report()

    # -- processes -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start waiting trials on free groups of devices."""
        now, free = time.monotonic(), list(self.groups)
        for run in self.running:
            if run.group is not None:
                free.remove(run.group)
        for run in [run for run in self.waiting if now >= run.starts_at_s]:
            if not free:
                return
            if run.folder.results_json.is_file() or self._is_pruned(run):
                self.waiting.remove(run)
                self._end(run)
                continue
            self.waiting.remove(run)
            run.start(free.pop(0), self.folder.resume_command)
            self.running.append(run)

    def _poll(self) -> None:
        """Look after the running trials."""
        self.console.progress("trials", self.finished, self.config.value.trials)
        for run in list(self.running):
            code = run.ended()
            if code is not None:
                self.running.remove(run)
                self._process_ended(run, code)
            elif run.has_new_figures() and self._is_pruned(run):
                run.stop()

    def _process_ended(self, run: TrialRun, code: int) -> None:
        """Record the result of a trial whose process has ended, or let the trial wait for another start."""
        if code == 0 or self._is_pruned(run):
            self._end(run)
        elif self.stop.source:
            self.waiting.append(run)
        elif run.record_failure(code):
            where = run.group.text if run.group is not None else "no device"
            self.console.warn(f"trial {run.number} on {where}: {run.reason(code)}; it is started again")
            run.starts_at_s = time.monotonic() + PAUSE_S
            self.waiting.insert(0, run)
        else:
            self._record(run, Result("failed", reason=run.reason(code)))

    def _result(self, run: TrialRun) -> Result:
        """Return the result of a trial by the figures in its folder.

        The rule of pruning reads them epoch by epoch, so it does not matter how far the trial has come meanwhile.
        """
        trial, curve = Trial(run.number, run.values, Result("open")), dict[int, float]()
        for epoch, best in run.curve():
            curve[epoch] = best
            if self.config.value.prune and self.study.is_pruned(trial, epoch, best, self.config.value.epochs):
                return Result("pruned", curve)
        if not curve:
            return Result("failed", reason="no epoch of it was validated")
        return Result("complete", curve)

    def _is_pruned(self, run: TrialRun) -> bool:
        return self._result(run).state == "pruned"

    def _end(self, run: TrialRun) -> None:
        self._record(run, self._result(run))

    def _record(self, run: TrialRun, result: Result) -> None:
        self.ended[run.number] = result
        self.finished += 1
        text = result.reason if result.state == "failed" else f"fitness {result.fitness:.4f}"
        if result.state == "pruned":
            text += f", stopped after epoch {max(result.curve)}"
        values = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in run.values.items()
        ]
        more = ", ..." if len(values) > SHOWN_VALUES else ""
        self.console.fact(
            f"trial {run.number}: {text}  ({duration(run.seconds)}; {', '.join(values[:SHOWN_VALUES])}{more})"
        )

    def _end_processes(self) -> None:
        """Stop all trials, and wait until they have saved; a second Ctrl-C ends them at once."""
        for run in self.running:
            run.stop()
        if self.running and self.stop.source:
            self.console.note("stopping after the current steps, then saving; Ctrl-C again ends at once")
        while any(run.process is not None and run.ended() is None for run in self.running):
            if self.stop.at_once:
                for run in self.running:
                    run.kill()
            time.sleep(POLL_S)

    # -- report --------------------------------------------------------------------------------------

    def _count(self, state: str) -> int:
        return sum(trial.result.state == state for trial in self.study.trials())

    def _report(self) -> None:
        """Write the figures so far, and delete the checkpoints of trials that have ended, and all weights but the best."""
        trials = self.study.trials()
        best = best_of(trials)
        write_figures(self.folder, trials, self.recipe, self.study)
        for trial in trials:
            if trial.result.state != "open":
                self._run_of(trial).discard_state(weights=trial is not best)

    def _finish(self) -> TuneResult:
        trials, importances = self.study.trials(), self.study.importances()
        best, default = best_of(trials), trials[0].result.fitness
        if best is None:
            raise NumericsError("no trial is complete", source=str(self.folder.table))
        self._report()  # an earlier start may have been killed before it wrote its last one
        if importances:
            self.console.table(
                "importance of the values",
                ("value", "importance", "recipe", "best"),
                [
                    (name, f"{share:.1%}", f"{getattr(self.recipe, name)}", f"{best.values.get(name, '')}")
                    for name, share in importances.items()
                ],
            )
        else:
            self.console.note(
                "no importances of the values: too few complete trials, or all have one fitness"
            )
        own = "failed" if default is None else f"{default:.4f}"
        self.console.summary(
            f"best of {len(trials)} trials: {best.number}, fitness {best.result.fitness:.4f}; the recipe's own values: {own}",
            {
                "recipe": f"{self.folder.best}   (yolofleet train --recipe {quoted(self.folder.best)})",
                "weights": str(self.folder.trial(best.number).weights / "best.safetensors"),
                "trials": f"{self.folder.table}: {self._count('complete')} complete, {self._count('pruned')} pruned, "
                f"{self._count('failed')} failed",
            },
        )
        return TuneResult(self.folder.path, best, default, self.folder.best, importances)
