"""Statistics of a split, and advice for a training on it.

Legend: N images, M labels (without crowd regions), C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.support.text import listed

SMALL_PX2, MEDIUM_PX2 = 32**2, 96**2  # COCO's limits of small and medium object area
NARROW_PX = 8  # the stride of the finest level of most networks
STRIDE_PX = 32  # image sizes are rounded up to it
USUAL_IMG_PX = (320, 416, 512, 640, 768, 960, 1280, 1536)
NARROW_SHARE = 0.05  # share of labels that may be narrower at the advised size
FEW_LABELS = 20
MAX_DETECTIONS = 300  # detections of an image that validation counts


@dataclass(frozen=True)
class ClassFigures:
    """Statistics of one class.

    Attributes:
        labels, images: number of labels, and of images with at least one.
        small, medium, large: labels by area at the training size, with COCO's limits.
        median_wh_px: width and height at the training size.
    """

    name: str
    labels: int
    images: int
    small: int
    medium: int
    large: int
    median_wh_px: tuple[float, float]


@dataclass(frozen=True)
class SplitFigures:
    """Statistics of one split.

    Attributes:
        img_px: training size; the longer side of each image is resized to it.
        crowd: regions that are neither learned nor counted.
        image_wh_px: (minimum, median, maximum) of width and of height.
        image_sizes: the five most frequent, (width, height, images).
        labels_per_image: mean, median, 95th percentile, maximum.
        aspect: width / height of boxes: 5th, 50th, 95th percentile.
        narrow: training size -> share of labels with a side below ``NARROW_PX``.
    """

    split: str
    img_px: int
    images: int
    labels: int
    images_without_labels: int
    crowd: int
    small: int
    medium: int
    large: int
    image_wh_px: tuple[tuple[int, int, int], tuple[int, int, int]]
    image_sizes: tuple[tuple[int, int, int], ...]
    labels_per_image: tuple[float, float, float, int]
    aspect: tuple[float, float, float]
    narrow: dict[int, float]
    classes: tuple[ClassFigures, ...]


def figures(index: DataIndex, img_px: int = 640) -> SplitFigures:
    """Return the statistics of a split for a training size."""
    owner, classes, sizes_px = learned(index)
    at_training = training_sizes(index, img_px)
    area = at_training.prod(1)
    size_class = (area >= SMALL_PX2).astype(int) + (area >= MEDIUM_PX2)  # [M] 0, 1, 2
    counts = np.bincount(owner, minlength=len(index))
    by_size = np.bincount(classes * 3 + size_class, minlength=3 * len(index.names)).reshape(-1, 3)

    per_class = []
    order = np.argsort(classes, kind="stable")
    ends = np.searchsorted(classes[order], np.arange(len(index.names) + 1))
    for number, name in enumerate(index.names):
        mine = order[ends[number] : ends[number + 1]]
        width, height = np.median(at_training[mine], axis=0) if len(mine) else (0.0, 0.0)
        images = len(np.unique(owner[mine]))
        small, medium, large = by_size[number].tolist()
        median = (round(float(width), 1), round(float(height), 1))
        per_class.append(ClassFigures(name, len(mine), images, small, medium, large, median))

    image_wh_px = _range(index.sizes_wh[:, 0]), _range(index.sizes_wh[:, 1])
    own_px = -(-_longest(image_wh_px) // STRIDE_PX) * STRIDE_PX
    sizes, times = np.unique(index.sizes_wh, axis=0, return_counts=True)
    frequent = np.argsort(-times, kind="stable")[:5]
    small, medium, large = by_size.sum(0).tolist()
    return SplitFigures(
        split=index.split,
        img_px=img_px,
        images=len(index),
        labels=len(classes),
        images_without_labels=index.background,
        crowd=int(index.crowd.sum()),
        small=small,
        medium=medium,
        large=large,
        image_wh_px=image_wh_px,
        image_sizes=tuple((*sizes[at].tolist(), int(times[at])) for at in frequent),
        labels_per_image=(
            round(float(counts.mean()), 2),
            float(np.median(counts)),
            round(float(np.percentile(counts, 95)), 2),
            int(counts.max()),
        ),
        aspect=_percentiles(sizes_px[:, 0] / np.maximum(sizes_px[:, 1], 1e-9)),
        narrow={size: narrow_share(index, size) for size in sorted({img_px, own_px, *USUAL_IMG_PX})},
        classes=tuple(per_class),
    )


def learned(index: DataIndex) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return image int64 [M], class int32 [M], and width and height float64 [M, 2] of the labels that are not crowd.

    Widths and heights are in pixels of the stored image.
    """
    keep = ~index.crowd
    owner = np.repeat(np.arange(len(index)), np.diff(index.offsets))[keep]
    return (
        owner,
        index.classes[keep],
        index.boxes_cxcywh_unit[keep, 2:] * index.sizes_wh[owner].astype(np.float64),
    )


def training_sizes(index: DataIndex, img_px: int) -> np.ndarray:
    """Return width and height at the training size, pixels, of the labels that are not crowd: float64 [M, 2]."""
    owner, _, sizes_px = learned(index)
    at_training: np.ndarray = sizes_px * (img_px / index.sizes_wh.max(1).astype(np.float64))[owner, None]
    return at_training


def narrow_share(index: DataIndex, img_px: int) -> float:
    """Return the share of labels with a side below ``NARROW_PX`` at this training size."""
    sizes_px = training_sizes(index, img_px)
    return round(float((sizes_px.min(1) < NARROW_PX).mean()), 4) if len(sizes_px) else 0.0


def advice(found: SplitFigures) -> list[str]:
    """Return what a person should consider before training on this split, a line each."""
    if not found.labels:
        return [f"{found.split} has no labels: a network cannot learn from it"]
    lines = [_size_advice(found)]
    share = found.images_without_labels / found.images
    if share > 0.5:
        lines.append(
            f"{share:.0%} of the images have no labels: correct for background, wrong if labels are missing"
        )
    empty = [figures.name for figures in found.classes if not figures.labels]
    few = [f"{f.name} {f.labels}" for f in found.classes if 0 < f.labels < FEW_LABELS]
    if empty:
        lines.append(f"{len(empty)} classes without a label: {listed(empty, most=8)}")
    if few:
        lines.append(f"{len(few)} classes with fewer than {FEW_LABELS} labels: {listed(few, most=8)}")
    if found.labels_per_image[3] > MAX_DETECTIONS:
        most = found.labels_per_image[3]
        lines.append(
            f"an image has {most} labels, but validation counts {MAX_DETECTIONS} detections an image: --max-det"
        )
    return [line for line in lines if line]


def _size_advice(found: SplitFigures) -> str:
    """Return a line about the share of narrow labels, with a better training size if there is one."""
    now = found.narrow[found.img_px]
    longest = _longest(found.image_wh_px)
    text = f"at --img {found.img_px}, {now:.1%} of the labels are less than {NARROW_PX} px wide or high"
    if now > NARROW_SHARE:
        larger = [size for size in USUAL_IMG_PX if found.img_px < size < 1.5 * longest]
        enough = next(
            (size for size in larger if found.narrow[size] <= NARROW_SHARE), larger[-1] if larger else 0
        )
        return f"{text}: hard to find; at --img {enough} {found.narrow[enough]:.1%}" if enough else text
    sizes = (size for size in sorted(found.narrow) if longest <= size < found.img_px)
    if whole := next((size for size in sizes if found.narrow[size] <= NARROW_SHARE), 0):
        return f"{text}; most images are at most {longest} px long, so --img {whole} keeps all detail and is faster"
    return text


def _longest(image_wh_px: tuple[tuple[int, int, int], tuple[int, int, int]]) -> int:
    """Return the larger one of the median width and height."""
    return max(image_wh_px[0][1], image_wh_px[1][1])


def _range(values: np.ndarray) -> tuple[int, int, int]:
    return int(values.min()), int(np.median(values)), int(values.max())


def _percentiles(values: np.ndarray) -> tuple[float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0
    low, middle, high = np.percentile(values, (5, 50, 95)).tolist()
    return round(low, 3), round(middle, 3), round(high, 3)
