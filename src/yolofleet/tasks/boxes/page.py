"""What the report page shows of boxes: curves, confusion, kinds of errors, images; and the label statistics of a split.

Legend: C classes, K classes with labels, M labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolofleet.data.datasets.index import DataIndex
from yolofleet.runs.report.draw import picture_base64
from yolofleet.tasks.boxes.coco import CocoMetrics, PrecisionRecall
from yolofleet.tasks.boxes.error_analysis import KINDS, analyse_errors
from yolofleet.tasks.boxes.matching import CONFUSION_SCORE, Labels, ScoredBoxes, labels_of
from yolofleet.tasks.task import sampled

PICTURES = 12  # pictures of the worst images, and as many of the others
PICTURE_BYTES = 2_300_000  # limit of all pictures together, so that the page stays below 5 MB
SIDE_PX = 640  # longest side of a picture
SHOWN_SCORE = 0.25  # lowest score of detections that count as shown
LEAST_SCORE = 0.1  # lowest score of detections in the pictures
CURVE_POINTS = 101
MOST_CURVES = 100  # classes
MOST_CONFUSED = 20  # pairs of classes
HEAT_CELLS = 24
MOST_BOXES = 1_000_000  # for the histograms of a split


def label_figures(index: DataIndex) -> dict[str, Any]:
    """Return the statistics of a split: labels of each class, sizes, positions."""
    classes = index.classes[~index.crowd]
    step = -(-len(index.classes) // MOST_BOXES) or 1
    boxes = np.asarray(index.boxes_cxcywh_unit[::step], np.float64)[~index.crowd[::step]]
    edges = np.geomspace(0.004, 1, 25)
    side = np.clip(np.sqrt(boxes[:, 2] * boxes[:, 3]), edges[0], edges[-1])
    unit = ((0, 1), (0, 1))
    heat, _, _ = np.histogram2d(boxes[:, 1], boxes[:, 0], bins=HEAT_CELLS, range=unit)
    return {
        "images": len(index),
        "labels": len(classes),
        "empty_images": int((np.diff(index.offsets) == 0).sum()),
        "per_class": np.bincount(classes, minlength=len(index.names)).tolist(),
        "side_edges": np.round(edges, 4).tolist(),
        "side_counts": np.histogram(side, edges)[0].tolist(),
        "centres": heat.astype(np.int64).tolist(),  # rows from top to bottom
    }


def page_of(metrics: CocoMetrics, found: ScoredBoxes, index: DataIndex) -> dict[str, Any]:
    """Return curves, confusion, error analysis, and images with labels and detections.

    Args:
        found: on the sampled images, see ``tasks.task.Task.page``.
    """
    labels = labels_of(index, sampled(len(index)))
    analysis = analyse_errors(labels, found, len(index.names))
    errors = analysis.of_image
    worst = sorted(errors, key=lambda image: (-errors[image], image))[:PICTURES]
    positions = sampled(len(index)).tolist()
    rest = [position for position in positions if position not in set(worst)]
    others = rest[:: -(-len(rest) // PICTURES) or 1][:PICTURES]
    pictures = _pictures(index, [*worst, *others])
    return {
        "curves": curves_of(metrics.curves, index.names),
        "confusion": _confusion(metrics.confusion),
        "errors": {
            "images": len(positions),
            "counted_above": CONFUSION_SCORE,
            "ap50": analysis.ap50,
            "kinds": [[kind, analysis.counts[kind], round(analysis.gains[kind], 4)] for kind in KINDS],
        },
        "images": _images(index, positions, labels, found, pictures),
        "worst": [[image, errors[image]] for image in worst if image in pictures],
        "others": [image for image in others if image in pictures],
    }


def curves_of(curves: PrecisionRecall, names: Sequence[str]) -> dict[str, Any]:
    """Return the curves at IoU 0.5 with ``CURVE_POINTS`` points: the mean, then the classes with labels."""
    at = np.linspace(0, len(curves.grid) - 1, CURVE_POINTS).round().astype(np.int64)

    def points(values: NDArray[np.float64]) -> list[list[float]]:
        if not len(values):
            return []
        table = np.vstack([values.mean(axis=0), values[:MOST_CURVES]])[:, at]  # [1 + K, points]
        rounded: list[list[float]] = np.round(table, 4).tolist()
        return rounded

    return {
        "x": np.round(curves.grid[at], 4).tolist(),
        "classes": [names[c] for c in curves.classes[:MOST_CURVES].tolist()],
        "confidence": curves.confidence,
        "precision at recall": points(curves.precision_at_recall),
        "precision": points(curves.precision_curves),
        "recall": points(curves.recall_curves),
        "F1": points(curves.f1_curves),
    }


def _confusion(matrix: NDArray[np.int64]) -> dict[str, Any]:
    """Return the matrix, if it fits on a page, and the most frequent confusions [predicted, true, count]."""
    wrong = matrix * (1 - np.eye(len(matrix), dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSED]
    pairs = [(*divmod(place, len(matrix)), int(wrong.flat[place])) for place in order.tolist()]
    return {
        "matrix": matrix.tolist() if len(matrix) <= MOST_CURVES + 1 else None,
        "most": [list(pair) for pair in pairs if pair[2]],
    }


def _pictures(index: DataIndex, images: Iterable[int]) -> dict[int, str]:
    """Return JPEGs in base64 by image, without boxes, until ``PICTURE_BYTES``; leave out unreadable images."""
    found, left_bytes = dict[int, str](), PICTURE_BYTES
    for image in images:
        jpeg = picture_base64(index.path(image), SIDE_PX)
        if jpeg and len(jpeg) <= left_bytes:
            found[image], left_bytes = jpeg, left_bytes - len(jpeg)
    return found


def _images(
    index: DataIndex,
    positions: Sequence[int],
    labels: Labels,
    found: ScoredBoxes,
    pictures: Mapping[int, str],
) -> list[dict[str, Any]]:
    """Return path, size, picture, labels [class, x, y, w, h] and detections [class, x, y, w, h, score] of each image.

    Coordinates are fractions of the image. Images with a picture have detections from ``LEAST_SCORE`` on.
    """
    listed = []
    for position in positions:
        least = LEAST_SCORE if position in pictures else SHOWN_SCORE
        size = np.asarray(index.sizes_wh[position], np.float64)
        on, mine = labels.image == position, (found.image == position) & (found.scores >= least)
        listed.append(
            {
                "position": position,
                "path": index.path(position),
                "size_wh_px": size.astype(int).tolist(),
                "jpeg": pictures.get(position, ""),
                "labels": _boxes(labels.classes[on], labels.boxes_xywh_px[on], size),
                "detections": _boxes(
                    found.classes[mine], found.boxes_xywh_px[mine], size, found.scores[mine]
                ),
            }
        )
    return listed


def _boxes(
    class_idx: NDArray[np.int64],
    boxes_xywh_px: NDArray[np.float64],
    size_wh: NDArray[np.float64],
    score: NDArray[np.float64] | None = None,
) -> list[list[float]]:
    unit = np.round(boxes_xywh_px / np.tile(size_wh, 2), 4)
    columns = [unit] if score is None else [unit, np.round(score, 3)[:, None]]
    return [[c, *row] for c, row in zip(class_idx.tolist(), np.hstack(columns).tolist(), strict=True)]
