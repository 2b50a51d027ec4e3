"""Report a training run: to the console, events, files, loggers, callbacks and the status of the run.

``run_files.py`` writes results and weights, ``pages.py`` draws, ``forecast.py`` predicts the end. Rank 0 writes the files
of the run, and a rank on another disk writes copies of those that a resume needs. Every rank has a clock, a log and an
event stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from yolofleet.config.schema import TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.listing import overlap_notes
from yolofleet.data.input.sample import MicroBatch
from yolofleet.families.networks.description import pretrained_name
from yolofleet.families.weights.format import tensors_sha256
from yolofleet.families.weights.value import WeightsHeader
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.summary import (
    accuracy_text,
    evaluation_figures,
    show_data_notes,
    show_evaluation,
)
from yolofleet.runs.checkpoint.names import name_of
from yolofleet.runs.report.clock import PHASES, Clock, Times, slowest
from yolofleet.runs.report.console import StepView
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog, numbers
from yolofleet.support import devices
from yolofleet.support.terminal import duration
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.task import Task
from yolofleet.training.advice import STEADIER, rise_in
from yolofleet.training.agreement import kernels
from yolofleet.training.forecast import MEASURED_STEPS, Forecast
from yolofleet.training.parallel.process import versions
from yolofleet.training.parallel.world import World
from yolofleet.training.run_files import RunFiles
from yolofleet.training.schedule import StepPlan
from yolofleet.training.slow_ranks import SlowRanks
from yolofleet.training.state import Tally, TrainState
from yolofleet.training.status import RunStatus

if TYPE_CHECKING:
    from pathlib import Path

    from yolofleet.runs.loggers.running import Loggers
    from yolofleet.training.callbacks import Callbacks
    from yolofleet.training.pages import RunPages


def by_name(terms: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the loss terms summed over levels: "box/0", "box/1", ... give "box"."""
    sums: dict[str, float] = {}
    for term, value in zip(terms, values, strict=True):
        name = term.split("/")[0]
        sums[name] = sums.get(name, 0.0) + value
    return sums


UNVALIDATED = "the data set has no val split: nothing is validated, --patience has no effect, and best.safetensors has the last weights"


@dataclass
class TrainReport:
    """Reports the progress of ``training/loop.py`` of one rank.

    Attributes:
        splits: the data indexes that have images: train, and val if the data set has it.
        callbacks: of this rank; None without --callbacks.
        loggers: of rank 0; None without --log.
        status: of the run, on rank 0 of a training.
        header: description of the model, for weights files.
        is_writer: this rank writes states, weights and results: rank 0, or a copy on another disk.
        pages: None without --plots.
    """

    world: World
    config: TrainConfig
    state: TrainState
    splits: Sequence[DataIndex]
    terms: Sequence[str]
    folder: RunFolder
    events: EventLog
    clock: Clock
    callbacks: Callbacks | None
    loggers: Loggers | None
    status: RunStatus | None
    header: WeightsHeader
    is_writer: bool
    task: Task = BOXES
    last_evaluation: Evaluation | None = None
    files: RunFiles = field(init=False)
    forecast: Forecast = field(init=False)
    pages: RunPages | None = field(init=False, default=None)
    _row: dict[str, float] = field(default_factory=dict)  # of the last epoch
    # seconds before the first step
    _before: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _overflows: int = 0  # steps of this epoch that fp16 has left out
    _slow_ranks: SlowRanks = field(default_factory=SlowRanks)
    _told: set[str] = field(default_factory=set)  # problems of other hosts that the user knows

    def __post_init__(self) -> None:
        losses, world, clock = list(by_name(self.terms, [0.0] * len(self.terms))), self.world, self.clock
        shared = (world, clock, self.callbacks, self.task.columns)
        self.files = RunFiles(self.folder, losses, self.header, self.is_writer, *shared)
        self.forecast = Forecast(self.config, self.dataset_images, clock)
        if self.config.plots:
            from yolofleet.training.pages import RunPages

            self.pages = RunPages(self.folder, world, clock, self.splits)

    @property
    def has_val(self) -> bool:
        return len(self.splits) > 1

    @property
    def dataset_images(self) -> int:
        """The images of an epoch."""
        return len(self.splits[0])

    def begin(
        self,
        *,
        facts: Mapping[str, str],
        settings: Sequence[tuple[str, str, str]],
        data_notes: Sequence[str],
        resumed: bool,
    ) -> None:
        """Print what will run where, and start the clock of the training.

        Args:
            facts: lines of the header, by name.
            settings: (name, value, source) of each setting that is not a default.
        """
        state, console, index = self.state, self.world.console, self.splits[0]
        if self.world.restarts:
            console.fact(f"started again as {facts['where']}")
        else:
            labels = f"{index.totals()['labels']} labels, {len(index.names)} classes"
            to_validate = len(self.splits[1]) if self.has_val else "none"
            data = f"{self.config.data}: {len(index)} images to train ({labels}), {to_validate} to validate"
            facts = {"data": data, **facts, "results": str(self.folder.path)}
            console.header("yolofleet train", facts, settings)
            if self.world.is_main:
                data_notes = [*data_notes, *overlap_notes(self.splits)]
            show_data_notes(console, data_notes, self.splits)
            if not self.has_val:
                console.note(UNVALIDATED)
        weights = {}
        if self.config.weights and self.world.is_main and not resumed:
            from yolofleet.training.start_facts import start_facts  # not for runs from scratch

            weights = {"weights": start_facts(self.config.weights)}
        self.events.write(
            "start",
            start_s=self.clock.epoch_so_far().seconds["start"],
            world=self.world.size,
            restarts=self.world.restarts,
            step=state.step,
            versions=versions(),
            kernels=kernels(self.world.device),
            data={index.split: index.digest for index in self.splits},
            data_images={index.split: len(index) for index in self.splits},
            **weights,
        )
        if resumed:
            epoch = min(state.images_seen // self.dataset_images + 1, self.config.epochs)
            console.fact(
                f"resumed after step {state.step} ({state.images_seen} images seen), in epoch {epoch}"
            )
        self.files.drop_rows_after(state.progress.epochs_done)
        if self.loggers is not None:
            self.loggers.begin(self.files.rows() if resumed else ())
        if self.pages is not None:
            self.pages.begin(resumed=resumed)
        self._open_epoch(state.progress.epochs_done + 1)
        if self.callbacks is not None:
            self.callbacks.start(
                state,
                folder=self.folder.path,
                settings=self.config.model_dump(mode="json"),
                names=index.names,
                rank=self.world.rank,
                ranks=self.world.size,
                step=state.step,
                epoch=state.progress.epochs_done,
                resumed=resumed,
            )
        if self.status is not None:
            self.status.note(task=self.task.judgement.stored())
        self.clock.training()
        self._before = self.clock.run_so_far().seconds

    def _open_epoch(self, epoch: int) -> None:
        for replica in self.state.replicas.all:
            devices.reset_peak_memory(replica.device)
        if epoch <= self.config.epochs:
            self.world.console.begin_epoch(epoch, self.config.epochs, self.dataset_images)

    def _note_first_step(self) -> None:
        """Write where the time until the end of the first step went. Waits for the device."""
        devices.synchronize(self.world.device)
        phases, activity = self.clock.run_so_far().seconds, self.world.activity
        data_s = phases["data"] - self._before["data"]
        step_s = sum(phases[phase] - self._before[phase] for phase in ("compute", "comm"))
        tasks = {task: spent_s for task, spent_s in activity.seconds.items() if task}
        seconds = {**tasks, "first batch": data_s, "first step": step_s}
        self.events.write("first_step", began_at_s=activity.began_at_s, seconds=seconds)

    def step(self, plan: StepPlan, mine: Sequence[MicroBatch], tally: Tally, own_images: int = 0) -> None:
        """Report a finished step. Reading the tally waits for the device, so only a shown line reads it.

        Args:
            own_images: images of the step on this rank.
        """
        if self.pages is not None:
            self.pages.step(mine)
        self.clock.step(plan.images, own_images)
        if self.clock.steps_here == 1:
            self._note_first_step()
        if self.clock.steps_here == MEASURED_STEPS and self.world.is_main:
            self.forecast.tell_end(plan, self.world.console, self.events)

        def view() -> StepView:
            return self._view(tally.own_means(), self.clock.epoch_so_far(), plan)

        self.world.console.step(tally.images, view)
        if self.status is not None and self.status.is_due:
            self.status.note(**self.forecast.progress(plan))
        if self.callbacks is not None:
            self.callbacks.step(plan, lambda: view().losses, self.state)

    def left_out(self, plan: StepPlan, rule: str, *, is_search: bool = False) -> None:
        """Report a step that changed nothing, because its gradient was not finite.

        Args:
            is_search: it is part of fp16's search for a loss scale; the console shows their number after each epoch.
        """
        self.events.write("left_out", step=plan.step, images=plan.images)
        self._overflows += is_search
        if not is_search:
            self.world.console.warn(
                f"the gradient of step {plan.step} is not finite: left out (--on-nan {rule})"
            )

    def ends_in_time(self, step: int, last_step: int) -> None:
        """Report after ``step`` steps that ``--minutes`` has decided the last step."""
        rate = "" if step == last_step else "; the learning rate falls until then"
        self.world.console.note(
            f"--minutes {self.config.minutes:g}: the run ends after step {last_step}{rate}"
        )
        self.events.write("ends_in_time", step=step, last_step=last_step)

    def out_of_patience(self, epoch: int) -> None:
        """Report that ``--patience`` ends the run after ``epoch`` epochs."""
        progress, patience = self.state.progress, self.config.patience
        best = (
            f"epoch {progress.best_epoch} is the best"
            if progress.best_fitness
            else "nothing was detected yet"
        )
        self.world.console.note(
            f"the run ends after epoch {epoch} of {self.config.epochs}: {best}, and --patience {patience} allows {patience} "
            f"epoch{'s' if patience > 1 else ''} without progress; {self.folder.resume_command} --patience 0 goes on"
        )
        if self.world.is_main:
            self.events.write("out_of_patience", epoch=epoch, best_epoch=progress.best_epoch)

    def rolled_back(self, why: str) -> None:
        """Report that the state is that of the newest checkpoint again, and remove the rows of later epochs."""
        state = self.state
        self.world.console.warn(
            f"{why}: back to the checkpoint of step {state.step}, without the images of that step"
        )
        self.events.write("rollback", step=state.step, why=why)
        self.files.drop_rows_after(state.progress.epochs_done)
        self._open_epoch(state.progress.epochs_done + 1)

    def _view(self, terms: Sequence[float], times: Times, plan: StepPlan) -> StepView:
        memory_gib = self._peak_memory_mib() / 1024
        losses = by_name(self.terms, terms) if terms else {}
        return StepView(losses, times, plan.lr, memory_gib, self.forecast.left_s(plan))

    def _peak_memory_mib(self) -> float:
        """Return the peak memory of this process's devices in the epoch, the largest of them; 0 if torch does not count it."""
        return max(devices.peak_memory_bytes(replica.device) for replica in self.state.replicas.all) / 2**20

    def epoch(
        self, epoch: int, plan: StepPlan, terms: Sequence[float], evaluation: Evaluation | None
    ) -> None:
        """Report a finished epoch: console line, row of results.csv, table of a validation.

        Collective: every rank (the output has the slowest rank's times).
        """
        times, memory_mib = self._slowest_rank(epoch)
        self.world.console.end_epoch(self._view(terms, times, plan))
        row: dict[str, float] = {
            "epoch": epoch,
            "step": plan.step + 1,
            "images": plan.end_image,
            **{f"train/{name}_loss": value for name, value in by_name(self.terms, terms).items()},
            "lr": plan.lr,
            "seconds": times.elapsed_s,
            "images_per_s": times.rate_img_s,
            **{f"{phase}_share": times.share(phase) for phase in ("data", "compute", "comm")},
            **({"device_memory_mib": memory_mib} if memory_mib else {}),
            **(self._evaluated(evaluation) if evaluation is not None else {}),
        }
        self.events.write("epoch", **row)
        self._write(row)
        # not from the disk, which may be full and yet be read
        risen, text = rise_in([numbers(one) for one in self.files.table.rows])
        if risen == epoch:
            self.world.console.warn(f"{text}: the training diverges; {STEADIER}")
        if self.callbacks is not None:
            self.callbacks.call("epoch", epoch, dict(row))
        if evaluation is not None:
            self._share_validation(epoch, evaluation)
        if self.status is not None:
            self.status.note(**self.forecast.progress(plan))
        if self._overflows:
            self.world.console.note(
                f"fp16: {self._overflows} steps were left out, because a gradient overflowed"
            )
            self._overflows = 0
        if self.forecast.ends_at_s:
            self.forecast.tell_end(plan, self.world.console, self.events)
        self._open_epoch(epoch + 1)

    def _slowest_rank(self, epoch: int) -> tuple[Times, float]:
        """Return the times of the slowest rank in the epoch, and the largest memory, MiB. Collective: every rank."""
        mine = {
            "spent": self.clock.spent()[:2],
            "times": asdict(self.clock.end_epoch()),
            "memory_mib": self._peak_memory_mib(),
        }
        every = self.world.gather({**mine, "host": self.world.host, "problem": self.files.problem})
        self._tell_lost_copies([rank["problem"] for rank in every])
        follows = self.config.shares == "auto"  # shares.py reports what it changes
        slow = {} if follows else self._slow_ranks.told([one["spent"] for one in every])
        for rank, slower in slow.items():
            what = f"rank {rank} on {every[rank]['host']} has become {slower:.0f} times slower"
            self.world.console.warn(f"{what}, and its share stays: --resume with --shares auto follows it")
        if self.world.is_main:
            seconds = [[round(s, 3) for s in rank["times"]["seconds"].values()] for rank in every]
            self.events.write("phases", epoch=epoch, hosts=[rank["host"] for rank in every], seconds=seconds)
        times = slowest(Times(**rank["times"]) for rank in every)
        return times, max(rank["memory_mib"] for rank in every)

    def _tell_lost_copies(self, problems: Sequence[str]) -> None:
        """Warn once about each other host whose disk refuses the copy of the run; ``problems``: of all ranks."""
        for problem in set(problems[1:]) - self._told - {""}:
            self._told.add(problem)
            self.world.console.warn(f"{problem}; the copy of the run there is not complete")

    def _write(self, row: dict[str, float]) -> None:
        self._row = row
        self.files.write_row(row)
        if self.loggers is not None:
            self.loggers.row(row)

    def validated(self, epoch: int, evaluation: Evaluation) -> None:
        """Report a validation of the last epoch that overlapped with training."""
        self.world.console.note(f"validation of epoch {epoch}")
        row = self._row
        if row.get("epoch") != epoch:  # the run was resumed in between
            stored = next((one for one in self.files.rows() if one.get("epoch") == epoch), {})
            row = {**stored, "epoch": epoch, "step": stored.get("step", 0)}
        figures = self._evaluated(evaluation)
        self.events.write("validation", epoch=epoch, step=row["step"], **figures)
        self._write(row | figures)
        self._share_validation(epoch, evaluation)

    def _share_validation(self, epoch: int, evaluation: Evaluation) -> None:
        """Tell callbacks and pages of a validation. Collective: every rank."""
        if self.callbacks is not None:
            figures = evaluation_figures(evaluation)
            self.callbacks.call("validation", epoch, figures["metrics"], figures["per_class"])
        if self.pages is not None:
            self.pages.validated(evaluation)

    def stopped(self) -> None:
        """Write the report of a run that a request stops. Collective: every rank."""
        if self.pages is not None:
            self.pages.share_figures(self.last_evaluation)
            self.pages.write_page()

    def checkpoint(self, step: int) -> None:
        """Report that the writing of a checkpoint begins."""
        if self.status is not None:
            self.status.note(saved_step=step)
        if self.callbacks is not None:
            self.callbacks.call("save", self.folder.checkpoints / name_of(step), step)

    def _evaluated(self, evaluation: Evaluation) -> dict[str, float]:
        """Show the figures of an evaluation, and return them by column."""
        self.last_evaluation = evaluation
        show_evaluation(self.world.console, evaluation, per_class=False)
        figures, columns = evaluation.metrics.figures, evaluation.task.columns
        return {
            **{column: max(figures[name], 0.0) for column, name in columns.items()},
            "val_seconds": evaluation.seconds["wall"],
            **{f"val/{name}_loss": value for name, value in (evaluation.losses or {}).items() if value},
        }

    def ended_before(self, evaluation: Evaluation | None, limits: Sequence[str]) -> None:
        """Report that the resumed run had already ended, by the settings ``limits``, such as ``--max-steps 2``."""
        self.last_evaluation = evaluation
        flags = " and ".join(limit.partition(" ")[0] for limit in limits)
        self.world.console.note(
            f"the run had ended already, by {' and '.join(limits)} of {self.folder.path / 'config.yaml'}; "
            f"{flags} with a higher number continues it"
        )

    def finish(self) -> None:
        """Write results.json, the plots and the report, and print the summary. Collective: every rank.

        Without plots, delete an older report: it lacks the epochs since then.
        """
        state, times = self.state, self.clock.run_so_far()
        every = self.world.gather((self.world.host, self.files.problem))
        hosts = sorted({host for host, _ in every})
        self._tell_lost_copies([problem for _, problem in every])
        self.events.write("end", step=state.step, seconds=times.seconds)
        pictures: list[Path] = []
        if self.pages is not None:
            self.pages.share_figures(self.last_evaluation)
            pictures = self.pages.draw_end(self.last_evaluation)
        if not self.is_writer:
            return
        if self.loggers is not None and pictures:
            self.loggers.pictures(pictures, state.progress.epochs_done)
        sha256 = tensors_sha256(state.weights())
        figures = evaluation_figures(self.last_evaluation) if self.last_evaluation else {}
        results = {
            **figures,
            "weights_sha256": sha256,  # of names, shapes and bits of the last weights
            "best": {
                "epoch": state.progress.best_epoch,
                "fitness": state.progress.best_fitness if self.has_val else None,
            },
            "steps": state.step,
            "images_seen": state.images_seen,
            "fleet": {"processes": self.world.size, "device": str(self.world.device), "hosts": hosts},
            "versions": versions(),
            "seconds": times.seconds,
        }
        self.files.renew(state)
        self.files.finish(results)
        has_page = self.pages is not None and self.pages.write_page()
        if self.pages is None:
            self.folder.discard_report()
        self._summarise(times, sha256, has_page=has_page)

    def _summarise(self, times: Times, sha256: str, *, has_page: bool) -> None:
        """Print the summary of the run."""
        state = self.state
        accuracy = ""
        if self.last_evaluation is not None:
            accuracy = f": {accuracy_text(self.last_evaluation)}"
        epochs = state.progress.epochs_done
        best, rows = "the last weights", self.files.rows()
        if self.has_val:
            epoch, counts = state.progress.best_epoch, self.task.fitness_of
            row = next((row for row in rows if row["epoch"] == epoch), {})
            names = {name: column for column, name in self.task.columns.items() if column in row}
            texts = [f"{name} {row[names[name]]:.3f}" for name in counts if name in names]
            best = ", ".join([f"epoch {epoch}", *texts])
        if state.progress.best_fitness == 0:
            trained = pretrained_name(self.header.description)
            start = f", or from trained weights (--weights {trained})" if trained else ""
            _, text = rise_in(rows)
            advice = (
                f"{text}, so the training diverged; {STEADIER}" if text else f"train longer (--epochs){start}"
            )
            self.world.console.note(f"nothing was detected yet: {advice}")
        self.world.console.summary(
            f"trained {f'{epochs} epoch' if epochs else 'a part of the first epoch'}{'s' if epochs > 1 else ''}, "
            f"{state.step} step{'s' if state.step != 1 else ''}, in {duration(times.elapsed_s)}{accuracy}",
            {
                "results": str(self.folder.path),
                "best": f"{self.folder.weights / 'best.safetensors'} ({best})",
                "last": str(self.folder.weights / "last.safetensors"),
                "sha256": sha256,
                **({"report": str(self.folder.report)} if has_page else {}),
            },
        )
