"""What a sampler draws follows from keys: loader processes, the fleet, an overlapped validation and a resume change nothing.

``test_recipe_on_every_fleet.py`` has the other samplers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, environment, killed_at_step, results, yolofleet

# After so few steps every AP is 0. So each validation gets figures here that depend on its weights.
RUN = """
import sys
from yolofleet.cli import main
from yolofleet.train import validations

def figures(evaluation):
    loss = sum(evaluation.losses.values())
    return [1e5 * loss * (1 + number) % 1 for number in range(len(evaluation.metrics.per_class))]

validations._class_ap_of = figures
sys.exit(main(sys.argv[1:]))
"""
# 13 steps of 8 images: most epochs of 20 images end within a step
EPOCHS = ["--epochs", "5", "--set", "warmup_epochs=0", "--set", "fliplr=0.4"]


def arguments(data: Path, name: str, *more: str) -> list[str]:
    start = ["train", "--data", str(data), *SMALL, "--threads", "1", "--reduce", "exact", *EPOCHS]
    return [*start, "--name", name, *more]


def trained(folder: Path, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *args],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def hash_of(folder: Path, name: str) -> str:
    return results(folder / "runs" / "train" / name)["weights_sha256"]


@pytest.mark.slow
def test_two_processes_and_a_resumed_run_draw_the_same_images(folder: Path, data: Path) -> None:
    yolofleet(folder, *arguments(data, "two", "--sampler", "weights", "--device", "cpu:2", "--val-overlap"))
    run = folder / "runs" / "train" / "killed"
    args = arguments(data, run.name, "--sampler", "weights", "--device", "cpu", "--save-steps", "1")
    killed_at_step(folder, 6, run, *args)
    yolofleet(folder, "train", "--resume", run)
    assert hash_of(folder, "two") == hash_of(folder, "killed")


@pytest.mark.slow
def test_overlapped_validations_loaders_and_resumes_at_any_step_draw_the_same_images(
    folder: Path, data: Path
) -> None:
    device = ["--sampler", "weights", "--device", "cpu", "--save-steps", "1", "--keep-last", "99"]
    trained(folder, *arguments(data, "plain", *device))
    trained(folder, *arguments(data, "overlap", *device, "--val-overlap", "--workers", "2"))
    trained(folder, *arguments(data, "ahead", "--sampler", "weights", "--val-overlap", "--workers", "1",
                               "--prefetch", "40", "--device", "cpu"))  # fmt: skip
    assert hash_of(folder, "plain") == hash_of(folder, "overlap") == hash_of(folder, "ahead")
    for run, step in (
        ("plain", 5),
        ("plain", 6),
        ("overlap", 3),
        ("overlap", 5),
        ("overlap", 7),
        ("overlap", 8),
    ):
        copy = folder / "runs" / "train" / f"{run} {step}"
        shutil.copytree(folder / "runs" / "train" / run, copy)
        for state in (copy / "checkpoints").glob("step-*.safetensors"):
            if int(state.stem.split("-")[1]) > step:
                state.unlink()
        trained(folder, "train", "--resume", str(copy))
        assert hash_of(folder, copy.name) == hash_of(folder, "plain"), copy.name
