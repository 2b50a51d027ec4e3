"""A run folder that was used before, and states that somebody changed: real runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import called, in_ranks, small_shapes, train_args, yolofleet

from yolofleet.families.weights.format import read_tensors, write_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("used")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Three steps, then in the same folder a new run of two."""
    data = small_shapes(folder, images=16, val_images=4)
    for steps, seed in ((3, 1), (2, 2)):
        args = (
            "--max-steps",
            steps,
            "--seed",
            seed,
            *("--save-every", "1steps", "--name", "used", "--exist-ok"),
        )
        in_ranks(folder, 1, *train_args(data, *map(str, args)))
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


WRITE_LARGE = """
import sys; import torch; from pathlib import Path; from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot
store = CheckpointStore(Path(sys.argv[1]))
store.save(Snapshot(9, {"a": torch.ones(64 << 20)}, {})); store.flush()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_resumed_run_removes_what_a_killed_process_has_left(run: Path, folder: Path) -> None:
    copy = folder / "runs" / "train" / "killed"
    shutil.copytree(run, copy)
    states = copy / "checkpoints"
    before = set(states.iterdir())
    writer = subprocess.Popen([sys.executable, "-c", WRITE_LARGE, str(states)])
    while not (left := set(states.iterdir()) - before):
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    assert left and all(path.name.startswith(".") for path in left), "it was killed too late"
    weights = copy / "weights"
    (weights / ".best.safetensors-0a_b1c2d.tmp").write_text("half")
    kept = [weights / ".notes.tmp", weights / ".best-of-all", weights / "my-0a_b1c2d.tmp"]
    for path in kept:
        path.touch()
    in_ranks(folder, 1, "train", "--resume", copy, "--max-steps", "3")
    assert steps_in(states) == ["step-00000002.safetensors", "step-00000003.safetensors"]
    assert not list(states.glob(".*"))
    assert set(weights.iterdir()) == {*kept, *(weights / f"{name}.safetensors" for name in ("best", "last"))}


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
    """In this process, because each start costs seconds."""
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
        said = called(*words)
        assert said.code == 3 and "Traceback" not in said.err, kind
        assert "not a training state" in said.err or i, kind


@pytest.mark.skipif(sys.platform == "win32", reason="no umask")
@pytest.mark.parametrize(
    ("mask", "folder_mode", "file_mode"),
    [
        pytest.param(0o027, 0o750, 0o640, marks=pytest.mark.slow),
        pytest.param(0o022, 0o755, 0o644, marks=pytest.mark.slow),
        pytest.param(0o077, 0o700, 0o600, marks=pytest.mark.slow),
    ],
    ids=["027", "022", "077"],
)
def test_files_of_a_run_follow_the_umask(tmp_path: Path, mask: int, folder_mode: int, file_mode: int) -> None:
    data = small_shapes(tmp_path, images=4, val_images=2)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(folder_mode if path.is_dir() else file_mode)
    before = os.umask(mask)
    try:
        plots = [
            word
            for word in train_args(data, "--device", "cpu:2", "--cache", "disk", "--epochs", "1")
            if word != "--no-plots"
        ]
        yolofleet(tmp_path, *plots)
        weights = tmp_path / "runs" / "train" / "exp" / "weights" / "last.safetensors"
        yolofleet(tmp_path, "export", "--weights", weights, "--format", "torchscript", "--img", "64")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    odd = [path for path, mode in modes.items() if mode != (folder_mode if path.is_dir() else file_mode)]
    assert not odd
    kinds = {path.suffix for path in modes}
    assert {".pixels", ".arrays", ".safetensors", ".torchscript", ".png", ".log", ".yaml", ".csv"} <= kinds
