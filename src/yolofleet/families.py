"""The table of model families: network, loss and default recipe."""

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
    """Return the family of ``description``."""
    return FAMILIES[description.family]


def outline(description: ModelDescription, nc: int) -> Detector:
    """Return the network on the meta device: names and shapes, without memory or random numbers.

    Raises:
        ConfigError: layers of the description do not fit together, or a number is out of range.
    """
    with torch.device("meta"):
        model = family_of(description).network(description, nc)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"model {description.name} has {parameters:,} parameters, at most {MAX_PARAMETERS:,} are possible",
            hint="use smaller multiples",
        )
    return model


def build_model(description: ModelDescription, nc: int, *, seed: int = 0) -> Detector:
    """Return the network with initial weights that depend only on the arguments.

    Raises:
        ConfigError: see :func:`outline`.
    """
    model = outline(description, nc).to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(seed))
    return model
