"""The fleet is not in the figures of a report, and a resumed run has one report.

``test_training.py`` looks at the report of two processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import small_shapes, train_args, yolofleet

from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("re port")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return small_shapes(folder)


def trained(folder: Path, data: Path, name: str, *more: str) -> RunFolder:
    arguments = train_args(data, "--reduce", "exact", "--plots", "--workers", "0", "--name", name, *more)
    yolofleet(folder, *arguments)
    return RunFolder(folder / "runs" / "train" / name)


def figures(run: RunFolder) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run.report_json.read_text(encoding="utf-8"))
    return values


def test_a_report_of_two_processes_has_the_figures_of_one_and_tells_of_both(folder: Path, data: Path) -> None:
    one = trained(folder, data, "one", "--device", "cpu", "--epochs", "1")
    two = trained(folder, data, "two", "--device", "cpu:2", "--epochs", "1")
    assert one.report.stat().st_size > 50_000 and two.report.is_file()
    assert figures(one)["images"][0]["jpeg"] and figures(one) == figures(two)
    # another epoch on another fleet: a second start, and the report of the longer run
    yolofleet(folder, "train", "--resume", two.path, "--epochs", "2", "--device", "cpu")
    resumed = read_run(two)
    assert [a["processes"] for a in resumed["timeline"]["attempts"]] == [2, 1]
    assert [span["epoch"] for span in resumed["timeline"]["spans"]] == [1, 2]
    assert resumed["curves"]["epoch"] == [1, 2] and figures(two) != figures(one)
    yolofleet(folder, "report", "compare", one.path, two.path, "--out", folder / "both.html")
    assert (folder / "both.html").stat().st_size > 50_000


def test_a_validation_on_two_processes_writes_the_report_of_one(folder: Path, data: Path) -> None:
    weights = folder / "runs" / "train" / "one" / "weights" / "last.safetensors"
    if not weights.is_file():
        pytest.skip("the training above failed")
    for device in ("cpu", "cpu:2"):
        arguments = ("--weights", weights, "--data", data, "--img", "64", "--workers", "0")
        yolofleet(folder, "val", *arguments, "--device", device, "--name", device.replace(":", "-"))
    one, two = (RunFolder(folder / "runs" / "val" / name) for name in ("cpu", "cpu-2"))
    assert figures(one)["errors"]["images"] and figures(one) == figures(two)
    assert read_run(one)["verb"] == "val" and one.report.is_file() and two.report.is_file()
