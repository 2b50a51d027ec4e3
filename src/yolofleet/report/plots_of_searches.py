"""Plots of lr-find, bench scaling, plan and tune as PNG files. Call them through :func:`plots.attempt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from yolofleet.report.plots import BLUE, GREEN, GREY, ORANGE, drawing


def plot_rates(
    rates: Sequence[float], losses: Sequence[float], smooth: Sequence[float], suggested: float, path: Path
) -> None:
    """Plot the loss and the smoothed loss over the learning rate of each step, and mark the suggested rate."""
    with drawing(path, 6, 4.2) as figure:
        axes = figure.subplots()
        axes.plot(rates, losses, color=GREY, linewidth=0.8, label="loss")
        axes.plot(rates, smooth, color=BLUE, label="smoothed")
        axes.axvline(suggested, color=ORANGE, linestyle="--", label=f"suggested: {suggested:.2g}")
        axes.set(title="loss", xlabel="learning rate", xscale="log")
        axes.legend(loc="upper left")


def plot_scaling(
    devices: Sequence[int],
    rates_img_s: Sequence[float],
    train_s: Sequence[float],
    val_s: Sequence[float],
    title: str,
    path: Path,
) -> None:
    """Plot images/s over the number of devices beside a straight line, and the seconds of an epoch.

    Args:
        train_s, val_s: of an epoch; NaN if unknown.
    """
    with drawing(path, 10, 4.2) as figure:
        figure.suptitle(title)
        speed, time = figure.subplots(1, 2)
        ideal = [rates_img_s[0] * count / devices[0] for count in devices]
        speed.plot(devices, ideal, color=GREY, linestyle="--", label="linear")
        speed.plot(devices, rates_img_s, color=BLUE, marker="o", label="measured")
        for count, rate, line in zip(devices, rates_img_s, ideal, strict=True):
            place = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            speed.annotate(f"{rate:.4g} ({rate / line:.0%})", (count, rate), **cast(Any, place))
        speed.set(title="images / s", xlabel="devices", ylim=(0, 1.1 * max(*ideal, *rates_img_s)))
        speed.set_xticks(devices)
        speed.margins(x=0.15)
        speed.legend(loc="upper left")
        places, known = range(len(devices)), np.nan_to_num(val_s)
        time.bar(places, train_s, color=BLUE, width=0.6, label="training")
        time.bar(places, known, bottom=train_s, color=ORANGE, width=0.6, label="validation")
        time.set(title="seconds of an epoch", xlabel="devices")
        time.set_xticks(places, [str(count) for count in devices])
        time.grid(axis="x", visible=False)
        time.legend(loc="upper right")


def plot_forecasts(
    fleets: Sequence[str],
    rates_img_s: Sequence[tuple[float, float, float]],
    hours: Mapping[str, Sequence[float]],
    title: str,
    path: Path,
) -> None:
    """Plot the predicted images/s of fleets with their ranges, and what the hours of a run are spent on.

    Args:
        rates_img_s: least, likely and most of each fleet.
        hours: by part of the run, of each fleet.
    """
    with drawing(path, 10, 1.6 + 0.35 * len(fleets)) as figure:
        figure.suptitle(title)
        speed, time = figure.subplots(1, 2, sharey=True)
        places = range(len(fleets))
        low, likely, high = (np.array(column) for column in zip(*rates_img_s, strict=True))
        speed.errorbar(likely, places, xerr=[likely - low, high - likely], fmt="o", color=BLUE, capsize=3)
        speed.set(title="images / s", xlim=(0, 1.1 * high.max()))
        speed.set_yticks(places, list(fleets))
        left = np.zeros(len(fleets))
        for name, values in hours.items():
            if max(values) > 0.005 * max(map(sum, zip(*hours.values(), strict=True))):
                time.barh(places, values, left=left, height=0.6, label=name.replace("_", "-"))
                left += np.array(values)
        time.set(title="hours of the run")
        time.invert_yaxis()
        time.legend(fontsize=8)


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
