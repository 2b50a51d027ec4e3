"""`yolofleet bench train` and `bench scaling` on processes of this machine, with settings that take seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import called, small_shapes, working_in
from small_files import TINY

from yolofleet.fleet.plan.inputs import Store

SMALL = ["--model", str(TINY), "--img", "64", "--batch", "8", "--nominal-batch", "8", "--micro-batch", "4", "--threads", "1"]  # fmt: skip


@pytest.mark.slow
def test_the_parts_of_a_training_on_two_processes(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    with working_in(tmp_path):
        done = called(
            "bench", "train", "--data", data, *SMALL, "--device", "cpu:2", "--steps", "2", "--json", "-"
        )
    assert done.code == 0, done.err
    figures = json.loads(done.out)  # standard output has nothing else
    parts = {part["name"]: part for part in figures["parts"]}
    assert parts.keys() == {"step", "all-reduce", "loader", "whole run", "validation", "checkpoint"}
    for part in parts.values():
        assert part["rate"] > 0 and part["limit"] > 0 and part["share"] > 0, part
        assert part["name"] in done.err
    assert figures["setup"]["step_images"] == 8 and figures["checkpoint"]["bytes"] > 5e5
    assert figures["binds"] in {"loader", "network", "step", "all-reduce"} and figures["advice"]
    assert "2 processes" in figures["where"] and figures["device_memory_mib"] == 0
    assert not [path for path in tmp_path.rglob("*") if "yolofleet-bench" in path.name or path.name == "runs"]


@pytest.mark.slow
def test_the_store_is_a_part_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    data = f"file://{small_shapes(tmp_path)}"
    more = ["--device", "cpu", "--steps", "1", "--workers", "1", "--json", "figures.json"]
    with working_in(tmp_path):
        done = called("bench", "train", "--data", data, *SMALL, *more)
    assert done.code == 0, done.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    store = next(part for part in figures["parts"] if part["name"] == "store")
    assert store["rate"] > 0 and store["share"] == pytest.approx(store["rate"] / store["limit"])
    assert figures["store"]["bytes_s"] > 0 and figures["store"]["request_s"] > 0
    words = re.search(r"plan --store (\S+)", done.out)
    assert words is not None and Store.parse(words[1]).bytes_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cpu:2"])
def test_the_parts_of_the_time_until_the_first_step(tmp_path: Path, device: str) -> None:
    data = small_shapes(tmp_path)
    code = tmp_path / "mine.py"  # a setting that no file may give reaches the run, too
    code.write_text(
        "from yolofleet import TrainingRecipe\nopen(f'{__file__}.read', 'a').write('x')\nclass Mine(TrainingRecipe): pass\n"
    )
    mine = ["--recipe-class", f"{code}:Mine"]
    with working_in(tmp_path):
        done = called(
            "bench", "start", "--data", data, *SMALL, "--device", device, *mine, "--runs", "2", "--json", "-"
        )
    assert done.code == 0, done.err
    figures = json.loads(done.out)  # standard output has nothing else
    assert figures["torch_s"] > 0 and len(figures["runs"]) == 2
    for seconds in figures["runs"]:
        parts = {name: value for name, value in seconds.items() if name != "sum"}
        assert sum(parts.values()) == pytest.approx(seconds["sum"])
        assert min(parts.values()) >= 0 and {"network", "first batch", "first step", "rest"} <= parts.keys()
        assert parts["command, launch and import of torch"] > parts["network"] > 0
    assert "run 2" in done.err and "first step" in done.err
    assert len(Path(f"{code}.read").read_text()) >= 2
    assert not [path for path in tmp_path.rglob("*") if "yolofleet-bench" in path.name or path.name == "runs"]


def test_a_start_that_fails_ends_with_the_code_of_the_training(tmp_path: Path) -> None:
    with working_in(tmp_path):
        done = called("bench", "start", "--data", "missing.yaml", *SMALL, "--device", "cpu")
    assert done.code == 2 and "seconds from the command" not in done.out


@pytest.mark.slow
def test_the_parts_of_a_training_without_a_cache_and_with_loader_processes(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    more = ["--device", "cpu", "--steps", "2", "--cache", "none", "--workers", "1", "--json", "figures.json"]
    with working_in(tmp_path):
        done = called("bench", "train", "--data", data, *SMALL, *more)
    assert done.code == 0, done.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    loader = next(part for part in figures["parts"] if part["name"] == "loader")
    assert loader["limited_by"] == "reading and decoding alone" and loader["limit"] > 0
    assert not any(part["name"] == "all-reduce" for part in figures["parts"])
    assert "yolofleet bench train" in done.out and "binds" in done.out


@pytest.mark.slow
def test_a_table_of_one_and_two_processes(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    with working_in(tmp_path):
        done = called(
            "bench", "scaling", "--data", data, *SMALL, "--devices", "1,2", "--device", "cpu", "--epochs", "3", "--json", "f.json"
        )  # fmt: skip
    assert done.code == 0, done.err
    folder = tmp_path / "runs/bench/exp"
    page = (folder / "scaling.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| 1", "| 2"] and rows[0][3] == "1.00"
    runs = json.loads((tmp_path / "f.json").read_text())["runs"]
    assert [run["devices"] for run in runs] == [1, 2]
    assert all(run["rate_img_s"] > 0 and run["val_s"] > 0 and run["memory_mib"] is None for run in runs)
    assert (folder / "devices-2/results.csv").is_file() and not (folder / "devices-2/checkpoints").exists()


def test_more_gpus_than_there_are_end_before_the_first_run(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    with working_in(tmp_path):
        done = called("bench", "scaling", "--data", data, *SMALL, "--devices", "1,3", "--device", "0,1")
    assert done.code == 2 and "--devices 3: --device 0,1 names 2" in done.err
    assert not (tmp_path / "runs").exists()
