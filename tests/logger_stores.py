"""What a run has sent to its loggers, read back from their stores."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

Rows = dict[int, dict[str, float]]  # by epoch


def table(run: Path) -> Rows:
    with (run / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(r["epoch"]): {k: float(v) for k, v in r.items() if v and k != "epoch"} for r in rows}


def tensorboard_rows(run: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    found: Rows = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            assert name not in found.get(scalar.step, {}), "an epoch occurs twice"
            found.setdefault(scalar.step, {})[name] = scalar.value
    return found


def agree(found: Rows, expected: Rows) -> None:
    assert found.keys() == expected.keys()
    for epoch, row in expected.items():
        assert found[epoch].keys() == row.keys(), f"epoch {epoch}"
        assert found[epoch] == pytest.approx(row, rel=1e-5), f"epoch {epoch}"  # of 6 digits
