"""Write results and weights of a run; if the disk refuses, keep them and try again with the next save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.runs.checkpoint.names import RESULTS
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import OF_BOXES, ResultsTable, numbers, read_rows
from yolofleet.storage.atomic import is_deleted, write_json
from yolofleet.support.errors import StorageError
from yolofleet.training.parallel.world import World
from yolofleet.training.state import TrainState

if TYPE_CHECKING:
    from yolofleet.training.callbacks import Callbacks

CHECKPOINT = "the last checkpoint"  # the name of its writing, for :meth:`RunFiles.saving`


@dataclass
class RunFiles:
    """The files that one rank writes.

    Attributes:
        losses: names of the loss columns. columns: of the task's figures.
        header: description of the model, for weights files.
        is_writer: this rank writes; on other ranks the methods do nothing.
        describe: writes the files that a resume needs beside a state.
        problem: why the disk refuses now; "": it does not.
    """

    folder: RunFolder
    losses: Sequence[str]
    header: WeightsHeader
    is_writer: bool
    world: World
    clock: Clock
    callbacks: Callbacks | None
    columns: Iterable[str] = tuple(OF_BOXES.columns)
    describe: Callable[[], None] = lambda: None
    problem: str = ""
    _refused: set[str] = field(default_factory=set)  # what the disk refused when it was last tried
    _weights: dict[str, Weights] = field(default_factory=dict)  # to write when the disk works again
    _rows: list[Mapping[str, float]] = field(default_factory=list)  # likewise

    def __post_init__(self) -> None:
        self.table = ResultsTable(self.folder.results_csv, self.losses, self.columns)

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
                self.problem = f"{self.world.host}: {problem.what}"
                again = "" if is_last else "; the training goes on, and the next save tries again"
                self.world.console.warn(f"{self.problem}{again}")
            # A checkpoint is written in the background, so its failure may not be known yet.
            self._refused |= {what} if is_last else {what, CHECKPOINT}
            if is_last and self.world.is_main:
                problem.what += (
                    f"; not written there at the end of the run: {', '.join(sorted(self._refused))}"
                )
                raise
        else:
            if what in self._refused:
                self._refused.remove(what)
                if not self._refused:
                    self.problem = ""
                    self.world.console.note(
                        f"{self.world.host}: the disk works again, and everything is saved"
                    )

    def write_weights(
        self, name: str, state: TrainState, epoch: int, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the moving average, or ``weights``, to ``weights/<name>.safetensors``."""
        if not self.is_writer:
            return
        extra = {"epoch": epoch, "step": state.step, "images_seen": state.images_seen}
        self._weights[name] = Weights(dict(weights or state.weights()), replace(self.header, extra=extra))
        self._write_waiting()
        if name in self._weights:  # the next steps would change the tensors
            copies = {key: t.detach().cpu().clone() for key, t in self._weights[name].tensors.items()}
            self._weights[name] = replace(self._weights[name], tensors=copies)

    def renew(self, state: TrainState) -> None:
        """Write again what a resume needs beside a state, if the folder was deleted since the last save."""
        if not (self.is_writer and is_deleted(self.folder.config)):
            return
        with self.saving("config.yaml"):
            self.describe()
            if rows := self.table.rows:
                self.table.write(numbers(rows[-1]))
            self.world.console.warn(
                f"{self.folder.path} was deleted: what a resume needs is written again; older states, events and logs are "
                "lost, and best.safetensors may have later weights"
            )
        for name in ("best", "last"):
            if is_deleted(self.folder.weights / f"{name}.safetensors"):
                self.write_weights(name, state, state.progress.epochs_done)

    def write_row(self, row: Mapping[str, float]) -> None:
        """Write a row of results.csv; it replaces one of the same epoch."""
        if self.is_writer:
            self._rows.append(row)
            self._write_waiting()

    def _write_waiting(self, *, is_last: bool = False) -> None:
        """Write weights and rows that are not on the disk yet."""
        for name in list(self._weights):
            with self.saving(f"weights/{name}.safetensors", is_last=is_last):
                file = self.folder.weights / f"{name}.safetensors"
                write_weights(file, self._weights[name])
                step = int(self._weights.pop(name).header.extra["step"])
                if self.callbacks is not None:
                    self.callbacks.call("save", file, step)
        if self._rows:
            with self.saving(RESULTS, is_last=is_last):
                for row in self._rows:
                    self.table.write(row)
                self._rows.clear()

    def rows(self) -> list[dict[str, float]]:
        """Return the rows of results.csv."""
        with self.saving(RESULTS):
            return [numbers(row) for row in read_rows(self.table.path)]
        return []

    def drop_rows_after(self, epochs: int) -> None:
        """Remove the rows of later epochs from results.csv."""
        if self.is_writer:
            with self.saving(RESULTS):
                self.table.drop_after(epochs)

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write results.json, and all that waits.

        Raises:
            StorageError: the disk of rank 0 refuses.
        """
        self._write_waiting(is_last=True)
        with self.saving("results.json", is_last=True):
            write_json(self.folder.results_json, results)
