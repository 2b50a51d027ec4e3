"""The notes of a data set and the tables of a validation, for the console and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yolofleet.data.datasets.index import DataIndex
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.screen_table import figure_text

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
        for table in evaluation.task.tables(evaluation.metrics):
            console.table(*table)
    if evaluation.candidates_cut:
        console.note(
            f"{evaluation.candidates_cut} candidate boxes of crowded images were left out before NMS, lowest scores "
            "first (usual in the first epochs)"
        )


def accuracy_text(evaluation: Evaluation) -> str:
    """Return the figures that choose the best weights, as ``NAME 0.500, NAME 0.300``."""
    figures = evaluation.metrics.figures
    return ", ".join(f"{name} {figure_text(figures[name])}" for name in evaluation.task.fitness_of)


def evaluation_figures(evaluation: Evaluation) -> dict[str, Any]:
    """Return values for JSON: ``task``, ``metrics``, ``per_class``, ``images``, ``seconds``."""
    return {
        "task": evaluation.task.judgement.stored(),
        "metrics": dict(evaluation.metrics.figures),
        "per_class": {name: dict(figures) for name, figures in evaluation.metrics.per_class.items()},
        "images": evaluation.images,
        "seconds": dict(evaluation.seconds),
    }


def evaluation_table(evaluation: Evaluation, *, per_class: bool) -> tuple[str, list[str], list[list[str]]]:
    """Return (title, columns, rows) of a validation: one row for all classes, then one per class."""
    metrics, of_class = evaluation.metrics, evaluation.task.of_class
    columns = ["class", "images", "labels", *of_class]
    figures = [metrics.figures[name] for name in of_class]
    labels = sum(int(c["labels"]) for c in metrics.per_class.values())
    rows = [["all", str(evaluation.images), str(labels), *(figure_text(v, labels) for v in figures)]]
    if per_class:
        for name, c in metrics.per_class.items():
            values = [c[name] for name in of_class.values()]
            count = int(c["labels"])
            rows.append([name, str(int(c["images"])), str(count), *(figure_text(v, count) for v in values)])
    return f"validation: {evaluation.images} images, {evaluation.seconds['wall']:.1f} s", columns, rows
