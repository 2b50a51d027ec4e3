"""`yolofleet lr-find`: what it suggests and what it writes.

``tests/multiprocess/test_recipe_on_every_fleet.py`` compares the curves of one process and of two.
"""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from commands import SMALL, called, small_shapes, working_in

from yolofleet.errors import ConfigError
from yolofleet.measure.lr_find import smoothed, suggestion

SEARCH = [
    *(word for word in SMALL if word != "--no-plots"),
    "--threads",
    "1",
    "--steps",
    "10",
    "--reduce",
    "exact",
    "--lowest",
    "0.0001",
]


def curve(folder: Path) -> list[tuple[float, float]]:
    with (folder / "lr_find.csv").open() as file:
        return [(float(row["lr"]), float(row["loss"])) for row in csv.DictReader(file)]


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_smallest_smoothed_loss() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 0.0]) == pytest.approx([1.0, 0.09 / 0.19])
    assert suggestion([0.01, 0.1, 1.0, 10.0], [3.0, 1.0, 2.0, math.inf]) == pytest.approx(0.01)


@pytest.mark.long
def test_a_search_writes_a_curve_and_no_weights(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    with working_in(tmp_path):
        done = called("lr-find", "--data", data, "--device", "cpu", *SEARCH)
        wrong = called("lr-find", "--data", data, "--device", "cpu", *SEARCH, "--highest", "0.00001")
        unknown = called("lr-find", "--data", data, "--log", "mlflow")
    assert done.code == 0, done.err
    run = tmp_path / "runs/lr-find/exp"
    found = curve(run)
    assert found[0][0] == pytest.approx(1e-4) and len(found) <= 10
    assert all(after[0] > before[0] for before, after in pairwise(found))
    lr0 = json.loads((run / "results.json").read_text())["lr0"]
    assert any(lr0 == pytest.approx(lr / 10, rel=1e-4) for lr, _ in found)
    assert f"suggested: --set lr0={lr0:.2g}" in done.out
    assert not list(run.rglob("*.safetensors"))
    assert wrong.code == ConfigError.exit_code and "is not below --highest" in wrong.err
    assert (
        unknown.code == ConfigError.exit_code
        and "--log is a setting of training that lr-find does not take" in unknown.err
    )
