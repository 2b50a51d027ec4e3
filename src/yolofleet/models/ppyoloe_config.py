"""PP-YOLOE networks as data (arXiv:2203.16250): two multiples, the "plus" variant, and the normalisation of images.

Descriptions come from the table here and from headers of weights files, which are untrusted. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yolofleet.errors import ConfigError
from yolofleet.models.checked import known_names, short

FAMILY = "ppyoloe"
SIZES = {"s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}  # depth, width multiple
KEYS = ("family", "name", "depth_multiple", "width_multiple", "plus", "normalise")

Rgb = tuple[float, float, float]


@dataclass(frozen=True)
class Normalisation:
    """Normalisation before the first layer: (image - mean) / std, for images in 0..1, RGB."""

    mean: Rgb
    std: Rgb


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class PpyoloeDescription:
    """A network without its number of classes.

    Attributes:
        depth_multiple, width_multiple: factors of the l model's numbers of blocks and channels.
        plus: the 1x1 branches of the backbone's re-parametrised blocks have a learned factor.
        normalise: None: no normalisation of images in 0..1.
    """

    family: str
    name: str
    depth_multiple: float
    width_multiple: float
    plus: bool
    normalise: Normalisation | None

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :meth:`from_dict` reads them."""
        normalise = self.normalise and {
            "mean": list(self.normalise.mean),
            "std": list(self.normalise.std),
        }
        return {
            "family": self.family,
            "name": self.name,
            "depth_multiple": self.depth_multiple,
            "width_multiple": self.width_multiple,
            "plus": self.plus,
            "normalise": normalise,
        }

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> PpyoloeDescription:
        """Check all values and return the description.

        Raises:
            ConfigError: names the wrong key and ``source``.
        """
        values = _exactly(KEYS, values, "a model description", source)
        family, name, plus, normalise = (values[key] for key in ("family", "name", "plus", "normalise"))
        if family != FAMILY:
            raise ConfigError(f"family is {short(family)}, expected {FAMILY}", source=source)
        if not isinstance(name, str) or len(name) > 200:
            raise ConfigError(
                f"name must be a text of at most 200 characters, not {short(name)}", source=source
            )
        if type(plus) is not bool:
            raise ConfigError(f"plus is {short(plus)}, expected true or false", source=source)
        if normalise is not None:
            pair = _exactly(("mean", "std"), normalise, "normalise", source)
            normalise = Normalisation(
                _rgb("normalise.mean", pair["mean"], -1000, source),
                _rgb("normalise.std", pair["std"], 1e-6, source),
            )
        depth, width = (
            _number(key, values[key], 0.01, 10, source) for key in ("depth_multiple", "width_multiple")
        )
        return cls(family, name, depth, width, plus, normalise)


# -- built-in --------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    return [f"ppyoloe-{plus}{size}" for plus in ("", "plus-") for size in SIZES]


def canonical(name: str) -> str | None:
    """Return the preset's name for ``name``, also in PaddleDetection's spellings; None if there is none.

    PaddleDetection writes ``ppyoloe_crn_s_300e_coco`` or ``ppyoloe_plus_s``.
    """
    match = re.fullmatch(
        r"pp-?yoloe(\+|-plus)?(-crn)?-([smlx])(-\d{1,3}e(-coco)?)?", name.lower().replace("_", "-")
    )
    return match and f"ppyoloe-{'plus-' if match[1] else ''}{match[3]}"


def preset(name: str) -> PpyoloeDescription:
    """Return a built-in description by name, in any spelling that :func:`canonical` knows.

    Raises:
        ConfigError: the name is unknown; the hint has the nearest known one.
    """
    known = canonical(name)
    if known is None:
        raise ConfigError(f"unknown model {short(name)}", hint=known_names(name, preset_names()))
    depth, width = SIZES[known[-1]]
    plus = "plus" in known
    return PpyoloeDescription(FAMILY, known, depth, width, plus, None if plus else IMAGENET)


# -- checking --------------------------------------------------------------------------------------------


def _exactly(keys: tuple[str, ...], values: Any, what: str, source: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what} must be a mapping, not {type(values).__name__}", source=source)
    for key in values:
        if key not in keys:
            raise ConfigError(f"{what}: unknown key {short(key)}", source=source, hint=known_names(key, keys))
    for key in keys:
        if key not in values:
            raise ConfigError(f"{what}: key {key} is missing", source=source)
    return values


def _number(key: str, value: Any, low: float, high: float, source: str) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        raise ConfigError(f"{key} is {short(value)}, expected a number in {low:g}..{high:g}", source=source)
    return float(value)


def _rgb(key: str, value: Any, low: float, source: str) -> Rgb:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ConfigError(f"{key} is {short(value)}, expected 3 numbers", source=source)
    red, green, blue = (_number(key, v, low, 1000, source) for v in value)
    return red, green, blue
