"""Pictures of a validation: precision, recall and F1 of each class, the confusion matrix, and images with boxes.

C classes, K classes with labels, X points of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.images.decode import read_image
from yolofleet.runs.report.draw import Picture, draw_boxes
from yolofleet.runs.report.plots import BLUE, GREY, MANY, drawing, hex_colour, or_note, plot_pictures
from yolofleet.storage.atomic import write_bytes
from yolofleet.tasks.boxes.coco import CocoMetrics, PrecisionRecall
from yolofleet.tasks.boxes.matching import ScoredBoxes, labels_of

SHOWN = 16  # images in a grid
SHOWN_SCORE = 0.25  # detections drawn


def plot_curves(curves: PrecisionRecall, names: Sequence[str], folder: Path) -> None:
    """Write ``PR_curve.png``, ``P_curve.png``, ``R_curve.png`` and ``F1_curve.png`` at IoU 0.5."""
    if not len(curves.classes):
        return
    ap50 = curves.ap[:, 0]
    _plot_curve(
        folder / "PR_curve.png",
        curves.grid,
        curves.precision_at_recall,
        labels=[f"{names[c]}  {ap:.3f}" for c, ap in zip(curves.classes, ap50, strict=True)],
        class_idx=curves.classes,
        mean_label=f"all classes  {ap50.mean():.3f} mAP50",
        axes_labels=("recall", "precision"),
    )
    for name, title, values in (
        ("P", "precision", curves.precision_curves),
        ("R", "recall", curves.recall_curves),
        ("F1", "F1", curves.f1_curves),
    ):
        mean = values.mean(axis=0)
        _plot_curve(
            folder / f"{name}_curve.png",
            curves.grid,
            values,
            labels=[names[c] for c in curves.classes],
            class_idx=curves.classes,
            mean_label=f"all classes  {mean[curves.best]:.3f} at {curves.confidence:.3f}",
            axes_labels=("confidence", title),
            mark=curves.confidence,
        )


def _plot_curve(
    path: Path,
    x: NDArray[np.float64],
    curves: NDArray[np.float64],
    *,
    labels: Sequence[str],
    class_idx: NDArray[np.int64],
    mean_label: str,
    axes_labels: tuple[str, str],
    mark: float | None = None,
) -> None:
    """Plot a thin line per class ([K, X]), with a name if there are few, their mean, and a vertical line at ``mark``."""
    few = len(curves) <= MANY
    with drawing(path, 8.5, 5.5) as figure:
        axes = figure.subplots()
        for label, c, curve in zip(labels, class_idx.tolist(), curves, strict=True):
            hue = hex_colour(c) if few else GREY
            # drawing the points of grey lines takes most of the time
            part = slice(None, None, 1 if few else 4)
            axes.plot(
                x[part],
                curve[part],
                color=hue,
                linewidth=1,
                alpha=1 if few else 0.5,
                label=label if few else None,
            )
        axes.plot(x, curves.mean(axis=0), color=BLUE, linewidth=3, label=mean_label)
        if mark is not None:
            axes.axvline(mark, color=BLUE, linewidth=1, linestyle="--")
        axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel=axes_labels[0], ylabel=axes_labels[1])
        figure.legend(loc="outside right upper", fontsize=8)


def plot_confusion(confusion: NDArray[np.int64], names: Sequence[str], path: Path) -> None:
    """Plot the confusion matrix as fractions of each true class.

    Args:
        confusion: [C + 1, C + 1], rows predicted, columns true, the last is background.
    """
    shares = confusion / np.maximum(confusion.sum(axis=0, keepdims=True), 1)
    labels = [*names, "background"]
    few = len(names) <= MANY
    side = min(max(5.0, 0.42 * len(labels) + 2.5), 14.0)
    with drawing(path, side + 1, side) as figure:
        axes = figure.subplots()
        axes.grid(False)
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes, shrink=0.7, label="fraction of the true class")
        step = 1 if few else math.ceil(len(labels) / 90)
        ticks = range(0, len(labels), step)
        size = 9 if few else 5
        axes.set_xticks(ticks, [labels[i] for i in ticks], rotation=90, fontsize=size)
        axes.set_yticks(ticks, [labels[i] for i in ticks], fontsize=size)
        axes.set(xlabel="true", ylabel="predicted", title="confusion matrix (confidence 0.25, IoU 0.45)")
        if few:
            for row, column in zip(*np.nonzero(shares >= 0.005), strict=True):
                value = shares[row, column]
                axes.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if value > 0.5 else "#111827",
                )


def draw_validation(
    metrics: CocoMetrics,
    found: ScoredBoxes,
    index: DataIndex,
    folder: Path,
    note: Callable[[str], None],
    painted: Callable[[NDArray[np.uint8], int, Any], NDArray[np.uint8]] = lambda pixels, *_: pixels,
) -> None:
    """Draw curves, the confusion matrix, and some images with labels and with detections.

    Args:
        painted: returns the pixels of an image with more than boxes; of the labels (None), or of these rows of ``found``.
    """
    curves = f"the curves of the validation in {folder}"
    or_note(note, curves, plot_curves, metrics.curves, index.names, folder)
    matrix = folder / "confusion_matrix.png"
    or_note(note, matrix, plot_confusion, metrics.confusion, index.names, matrix)
    examples = f"the examples of the validation in {folder}"
    or_note(note, examples, _draw_examples, found, index, folder, painted)


def draw_worst(
    found: ScoredBoxes, index: DataIndex, errors: Mapping[int, int], most: int, folder: Path
) -> None:
    """Write the images with the most errors, with labels at the left and detections at the right.

    Args:
        errors: number of errors of each image; equal numbers are in the order of the images.
    """
    worst = sorted(errors, key=lambda image: (-errors[image], image))[:most]
    for place, image in enumerate(worst, 1):
        path = Path(index.path(image))
        pixels, labels = read_image(path), labels_of(index, np.array([image]))
        rows = (found.image == image) & (found.scores >= SHOWN_SCORE)
        boxes = _corners(found.boxes_xywh_px[rows])
        truth = draw_boxes(pixels, _corners(labels.boxes_xywh_px), labels.classes, index.names)
        detected = draw_boxes(pixels, boxes, found.classes[rows], index.names, found.scores[rows])
        name = f"{place:0{len(str(len(worst)))}}_{path.stem[:100]}.jpg"
        _, encoded = cv2.imencode(".jpg", np.hstack([truth, detected]))
        write_bytes(folder / name, encoded.tobytes())


def _draw_examples(
    found: ScoredBoxes,
    index: DataIndex,
    folder: Path,
    painted: Callable[[NDArray[np.uint8], int, Any], NDArray[np.uint8]],
) -> None:
    truths, detections = [], []
    for image in np.unique(found.image)[:SHOWN].tolist():
        pixels, title = read_image(index.path(image)), Path(index.path(image)).name
        labels = labels_of(index, np.array([image]))
        true = painted(pixels, image, None)
        truths.append(Picture(true, _corners(labels.boxes_xywh_px), labels.classes, None, title))
        rows = (found.image == image) & (found.scores >= SHOWN_SCORE)
        boxes = _corners(found.boxes_xywh_px[rows])
        seen = painted(pixels, image, rows)
        detections.append(Picture(seen, boxes, found.classes[rows], found.scores[rows], title))
    plot_pictures(truths, index.names, folder / "val_labels.jpg", most=SHOWN)
    plot_pictures(detections, index.names, folder / "val_predictions.jpg", most=SHOWN)


def _corners(boxes_xywh: np.ndarray) -> np.ndarray:
    """Return boxes [M, 4] as x1, y1, x2, y2 from x, y, w, h."""
    return np.concatenate([boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:]], axis=1)
