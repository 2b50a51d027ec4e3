"""RT-DETRv2 networks as data (arXiv:2304.08069, arXiv:2407.17140), and the fields that D-FINE's networks have too.

Descriptions come from the table here and from headers of weights files, which are untrusted. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from yolofleet.families.family import MASKED
from yolofleet.families.networks.checked import Checker, short

if TYPE_CHECKING:
    from typing_extensions import Self

Network = TypeVar("Network", bound="DetrDescription")
HEADS = 8  # of all attentions
MASK_WIDTH = 128


@dataclass(frozen=True)
class DetrDescription:
    """A network without its number of classes. L levels of feature maps, the finest first.

    Attributes:
        is_frozen: the backbone's batch normalisation is constant, and its stem is not trained.
        width, decoder_width: channels of the encoder and of the decoder, multiples of 8.
        feedforward, decoder_feedforward: channels between the two linear layers of their transformer blocks.
        expansion, depth_multiple: factors of the channels and of the number of blocks where the encoder joins two maps.
        layers: of the decoder.
        used_layers: of them, the first ones that a prediction needs; the others help the training only.
        points: sampled by each head of the decoder on each level, [L].
        queries: predictions of an image.
        mask_width: channels of the head of masks, a multiple of 8; 0: the network finds boxes alone.
    """

    name: str
    is_frozen: bool
    width: int
    feedforward: int
    expansion: float
    depth_multiple: float
    decoder_width: int
    decoder_feedforward: int
    layers: int
    used_layers: int
    points: tuple[int, ...]
    queries: int
    mask_width: int = field(default=0, kw_only=True)

    family: ClassVar[str]
    layout: ClassVar[str] = "rtdetr"  # the family whose names of tensors and recipes it has
    activation: ClassVar[str] = "relu"  # between the decoder's linear layers
    levels: ClassVar[tuple[int, ...]] = (3,)  # possible numbers of them
    lengths: ClassVar[dict[str, int]] = {}  # of the other tuples
    # network -> rate, that of the recipe deim, factor of the backbone's rate, weight decay; the recipe has those of the others
    rates: ClassVar[dict[str, tuple[float, float, float, float]]] = {}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {  # of the numbers of each field
        "width": (HEADS, 4096),
        "feedforward": (1, 16384),
        "expansion": (0.01, 10),
        "depth_multiple": (0.01, 10),
        "decoder_width": (HEADS, 4096),
        "decoder_feedforward": (1, 16384),
        "layers": (1, 100),
        "used_layers": (1, 100),
        "points": (1, 64),
        "queries": (1, 10_000),
        "mask_width": (0, 1024),
    }

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :meth:`from_dict` reads them. Networks of boxes have no ``mask_width``, as before there were masks."""
        values = {"family": self.family, **asdict(self)}
        return values if self.mask_width else {k: v for k, v in values.items() if k != "mask_width"}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> Self:
        """Check all values and return the description.

        Raises:
            ConfigError: names the wrong key and ``source``.
        """
        check = Checker(source)
        names = [f.name for f in fields(cls) if f.name != "mask_width"]
        check.keys(values, ("family", *names), ("mask_width",))
        given = {f.name: cls._checked(check, f.name, f.type, values.get(f.name, 0)) for f in fields(cls)}
        for key in ("width", "decoder_width", "mask_width"):
            if given[key] % HEADS:
                raise check.error(f"{key} is {given[key]}, expected a multiple of {HEADS}")
        if given["used_layers"] > given["layers"]:
            raise check.error(f"used_layers is {given['used_layers']}, more than layers, {given['layers']}")
        return cls(**given)

    @classmethod
    def _checked(cls, check: Checker, key: str, kind: Any, value: Any) -> Any:
        """Return ``value`` of the type that the annotation ``kind`` names."""
        if kind == "str":
            return check.name(value)
        if kind == "bool":
            return check.flag(key, value)
        if kind == "tuple[int, ...]":
            lengths = cls.levels if key == "points" else (cls.lengths[key],)
            if not isinstance(value, (list, tuple)) or len(value) not in lengths:
                expected = " or ".join(map(str, lengths))
                raise check.error(f"{key} is {short(value)}, expected a list of {expected} numbers")
            return tuple(cls._checked(check, key, "int", item) for item in value)
        number = check.number(key, value, *cls.ranges[key])
        if kind == "int" and number != int(number):
            raise check.error(f"{key} is {short(value)}, expected a whole number")
        return int(number) if kind == "int" else number


@dataclass(frozen=True)
class RtdetrDescription(DetrDescription):
    """RT-DETRv2 with a backbone ResNet-vd (arXiv:1812.01187).

    Attributes:
        has_bottlenecks: blocks of 1x1, 3x3 and 1x1 convolutions instead of two 3x3 ones.
        stage_widths, stage_blocks: of the four stages: channels of the 3x3 convolutions, and number of blocks.
    """

    has_bottlenecks: bool
    stage_widths: tuple[int, ...]
    stage_blocks: tuple[int, ...]

    family = "rtdetr"
    rates = {
        "rtdetrv2-r18": (1e-4, 2e-4, 1.0, 1e-4),
        "rtdetrv2-r34": (1e-4, 2e-4, 0.5, 1e-4),
        "rtdetrv2-r50m": (1e-4, 2e-4, 0.1, 1e-4),
        "rtdetrv2-r50": (1e-4, 2e-4, 0.1, 1e-4),
        "rtdetrv2-r101": (1e-4, 2e-4, 0.01, 1e-4),
    }
    lengths = {"stage_widths": 4, "stage_blocks": 4}
    ranges = DetrDescription.ranges | {"stage_widths": (2, 4096), "stage_blocks": (1, 200)}

    @property
    def outer_widths(self) -> tuple[int, ...]:
        """Channels of a stage's result."""
        return tuple(width * (4 if self.has_bottlenecks else 1) for width in self.stage_widths)


def with_masks(*networks: Network) -> dict[str, Network]:
    """Return the networks by name, and after them those that find masks as well, ``NAME-seg``."""
    masked = [replace(network, name=f"{network.name}{MASKED}", mask_width=MASK_WIDTH) for network in networks]
    return {network.name: network for network in (*networks, *masked)}


_R18 = RtdetrDescription(
    name="rtdetrv2-r18",
    is_frozen=False,
    width=256,
    feedforward=1024,
    expansion=0.5,
    depth_multiple=1.0,
    decoder_width=256,
    decoder_feedforward=1024,
    layers=3,
    used_layers=3,
    points=(4, 4, 4),
    queries=300,
    has_bottlenecks=False,
    stage_widths=(64, 128, 256, 512),
    stage_blocks=(2, 2, 2, 2),
)
_R34 = replace(_R18, name="rtdetrv2-r34", stage_blocks=(3, 4, 6, 3), layers=4, used_layers=4)
_R50 = replace(
    _R34, name="rtdetrv2-r50", is_frozen=True, has_bottlenecks=True, expansion=1.0, layers=6, used_layers=6
)
_R50M = replace(_R50, name="rtdetrv2-r50m", expansion=0.5, used_layers=3)
_R101 = replace(_R50, name="rtdetrv2-r101", stage_blocks=(3, 4, 23, 3), width=384, feedforward=2048)
PRESETS = with_masks(_R18, _R34, _R50M, _R50, _R101)


def canonical(name: str) -> str | None:
    """Return the built-in network's name for a name that this or another project uses; None if ``name`` is another network's.

    The authors write ``rtdetrv2_r50vd_m_7x_coco``, Hugging Face ``PekingU/rtdetr_v2_r18vd``.
    """
    match = re.fullmatch(
        r"(pekingu/)?rt-?detr-?v2-(r18|r34|r50|r101)(vd)?(-?m)?(-\d{1,3}[ex])?(-coco)?(-seg)?",
        name.lower().replace("_", "-"),
    )
    known = match and f"rtdetrv2-{match[2]}{'m' if match[4] else ''}{match[7] or ''}"
    return known if known in PRESETS else None


def to_train(network: DetrDescription, untrained: Collection[str]) -> tuple[DetrDescription, str]:
    """Return the description of a network to train, and a note about what it changes; "" if nothing.

    Constant norms and a constant stem are right only for a trained backbone.

    Args:
        untrained: names of the tensors that trained weights do not have.
    """
    if not network.is_frozen or not any(name.startswith("backbone.") for name in untrained):
        return network, ""
    what = f"the backbone of {network.name} starts without trained weights"
    return replace(network, is_frozen=False), f"{what}: its norms and its stem are trained, too"


def recipe_values(recipe: str, network: DetrDescription) -> dict[str, Any]:
    """Return the hyperparameters of a built-in recipe of both families that differ for this network, with or without masks."""
    name, made_for = network.name.removesuffix(MASKED), (network.layout, f"{network.layout}-few", "deim")
    if recipe not in made_for or name not in network.rates:
        return {}
    rate, deim_rate, backbone, weight_decay = network.rates[name]
    values: dict[str, Any] = {"lr0": deim_rate if recipe == "deim" else rate}
    values |= {"lr_factors": f"backbone:{backbone:g}", "weight_decay": weight_decay}
    is_nano = name in ("dfine-n", "deim-n")
    if is_nano or name == "rtdetrv2-r18":
        values |= {"size_low": 1.0, "size_high": 1.0}
    if is_nano and recipe.endswith("-few"):
        values["lr0"] = rate / 4  # its square root rule: steps of 8 images instead of 128
    elif is_nano:  # the authors' steps
        values["reference_batch"] = 128
        values |= {"flat_fraction": 1.0} if recipe == "deim" else {}
    return values
