"""A training set smaller than a batch trains with a smaller batch, says so, and stops within a long step."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import (
    DEADLINE_S,
    called,
    in_ranks,
    results,
    small_shapes,
    started,
    wait_until,
    working_in,
)
from safetensors.numpy import load_file
from small_files import TINY_YAML

from yolofleet.storage.yaml_lines import read_yaml

RUN = ["--img", "64", "--threads", "1", "--workers", "0", "--no-plots", "--reduce", "exact"]
DATA = ["--data", "set/data.yaml", "--cfg", "tiny.yaml"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 6 training images in set, and a description of a small YOLOv5 network."""
    made = tmp_path_factory.mktemp("few")
    small_shapes(made, images=6, val_images=4).parent.rename(made / "set")
    (made / "tiny.yaml").write_text(TINY_YAML)
    return made


def trained(folder: Path, name: str, ranks: int, *words: str) -> tuple[str, str]:
    """Return the output of a training, and the hash of its weights."""
    text = in_ranks(folder, ranks, "train", *DATA, "--epochs", "3", "--name", name, *RUN, *words)
    return text, results(folder / "runs/train" / name)["weights_sha256"]


def test_six_images_are_one_batch_of_an_epoch_on_every_fleet(folder: Path) -> None:
    small = ("--micro-batch", "3", "--recipe", "scratch-low")
    text, alone = trained(folder, "alone", 1, *small)
    assert (
        text.count(
            "note: --batch 18 (--micro-batch 3) is more than the 6 training images: a batch has 6, a step 24"
        )
        == 1
    )
    stored = read_yaml(folder / "runs/train/alone/config.yaml")
    assert [stored[name].value for name in ("batch", "nominal_batch", "micro_batch")] == [6, 24, 3]
    _, together = trained(folder, "together", 2, *small)
    _, typed = trained(folder, "typed", 1, *small, "--batch", "6", "--nominal-batch", "24")
    assert alone == together == typed
    trained(folder, "short", 1, *small, "--max-steps", "1")
    with working_in(folder):
        again = called("train", "--resume", "runs/train/short", "--max-steps", "0")
    assert again.code == 0 and "is more than the 6" not in again.err, again.err
    assert results(folder / "runs/train/short")["weights_sha256"] == alone


@pytest.mark.slow
def test_a_device_without_work_is_said_and_changes_nothing(folder: Path) -> None:
    small = ("--nominal-batch", "6")
    text, together = trained(folder, "idle", 2, *small)
    advice = "--micro-batch 3 (batch normalisation then sees 3 images), or 1 device"
    assert text.count(f"1 of 2 devices get no work: a step of 6 images has 1 micro-batch of 6; {advice}") == 1
    _, alone = trained(folder, "one", 1, *small)
    assert together == alone


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_ends_a_step_that_takes_minutes(folder: Path) -> None:
    """The step would show each image 2,000 times."""
    argv = [
        "train",
        *DATA,
        "--name",
        "long",
        *RUN,
        *("--device", "cpu", "--nominal-batch", "12000", "--set", "warmup_epochs=0"),
    ]
    with started(folder, *argv, "--epochs", "2000000") as run:
        status = folder / "runs/train/long/logs/status.json"
        wait_until(lambda: status.exists() and json.loads(status.read_text())["phase"] == "compute", run)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 75, out + err
    assert "stopped on request after step 0; the state is saved" in err
    with working_in(folder):
        again = called("checkpoints", "list", "runs/train/long")
    assert again.code == 0 and "step 0" in again.out.replace("step-0", "step 0"), again.out


@pytest.mark.slow
def test_a_micro_batch_above_the_recipe_for_few_images_still_trains(tmp_path: Path) -> None:
    """The recipe for few images has steps of 8; a user's micro-batch of 16 must not leave them empty."""
    data = small_shapes(tmp_path, images=20, val_images=4)
    start = [
        *("--img", "64", "--threads", "1", "--workers", "0", "--no-plots", "--device", "cpu"),
        *("--epochs", "1"),
    ]
    with working_in(tmp_path):
        for argv in (["--model", "dfine-n", "--name", "a", "--max-steps", "1", "--batch", "8"],):
            done = called("train", "--data", data, *start, *argv)
            assert done.code == 0, done.err
        first = Path("runs/train/a/weights/last.safetensors")
        other = tmp_path / "other.yaml"
        other.write_text(
            data.read_text().replace("circle", "ring").replace("path: .", f"path: {data.parent}")
        )
        done = called(
            "train", "--data", other, "--weights", first, *start, "--micro-batch", "16", "--name", "b"
        )
        assert done.code == 0 and "recipe dfine-few" in done.out and "steps of 16 images" in done.out, (
            done.out
        )
        before, after = load_file(first), load_file("runs/train/b/weights/last.safetensors")
        rows = Path("runs/train/b/results.csv").read_text()
    same = [
        np.array_equal(before[name], after[name])
        for name in before
        if before[name].shape == after[name].shape
    ]
    assert not all(same), rows
    header, row = (line.split(",") for line in rows.splitlines()[:2])
    losses = [
        float(value) for name, value in zip(header, row, strict=True) if name.strip().startswith("train/")
    ]
    assert any(losses), rows
