"""Labels as rows of numbers, which tests write and compare, and as ``Shapes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry.shapes import Shapes


def shapes_of(rows: np.ndarray | Sequence[Sequence[float]]) -> Shapes:
    """Return the labels of rows [n, 6] image, class, cx, cy, w, h; or [n, 5], of one image."""
    array = np.asarray(rows, np.float32)
    array = array.reshape(-1, array.shape[-1] if array.size else 5)
    numbers = array[:, 0] if array.shape[1] == 6 else np.zeros(len(array))
    return Shapes(numbers.astype(np.int64), array[:, -5].astype(np.int64), array[:, -4:])


def of_images(labels: Shapes, first: int, last: int) -> Shapes:
    """Return the labels of the images ``first`` to ``last - 1`` of a micro-batch, numbered from 0."""
    mine = labels.rows((labels.image >= first) & (labels.image < last))
    return replace(mine, image=mine.image - first)


def rows_of(labels: Shapes) -> np.ndarray:
    """Return float32 [n, 5] class, cx, cy, w, h."""
    return np.column_stack([labels.classes, labels.boxes]).astype(np.float32)


def index_of(data: Path | str, split: str = "train", **choices: Any) -> DataIndex:
    """Return the index of a split of the data set that ``--data`` would name."""
    return build_index(load_dataset(str(data)), split, **choices)


def rows_by_name(index: DataIndex) -> dict[str, list[list[float]]]:
    """Return the rows to learn of each image, with 5 decimal places, by the name of its file."""
    return {
        Path(path).name: rows_of(index.labels(at)).astype(float).round(5).tolist()
        for at, path in enumerate(index.paths)
    }
