"""The pictures and the report page of a run (``--plots``). What cannot be drawn gives a note and does not end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.input.sample import MicroBatch
from yolofleet.inference.evaluate.figures import shared_sample, write_figures
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.page import write_report
from yolofleet.runs.report.plots import or_note, plot_labels, plot_pictures, plot_results, training_pictures
from yolofleet.training.parallel.world import World

SHOWN = 16  # images in a grid
PICTURED_STEPS = 3  # first steps with images of rank 0, whose first micro-batch is drawn


@dataclass
class RunPages:
    """Rank 0 draws. The other ranks give their part of the figures.

    Attributes:
        splits: the data indexes that have images, train first.
    """

    folder: RunFolder
    world: World
    clock: Clock
    splits: Sequence[DataIndex]
    _pictured: int = field(default=0, init=False)  # steps
    _validations: int = field(default=0, init=False)

    def begin(self, *, resumed: bool) -> None:
        """Draw the labels of the training images; a resumed run has its first pictures."""
        if resumed:
            self._pictured = PICTURED_STEPS
        elif self.world.is_main:
            with self._drawing():
                draw_labels(self.splits[0], self.folder.plots, self.world.console.note)
            or_note(self.world.console.note, self.folder.report_json, self._write_figures, None, None)

    def _drawing(self) -> AbstractContextManager[None]:
        return self.world.activity.doing("plots")

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Draw a micro-batch of the first steps."""
        if self.world.is_main and self._pictured < PICTURED_STEPS and micro_batches:
            self._pictured += 1
            draw_micro_batch(
                micro_batches[0], self.splits[0].names, self.folder.plots, self.world.console.note
            )

    def validated(self, evaluation: Evaluation) -> None:
        """Update report.json after some validations, for the board. Collective: every rank."""
        self._validations += 1
        # after 1, 2, 4, 8 ... of them: so few that the cost of a long run is bounded
        if self._validations.bit_count() == 1:
            self.share_figures(evaluation)

    def share_figures(self, evaluation: Evaluation | None) -> None:
        """Write report.json with a validation; without one do nothing. Collective: every rank."""
        if evaluation is None:
            return
        with self.clock("evaluate"):
            sample = shared_sample(evaluation, self.world)
            if self.world.is_main:
                or_note(
                    self.world.console.note, self.folder.report_json, self._write_figures, evaluation, sample
                )

    def _write_figures(self, evaluation: Evaluation | None, sample: Any) -> None:
        """Write the label statistics and, with the detections of a sample, a validation."""
        write_figures(self.folder, {index.split: index for index in self.splits}, evaluation, sample)

    def draw_end(self, evaluation: Evaluation | None) -> list[Path]:
        """Draw the curves of the run and its last validation; return the pictures for the loggers."""
        if not self.world.is_main:
            return []
        picture = self.folder.plots / "results.png"
        with self._drawing():
            or_note(self.world.console.note, picture, plot_results, self.folder.results_csv, picture)
            if evaluation is not None:
                draw_validation(evaluation, self.splits[-1], self.folder.plots, self.world.console.note)
        if evaluation is None:
            return []
        names = ("val_labels.jpg", "val_predictions.jpg", "confusion_matrix.png")
        return [path for name in names if (path := self.folder.plots / name).is_file()]

    def write_page(self) -> bool:
        """Write report.html on rank 0; return whether it is there."""
        with self._drawing():
            return self.world.is_main and or_note(
                self.world.console.note, self.folder.report, write_report, self.folder
            )


def draw_validation(
    evaluation: Evaluation, index: DataIndex, folder: Path, note: Callable[[str], None]
) -> None:
    """Draw a validation as its task does."""
    task, found, what = evaluation.task, evaluation.detections, f"the pictures of the validation in {folder}"
    or_note(note, what, task.plots, evaluation.metrics, found, index, folder, note)


def draw_labels(index: DataIndex, folder: Path, note: Callable[[str], None]) -> None:
    path = folder / "labels.png"
    or_note(note, path, plot_labels, index.classes, index.boxes_cxcywh_unit, index.names, path)


def draw_micro_batch(
    micro_batch: MicroBatch, names: Sequence[str], folder: Path, note: Callable[[str], None]
) -> None:
    """Draw images of a micro-batch with their labels, as the network sees them."""
    images = micro_batch.images_on(torch.device("cpu"))
    pictures = training_pictures(images, micro_batch.labels, most=SHOWN)
    path = folder / f"train_step{micro_batch.step}.jpg"
    or_note(note, path, plot_pictures, pictures, names, path)
