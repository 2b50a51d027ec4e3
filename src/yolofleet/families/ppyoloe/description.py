"""PP-YOLOE networks as data (arXiv:2203.16250): two multiples, the "plus" variant, and the normalisation of images.

Descriptions come from the table here and from headers of weights files, which are untrusted. No torch here.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from yolofleet.families.networks.checked import Checker, short

SIZES = {"s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}  # depth, width multiple

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

    name: str
    depth_multiple: float
    width_multiple: float
    plus: bool
    normalise: Normalisation | None

    family = "ppyoloe"

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :meth:`from_dict` reads them."""
        return {"family": self.family, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> PpyoloeDescription:
        """Check all values and return the description. Raise ConfigError, which names the wrong key and ``source``."""
        check = Checker(source)
        check.keys(values, ("family", *(field.name for field in fields(cls))))
        plus, normalise = check.flag("plus", values["plus"]), values["normalise"]
        if normalise is not None:
            check.keys(normalise, ("mean", "std"), owner="normalise")
            normalise = Normalisation(
                _rgb(check, "normalise.mean", normalise["mean"], -1000),
                _rgb(check, "normalise.std", normalise["std"], 1e-6),
            )
        depth, width = (
            check.number(key, values[key], 0.01, 10) for key in ("depth_multiple", "width_multiple")
        )
        return cls(check.name(values["name"]), depth, width, plus, normalise)


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
    """Return the built-in description of a name that :func:`canonical` knows."""
    known = canonical(name)
    assert known is not None, name
    depth, width = SIZES[known[-1]]
    plus = "plus" in known
    return PpyoloeDescription(known, depth, width, plus, None if plus else IMAGENET)


def _rgb(check: Checker, key: str, value: Any, low: float) -> Rgb:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise check.error(f"{key} is {short(value)}, expected 3 numbers")
    red, green, blue = (check.number(key, v, low, 1000) for v in value)
    return red, green, blue
