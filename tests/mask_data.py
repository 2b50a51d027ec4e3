"""A small data set with polygons: shapes, each with the outline of an octagon in its box."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from commands import small_shapes

_TURNS = np.arange(8) * np.pi / 4
OCTAGON = np.column_stack([np.cos(_TURNS), np.sin(_TURNS)]) / 2


def small_masks(folder: Path, images: int = 20, val_images: int = 10) -> Path:
    """Write the data set as :func:`commands.small_shapes` does; its rows are class and polygon instead of class and box."""
    return with_polygons(small_shapes(folder, images, val_images))


def with_polygons(data: Path) -> Path:
    """Write a polygon in the place of each box of a data set; return its YAML file."""
    for file in sorted((data.parent / "labels").rglob("*.txt")):
        rows = [[float(value) for value in line.split()] for line in file.read_text().splitlines()]
        polygons = [(int(row[0]), OCTAGON * row[3:] + row[1:3]) for row in rows]
        lines = (f"{number} {' '.join(f'{x:.6f}' for x in points.ravel())}\n" for number, points in polygons)
        file.write_text("".join(lines))
    return data
