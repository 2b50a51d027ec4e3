"""A run folder that was used before, and states that somebody changed: real runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import small_shapes, train_args, yolofleet

from yolofleet.checkpoint.format import read_tensors, write_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("used")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Three steps, then in the same folder a new run of two."""
    data = small_shapes(folder, images=16, val_images=4)
    for steps, seed in ((3, 1), (2, 2)):
        args = ("--max-steps", steps, "--seed", seed, "--save-steps", 1, "--name", "used", "--exist-ok")
        yolofleet(folder, *train_args(data, "--device", "cpu", *map(str, args)))
    return folder / "runs" / "train" / "used"


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_new_run_in_a_used_folder_keeps_its_own_states_and_the_older_ones(run: Path) -> None:
    assert steps_in(run / "checkpoints") == ["step-00000001.safetensors", "step-00000002.safetensors"]
    assert steps_in(run / "checkpoints-before-1") == [
        "step-00000002.safetensors",
        "step-00000003.safetensors",
    ]
    for weights in ("weights", "weights-before-1"):
        assert (run / weights / "last.safetensors").is_file()
    _, header = read_tensors(run / "checkpoints" / "step-00000002.safetensors")
    assert header["state"]["fingerprint"]["settings"]["seed"] == 2


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    """Remove a value from the state."""

    def change(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        del values[path[-1]]

    return change


def with_value(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    """Set a value of the state."""

    def change(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


FORGED = {
    "no fingerprint": without("fingerprint"),
    "no model": without("fingerprint", "model"),
    "another model": with_value({"family": "nothing"}, "fingerprint", "model"),
    "endless": with_value(float("inf"), "images_seen"),
    "text": with_value("abc", "bn_batches"),
    "list": with_value([], "progress"),
    "progress": with_value("abc", "progress", "best_fitness"),
    "clock": with_value(None, "clock", "run"),
    "scaler": with_value({"scale": "abc"}, "scaler"),
}


def test_forged_states_are_messages(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, because each start costs seconds; the first one as a user does it, too."""
    from yolofleet.cli.app import run as run_words

    state = run / "checkpoints" / "step-00000002.safetensors"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(folder / "cache"))
    for i, (kind, change) in enumerate(FORGED.items()):
        copy = folder / "runs" / "train" / f"forged {i}"
        shutil.copytree(run, copy)
        tensors, header = read_tensors(state)
        change(header["state"])
        shutil.rmtree(copy / "checkpoints")
        write_tensors(copy / "checkpoints" / state.name, tensors, header)
        words = ["train", "--resume", str(copy), "--max-steps", "3"]
        if i:
            assert run_words(words) == 3, kind
        else:
            said = yolofleet(folder, *words, code=3)
            assert "Traceback" not in said.err and "not a training state" in said.err
