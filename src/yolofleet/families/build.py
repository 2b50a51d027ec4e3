"""Build the network of a description, and the loss of a network."""

from __future__ import annotations

import torch

from yolofleet.config.schema import Recipe
from yolofleet.families.family import Family, load
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.networks.detector import Detector
from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError

MAX_PARAMETERS = 2_000_000_000


def family_of(description: ModelDescription) -> Family:
    """Return the family of ``description``."""
    return FAMILIES[description.family]


def family_loss(model: Detector, recipe: Recipe, img: int) -> DetectionLoss:
    """Return the loss of the network's family.

    Args:
        img: training size, pixels.
    """
    loss: DetectionLoss = load(family_of(model.description).loss)(model, recipe, img)
    return loss


def outline(description: ModelDescription, nc: int) -> Detector:
    """Return the network on the meta device: names and shapes, without memory or random numbers.

    Raises:
        ConfigError: layers of the description do not fit together, or a number is out of range.
    """
    with torch.device("meta"):
        model = load(family_of(description).network)(description, nc)
    if not isinstance(model, Detector):
        raise ConfigError(
            f"{description.name}.network returned {type(model).__name__}, expected a subclass of Detector"
        )
    model.description = description
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
