"""The table of model families: network, loss and default recipe.

A process imports the networks of Darknet and PP-YOLOE only if it builds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from yolofleet.config.schema import Recipe
from yolofleet.errors import ConfigError
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.families.yolov5.network import RowNetwork
from yolofleet.losses.loss import DetectionLoss
from yolofleet.models.description import CustomDescription, ModelDescription
from yolofleet.models.detector import AnchorDetector, Detector

MAX_PARAMETERS = 2_000_000_000
OF_ANCHORS = (
    "box",
    "cls",
    "cls_pw",
    "obj",
    "obj_pw",
    "anchor_t",
    "fl_gamma",
    "label_smoothing",
    "autobalance",
)
OF_PPYOLOE = ("cls_gain", "iou_gain", "dfl_gain", "assigner_switch")


@dataclass(frozen=True)
class Family:
    network: Callable[..., Detector]  # (description, nc)
    loss: Callable[..., DetectionLoss]  # (model, recipe, training size px)
    recipe_name: str  # default recipe
    fields: tuple[str, ...]  # hyperparameters that not every family has
    small_recipe: str = ""  # default recipe from weights on few images; "": none was measured


def anchor_loss(model: AnchorDetector, recipe: Recipe, img: int) -> DetectionLoss:
    return Yolov5Loss(
        anchors_px=model.anchors_px,
        strides=model.strides,
        nc=model.nc,
        recipe=recipe,
        img=img,
        codings=model.codings,
    )


def darknet_network(description: ModelDescription, nc: int) -> Detector:
    from yolofleet.families.darknet.cfg import DarknetDescription
    from yolofleet.families.darknet.network import DarknetNetwork

    assert isinstance(description, DarknetDescription)
    return DarknetNetwork(description, nc)


def ppyoloe_network(description: ModelDescription, nc: int) -> Detector:
    from yolofleet.families.ppyoloe.description import PpyoloeDescription
    from yolofleet.families.ppyoloe.network import PpyoloeNetwork

    assert isinstance(description, PpyoloeDescription)
    return PpyoloeNetwork(description, nc)


def ppyoloe_loss(model: Detector, recipe: Recipe, img: int) -> DetectionLoss:
    from yolofleet.families.ppyoloe.loss import PpyoloeLoss

    return PpyoloeLoss(
        strides=model.strides,
        cls_gain=recipe.cls_gain,
        iou_gain=recipe.iou_gain,
        dfl_gain=recipe.dfl_gain,
        assigner_switch=recipe.assigner_switch,
    )


CUSTOM: dict[
    str, Callable[[int], Detector]
] = {}  # networks of the recipe classes that this process has loaded


def custom_network(description: CustomDescription, nc: int) -> Detector:
    """Return the network of a user's ``TrainingRecipe``.

    Raises:
        ConfigError: this process has not loaded that class, or it returns something else.
    """
    if description.name not in CUSTOM:
        raise ConfigError(
            f"the network {description.name} is built by a recipe class, which must be named",
            hint=f"--recipe-class FILE.py:{description.name}",
        )
    model = CUSTOM[description.name](nc)
    if not isinstance(model, Detector):
        raise ConfigError(
            f"{description.name}.network returned {type(model).__name__}, expected a subclass of Detector"
        )
    model.description = description
    return model


def custom_loss(model: Detector, recipe: Recipe, img: int) -> DetectionLoss:
    if not isinstance(model, AnchorDetector):
        raise ConfigError(
            f"{model.description.name} has a network without anchors, and no method loss",
            hint="add the method loss, or make the network a subclass of AnchorDetector",
        )
    return anchor_loss(model, recipe, img)


FAMILIES = {
    "yolov5": Family(RowNetwork, anchor_loss, "scratch-low", OF_ANCHORS, "finetune"),  # and yolov3
    "darknet": Family(darknet_network, anchor_loss, "scratch-low", OF_ANCHORS),
    "ppyoloe": Family(ppyoloe_network, ppyoloe_loss, "ppyoloe-300e", OF_PPYOLOE),
    "custom": Family(custom_network, custom_loss, "scratch-low", OF_ANCHORS + OF_PPYOLOE),
}


def family_of(description: ModelDescription) -> Family:
    """Return the family of ``description``."""
    return FAMILIES[description.family]


def check_fields(description: ModelDescription, given: Mapping[str, str]) -> None:
    """Raise if a hyperparameter belongs to other families, because it would have no effect.

    Args:
        given: the source of each hyperparameter that the user set, by name.

    Raises:
        ConfigError: it names the families that have it.
    """
    own = family_of(description).fields
    for name in (name for name in given if name in OF_ANCHORS + OF_PPYOLOE and name not in own):
        owners = [family for family, each in FAMILIES.items() if name in each.fields and family != "custom"]
        raise ConfigError(
            f"{name} belongs to {' and '.join(owners)}, and {description.name} is of the family {description.family}",
            source=given[name],
            hint=f"leave it out; {description.family} has: {', '.join(own)}",
        )


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
