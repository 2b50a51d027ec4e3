"""The picture of a study of ``yolofleet tune``. Call it through :func:`plots.attempt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from yolofleet.report.plots import BLUE, GREEN, ORANGE, drawing


def plot_tune(
    numbers: Sequence[int],
    fitness: Sequence[float],
    importances: Mapping[str, float],
    columns: Mapping[str, Sequence[float]],
    path: Path,
) -> None:
    """Plot the fitness of each trial with the best so far, the importances, and the fitness over recipe values.

    Args:
        numbers, fitness: of trials that have a fitness.
        columns: by the name of a value, its numbers in these trials; the first six are drawn.
    """
    shown = list(columns.items())[:6]
    rows = 1 + -(-len(shown) // 3)
    with drawing(path, 11, 3.4 * rows) as figure:
        grid = figure.add_gridspec(rows, 6)
        history = figure.add_subplot(grid[0, :3])
        history.scatter(numbers, fitness, s=16, color=BLUE, label="trial")
        history.step(numbers, np.maximum.accumulate(fitness), where="post", color=ORANGE, label="best so far")
        history.set(title="fitness of the trials", xlabel="trial")
        history.legend(loc="lower right")
        bars = figure.add_subplot(grid[0, 3:])
        most = dict(list(importances.items())[:12][::-1])
        bars.barh(list(most), list(most.values()), color=GREEN)
        bars.set(title="importance of the values")
        for place, (name, values) in enumerate(shown):
            row, column = divmod(place, 3)
            axes = figure.add_subplot(grid[1 + row, 2 * column : 2 * column + 2])
            axes.scatter(values, fitness, c=numbers, s=16, cmap="viridis")
            spread = max(values) / min(values) if min(values) > 0 else 1.0
            axes.set(title=name, ylabel="fitness", xscale="log" if spread > 50 else "linear")
