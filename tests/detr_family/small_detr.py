"""Networks of RT-DETR and D-FINE that are small enough for tests. --recipe-class small_detr.py:Small --model dfine-toy"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from yolofleet import TrainingRecipe
from yolofleet.families import dfine, rtdetr
from yolofleet.families.build import load
from yolofleet.families.family import Family

WIDTHS = dict.fromkeys(("width", "feedforward", "decoder_width", "decoder_feedforward"), 16)
HEAD = {"layers": 2, "used_layers": 2, "queries": 20}
HGNET = {"stem": (8, 8), "inner_widths": (4, 8, 8, 8), "outer_widths": (8, 16, 16, 16), "stage_layers": 1}
RESNET = {"stage_widths": (8, 8, 16, 16), "stage_blocks": (1, 1, 1, 1)}
NETWORKS: dict[str, tuple[Family, str, dict[str, Any]]] = {
    "dfine-toy": (dfine.FAMILY, "dfine-n", HGNET),
    "rtdetr-toy": (rtdetr.FAMILY, "rtdetrv2-r18", RESNET),
}


def preset(name: str) -> Any:
    family, base, changes = NETWORKS[name]
    return replace(load(family.preset)(base), name=name, **WIDTHS, **HEAD, **changes)


class Small(TrainingRecipe):
    """Adds names of networks. Their descriptions belong to the built-in families."""

    family = Family(
        name="small-detr",
        from_dict=lambda values, source: None,
        network=lambda description, nc: None,
        loss=lambda model, recipe, img: None,
        preset_names=lambda: list(NETWORKS),
        preset=preset,
    )
