"""Means and differences over seeds with 95 % intervals, for accuracy_study.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FIGURES = ("mAP50", "mAP50-95")


def t_quantile(share: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution for ``share`` in (0.5, 1) and ``freedom`` >= 1, to 1e-4.

    With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom - 1).
    """

    def integral(angle: float, parts: int = 2000) -> float:  # Simpson's rule
        at = [math.cos(angle * k / parts) ** (freedom - 1) for k in range(parts)]
        last = max(math.cos(angle), 0.0) ** (freedom - 1)
        return (at[0] + last + 4 * sum(at[1::2]) + 2 * sum(at[2::2])) * angle / (3 * parts)

    wanted = (2 * share - 1) * integral(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if integral(middle) < wanted else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t); NaN for a single value."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), error * t_quantile(0.975, len(values) - 1)


def difference_interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the difference of the means and half the width of its 95 % interval (Welch); NaN for a single value."""
    difference = statistics.mean(ours) - statistics.mean(other)
    if min(len(ours), len(other)) < 2:
        return difference, math.nan
    parts = [statistics.variance(values) / len(values) for values in (ours, other)]
    if not sum(parts):
        return difference, 0.0
    sizes = (len(ours), len(other))
    freedom = sum(parts) ** 2 / sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    return difference, math.sqrt(sum(parts)) * t_quantile(0.975, freedom)


def conclusion(difference: float, half: float) -> str:
    """Return what an interval says of the first arm of a difference."""
    if math.isnan(half):
        return "too few seeds"
    if abs(difference) <= half:
        return "differs by less than the interval"
    return "better" if difference > 0 else "lower"


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the means, the differences and a conclusion for each as markdown tables.

    Args:
        rows: of the results file; arms appear in its order.
    """
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    names = sorted(arms, key=lambda name: name.partition("/")[0], reverse=True)
    lines = ["| arm | seeds | epochs | mAP50 | mAP50-95 | commit |", "|---|---|---|---|---|---|"]
    for name in names:
        shown = [
            "{:.4f} ± {:.4f}".format(*mean_interval([row[figure] for row in arms[name]]))
            for figure in FIGURES
        ]
        commits = sorted({row["commit"][:8] + ("" if row["clean"] else " (changed)") for row in arms[name]})
        lines.append(
            f"| {name} | {len(arms[name])} | {arms[name][0]['epochs']} | {' | '.join(shown)} | {', '.join(commits)} |"
        )
    lines += ["", "| difference | mAP50 | mAP50-95 | conclusion |", "|---|---|---|---|"]
    for base in ("yolov5", "ours"):
        for name in names:
            other = f"{name.partition('/')[0]}/{base}"
            if other not in arms or name in (other, f"{name.partition('/')[0]}/yolov5"):
                continue
            found = [
                difference_interval([row[f] for row in arms[name]], [row[f] for row in arms[other]])
                for f in FIGURES
            ]
            words = [f"{f} {conclusion(*pair)}" for f, pair in zip(FIGURES, found, strict=True)]
            cells = " | ".join("{:+.4f} ± {:.4f}".format(*pair) for pair in found)
            lines.append(f"| {name} - {other} | {cells} | {', '.join(words)} |")
    return "\n".join([*lines, "", "Means over seeds ± half of the 95 % interval (Student's t; Welch)."])
