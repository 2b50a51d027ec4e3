"""The trials of a study: their values, results and files, and the choice of the next values by Optuna.

One process, ``yolofleet tune``, has the file open. It is Optuna's journal: one line of JSON for each
change. There is no pickle in it, and no state of a sampler: the values of trial n are a function of the seed, of n, and of
the trials that it may know (:meth:`Study.suggest`). So a study that was killed goes on with the same trials.
"""

from __future__ import annotations

import json
import shlex
import statistics
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from yolofleet.config.schema import Recipe
from yolofleet.config.stored.resume_study import STUDY
from yolofleet.measure.tune.space import Choices, Range, Space, Value
from yolofleet.runs.report.folder import Inside, RunFolder
from yolofleet.runs.report.results import read_rows
from yolofleet.storage.atomic import write_bytes, write_csv, write_json, write_text
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.support.errors import CheckpointError, ConfigError, StorageError, install_hint
from yolofleet.support.random_numbers import generator

MAX_JOURNAL_BYTES = 64 << 20  # 1,000 trials of 300 epochs have 45 MiB
NAME = "yolofleet"  # of the study in its file
State = Literal["open", "complete", "pruned", "failed"]
STATES: dict[str, State] = {"RUNNING": "open", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
REASON = "reason"
LEAST_FOR_MEDIAN = 4  # figures of earlier trials that a median needs
LEAST_FOR_IMPORTANCE = 4  # complete trials
WARMUP_SHARE = 1 / 3  # share of the epochs before the study prunes a trial


@dataclass(frozen=True)
class Result:
    """How a trial ended.

    Attributes:
        curve: highest fitness up to each epoch with a validation.
        reason: why it failed.
    """

    state: State
    curve: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def fitness(self) -> float | None:
        """The highest fitness; None for a trial that failed."""
        return None if self.state == "failed" else max(self.curve.values(), default=None)


@dataclass(frozen=True)
class Trial:
    """A trial of a study; ``result`` has the state ``open`` until the study was told another one."""

    number: int
    values: Mapping[str, Value]
    result: Result


class _NoLock:
    """A lock for Optuna that does nothing, because the lock of the folder keeps other processes away.

    Optuna's own lock is a link, which a killed process leaves behind.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "yolofleet tune needs Optuna, which is not installed", hint=install_hint("tune")
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Study:
    """The trials of a study, in a file.

    Args:
        file: is created if it does not exist.
        generation: trials that are chosen without knowing each other's results.

    Raises:
        ConfigError: Optuna is not installed. CheckpointError: the file is not a study; it is unchanged.
        StorageError: the disk refused.
    """

    def __init__(self, file: Path, space: Space, seed: int, generation: int) -> None:
        self._optuna = _optuna()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.space, self.seed, self.generation = space, seed, generation
        try:
            _drop_torn_line(file)
            self._storage = JournalStorage(JournalFileBackend(str(file), lock_obj=cast(Any, _NoLock())))
            studies = self._storage.get_all_studies()
            if not studies:
                self._storage.create_new_study([self._optuna.study.StudyDirection.MAXIMIZE], NAME)
            self._id = self._storage.get_study_id_from_name(NAME)
            self.trials()
        except StorageError:
            raise
        except Exception as problem:  # of Optuna, which expects files of its own
            why = getattr(problem, "strerror", None) or problem
            if not isinstance(problem, (OSError, ValueError)):
                why = f"{type(problem).__name__}: {problem}"
            raise CheckpointError(
                f"{file} is not a study that can be read: {why}", hint="start a new study"
            ) from None

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        trials = []
        for frozen in self._frozen():
            state, reason = STATES[frozen.state.name], str(frozen.user_attrs.get(REASON, ""))
            result = Result(state, frozen.intermediate_values, reason)
            trials.append(Trial(frozen.number, frozen.params, result))
        return trials

    def first_of_generation(self, number: int) -> int:
        """Return the number of the first trial of the generation of trial ``number``."""
        return number - number % self.generation

    def add(self, values: Mapping[str, Value]) -> Trial:
        """Add an open trial with these values, and return it."""
        with _quiet():
            frozen = self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState.RUNNING,
                params=dict(values),
                distributions={name: self._distributions()[name] for name in values},
            )
            self._storage.create_new_trial(self._id, template_trial=frozen)
        return self.trials()[-1]

    def tell(self, trial: Trial, result: Result) -> None:
        """Record how an open trial ended."""
        key = self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)
        for epoch, fitness in result.curve.items():
            self._storage.set_trial_intermediate_value(key, epoch, fitness)
        if result.reason:
            self._storage.set_trial_user_attr(key, REASON, result.reason)
        name = next(name for name, state in STATES.items() if state == result.state)
        values = None if result.fitness is None else [result.fitness]
        self._storage.set_trial_state_values(key, self._optuna.trial.TrialState[name], values)

    def suggest(self) -> dict[str, Value]:
        """Return values for the next trial.

        A tree-structured Parzen estimator (arXiv:2304.11127) proposes them from the trials of earlier generations. It
        avoids the values of the trials of its own generation, whose results it does not know.
        """
        optuna, frozen = self._optuna, self._frozen()
        number = len(frozen)
        first = self.first_of_generation(number)
        with _quiet():
            sampler = optuna.samplers.TPESampler(
                seed=int(generator(self.seed, "tune", number).random() * 2**32),
                n_startup_trials=self.generation,
                constant_liar=True,
            )
            known = optuna.create_study(direction="maximize", sampler=sampler)
            for other in frozen:
                known.add_trial(
                    other
                    if other.state.is_finished() and other.number < first
                    else optuna.trial.create_trial(
                        state=optuna.trial.TrialState.RUNNING,
                        params=other.params,
                        distributions=other.distributions,
                    )
                )
            drawn = known.ask(self._distributions()).params
        return {name: part.rounded(drawn[name]) for name, part in self.space.items()}

    def is_pruned(self, trial: Trial, epoch: int, best: float, epochs: int) -> bool:
        """Return whether to stop a trial after ``epoch``: the median stopping rule of Google Vizier.

        It compares the highest fitness so far with the median of those of complete trials at the same epoch, of earlier
        generations only.

        Args:
            best: highest fitness of the trial up to this epoch.
            epochs: of a whole trial.
        """
        if epoch <= epochs * WARMUP_SHARE or epoch >= epochs:
            return False
        first = self.first_of_generation(trial.number)
        others = [
            other.result.curve[epoch]
            for other in self.trials()
            if other.result.state == "complete" and epoch in other.result.curve and other.number < first
        ]
        return len(others) >= LEAST_FOR_MEDIAN and best < statistics.median(others)

    def importances(self) -> dict[str, float]:
        """Return the share of each value in the differences of fitness, the largest first; {} for too few trials.

        PED-ANOVA, arXiv:2304.10255.
        """
        frozen = [trial for trial in self._frozen() if trial.state.name == "COMPLETE"]
        if len(frozen) < LEAST_FOR_IMPORTANCE or len({trial.value for trial in frozen}) == 1:
            return {}
        with _quiet():
            study = self._optuna.create_study(direction="maximize")
            study.add_trials(frozen)
            evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
            found: dict[str, float] = self._optuna.importance.get_param_importances(
                study, evaluator=evaluator
            )
        return found

    def _frozen(self) -> list[Any]:
        return sorted(self._storage.get_all_trials(self._id), key=lambda trial: trial.number)

    def _distributions(self) -> dict[str, Any]:
        return {name: self._distribution(part) for name, part in self.space.items()}

    def _distribution(self, part: Range | Choices) -> Any:
        kinds = self._optuna.distributions
        if isinstance(part, Choices):
            return kinds.CategoricalDistribution(part.values)
        if isinstance(part.low, int):
            return kinds.IntDistribution(part.low, part.high, log=part.log)
        return kinds.FloatDistribution(part.low, part.high, log=part.log)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the highest fitness, of equal ones the first; None without one."""
    complete = [trial for trial in trials if trial.result.state == "complete"]
    return max(complete, key=lambda trial: (trial.result.fitness or 0.0, -trial.number), default=None)


def _drop_torn_line(file: Path) -> None:
    """Remove a last line without an end, which a machine that lost its power may leave. Optuna does not read on after it.

    Raises:
        OSError: the file is a link, larger than the limit, or cannot be read. ValueError: it is not a journal.
        StorageError: it cannot be written.
    """
    try:
        content = read_foreign(file, limit_bytes=MAX_JOURNAL_BYTES, follow=False)
    except FileNotFoundError:
        return
    whole, end, torn = content.rpartition(b"\n")
    if content and not end:
        raise ValueError("its only line has no end")
    first = json.loads(whole.partition(b"\n")[0]) if content else {"op_code": 0}
    if not isinstance(first, dict) or "op_code" not in first:
        raise ValueError("its first line is not that of Optuna's journal")
    if torn:
        write_bytes(file, whole + end)


@contextmanager
def _quiet() -> Any:
    """Suppress Optuna's warnings about features that may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class TuneFolder:
    """The folder of a study, and the paths in it.

    Attributes:
        resume_options: options that the command which resumes the study must repeat, because its files do not store them.
    """

    path: Path
    resume_options: tuple[str, ...] = ()

    config = Inside("config.yaml")
    journal = Inside(STUDY)
    space = Inside("space.yaml")
    recipe = Inside("recipe.yaml")  # the recipe that the trials change
    best = Inside("best.yaml")
    table = Inside("trials.csv")
    results = Inside("results.json")
    logs = Inside("logs")

    def trial(self, number: int) -> RunFolder:
        return RunFolder(self.path / "trials" / f"{number:04}")

    @property
    def resume_command(self) -> str:
        return shlex.join(["yolofleet", "tune", "--resume", str(self.path), *self.resume_options])


def write_figures(folder: TuneFolder, trials: Sequence[Trial], recipe: Recipe, study: Study) -> None:
    """Write ``trials.csv``, ``results.json`` and, when a trial is complete, ``best.yaml``.

    Args:
        recipe: the one that the trials change.
    Raises:
        StorageError: a file cannot be written.
    """
    names = list(study.space)
    rows: list[list[object]] = [["trial", "state", "fitness", "epochs", "seconds", "reason", *names]]
    for trial in trials:
        result, curve = trial.result, trial.result.curve
        values = {**recipe.model_dump(), **trial.values}
        rows.append(
            [
                trial.number,
                result.state,
                "" if result.fitness is None else f"{result.fitness:.6g}",
                max(curve, default=0),
                f"{_seconds(folder, trial):.1f}",
                result.reason,
                *(values[name] for name in names),
            ]
        )
    write_csv(folder.table, rows)
    best, default = best_of(trials), trials[0].result.fitness
    if best is None:
        return
    own = "failed" if default is None else f"{default:.6g}"
    heading = (
        f"# The best recipe of {len(trials)} trials of yolofleet tune: trial {best.number}, fitness {best.result.fitness:.6g}.\n"
        f"# Fitness of the recipe that the search began with: {own}.\n"
    )
    write_text(folder.best, heading + write_yaml({**recipe.model_dump(mode="json"), **best.values}))
    write_json(
        folder.results,
        {
            "trials": len(trials),
            "best": {"trial": best.number, "fitness": best.result.fitness, "values": dict(best.values)},
            "recipe_fitness": default,
            "importances": study.importances(),
        },
    )


def _seconds(folder: TuneFolder, trial: Trial) -> float:
    """Return the seconds of the epochs of a trial, on its devices."""
    rows = read_rows(folder.trial(trial.number).results_csv)
    return sum(float(row["seconds"]) for row in rows if row.get("seconds"))
