"""The table of model families: how to build a network, its loss, and the recipe it was made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from yolofleet.config.schema import Recipe
from yolofleet.errors import ConfigError
from yolofleet.losses.yolov5 import Yolov5Loss
from yolofleet.models.description import ModelDescription
from yolofleet.models.detection import DetectionModel, build_model


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[..., DetectionModel]  # (description, nc, *, seed)
    loss: Callable[[DetectionModel, Recipe, int], Yolov5Loss]  # (model, recipe, training size px)
    recipe_name: str  # default recipe


def _yolov5_loss(model: DetectionModel, recipe: Recipe, img: int) -> Yolov5Loss:
    return Yolov5Loss(anchors_px=model.anchors_px, strides=model.strides, nc=model.nc, recipe=recipe, img=img)


FAMILIES = {"yolov5": Family("yolov5", build_model, _yolov5_loss, "scratch-low")}


def family_of(description: ModelDescription) -> Family:
    """The family that ``description`` names.

    Raises:
        ConfigError: no such family.
    """
    if description.family not in FAMILIES:
        raise ConfigError(
            f"unknown model family {description.family!r}", hint=f"known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[description.family]
