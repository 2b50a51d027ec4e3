"""Find anchors that fit the labels better, and say how YOLOv5's fit.

M labels, L levels, A anchors per level.
"""

from __future__ import annotations

import numpy as np

from yolofleet.families.networks.anchor_fit import GOOD_ENOUGH, USUAL_RATIO, anchor_fit, chunks, ratios
from yolofleet.families.networks.description import AnchorDescription, preset
from yolofleet.support.random_numbers import generator

MIN_SIDE_PX = 2.0  # smallest side of an anchor; as in YOLOv5, the search ignores labels with smaller sides
# ratios are summed as integers in 1 / UNIT, so sums do not depend on their order or the machine
UNIT = 1 << 16

SAMPLE = 4096  # labels that the search uses; it has 18 numbers to find, and more labels do not change them
CLUSTER_ROUNDS = 30
MUTATIONS = 3000
MUTATION = 0.2  # largest relative change of a side
GRID_PX = 1 / 64  # of the sides found


def anchor_fitness(sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray, threshold: float) -> float:
    """Return the mean over labels of the side ratio (0..1) to the best anchor; a label without a match counts 0.

    YOLOv5's search maximises it. Arguments as of :func:`anchor_fit`.
    """
    if not len(sizes_wh_px):
        return 0.0
    total = sum(
        int(_worth(ratio, threshold).max(0).sum(dtype=np.int64))
        for ratio in chunks(sizes_wh_px, anchors_wh_px)
    )
    return total / UNIT / len(sizes_wh_px)


def better_anchors(
    sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray, threshold: float, seed: int
) -> np.ndarray:
    """Return anchors that fit the labels at least as well as the given ones.

    The search starts from clusters of the labels' sizes and from the given anchors, refines each by mutation and
    selection, and takes the better result. It is equal on every machine, because decisions depend only on sums of integers
    and on single operations of IEEE 754.

    Args:
        sizes_wh_px: [M, 2] label sizes at the training size, above 0.
        anchors_wh_px: [L, A, 2].
        threshold: largest side ratio of a match (``anchor_t``).
    Returns:
        [L, A, 2] float64 pixels. Small anchors are on the level that had small ones, sorted by area within it.
        ``anchors_wh_px`` itself if the search finds no higher fitness without a loss of best possible recall.
    """
    sizes = sizes_wh_px[(sizes_wh_px >= MIN_SIDE_PX).any(1)].astype(np.float64)
    if not len(sizes):
        return anchors_wh_px
    rng = generator(seed, "anchors")
    if len(sizes) > SAMPLE:
        sizes = sizes[np.argsort(rng.random(len(sizes)), kind="stable")[:SAMPLE]]
    given = anchors_wh_px.reshape(-1, 2).astype(np.float64)
    starts = (given, _clusters(sizes, len(given)))
    refined = [_refined(sizes, start, threshold, rng) for start in starts]
    found = max(refined, key=lambda anchors: anchor_fitness(sizes, anchors, threshold))

    def figures(anchors: np.ndarray) -> tuple[float, float]:
        return anchor_fitness(sizes_wh_px, anchors, threshold), anchor_fit(sizes_wh_px, anchors, threshold)[0]

    (fitness, recall), (given_fitness, given_recall) = figures(found), figures(given)
    if fitness <= given_fitness or recall < given_recall:
        return anchors_wh_px
    by_area = found[np.argsort(found.prod(1), kind="stable")].reshape(anchors_wh_px.shape)
    placed = np.empty_like(by_area)
    placed[np.argsort(anchors_wh_px.prod(2).mean(1), kind="stable")] = by_area
    return placed


def _worth(ratio: np.ndarray, threshold: float) -> np.ndarray:
    """Return int32 ratios in UNITs; 0 if they do not match."""
    return np.where(ratio > 1 / threshold, ratio * UNIT, 0).astype(np.int32)


def _clusters(sizes_wh_px: np.ndarray, count: int) -> np.ndarray:
    """Return [count, 2] cluster centres of the sizes, by k-means with IoU as similarity (arXiv:1612.08242).

    It starts from quantiles of the area; a centre is the median of its members' sides.
    """
    areas = sizes_wh_px.prod(1)
    middle = ((np.arange(count) + 0.5) * len(sizes_wh_px) / count).astype(np.int64)
    centres = sizes_wh_px[np.argsort(areas, kind="stable")[middle]]
    for _ in range(CLUSTER_ROUNDS):
        shared = np.minimum(sizes_wh_px[:, None], centres).prod(2)  # [M, count]
        member_of = (shared / (areas[:, None] + centres.prod(1) - shared)).argmax(1)
        members = [sizes_wh_px[member_of == i] for i in range(count)]
        moved = np.array([np.median(m, 0) if len(m) else c for m, c in zip(members, centres, strict=True)])
        if np.array_equal(moved, centres):
            break
        centres = moved
    return _on_grid(centres)


def _on_grid(anchors_wh_px: np.ndarray) -> np.ndarray:
    return np.maximum(np.rint(anchors_wh_px / GRID_PX) * GRID_PX, MIN_SIDE_PX)


def _refined(
    sizes_wh_px: np.ndarray, anchors_wh_px: np.ndarray, threshold: float, rng: np.random.Generator
) -> np.ndarray:
    """Return anchors after random changes of one anchor at a time, of which only improvements are kept."""
    anchors: np.ndarray = anchors_wh_px.copy()
    worth = _worth(ratios(sizes_wh_px, anchors), threshold)  # [A, M]
    best = worth.max(0).sum(dtype=np.int64)
    for one, *sides in rng.random((MUTATIONS, 5)):
        i = int(one * len(anchors))
        factor = 1 + MUTATION * np.subtract(sides[:2], sides[2:])  # small changes are more likely
        changed = _on_grid(anchors[i] * factor)
        before = worth[i].copy()
        worth[i] = _worth(ratios(sizes_wh_px, changed[None]), threshold)[0]
        total = worth.max(0).sum(dtype=np.int64)
        if total > best:
            best, anchors[i] = total, changed
        else:
            worth[i] = before
    return anchors


ADVICE_LABELS = 100_000  # a sample is enough to say how anchors fit


def preset_advice(sizes_wh_px: np.ndarray, img: int) -> list[str]:
    """Return a line about how YOLOv5's anchors fit labels of these sizes at --img ``img``; none without labels."""
    if not len(sizes_wh_px):
        return []
    sample = sizes_wh_px[:: max(1, len(sizes_wh_px) // ADVICE_LABELS)]
    described = preset("yolov5n")
    assert isinstance(described, AnchorDescription)
    anchors = np.array(described.anchors_px, float).reshape(-1, 2)
    recall, per_label = anchor_fit(sample, anchors, USUAL_RATIO)
    text = (
        f"YOLOv5's anchors can match {recall:.1%} of the labels at --img {img}, {per_label:.1f} anchors each"
    )
    return [
        text if recall >= GOOD_ENOUGH else f"{text}: too few; another --img, or other anchors in a --cfg file"
    ]
