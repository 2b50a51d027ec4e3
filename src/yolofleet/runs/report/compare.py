"""Compare runs: their settings, curves and figures, and the validation images on which their detections differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolofleet.runs.report.draw import picture_base64
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import mapping, read_run
from yolofleet.runs.report.page import page
from yolofleet.runs.report.results import METRICS
from yolofleet.storage.atomic import write_text
from yolofleet.support.errors import ConfigError

MOST_RUNS = 10
PICTURES = 24
PICTURE_BYTES = 2_300_000  # limit of all pictures together
SIDE_PX = 640
SHOWN_SCORE = 0.25
SAME_IOU = 0.5
# of an image; a run stores at most 100 detections, and pairing needs the square of the number
MOST_BOXES = 1000


def write_comparison(folders: Sequence[RunFolder], out: Path) -> None:
    """Write the comparison of runs as one HTML file.

    Pictures come from the reports of the runs, or from the image files if a report has none.

    Raises:
        ConfigError: not two to ten folders of runs. StorageError: the page cannot be written.
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        raise ConfigError(
            f"cannot compare {len(folders)} run{'s' if len(folders) != 1 else ''}: expected 2 to {MOST_RUNS}",
            hint="yolofleet report compare runs/train/exp runs/train/exp2",
        )
    values = comparison([read_run(folder) for folder in folders])
    write_text(out, page(f"Comparison of {len(folders)} runs", values), into_special=True)


def comparison(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of the page, from those of :func:`history.read_run`."""
    names = _distinct(runs)
    unlike = _unlike(runs, names)
    return {
        "unlike": unlike,
        "kind": "compare",
        "runs": [
            {"name": name, **{key: run[key] for key in ("folder", "finished", "curves", "curves_problem")}}
            for name, run in zip(names, runs, strict=True)
        ],
        "figures": _final_figures(runs, has_best=not unlike),
        "settings": _different_settings(runs),
        "main": runs[0]["task"]["main"],
        "classes": _per_class(runs),
        **_disagreements(runs, names),
    }


def _distinct(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each run, or its folder if several have that name."""
    names = [str(run["name"]) for run in runs]
    return [
        name if names.count(name) == 1 else f"{Path(run['folder']).parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


# name and path in the values of a run, of what is neither better nor worse
_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("best epoch", ("best", "epoch")),
    ("steps", ("steps",)),
    ("images seen", ("images_seen",)),
    ("processes", ("fleet", "processes")),
    ("device", ("fleet", "device")),
    ("SHA-256 of the last weights", ("weights_sha256",)),
)


def _unlike(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return how the images or labels of the validations differ, so that no accuracy is better; "" if they do not."""
    every = {name: _images(run) for name, run in zip(names, runs, strict=True)}
    labels = [{key: image["labels"] for key, image in images.items()} for images in every.values() if images]
    if all(one == labels[0] for one in labels):
        return ""
    common = set(labels[0]).intersection(*labels)
    equal = sum(all(one[key] == labels[0][key] for one in labels) for key in common)
    counts = ", ".join(f"{name} on {len(images)}" for name, images in every.items() if images)
    return f"The runs were validated on different images ({counts} of those in the reports; {len(common)} are common, {equal} with equal labels), so no accuracy is marked as the best. Validate all weights on one data set: yolofleet val."


def _final_figures(runs: Sequence[Mapping[str, Any]], *, has_best: bool) -> list[list[Any]]:
    """Return a line for each figure that a run has: name, higher is better, value of each run.

    Args:
        has_best: whether one accuracy may be better than another.
    """
    lines: list[list[Any]] = []
    names = {
        figure: column.removeprefix(METRICS)
        for run in runs
        for column, figure in run["task"]["columns"].items()
    }
    figures = dict.fromkeys(name for run in runs for name in mapping(run["results"].get("metrics")))
    accuracies = [(names.get(figure, figure), ("metrics", figure)) for figure in figures]
    accuracies.append(("best fitness", ("best", "fitness")))
    for higher, table in ((True if has_best else None, accuracies), (None, _FACTS)):
        for name, path in table:
            values = [_at(run["results"], path) for run in runs]
            if any(value is not None and value != -1 for value in values):  # -1: no labels of that size
                lines.append([name, higher, *values])
    seconds = [_total(run["results"].get("seconds")) for run in runs]
    if any(value is not None for value in seconds):
        lines.append(["seconds", False, *seconds])
    versions = {key for run in runs for key in mapping(run["results"].get("versions"))}
    for key in sorted(versions):
        values = [mapping(run["results"].get("versions")).get(key) for run in runs]
        if len(set(map(str, values))) > 1:
            lines.append([f"version of {key}", None, *values])
    return lines


def _at(values: Any, path: Sequence[str]) -> Any:
    for name in path:
        values = mapping(values).get(name)
    return values if isinstance(values, (int, float, str)) else None


def _total(seconds: Any) -> float | None:
    parts = mapping(seconds)
    # a validation stores its total as "wall"; a training stores several parts
    spent = [parts["wall"]] if "wall" in parts else parts.values()
    numbers = [float(value) for value in spent if isinstance(value, (int, float))]
    return sum(numbers) if numbers else None


def _different_settings(runs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the settings and recipe values that differ: name, value of each run with its source."""
    lines = []
    for part in ("settings", "recipe"):
        tables = [{row[0]: row for row in run["settings"][part]} for run in runs]
        for name in dict.fromkeys(name for table in tables for name in table):
            cells = [table.get(name, [name, "(not set)", ""]) for table in tables]
            if len({str(cell[1]) for cell in cells}) > 1:
                lines.append(
                    [
                        name,
                        *(f"{cell[1] or '(empty)'}  [{cell[2]}]" if cell[2] else cell[1] for cell in cells),
                    ]
                )
    return lines


def _per_class(runs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    tables = [mapping(run["figures"].get("per_class")) for run in runs]
    mains = [run["task"]["of_class"].get(run["task"]["main"], "") for run in runs]
    names = list(dict.fromkeys(name for table in tables for name in table))
    return [
        [name, *(_at(table.get(name), (main,)) for table, main in zip(tables, mains, strict=True))]
        for name in names
    ]


# -- images ----------------------------------------------------------------------------------------------------


def _disagreements(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the common images on which most detections differ from those of the first run, with their pictures.

    Runs without detections, or with other classes than the first run that has some, are left out: ``left_out`` says why.
    ``compared`` holds the positions of the others.
    """
    every = [_images(run) for run in runs]
    compared, left_out = list[int](), list[str]()
    for at, (run, images) in enumerate(zip(runs, every, strict=True)):
        if not images:
            left_out.append(f"{names[at]}: its report.json has no detections of a validation")
        elif compared and run["figures"].get("names") != runs[compared[0]]["figures"].get("names"):
            left_out.append(f"{names[at]}: its classes are not those of {names[compared[0]]}")
        else:
            compared.append(at)
    part = {"compared": compared, "left_out": left_out, "images": 0, "differing": 0, "disagreements": []}
    if len(compared) < 2:
        return part | {"names": []}
    tables = [every[at] for at in compared]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    counts = {}
    for key in common:
        found = [_table(table[key]["detections"]) for table in tables]
        counts[key] = sum(unpaired(found[0], other) for other in found[1:])
    order = sorted((key for key in common if counts[key]), key=lambda key: -counts[key])[:PICTURES]
    listed, left_bytes = [], PICTURE_BYTES
    for key in order:
        first = tables[0][key]
        jpeg = _picture(tables, key)
        if len(jpeg) > left_bytes:
            continue
        left_bytes -= len(jpeg)
        detections = [table[key]["detections"] for table in tables]
        image = {"count": counts[key], "jpeg": jpeg, "detections": detections}
        listed.append({**image, **{name: first[name] for name in ("path", "size_wh_px", "labels")}})
    differing = sum(count > 0 for count in counts.values())
    classes = runs[compared[0]]["figures"].get("names", [])
    values = {"images": len(common), "differing": differing, "disagreements": listed, "names": classes}
    return part | values


def _images(run: Mapping[str, Any]) -> dict[tuple[str, int, int], Mapping[str, Any]]:
    """Return the images of a report by file name and size, without names that occur twice or damaged entries."""
    found: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    twice = set()
    for image in run["figures"].get("images", ()):
        try:
            key = (os.path.basename(image["path"]), *map(int, image["size_wh_px"]))  # noqa: PTH119
            detections, _ = _table(image["detections"]), _table(image["labels"], 5)
        except (TypeError, KeyError, ValueError):
            continue
        if len(detections) > MOST_BOXES:
            continue
        if len(key) != 3 or key in found:
            twice.add(key)
            continue
        found[key] = image
    return {key: image for key, image in found.items() if key not in twice}


def _table(boxes: Any, columns: int = 6) -> NDArray[np.float64]:
    return np.array(boxes, np.float64).reshape(-1, columns)


def _picture(tables: Sequence[Mapping[Any, Mapping[str, Any]]], key: Any) -> str:
    stored = [jpeg for table in tables if isinstance(jpeg := table[key].get("jpeg"), str) and jpeg]
    return stored[0] if stored else picture_base64(str(tables[0][key]["path"]), SIDE_PX)


def unpaired(one: NDArray[np.float64], two: NDArray[np.float64]) -> int:
    """Return how many detections of both runs have no partner: same class and an IoU of at least ``SAME_IOU``.

    Args:
        one, two: [D, 6] class, x, y, w, h, score.
    """
    one, two = one[one[:, 5] >= SHOWN_SCORE], two[two[:, 5] >= SHOWN_SCORE]
    if not len(one) or not len(two):
        return len(one) + len(two)
    low = np.maximum(one[:, None, 1:3], two[None, :, 1:3])
    high = np.minimum(one[:, None, 1:3] + one[:, None, 3:5], two[None, :, 1:3] + two[None, :, 3:5])
    shared = np.prod(np.maximum(high - low, 0), axis=2)
    union = np.prod(one[:, 3:5], axis=1)[:, None] + np.prod(two[:, 3:5], axis=1)[None] - shared
    overlap = np.where(one[:, None, 0] == two[None, :, 0], shared / np.maximum(union, 1e-12), 0.0)
    pairs = 0
    while overlap.max() >= SAME_IOU:
        row, column = divmod(int(overlap.argmax()), overlap.shape[1])
        overlap[row], overlap[:, column] = -1.0, -1.0
        pairs += 1
    return len(one) + len(two) - 2 * pairs
