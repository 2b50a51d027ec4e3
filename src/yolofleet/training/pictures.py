"""Pictures of a run, drawn by rank 0. A picture that cannot be drawn gives a note and does not end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.images.decode import read_image
from yolofleet.data.input.sample import MicroBatch
from yolofleet.inference.evaluate.batches import labels_of
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.plots import plot_confusion, plot_curves
from yolofleet.runs.report.draw import Picture, draw_boxes
from yolofleet.runs.report.plots import (
    or_note,
    plot_labels,
    plot_pictures,
    training_pictures,
)
from yolofleet.support.files.atomic import write_bytes

SHOWN = 16  # images in a grid
SHOWN_SCORE = 0.25  # detections drawn


def draw_labels(index: DataIndex, folder: Path, note: Callable[[str], None]) -> None:
    path = folder / "labels.png"
    or_note(note, path, plot_labels, index.classes, index.boxes_cxcywh_unit, index.names, path)


def draw_micro_batch(
    micro_batch: MicroBatch, names: Sequence[str], folder: Path, note: Callable[[str], None]
) -> None:
    """Draw images of a micro-batch with their labels, as the network sees them."""
    images = micro_batch.images_on(torch.device("cpu"))
    pictures = training_pictures(images, micro_batch.labels, most=SHOWN)
    path = folder / f"train_step{micro_batch.step}.jpg"
    or_note(note, path, plot_pictures, pictures, names, path)


def draw_evaluation(
    evaluation: Evaluation, index: DataIndex, folder: Path, note: Callable[[str], None]
) -> None:
    """Draw curves, the confusion matrix, and some of this rank's images with labels and with detections."""
    curves = f"the curves of the validation in {folder}"
    or_note(note, curves, plot_curves, evaluation.metrics.curves, index.names, folder)
    matrix = folder / "confusion_matrix.png"
    or_note(note, matrix, plot_confusion, evaluation.confusion, index.names, matrix)
    or_note(note, f"the examples of the validation in {folder}", _draw_examples, evaluation, index, folder)


def draw_worst(
    evaluation: Evaluation, index: DataIndex, errors: Mapping[int, int], most: int, folder: Path
) -> None:
    """Write the images with the most errors, with labels at the left and detections at the right.

    Args:
        errors: number of errors of each image; equal numbers are in the order of the images.
        most: number of images.
    """
    found = evaluation.detections
    worst = sorted(errors, key=lambda image: (-errors[image], image))[:most]
    for place, image in enumerate(worst, 1):
        path = Path(index.path(image))
        pixels, labels = read_image(path), labels_of(index, np.array([image]))
        rows = (found.image == image) & (found.score >= SHOWN_SCORE)
        boxes = _corners(found.boxes_xywh_px[rows])
        truth = draw_boxes(pixels, _corners(labels.boxes_xywh_px), labels.class_idx, index.names)
        detected = draw_boxes(pixels, boxes, found.class_idx[rows], index.names, found.score[rows])
        name = f"{place:0{len(str(len(worst)))}}_{path.stem[:100]}.jpg"
        _, encoded = cv2.imencode(".jpg", np.hstack([truth, detected]))
        write_bytes(folder / name, encoded.tobytes())


def _draw_examples(evaluation: Evaluation, index: DataIndex, folder: Path) -> None:
    found, truths, detections = evaluation.detections, [], []
    for image in np.unique(found.image)[:SHOWN].tolist():
        pixels, title = read_image(index.path(image)), Path(index.path(image)).name
        labels = labels_of(index, np.array([image]))
        truths.append(Picture(pixels, _corners(labels.boxes_xywh_px), labels.class_idx, None, title))
        rows = (found.image == image) & (found.score >= SHOWN_SCORE)
        boxes = _corners(found.boxes_xywh_px[rows])
        detections.append(Picture(pixels, boxes, found.class_idx[rows], found.score[rows], title))
    plot_pictures(truths, index.names, folder / "val_labels.jpg", most=SHOWN)
    plot_pictures(detections, index.names, folder / "val_predictions.jpg", most=SHOWN)


def _corners(boxes_xywh: np.ndarray) -> np.ndarray:
    """Return boxes [M, 4] as x1, y1, x2, y2 from x, y, w, h."""
    return np.concatenate([boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:]], axis=1)
