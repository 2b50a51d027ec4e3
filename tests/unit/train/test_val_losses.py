"""Losses of a validation: a term that it does not compute has no column, and so no chart."""

from types import SimpleNamespace
from typing import Any

from yolofleet.tasks.boxes.task import BOXES
from yolofleet.training import report


def test_a_term_that_a_validation_does_not_compute_is_left_out(monkeypatch) -> None:
    monkeypatch.setattr(report, "show_evaluation", lambda *_, **__: None)
    metrics = SimpleNamespace(figures={"P": 0.5, "R": 0.5, "mAP50": 0.5, "mAP50-95": 0.25})
    losses = {"cls": 0.5, "box": 0.25, "aux": 0.0, "denoise": 0.0}
    evaluation: Any = SimpleNamespace(task=BOXES, metrics=metrics, seconds={"wall": 1.0}, losses=losses)
    mine: Any = SimpleNamespace(world=SimpleNamespace(console=None), config=SimpleNamespace(verbose=False))
    row = report.TrainReport._evaluated(mine, evaluation)
    assert [name for name in row if name.startswith("val/")] == ["val/cls_loss", "val/box_loss"]
