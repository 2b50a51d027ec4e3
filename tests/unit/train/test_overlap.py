"""A validation in a thread: errors arrive in the main thread, progress is told, and a run that ends does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from commands import small_shapes

from yolofleet import Model
from yolofleet.inference.evaluate import run as evaluation
from yolofleet.inference.evaluate.batches import val_loader
from yolofleet.inference.evaluate.run import OnBatch, Validation
from yolofleet.support.errors import DataError
from yolofleet.training import validations as overlap_module
from yolofleet.training.validations import OverlappedValidation

DEADLINE_S = 900


class Part:
    """A rank's part of a validation, of batches that the test releases."""

    def __init__(self, on_batch: OnBatch, error: Exception | None = None) -> None:
        self.on_batch, self.error = on_batch, error
        self.release, self.left_out = threading.Event(), threading.Event()
        self.thread = ""

    def run(self) -> None:
        self.thread = threading.current_thread().name
        self.on_batch(1, 2)
        while not (self.release.wait(0.01) or self.left_out.is_set()):
            pass
        if self.error:
            raise self.error

    def gathered(self) -> str:
        assert threading.current_thread() is threading.main_thread()
        return "figures"

    def leave_out_rest(self) -> None:
        self.left_out.set()


def begun(error: Exception | None = None) -> tuple[OverlappedValidation, Part]:
    made: list[Part] = []

    def prepare(on_batch: OnBatch) -> Validation:
        made.append(Part(on_batch, error))
        return cast(Any, made[0])

    return OverlappedValidation(3, {}, prepare, torch.device("cpu")), made[0]


def test_the_main_thread_gathers_and_tells_the_watchdog_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_module, "WAIT_S", 0.01)
    overlapped, part = begun()
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        part.release.set()

    assert cast(Any, overlapped.result(tick)) == "figures"
    assert part.thread.startswith("validation") and ticks == [1]


def test_an_error_of_the_thread_is_raised_in_the_main_thread() -> None:
    overlapped, part = begun(DataError("an image cannot be read"))
    part.release.set()
    with pytest.raises(DataError, match="cannot be read"):
        overlapped.result(lambda: None)


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("error", [None, DataError("too late")])
def test_an_abandoned_validation_ends_early(error: Exception | None) -> None:
    overlapped, part = begun(error)
    ended: Callable[[], None] = overlapped.abandon
    ended()
    assert part.left_out.is_set() and not part.release.is_set()


def test_a_validation_beside_the_training_has_a_quarter_of_its_loader_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last validation of a run has all of them, because the training has ended."""
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []

    def spy(*arguments: Any, workers: int, **settings: Any) -> Any:
        seen.append(workers)
        return val_loader(*arguments, workers=workers, **settings)

    monkeypatch.setattr(evaluation, "val_loader", spy)
    Model("yolov5n").train(
        data=str(small_shapes(tmp_path, images=4, val_images=2)), img=64, batch=4, nominal_batch=4,
        epochs=2, workers=4, val_overlap=True, device="cpu", plots=False, threads=1,
    )  # fmt: skip
    assert seen == [1, 4]
