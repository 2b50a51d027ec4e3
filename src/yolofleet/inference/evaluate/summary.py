"""The notes of a data set and the tables of a validation, for the console and for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from yolofleet.data.datasets.index import DataIndex
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.matching import AREA_RANGES_PX
from yolofleet.runs.report.console import NullConsole

PROBLEMS_SHOWN = 5  # of each split


def show_data_notes(console: NullConsole, notes: Sequence[str], splits: Sequence[DataIndex]) -> None:
    """Print the notes about a data set and the problems of its splits."""
    assumed = (note for index in splits for note in index.assumed)
    for note in dict.fromkeys((*notes, *assumed)):  # splits may share files
        console.note(note)
    for index in splits:
        console.fact(index.totals_text())
        text = index.problems_text(PROBLEMS_SHOWN)
        if text:
            many = f"{index.problem_count} problems" if index.problem_count > 1 else "1 problem"
            console.warn(f"{many} in the {index.split} split (all: yolofleet data check)")
            for line in text.splitlines():
                console.fact(f"    {line}")


def show_evaluation(console: NullConsole, evaluation: Evaluation, *, per_class: bool) -> None:
    """Print the table of a validation, and a note if candidate boxes were left out."""
    console.table(*evaluation_table(evaluation, per_class=per_class))
    if per_class:
        figures, sizes = evaluation.metrics.figures, [size for size in AREA_RANGES_PX if size != "all"]
        areas = [f"{low:g} to {high:g} px" for low, high in ((0, 32), (32, 96), (96, math.inf))]
        rows = [
            [size, area, *(figure_text(figures[f"{name}-{size}"]) for name in ("mAP", "AR"))]
            for size, area in zip(sizes, areas, strict=True)
        ]
        console.table("by size", ["size", "square root of area", "mAP50-95", "AR100"], rows)
    if evaluation.candidates_cut:
        console.note(
            f"{evaluation.candidates_cut} candidate boxes of crowded images were left out before NMS, lowest scores "
            "first (usual in the first epochs)"
        )


def figure_text(value: float, labels: int = 1) -> str:
    """Return a figure as text: "no labels" if there are no ``labels`` or the figure is -1, as files and pycocotools write it."""
    return f"{value:.3f}" if labels and value != -1 else "no labels"


def accuracy_text(evaluation: Evaluation) -> str:
    """Return ``mAP50 0.500, mAP50-95 0.300``."""
    figures = evaluation.metrics.figures
    return ", ".join(f"{name} {figure_text(figures[name])}" for name in ("mAP50", "mAP50-95"))


def evaluation_figures(evaluation: Evaluation) -> dict[str, Any]:
    """Return values for JSON: ``metrics``, ``per_class``, ``images``, ``seconds``."""
    return {
        "metrics": dict(evaluation.metrics.figures),
        "per_class": {name: dict(figures) for name, figures in evaluation.metrics.per_class.items()},
        "images": evaluation.images,
        "seconds": dict(evaluation.seconds),
    }


def evaluation_table(evaluation: Evaluation, *, per_class: bool) -> tuple[str, list[str], list[list[str]]]:
    """Return (title, columns, rows) of a validation: one row for all classes, then one per class."""
    metrics = evaluation.metrics
    columns = ["class", "images", "labels", "P", "R", "mAP50", "mAP50-95"]
    figures = [metrics.figures[name] for name in ("P", "R", "mAP50", "mAP50-95")]
    labels = sum(int(c["labels"]) for c in metrics.per_class.values())
    rows = [["all", str(evaluation.images), str(labels), *(figure_text(v, labels) for v in figures)]]
    if per_class:
        for name, c in metrics.per_class.items():
            values = (c["P"], c["R"], c["AP50"], c["AP"])
            count = int(c["labels"])
            rows.append([name, str(int(c["images"])), str(count), *(figure_text(v, count) for v in values)])
    return f"validation: {evaluation.images} images, {evaluation.seconds['wall']:.1f} s", columns, rows
