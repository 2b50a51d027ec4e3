"""Output of a training run: console, events, results, weights and plots.

Rank 0 writes the files of the run, and a rank on another disk writes copies of those that a resume needs. Every rank has
a clock, a log and an event stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from yolofleet import devices
from yolofleet.checkpoint.format import tensors_sha256
from yolofleet.checkpoint.names import name_of
from yolofleet.checkpoint.weights import Weights, WeightsHeader, write_weights
from yolofleet.config.schema import TrainConfig
from yolofleet.datasets.index import DataIndex
from yolofleet.datasets.overlap import overlap_notes
from yolofleet.errors import StorageError
from yolofleet.evaluate.gather import Evaluation
from yolofleet.evaluate.matching import ScoredBoxes
from yolofleet.extend.callbacks import Callbacks, RunStart, StepEnd
from yolofleet.files.atomic import write_json
from yolofleet.input.sample import MicroBatch
from yolofleet.models.description import pretrained_name
from yolofleet.parallel.world import World
from yolofleet.report.clock import PHASES, Clock, Times, slowest
from yolofleet.report.console import NullConsole, StepView
from yolofleet.report.events import EventLog
from yolofleet.report.figures import shared_sample, write_figures
from yolofleet.report.folder import RunFolder
from yolofleet.report.page import write_report
from yolofleet.report.plots import attempt, plot_results
from yolofleet.report.results import ResultsTable, numbers, read_rows
from yolofleet.report.validation import accuracy_text, evaluation_figures, show_data_notes, show_evaluation
from yolofleet.terminal import duration
from yolofleet.train.agreement import kernels
from yolofleet.train.pictures import draw_evaluation, draw_labels, draw_micro_batch
from yolofleet.train.schedule import StepPlan
from yolofleet.train.state import TrainState
from yolofleet.train.status import RunStatus

if TYPE_CHECKING:
    from yolofleet.report.loggers.running import Loggers

CHECKPOINT = "the last checkpoint"  # the name of its writing, for :meth:`TrainReport.saving`
MEASURED_STEPS = 100  # steps of this process before it predicts the end of the run
WRONG_END = 0.25  # share of the time that is left: a larger change of the predicted end is printed
PICTURED_STEPS = 3  # first steps with images of rank 0, whose first micro-batch is drawn


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
    """Reports the progress of ``train/loop.py`` of one rank.

    Attributes:
        terms: names of the loss terms.
        dataset_images: images of an epoch.
        callbacks: of this rank.
        loggers: of rank 0; None without --log.
        status: of the run, on rank 0 of a training.
        header: description of the model, for weights files.
        is_writer: this rank writes states, weights and results: rank 0, or a copy on another disk.
    """

    world: World
    config: TrainConfig
    terms: Sequence[str]
    dataset_images: int
    folder: RunFolder
    console: NullConsole
    events: EventLog
    clock: Clock
    callbacks: Callbacks
    loggers: Loggers | None
    status: RunStatus | None
    header: WeightsHeader
    is_writer: bool
    last_evaluation: Evaluation | None = None
    _refused: set[str] = field(default_factory=set)  # what the disk refused when it was last tried
    _unwritten: dict[str, Weights] = field(default_factory=dict)  # weights to write when the disk works again
    _rows: list[dict[str, float]] = field(default_factory=list)  # rows of results.csv, likewise
    _row: dict[str, float] = field(default_factory=dict)  # of the last epoch
    _ends_at_s: float = 0.0  # predicted; 0 = not yet
    _pictured: int = 0  # steps
    _before: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )  # seconds before the first step
    _overflows: int = 0  # steps of this epoch that fp16 has left out
    _validations: int = 0

    def __post_init__(self) -> None:
        self.table = ResultsTable(self.folder.results_csv, list(by_name(self.terms, [0.0] * len(self.terms))))
        self.draws = self.config.plots and self.world.is_main

    def begin(
        self,
        state: TrainState,
        index: DataIndex,
        val_index: DataIndex,
        *,
        facts: Mapping[str, str],
        settings: Sequence[tuple[str, str, str]],
        versions: Mapping[str, str],
        data_notes: Sequence[str],
        resumed: bool,
    ) -> None:
        """Print what will run where, and start the clock of the training.

        Args:
            facts: lines of the header, by name.
            settings: (name, value, source) of each setting that is not a default.
            resumed: the run continues from a checkpoint.
        """
        self.index, self.val_index = index, val_index
        self.devices = [replica.device for replica in state.replicas.all]
        labels = f"{len(index.classes)} labels, {len(index.names)} classes"
        data = f"{self.config.data}: {len(index)} images to train ({labels}), {len(val_index) or 'none'} to validate"
        if self.world.restarts:
            self.console.fact(f"started again as {facts['where']}")
        else:
            self.console.header(
                "yolofleet train", {"data": data, **facts, "results": str(self.folder.path)}, settings
            )
            if self.world.is_main:
                data_notes = [*data_notes, *overlap_notes(self._splits())]
            show_data_notes(self.console, data_notes, self._splits())
            if not len(val_index):
                self.console.note(UNVALIDATED)
        bits = kernels(self.world.device)
        self.events.write(
            "start",
            start_s=self.clock.epoch_so_far().seconds["start"],
            world=self.world.size,
            restarts=self.world.restarts,
            step=state.step,
            versions=versions,
            kernels=bits,
        )
        if resumed:
            epoch = min(state.images_seen // self.dataset_images + 1, self.config.epochs)
            self.console.fact(
                f"resumed after step {state.step} ({state.images_seen} images seen), in epoch {epoch}"
            )
        self.versions = versions
        self._pictured = PICTURED_STEPS if resumed else 0
        if self.is_writer:
            with self.saving("results.csv"):
                self.table.drop_after(state.progress.epochs_done)
                if self.loggers is not None:
                    self.loggers.begin(map(numbers, read_rows(self.table.path)) if resumed else ())
        if self.draws and not resumed:
            draw_labels(index, self.folder.plots, self.console.note)
            attempt(self.console.note, self.folder.report_json, self._write_figures)
        self._open_epoch(state.progress.epochs_done + 1)
        run = RunStart(
            folder=self.folder.path,
            settings=self.config.model_dump(mode="json"),
            names=index.names,
            rank=self.world.rank,
            ranks=self.world.size,
            step=state.step,
            epoch=state.progress.epochs_done,
            resumed=resumed,
            state=None,
        )
        self.callbacks.start(run, state)
        self.state = state
        self.clock.training()
        self._before = self.clock.run_so_far().seconds

    def _open_epoch(self, epoch: int) -> None:
        for device in self.devices:
            devices.reset_peak_memory(device)
        if epoch <= self.config.epochs:
            self.console.begin_epoch(epoch, self.config.epochs, self.dataset_images)

    def _note_first_step(self) -> None:
        """Write where the time until the end of the first step went. Waits for the device."""
        devices.synchronize(self.world.device)
        phases, activity = self.clock.run_so_far().seconds, self.world.activity
        data_s = phases["data"] - self._before["data"]
        step_s = sum(phases[phase] - self._before[phase] for phase in ("compute", "comm"))
        tasks = {task: spent_s for task, spent_s in activity.seconds.items() if task}
        seconds = {**tasks, "first batch": data_s, "first step": step_s}
        self.events.write("first_step", began_at_s=activity.began_at_s, seconds=seconds)

    def step(
        self,
        plan: StepPlan,
        mine: Sequence[MicroBatch],
        tally: Tensor,
        tally_images: int,
        own_images: int = 0,
        tally_own_images: int = 0,
    ) -> None:
        """Report a finished step. Reading the tally waits for the device, so only a shown line reads it.

        Args:
            tally_images: images of the epoch so far, of all ranks.
            own_images: images of the step on this rank.
            tally_own_images: images that ``tally`` is a sum over.
        """
        if self.draws and self._pictured < PICTURED_STEPS and mine:
            self._pictured += 1
            draw_micro_batch(mine[0], self.index.names, self.folder.plots, self.console.note)
        self.clock.step(plan.images, own_images)
        if self.clock.steps_here == 1:
            self._note_first_step()
        if self.clock.steps_here == MEASURED_STEPS and self.world.is_main:
            self._tell_end(plan)

        def view() -> StepView:
            # An estimate from this rank's part: all ranks get random samples of one shuffled stream.
            means = [value / tally_own_images for value in tally.tolist()] if tally_own_images else []
            return self._view(means, self.clock.epoch_so_far(), plan)

        self.console.step(tally_images, view)
        if self.status is not None and self.status.is_due:
            self._note_progress(self.status, plan)
        done = StepEnd(plan.step + 1, plan.end_image, plan.lr, lambda: view().losses)
        self.callbacks.step(done, self.state)

    def _left_s(self, plan: StepPlan) -> float:
        """Return the predicted seconds to the end of the run at its present rate, after the step ``plan``; 0: unknown.

        Each epoch that is left costs as much besides its steps as the last ones: validation and checkpoint.
        """
        times, images = self.clock.run_so_far(), self._images_left(plan)
        if images <= 0 or self.config.minutes or not times.rate_img_s > 0:
            return 0.0
        rest = (times.seconds["evaluate"] + times.seconds["checkpoint"]) / max(times.images, 1)
        return images * (1 / times.rate_img_s + rest)

    def _tell_end(self, plan: StepPlan) -> None:
        """Print when the run will end, if that is new or has changed; ``plan`` is the last step."""
        left_s = self._left_s(plan)
        ends_at_s = time.time() + left_s
        if not left_s or abs(ends_at_s - self._ends_at_s) <= WRONG_END * left_s:
            return
        words = "the run will end" if not self._ends_at_s else "corrected: the run will end"
        self._ends_at_s = ends_at_s
        self.console.fact(
            f"{words} in about {duration(left_s)}, {time.strftime('%a %H:%M', time.localtime(ends_at_s))}"
        )
        self.events.write("predicted_end", step=plan.step, seconds=left_s)

    def _images_left(self, plan: StepPlan) -> int:
        """Return the images of the run after the step ``plan``; ``--minutes`` may leave some out."""
        images, most = self.config.epochs * self.dataset_images - plan.end_image, self.config.max_steps
        return min(images, (most - plan.step - 1) * plan.images) if most else images

    def _note_progress(self, status: RunStatus, plan: StepPlan) -> None:
        """Put the figures of the step ``plan`` into the status of the run. It reads nothing from the device."""
        times, epoch_rate = self.clock.run_so_far(), self.clock.epoch_so_far().rate_img_s
        images, minutes = self._images_left(plan), self.config.minutes
        left_s = self._left_s(plan) or math.nan
        # the last step may have images of one more epoch
        share = min(plan.end_image / max(plan.end_image + images, 1), 1.0)
        if minutes:
            trained_s = times.elapsed_s - times.seconds["start"]
            left_s, share = max(60 * minutes - trained_s, 0.0), min(trained_s / (60 * minutes), 1.0)
        status.note(
            step=plan.step + 1,
            epoch=min(-(-plan.end_image // self.dataset_images), self.config.epochs),
            epochs=self.config.epochs,
            share=share,
            rate_img_s=times.rate_img_s if math.isnan(epoch_rate) else epoch_rate,
            ends_at_s=time.time() + left_s,
        )

    def takes_save_request(self) -> bool:
        """Return whether a user requested a save since the last call; only rank 0 knows."""
        return self.status is not None and self.status.take_save()

    def unreadable(self, why: str, count: int, most: int) -> None:
        """Report an image that cannot be read, for the first time; it is number ``count`` of at most ``most``."""
        self.console.warn(f"{why}: another image replaces it ({count} of at most {most})")
        if self.world.is_main:
            self.events.write("unreadable", why=why, count=count)

    def left_out(self, plan: StepPlan, rule: str, *, is_search: bool = False) -> None:
        """Report a step that changed nothing, because its gradient was not finite.

        Args:
            is_search: it is part of fp16's search for a loss scale; the console shows their number after each epoch.
        """
        self.events.write("left_out", step=plan.step, images=plan.images)
        self._overflows += is_search
        if not is_search:
            self.console.warn(f"the gradient of step {plan.step} is not finite: left out (--on-nan {rule})")

    def ends_in_time(self, step: int, last_step: int) -> None:
        """Report after ``step`` steps that ``--minutes`` has decided the last step."""
        rate = "" if step == last_step else "; the learning rate falls until then"
        self.console.note(f"--minutes {self.config.minutes:g}: the run ends after step {last_step}{rate}")
        self.events.write("ends_in_time", step=step, last_step=last_step)

    def rolled_back(self, why: str, state: TrainState) -> None:
        """Report that ``state`` is that of the newest checkpoint again, and remove the rows of later epochs."""
        self.console.warn(
            f"{why}: back to the checkpoint of step {state.step}, without the images of that step"
        )
        self.events.write("rollback", step=state.step, why=why)
        if self.is_writer:
            with self.saving("results.csv"):
                self.table.drop_after(state.progress.epochs_done)
        self._open_epoch(state.progress.epochs_done + 1)

    def _view(self, terms: Sequence[float], times: Times, plan: StepPlan) -> StepView:
        memory_gib = self._peak_memory_mib() / 1024
        losses = by_name(self.terms, terms) if terms else {}
        return StepView(losses, times, plan.lr, memory_gib, self._left_s(plan))

    def _peak_memory_mib(self) -> float:
        """Return the peak memory of this process's devices in the epoch, the largest of them; 0 if torch does not count it."""
        return max(devices.peak_memory_bytes(device) for device in self.devices) / 2**20

    @contextmanager
    def saving(self, what: str, *, is_last: bool = False) -> Iterator[None]:
        """Charge the block, which writes ``what``, to the phase ``checkpoint``.

        If the disk refuses, the training goes on and the next save tries again. The user is told once, and once more
        when everything is written.

        Args:
            is_last: no later save follows.
        Raises:
            StorageError: ``is_last``, and the disk of rank 0 refuses; it names all that is lost.
        """
        try:
            with self.clock("checkpoint"):
                yield
        except StorageError as problem:
            if not self._refused:
                again = "" if is_last else "; the training goes on, and the next save tries again"
                self.console.warn(f"{self.world.host}: {problem.what}{again}")
            # A checkpoint is written in the background, so its failure may not be known yet.
            self._refused |= {what} if is_last else {what, CHECKPOINT}
            if is_last and self.world.is_main:
                problem.what += f"; lost at the end of the run: {', '.join(sorted(self._refused))}"
                raise
        else:
            if what in self._refused:
                self._refused.remove(what)
                if not self._refused:
                    self.console.note(f"{self.world.host}: the disk works again, and everything is saved")

    def write_weights(
        self, name: str, state: TrainState, epoch: int, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the moving average, or ``weights``, to ``weights/<name>.safetensors``."""
        if self.is_writer:
            extra = {"epoch": epoch, "step": state.step, "images_seen": state.images_seen}
            self._unwritten[name] = Weights(
                dict(weights or state.weights()), replace(self.header, extra=extra)
            )
            self._write_unwritten()
            if name in self._unwritten:  # the next steps would change the tensors
                copies = {key: t.detach().cpu().clone() for key, t in self._unwritten[name].tensors.items()}
                self._unwritten[name] = replace(self._unwritten[name], tensors=copies)

    def _write_unwritten(self, *, is_last: bool = False) -> None:
        """Write weights and rows that are not on the disk yet."""
        for name in list(self._unwritten):
            with self.saving(f"weights/{name}.safetensors", is_last=is_last):
                file = self.folder.weights / f"{name}.safetensors"
                write_weights(file, self._unwritten[name])
                step = int(self._unwritten.pop(name).header.extra["step"])
                self.callbacks.call("save", file, step)
        if self._rows:
            with self.saving("results.csv", is_last=is_last):
                for row in self._rows:
                    self.table.write(row)
                self._rows.clear()

    def epoch(
        self, epoch: int, plan: StepPlan, terms: Sequence[float], evaluation: Evaluation | None
    ) -> None:
        """Report a finished epoch: console line, row of results.csv, table of a validation.

        Collective: every rank (the output has the slowest rank's times).
        """
        mine = {"times": asdict(self.clock.end_epoch()), "memory_mib": self._peak_memory_mib()}
        mine["host"] = self.world.host
        every = self.world.gather(mine)
        times = slowest(Times(**rank["times"]) for rank in every)
        memory_mib = max(rank["memory_mib"] for rank in every)
        if self.world.is_main:
            seconds = [[round(s, 3) for s in rank["times"]["seconds"].values()] for rank in every]
            self.events.write("phases", epoch=epoch, hosts=[rank["host"] for rank in every], seconds=seconds)
        self.console.end_epoch(self._view(terms, times, plan))
        losses = by_name(self.terms, terms)
        row: dict[str, float] = {
            "epoch": epoch,
            "step": plan.step + 1,
            "images": plan.end_image,
            **{f"train/{name}_loss": value for name, value in losses.items()},
            "lr": plan.lr,
            "seconds": times.elapsed_s,
            "images_per_s": times.rate_img_s,
            **{f"{phase}_share": times.share(phase) for phase in ("data", "compute", "comm")},
        }
        if memory_mib:
            row["device_memory_mib"] = memory_mib
        if evaluation is not None:
            row |= self._evaluated(evaluation)
        self.events.write("epoch", **row)
        self._row = row
        self._write_row()
        self.callbacks.call("epoch", epoch, dict(row))
        if evaluation is not None:
            self._tell_validation(epoch, evaluation)
        if self.status is not None:
            self._note_progress(self.status, plan)
        if self._overflows:
            self.console.note(f"fp16: {self._overflows} steps were left out, because a gradient overflowed")
            self._overflows = 0
        if self._ends_at_s:
            self._tell_end(plan)
        self._open_epoch(epoch + 1)

    def validated(self, epoch: int, evaluation: Evaluation) -> None:
        """Report a validation of the last epoch that overlapped with training."""
        self.console.note(f"validation of epoch {epoch}")
        if self._row.get("epoch") != epoch:  # the run was resumed in between
            self._row = {}
            with self.saving("results.csv"):
                cells = next((row for row in read_rows(self.table.path) if int(row["epoch"]) == epoch), {})
                self._row = numbers(cells)
            self._row |= {"epoch": epoch, "step": self._row.get("step", 0)}
        row = {"epoch": self._row["epoch"], "step": self._row["step"], **self._evaluated(evaluation)}
        self.events.write("validation", **row)
        self._row |= row
        self._write_row()
        self._tell_validation(int(self._row["epoch"]), evaluation)

    def _tell_validation(self, epoch: int, evaluation: Evaluation) -> None:
        figures = evaluation_figures(evaluation)
        self.callbacks.call("validation", epoch, figures["metrics"], figures["per_class"])
        self._validations += 1
        if self._validations & (self._validations - 1) == 0:  # 1, 2, 4, ...: a bounded cost for the board
            self._share_figures()

    def _share_figures(self) -> None:
        """Write report.json with the last validation of this process. Collective: every rank."""
        evaluation = self.last_evaluation if self.config.plots else None
        if evaluation is None:
            return
        with self.clock("evaluate"):
            sample = shared_sample(evaluation, self.world)
            if self.draws:
                attempt(self.console.note, self.folder.report_json, self._write_figures, sample)

    def _write_report(self) -> bool:
        """Write report.html if this rank draws; return whether it has."""
        return self.draws and attempt(self.console.note, self.folder.report, write_report, self.folder)

    def stopped(self) -> None:
        """Write the report of a run that a request stops. Collective: every rank."""
        self._share_figures()
        self._write_report()

    def checkpoint(self, step: int) -> None:
        """Report that the writing of a checkpoint begins."""
        if self.status is not None:
            self.status.note(saved_step=step)
        self.callbacks.call("save", self.folder.checkpoints / name_of(step), step)

    def _evaluated(self, evaluation: Evaluation) -> dict[str, float]:
        """Show the figures of an evaluation, and return them by column."""
        self.last_evaluation = evaluation
        show_evaluation(self.console, evaluation, per_class=self.config.verbose)
        metrics = evaluation.metrics
        return {
            "metrics/precision": metrics.figures["P"],
            "metrics/recall": metrics.figures["R"],
            "metrics/mAP50": metrics.map50,
            "metrics/mAP50-95": metrics.map50_95,
            "val_seconds": evaluation.seconds["wall"],
            **{f"val/{name}_loss": value for name, value in (evaluation.losses or {}).items()},
        }

    def _write_row(self) -> None:
        if self.is_writer:
            self._rows.append(self._row)
            self._write_unwritten()
        if self.loggers is not None:
            self.loggers.row(self._row)

    def ended_before(self, evaluation: Evaluation | None, limits: Sequence[str]) -> None:
        """Report that the resumed run had already ended, by the settings ``limits``, such as ``--max-steps 2``."""
        self.last_evaluation = evaluation
        flags = " and ".join(limit.partition(" ")[0] for limit in limits)
        self.console.note(
            f"the run had ended already, by {' and '.join(limits)} of {self.folder.path / 'config.yaml'}; "
            f"{flags} with a higher number continues it"
        )

    def finish(self, state: TrainState) -> None:
        """Write results.json, the plots and the report, and print the summary. Collective: every rank.

        Without plots, delete an older report: it lacks the epochs since then.
        """
        times = self.clock.run_so_far()
        hosts = sorted(set(self.world.gather(self.world.host)))
        self.events.write("end", step=state.step, seconds=times.seconds)
        self._share_figures()
        if not self.is_writer:
            return
        if self.draws:
            picture = self.folder.plots / "results.png"
            attempt(self.console.note, picture, plot_results, self.folder.results_csv, picture)
            if self.last_evaluation is not None:
                draw_evaluation(self.last_evaluation, self.val_index, self.folder.plots, self.console.note)
                if self.loggers is not None:
                    names = ("val_labels.jpg", "val_predictions.jpg", "confusion_matrix.png")
                    found = [path for name in names if (path := self.folder.plots / name).is_file()]
                    self.loggers.pictures(found, state.progress.epochs_done)
        sha256 = tensors_sha256(state.weights())
        figures = evaluation_figures(self.last_evaluation) if self.last_evaluation else {}
        results = {
            **figures,
            "weights_sha256": sha256,  # of names, shapes and bits of the last weights
            "best": {
                "epoch": state.progress.best_epoch,
                "fitness": state.progress.best_fitness if len(self.val_index) else None,
            },
            "steps": state.step,
            "images_seen": state.images_seen,
            "fleet": {"processes": self.world.size, "device": str(self.world.device), "hosts": hosts},
            "versions": self.versions,
            "seconds": times.seconds,
        }
        self._write_unwritten(is_last=True)
        with self.saving("results.json", is_last=True):
            write_json(self.folder.results_json, results)
        has_page = self._write_report()
        if not self.config.plots:
            self.folder.discard_report()
        accuracy = ""
        if self.last_evaluation is not None:
            accuracy = f": {accuracy_text(self.last_evaluation)}"
        epochs = state.progress.epochs_done
        best = f"epoch {state.progress.best_epoch}" if len(self.val_index) else "the last weights"
        if state.progress.best_fitness == 0:
            trained = pretrained_name(self.header.description)
            start = f", or from trained weights (--weights {trained})" if trained else ""
            self.console.note(f"nothing was detected yet: train longer (--epochs){start}")
        self.console.summary(
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

    def _splits(self) -> list[DataIndex]:
        """Return the indexes that have images: a training may have no val."""
        return [index for index in (self.index, self.val_index) if len(index)]

    def _write_figures(self, sample: ScoredBoxes | None = None) -> None:
        """Write the label statistics and, with the detections of a sample, the last validation."""
        splits = {index.split: index for index in self._splits()}
        write_figures(self.folder, splits, self.last_evaluation, sample)
