"""The table of model families: the network of a description, its loss, and the recipe it was made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from yolofleet.config.schema import Recipe
from yolofleet.errors import ConfigError
from yolofleet.losses.loss import DetectionLoss
from yolofleet.losses.ppyoloe import PpyoloeLoss
from yolofleet.losses.yolov5 import Yolov5Loss
from yolofleet.models.darknet import DarknetNetwork
from yolofleet.models.description import ModelDescription
from yolofleet.models.detector import AnchorDetector, Detector
from yolofleet.models.ppyoloe import PpyoloeNetwork
from yolofleet.models.row_network import RowNetwork

MAX_PARAMETERS = 2_000_000_000


@dataclass(frozen=True)
class Family:
    network: Callable[..., Detector]  # (description, nc)
    loss: Callable[..., DetectionLoss]  # (model, recipe, training size px)
    recipe_name: str  # default recipe


def anchor_loss(model: AnchorDetector, recipe: Recipe, img: int) -> DetectionLoss:
    return Yolov5Loss(
        anchors_px=model.anchors_px,
        strides=model.strides,
        nc=model.nc,
        recipe=recipe,
        img=img,
        codings=model.codings,
    )


def ppyoloe_loss(model: PpyoloeNetwork, recipe: Recipe, img: int) -> DetectionLoss:
    return PpyoloeLoss(
        strides=model.strides,
        cls_gain=recipe.cls_gain,
        iou_gain=recipe.iou_gain,
        dfl_gain=recipe.dfl_gain,
        assigner_switch=recipe.assigner_switch,
    )


FAMILIES = {
    "yolov5": Family(RowNetwork, anchor_loss, "scratch-low"),
    "darknet": Family(DarknetNetwork, anchor_loss, "scratch-low"),
    "ppyoloe": Family(PpyoloeNetwork, ppyoloe_loss, "ppyoloe-300e"),
}


def family_of(description: ModelDescription) -> Family:
    """The family that ``description`` names."""
    return FAMILIES[description.family]


def outline(description: ModelDescription, nc: int) -> Detector:
    """A network on the meta device: names and shapes, neither memory nor random numbers.

    Raises:
        ConfigError: the description's parts do not fit together, or a number is out of range.
    """
    with torch.device("meta"):
        model = family_of(description).network(description, nc)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"model {description.name} has {parameters:,} parameters", hint="use smaller multiples"
        )
    return model


def build_model(description: ModelDescription, nc: int, *, seed: int = 0) -> Detector:
    """A network with starting weights that depend on nothing but the arguments.

    Raises:
        ConfigError: see :func:`outline`.
    """
    model = outline(description, nc).to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(seed))
    return model
