"""D-FINE networks as data (arXiv:2410.13842). No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from yolofleet.families.rtdetr.description import DetrDescription, with_masks


@dataclass(frozen=True)
class DfineDescription(DetrDescription):
    """D-FINE with a backbone HGNetV2 of four stages.

    Attributes:
        has_affine: activations of the backbone are followed by a learned factor and summand.
        stem: channels inside and after the stem.
        inner_widths, outer_widths: channels of a stage's inner convolutions, and of its result.
        stage_blocks: number of blocks of a stage.
        stage_layers: inner layers of each block.
        reg_scale: scale of the distances that a distribution's bins stand for.
    """

    has_affine: bool
    stem: tuple[int, ...]
    inner_widths: tuple[int, ...]
    outer_widths: tuple[int, ...]
    stage_blocks: tuple[int, ...]
    stage_layers: int
    reg_scale: float

    family = layout = "dfine"
    rates = {
        "dfine-n": (8e-4, 8e-4, 0.5, 1e-4),
        "dfine-m": (2e-4, 4e-4, 0.1, 1e-4),
        "dfine-l": (2.5e-4, 5e-4, 0.05, 1.25e-4),
        "dfine-x": (2.5e-4, 5e-4, 0.01, 1.25e-4),
    }
    levels = (2, 3)
    lengths = {"stem": 2, "inner_widths": 4, "outer_widths": 4, "stage_blocks": 4}
    ranges = DetrDescription.ranges | {
        "stem": (2, 4096),
        "inner_widths": (1, 4096),
        "outer_widths": (2, 8192),
        "stage_blocks": (1, 100),
        "stage_layers": (1, 100),
        "reg_scale": (0.1, 1000),
    }


def _hgnet(*values: Any) -> dict[str, Any]:
    fields = ("stem", "inner_widths", "outer_widths", "stage_blocks", "stage_layers")
    return dict(zip(fields, values, strict=True))


_B0 = _hgnet((16, 16), (16, 32, 64, 128), (64, 256, 512, 1024), (1, 1, 2, 1), 3)
_B2 = _hgnet((24, 32), (32, 64, 128, 256), (96, 384, 768, 1536), (1, 1, 3, 1), 4)
_B4 = _hgnet((32, 48), (48, 96, 192, 384), (128, 512, 1024, 2048), (1, 1, 3, 1), 6)
_B5 = _hgnet((32, 64), (64, 128, 256, 512), (128, 512, 1024, 2048), (1, 2, 5, 2), 6)
_WIDE: dict[str, Any] = {"width": 256, "feedforward": 1024, "decoder_width": 256, "decoder_feedforward": 1024}
_N = DfineDescription(
    name="dfine-n",
    is_frozen=False,
    width=128,
    feedforward=512,
    expansion=0.34,
    depth_multiple=0.5,
    decoder_width=128,
    decoder_feedforward=512,
    layers=3,
    used_layers=3,
    points=(6, 6),
    queries=300,
    has_affine=True,
    **_B0,
    reg_scale=4.0,
)
_S = replace(_N, name="dfine-s", **_WIDE, expansion=0.5, depth_multiple=0.34, points=(3, 6, 3))
_M = replace(_S, name="dfine-m", **_B2, expansion=1.0, depth_multiple=0.67, layers=4, used_layers=4)
_L = replace(
    _M, name="dfine-l", **_B4, is_frozen=True, has_affine=False, depth_multiple=1.0, layers=6, used_layers=6
)
_X = replace(_L, name="dfine-x", **_B5, width=384, feedforward=2048, reg_scale=8.0)
PRESETS = with_masks(_N, _S, _M, _L, _X)


def canonical(name: str) -> str | None:
    """Return the built-in network's name for a name that this or another project uses; None if ``name`` is another network's.

    The authors write ``dfine_hgnetv2_n_coco`` or ``dfine_n_coco``, Hugging Face ``ustc-community/dfine-nano-coco``.
    """
    match = re.fullmatch(
        r"(ustc-community/)?d-?fine-(hgnetv2-)?([nsmlx]|nano|small|medium|large|xlarge)(-coco)?(-seg)?",
        name.lower().replace("_", "-"),
    )
    return match and f"dfine-{match[3][0]}{match[5] or ''}"
