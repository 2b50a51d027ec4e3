"""Weighted box fusion: join the boxes that several sources found, without discarding any.

A source is a network, or one view of an image that a network has seen. Source: arXiv:1910.13302; compared with the
authors' package in tests/parity/test_fusion_parity.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FUSION_IOU = 0.55  # the paper's threshold


def fused_detections(
    sources: Sequence[Tensor], *, conf: float, max_det: int, agnostic: bool = False
) -> Tensor:
    """Return the fused boxes of one image, highest score first.

    Args:
        sources: [n, 6] x1, y1, x2, y2 px, score, class: the boxes of each source after its own suppression.
        conf: lowest score (exclusive), also after the fusion lowered it.
        agnostic: boxes of different classes are fused too; the class is that of the highest score.
    Returns:
        [n, 6] float32, on the device of the sources.
    """
    every = torch.cat(list(sources)).cpu().numpy().astype(np.float64)
    groups = np.zeros(len(every), np.int64) if agnostic else every[:, 5].astype(np.int64)
    boxes, scores, first = fuse_boxes(every[:, :4], every[:, 4], groups, sources=len(sources))
    kept = np.flatnonzero(scores > conf)[:max_det]
    rows = np.column_stack([boxes[kept], scores[kept], every[first[kept], 5]])
    return torch.from_numpy(rows.astype(np.float32)).to(sources[0].device)


def fuse_boxes(
    boxes_xyxy: NDArray[np.float64],
    scores: NDArray[np.float64],
    groups: NDArray[np.int64],
    *,
    sources: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Fuse boxes of the same group that overlap by more than ``FUSION_IOU``.

    Boxes join clusters in order of score. A cluster's box is the mean of its boxes, weighted by their scores; its score is
    their mean, multiplied by min(boxes of the cluster, sources) / sources.

    Args:
        boxes_xyxy: [M, 4] any unit. scores: [M], 0..1. groups: [M].
        sources: number of sources that could have found a box.
    Returns:
        boxes [n, 4], scores [n] and, for each cluster, its row of the highest score [n]; highest score first.
    """
    order = np.argsort(-scores, kind="stable")
    found: list[tuple[NDArray[np.float64], float, int]] = []
    for group in np.unique(groups).tolist():
        rows = order[groups[order] == group]
        fused, sums = np.zeros((len(rows), 4)), np.zeros((len(rows), 4))  # [clusters, 4]
        weight, count = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
        first = np.zeros(len(rows), np.int64)
        clusters = 0
        for row in rows.tolist():
            overlaps = _iou(fused[:clusters], boxes_xyxy[row])
            place = int(overlaps.argmax()) if clusters else -1
            if place < 0 or overlaps[place] <= FUSION_IOU:
                place, first[clusters], clusters = clusters, row, clusters + 1
            sums[place] += scores[row] * boxes_xyxy[row]
            weight[place] += scores[row]
            count[place] += 1
            fused[place] = sums[place] / weight[place]
        mean = weight[:clusters] / count[:clusters]
        final = mean * np.minimum(count[:clusters], sources) / sources
        found += zip(fused[:clusters], final.tolist(), first[:clusters].tolist(), strict=True)
    found.sort(key=lambda entry: (-entry[1], entry[2]))
    return (
        np.array([box for box, _, _ in found]).reshape(-1, 4),
        np.array([score for _, score, _ in found], np.float64),
        np.array([row for _, _, row in found], np.int64),
    )


def _iou(boxes_xyxy: NDArray[np.float64], box_xyxy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [n] the IoU of each box with one box; 0 for empty boxes."""
    low, high = np.maximum(boxes_xyxy[:, :2], box_xyxy[:2]), np.minimum(boxes_xyxy[:, 2:], box_xyxy[2:])
    shared = np.prod(np.maximum(high - low, 0), axis=1)
    union = (
        np.prod(boxes_xyxy[:, 2:] - boxes_xyxy[:, :2], axis=1) + np.prod(box_xyxy[2:] - box_xyxy[:2]) - shared
    )
    overlap: NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlap
