"""Every training option that needs no GPU does its work, in this process, on a job of seconds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from commands import small_shapes
from small_files import TINY

from yolofleet.config.load import resolve_train
from yolofleet.families.weights.format import read_tensors
from yolofleet.fleet.launch.plan import plan_run, start
from yolofleet.support.errors import Stopped

BASE = {
    "model": str(TINY), "img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 4, "epochs": 2, "max_steps": 3,
    "device": "cpu", "threads": 1, "plots": False, "workers": 0, "patience": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shapes(tmp_path_factory.mktemp("options"), images=16, val_images=4)


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def train(data: Path, **settings: object) -> Path:
    """The run's folder."""
    name = "run" + str(len(list(Path.cwd().glob("runs/train/*"))))
    try:
        config, recipe = resolve_train({"data": str(data), "name": name, **BASE, **settings})
        assert start(plan_run(config, recipe))[0] == 0
    finally:
        torch.use_deterministic_algorithms(False)
    return Path("runs/train") / name


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return read_tensors(run / "weights" / f"{name}.safetensors")[0]


def test_loader_processes_and_caches_change_no_bit(data: Path) -> None:
    runs = [
        train(data, **more) for more in ({}, {"workers": 2, "cache": "disk"}, {"workers": 1, "cache": "none"})
    ]
    hashes = {json.loads((run / "results.json").read_text())["weights_sha256"] for run in runs}
    assert len(hashes) == 1


def test_frozen_layers_keep_weights_and_statistics(data: Path) -> None:
    first = train(data, max_steps=1)
    start_weights = first / "weights" / "last.safetensors"
    frozen = weights(train(data, weights=str(start_weights), model="", freeze="backbone", max_steps=3))
    for name, t in weights(first).items():
        layer = int(name.split(".")[1])
        if layer < 7 and t.is_floating_point():
            assert torch.equal(t, frozen[name]), name
    assert any(not torch.equal(t, frozen[n]) for n, t in weights(first).items() if n.startswith("model.7."))


def test_more_epochs_after_the_end(data: Path) -> None:
    run = train(data, max_steps=0, epochs=1)
    config, recipe = resolve_train({"resume": str(run), "epochs": 3, "device": "cpu"})
    assert start(plan_run(config, recipe))[0] == 0
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]


def test_patience_ends_a_run_saves_it_and_says_why_and_how_to_go_on(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(data, max_steps=0, epochs=30, patience=1, set=("lr0=1e-9", "warmup_bias_lr=0"))
    done = len((run / "results.csv").read_text().splitlines()) - 1
    assert 1 <= done < 30 and list((run / "checkpoints").glob("step-*.safetensors"))
    best = json.loads((run / "results.json").read_text())["best"]
    assert best == {"epoch": done, "fitness": 0}, "of weights without accuracy, the newest are the best"
    told = [line for line in capsys.readouterr().out.splitlines() if "--patience 1" in line]
    assert len(told) == 1 and f"ends after epoch {done} of 30" in told[0]
    assert f"yolofleet train --resume {run} --patience 0" in told[0]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in events if event["kind"] == "out_of_patience"] == [done]
    config, recipe = resolve_train({"resume": str(run), "patience": 0, "epochs": done + 1, "device": "cpu"})
    assert start(plan_run(config, recipe))[0] == 0
    assert len((run / "results.csv").read_text().splitlines()) - 1 == done + 1
    assert "--patience" not in capsys.readouterr().out


DELETES = """
import shutil
from yolofleet import Callback
from yolofleet.support.system.signals import request_stop

class Deletes(Callback):
    def start(self, run):
        self.folder = run.folder

    def step(self, step):
        if step.step == 3:
            shutil.rmtree(self.folder)
            if {stops}:
                request_stop("a test")
"""


@pytest.mark.parametrize("stops", [False, True])
def test_a_run_whose_folder_is_deleted_is_saved_whole_and_can_be_resumed(
    data: Path, capsys: pytest.CaptureFixture[str], stops: bool
) -> None:
    Path(f"deletes{stops}.py").write_text(DELETES.format(stops=stops))
    run = Path("runs/train/run0")
    try:
        train(data, max_steps=0, epochs=3, callbacks=(f"deletes{stops}.py:Deletes",))
        assert not stops
    except Stopped as stopped:
        assert stops and str(run) in str(stopped.hint)
    told = capsys.readouterr().out
    assert told.count(f"{run} was deleted") == 1
    assert next(iter(csv.DictReader((run / "results.csv").open())))["epoch"] == "1"
    assert (run / "weights" / "best.safetensors").is_file()
    assert stops or (run / "events.jsonl").stat().st_size  # nothing happens between the save and the stop
    config, recipe = resolve_train({"resume": str(run), "epochs": 4, "device": "cpu"})
    assert start(plan_run(config, recipe))[0] == 0
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    assert "deleted" not in capsys.readouterr().out
