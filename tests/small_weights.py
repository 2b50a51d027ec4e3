"""Weights files of networks that nobody has trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import Detector
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights


def untrained(classes: int | Sequence[str]) -> Detector:
    """Return yolov5n with so many classes, or with classes of these names; the weights are the same each time."""
    if isinstance(classes, int):
        return build_model(describe("yolov5n"), classes, seed=0)
    model = untrained(len(classes))
    model.names = tuple(classes)
    return model


def saved(model: Detector, path: Path, img: int = 64) -> Path:
    """Write a network as if it had been trained on images of ``img`` pixels; return the path."""
    write_weights(path, Weights(model.state_dict(), WeightsHeader.of(model, img=img)))
    return path
