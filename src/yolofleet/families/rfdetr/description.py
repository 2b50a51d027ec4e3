"""RF-DETR networks as data (arXiv:2511.09554). No torch here.

Descriptions come from the table here and from headers of weights files, which are untrusted.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from yolofleet.families.networks.checked import Checker, short

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLING_HEADS = 16  # of the attention to the map; that of the queries has 8
MASK_STRIDE = 4  # pixels of a cell of the masks
RECIPES = ("rfdetr", "rfdetr-few")


@dataclass(frozen=True)
class RfdetrDescription:
    """A network without its number of classes.

    Attributes:
        patch: side of a patch, pixels; the map has a cell for each.
        windows: along each side of the image. Most blocks of the backbone attend within a window.
        positions: side of the grid of learned positions, which other image sizes resample.
        blocks: of the backbone.
        taps: numbers of the blocks whose results the map joins, counted from 1, ascending. The block after each of them, where
            there is one, attends to the whole image.
        backbone_width, backbone_heads: of the backbone's tokens, and of its attention.
        decoder_width, decoder_feedforward: channels of the map and of the queries, and between the linear layers of a layer.
        layers: of the decoder.
        queries: predictions of an image.
        groups: of queries in training; each group is matched with all labels.
        mask_width: channels of the head of masks, ``decoder_width``; 0: the network finds boxes alone.
    """

    name: str
    patch: int
    windows: int
    positions: int
    blocks: int
    taps: tuple[int, ...]
    backbone_width: int
    backbone_heads: int
    decoder_width: int
    decoder_feedforward: int
    layers: int
    queries: int
    groups: int
    mask_width: int

    family: ClassVar[str] = "rfdetr"
    activation: ClassVar[str] = "relu"  # between the decoder's linear layers
    points: ClassVar[tuple[int, ...]] = (2,)  # that a head of a query samples
    ranges: ClassVar[dict[str, tuple[int, int]]] = {
        "patch": (MASK_STRIDE, 64),
        "windows": (1, 16),
        "positions": (1, 512),
        "blocks": (1, 100),
        "backbone_width": (1, 4096),
        "backbone_heads": (1, 64),
        "decoder_width": (SAMPLING_HEADS, 4096),
        "decoder_feedforward": (1, 16384),
        "layers": (1, 100),
        "queries": (1, 10_000),
        "groups": (1, 100),
        "mask_width": (0, 4096),
    }

    @property
    def used_layers(self) -> int:
        """Layers that a prediction needs: all."""
        return self.layers

    @property
    def stride(self) -> int:
        """Sides of images are multiples of it, so that each window has whole patches, pixels."""
        return self.patch * self.windows

    @property
    def px(self) -> int:
        """Image size whose positions need no resampling, pixels."""
        return self.patch * self.positions

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :meth:`from_dict` reads them."""
        return {"family": self.family, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> Self:
        """Check all values and return the description.

        Raises:
            ConfigError: names the wrong key and ``source``.
        """
        check = Checker(source)
        check.keys(values, ("family", *(f.name for f in fields(cls))))
        given: dict[str, int] = {}
        for key, (low, high) in cls.ranges.items():
            number = check.number(key, values[key], low, high)
            if number != int(number):
                raise check.error(f"{key} is {short(values[key])}, expected a whole number")
            given[key] = int(number)
        taps = values["taps"]
        if (
            not isinstance(taps, (list, tuple))
            or not taps
            or not all(type(tap) is int and 1 <= tap <= given["blocks"] for tap in taps)
            or list(taps) != sorted(set(taps))
        ):
            raise check.error(f"taps is {short(taps)}, expected ascending numbers in 1..{given['blocks']}")
        for key, factor in (
            ("backbone_width", given["backbone_heads"]),
            ("decoder_width", SAMPLING_HEADS),
            ("patch", MASK_STRIDE),
        ):
            if given[key] % factor:
                raise check.error(f"{key} is {given[key]}, expected a multiple of {factor}")
        if given["mask_width"] not in (0, given["decoder_width"]):
            raise check.error(f"mask_width is {given['mask_width']}, expected 0 or {given['decoder_width']}")
        return cls(name=check.name(values["name"]), taps=tuple(taps), **given)


def _networks() -> dict[str, RfdetrDescription]:
    """Return the built-in networks by name."""
    nano = RfdetrDescription(
        name="rfdetr-n",
        patch=16,
        windows=2,
        positions=24,
        blocks=12,
        taps=(3, 6, 9, 12),
        backbone_width=384,
        backbone_heads=6,
        decoder_width=256,
        decoder_feedforward=2048,
        layers=2,
        queries=300,
        groups=13,
        mask_width=0,
    )
    masks = replace(nano, patch=12, layers=4, mask_width=256)
    networks = (
        nano,
        replace(nano, name="rfdetr-s", positions=32, layers=3),
        replace(nano, name="rfdetr-m", positions=36, layers=4),
        replace(nano, name="rfdetr-l", positions=44, layers=4),
        replace(masks, name="rfdetr-n-seg", windows=1, positions=26, queries=100),
        replace(masks, name="rfdetr-s-seg", positions=32, queries=100),
        replace(masks, name="rfdetr-m-seg", positions=36, queries=200, layers=5),
        replace(masks, name="rfdetr-l-seg", positions=42, queries=200, layers=5),
    )
    return {network.name: network for network in networks}


PRESETS = _networks()
SIZES = {"nano": "n", "small": "s", "medium": "m", "large": "l"}


def canonical(name: str) -> str | None:
    """Return the built-in network's name for a name that this or another project uses; None if ``name`` is another network's.

    The authors write ``rf-detr-nano``, ``rf-detr-seg-nano`` and ``RFDETRNano``, Hugging Face ``Roboflow/rf-detr-nano``.
    """
    match = re.fullmatch(
        rf"(?:roboflow/)?rf-?detr-?(seg-?)?({'|'.join(SIZES)}|[nsml])(-seg)?(?:-2026|-coco)?(?:\.pth?)?",
        name.lower().replace("_", "-"),
    )
    return match and f"rfdetr-{SIZES.get(match[2], match[2])}{'-seg' if match[1] or match[3] else ''}"


def recipe_values(recipe: str, network: RfdetrDescription) -> dict[str, Any]:
    """Return the hyperparameters of a built-in recipe of the family that differ for this network.

    The rate of a block of the backbone falls by 0.8 with each block before the last one, as the authors' does, whose exponent
    counts two more. Image sizes are those of five windows' patches below and above the network's own.
    """
    if recipe not in RECIPES:
        return {}
    blocks = {f"backbone.layers.{i}.": network.blocks + 1 - i for i in range(network.blocks)}
    decays = {"backbone.embeddings.": network.blocks + 2, **blocks}
    factors = {
        "backbone": 1.5 * 0.7**2,
        **{part: 0.8**n for part, n in decays.items()},
        "decoder.layers.": 0.7,
    }
    side = network.px / network.stride
    return {
        "lr_factors": ", ".join(f"{part}:{factor:.6g}" for part, factor in factors.items()),
        "size_low": round(max(side - 5, 2) / side, 4),
        "size_high": round((side + 5) / side, 4),
    }
