"""Networks of RT-DETR, D-FINE and RF-DETR that are small enough for tests. --recipe-class small_detr.py:Small --model dfine-toy"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from yolofleet import TrainingRecipe
from yolofleet.families import dfine, rfdetr, rtdetr
from yolofleet.families.build import load
from yolofleet.families.family import Family

WIDTHS = ("width", "feedforward", "decoder_width", "decoder_feedforward")
HGNET = {"stem": (8, 8), "inner_widths": (4, 8, 8, 8), "outer_widths": (8, 16, 16, 16), "stage_layers": 1}
HGNET64 = {
    "stem": (8, 16),
    "inner_widths": (8, 16, 32, 64),
    "outer_widths": (32, 64, 128, 256),
    "stage_layers": 2,
    "points": (3, 6, 3),
    "feedforward": 128,
    "decoder_feedforward": 128,
}  # of benchmarks/README.md, with the next
RESNET64 = {"stage_widths": (32, 64, 128, 256), "stage_blocks": (1, 1, 1, 1)}
RESNET = RESNET64 | {"stage_widths": (8, 8, 16, 16)}
MASKS = {"mask_width": 16}
# family, a built-in network, changes of its backbone, width, queries
NETWORKS: dict[str, tuple[Family, str, dict[str, Any], int, int]] = {
    "dfine-toy": (dfine.FAMILY, "dfine-n", HGNET, 16, 20),
    "dfine-frozen": (dfine.FAMILY, "dfine-l", HGNET | {"points": (6, 3, 3)}, 16, 20),
    "rtdetr-toy": (rtdetr.FAMILY, "rtdetrv2-r18", RESNET, 16, 20),
    "dfine-small": (dfine.FAMILY, "dfine-n", HGNET | {"outer_widths": (16, 32, 32, 32)}, 32, 40),
    "dfine-small64": (dfine.FAMILY, "dfine-n", HGNET64, 64, 40),
    "rtdetr-small64": (rtdetr.FAMILY, "rtdetrv2-r18", RESNET64, 64, 40),
    "dfine-toy-seg": (dfine.FAMILY, "dfine-n", HGNET | MASKS, 16, 20),
    "rtdetr-toy-seg": (rtdetr.FAMILY, "rtdetrv2-r18", RESNET | MASKS, 16, 20),
    "rtdetr-small": (rtdetr.FAMILY, "rtdetrv2-r18", RESNET | {"stage_widths": (16, 32, 32, 32)}, 32, 40),
}
VIT = {
    "positions": 4,
    "blocks": 4,
    "taps": (1, 2, 3, 4),
    "backbone_width": 32,
    "backbone_heads": 2,
    "groups": 3,
}
VIT |= {"patch": 8, "decoder_width": 32, "decoder_feedforward": 32, "layers": 2, "queries": 20}
WIDER = VIT | {"positions": 16, "backbone_width": 64, "decoder_width": 64, "queries": 100}
# a built-in network and its changes
RFDETR: dict[str, tuple[str, dict[str, Any]]] = {
    "rfdetr-toy": ("rfdetr-n", VIT),
    "rfdetr-toy-seg": ("rfdetr-n-seg", VIT | {"mask_width": 32}),
    "rfdetr-small": ("rfdetr-n", WIDER),
    "rfdetr-small-seg": ("rfdetr-n-seg", WIDER | {"mask_width": 64}),
}


def preset(name: str) -> Any:
    if name in RFDETR:
        base, changes = RFDETR[name]
        return replace(load(rfdetr.FAMILY.preset)(base), name=name, **changes)
    family, base, changes, width, queries = NETWORKS[name]
    sizes = dict.fromkeys(WIDTHS, width) | {"layers": 2, "used_layers": 2, "queries": queries}
    return replace(load(family.preset)(base), name=name, **(sizes | changes))


class Small(TrainingRecipe):
    """Adds names of networks. Their descriptions belong to the built-in families."""

    family = Family(
        name="small-detr",
        from_dict=lambda values, source: None,
        network=lambda description, nc: None,
        loss=lambda model, recipe, img: None,
        preset_names=lambda: [*NETWORKS, *RFDETR],
        preset=preset,
    )
