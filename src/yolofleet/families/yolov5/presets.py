"""The built-in networks of YOLOv5 and YOLOv3 as rows: one rule for all sizes. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yolofleet.families.family import MASKED
from yolofleet.families.yolov5.rows import Anchors, Row, RowDescription

SIZES = {"n": (0.33, 0.25), "s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}

P5_ANCHORS: Anchors = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
P6_ANCHORS: Anchors = (
    ((19, 27), (44, 40), (38, 94)),
    ((96, 68), (86, 152), (180, 137)),
    ((140, 301), (303, 264), (238, 542)),
    ((436, 615), (739, 380), (925, 792)),
)


TINY_ANCHORS: Anchors = (((10, 14), (23, 27), (37, 58)), ((81, 82), (135, 169), (344, 319)))
YOLOV3 = ("yolov3", "yolov3-spp", "yolov3-tiny")


def preset_names() -> list[str]:
    return [*(f"yolov5{size}{kind}" for kind in ("", "6", MASKED) for size in SIZES), *YOLOV3]


def preset(name: str) -> RowDescription:
    """Return the built-in description of one of the names from :func:`preset_names`."""
    if name == "yolov3-tiny":
        return RowDescription(name, 1.0, 1.0, *tiny_rows(), TINY_ANCHORS)
    if name in YOLOV3:
        return RowDescription(name, 1.0, 1.0, *darknet53_rows(spp=name == "yolov3-spp"), P5_ANCHORS)
    p6, masks = name.endswith("6"), name.endswith(MASKED)
    size = name.removeprefix("yolov5").removesuffix("6").removesuffix(MASKED)
    depth, width = SIZES[size]
    stage_channels = (128, 256, 512, 768, 1024) if p6 else (128, 256, 512, 1024)
    stage_depths = (3, 6, 9, 3, 3) if p6 else (3, 6, 9, 3)
    backbone, head = pyramid(stage_channels, stage_depths)
    if masks:
        head = (*head[:-1], row("Segment", "nc", "anchors", 32, 256, at=head[-1].inputs))
    return RowDescription(name, depth, width, backbone, head, P6_ANCHORS if p6 else P5_ANCHORS)


def row(module: str, *args: Any, at: int | tuple[int, ...] = -1, times: int = 1) -> Row:
    return Row(at if isinstance(at, tuple) else (at,), times, module, args)


def pyramid(channels: Sequence[int], depths: Sequence[int]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return backbone and head of a CSP network with a path-aggregation neck (arXiv:1911.11929, arXiv:1803.01534).

    Args:
        channels, depths: of the stages from stride 4 on; the head predicts from the stages from stride 8 on.
    """
    rows = [row("Conv", 64, 6, 2, 2)]
    stage_rows = []
    for c, n in zip(channels, depths, strict=True):
        rows += [row("Conv", c, 3, 2), row("C3", c, times=n)]
        stage_rows.append(len(rows) - 1)
    rows.append(row("SPPF", channels[-1], 5))
    backbone = tuple(rows)

    laterals = []  # top-down: coarse to fine
    for c, stage in zip(channels[-2:0:-1], stage_rows[-2:0:-1], strict=True):
        rows.append(row("Conv", c, 1, 1))
        laterals.append(len(rows) - 1)
        rows += [*join(stage), row("C3", c, False, times=3)]
    outputs = [len(rows) - 1]
    for c, wider, lateral in zip(channels[1:-1], channels[2:], reversed(laterals), strict=True):  # bottom-up
        rows += [row("Conv", c, 3, 2), row("Concat", 1, at=(-1, lateral)), row("C3", wider, False, times=3)]
        outputs.append(len(rows) - 1)
    rows.append(row("Detect", "nc", "anchors", at=tuple(outputs)))
    return backbone, tuple(rows[len(backbone) :])


def join(lateral: int) -> list[Row]:
    """Return rows that upsample the last map and concatenate an earlier one."""
    return [row("nn.Upsample", None, 2, "nearest"), row("Concat", 1, at=(-1, lateral))]


def darknet53_rows(*, spp: bool) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the rows of YOLOv3 (arXiv:1804.02767), with its blocks as bottlenecks.

    Args:
        spp: add spatial pyramid pooling (arXiv:1406.4729) before the coarsest prediction.
    """
    backbone = [row("Conv", 32, 3, 1)]
    for c, n in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        backbone += [row("Conv", c, 3, 2), row("Bottleneck", c, times=n)]
    head = [
        row("Bottleneck", 1024, False),
        row("SPP", 512, (5, 9, 13)) if spp else row("Conv", 512, 1, 1),
        row("Conv", 1024, 3, 1),
        row("Conv", 512, 1, 1),
        row("Conv", 1024, 3, 1),  # 15: stride 32
        row("Conv", 256, 1, 1, at=-2),
        *join(8),
        row("Bottleneck", 512, False),
        row("Bottleneck", 512, False),
        row("Conv", 256, 1, 1),
        row("Conv", 512, 3, 1),  # 22: stride 16
        row("Conv", 128, 1, 1, at=-2),
        *join(6),
        row("Bottleneck", 256, False),
        row("Bottleneck", 256, False, times=2),  # 27: stride 8
        row("Detect", "nc", "anchors", at=(27, 22, 15)),
    ]
    return tuple(backbone), tuple(head)


def tiny_rows() -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the rows of YOLOv3-tiny: single convolutions between pools, two levels."""
    backbone = []
    for c in (16, 32, 64, 128, 256):
        backbone += [row("Conv", c, 3, 1), row("nn.MaxPool2d", 2, 2, 0)]
    backbone += [row("Conv", 512, 3, 1), row("nn.ZeroPad2d", (0, 1, 0, 1)), row("nn.MaxPool2d", 2, 1, 0)]
    head = [
        row("Conv", 1024, 3, 1),
        row("Conv", 256, 1, 1),
        row("Conv", 512, 3, 1),  # 15: stride 32
        row("Conv", 128, 1, 1, at=-2),
        *join(8),
        row("Conv", 256, 3, 1),  # 19: stride 16
        row("Detect", "nc", "anchors", at=(19, 15)),
    ]
    return tuple(backbone), tuple(head)
