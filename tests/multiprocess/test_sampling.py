"""What a sampler draws follows from keys: loader processes, the fleet, an overlapped validation and a resume change nothing.

``test_recipe_on_every_fleet.py`` has the other samplers.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from commands import SMALL, ran, results

# After so few steps every AP is 0. So each validation gets figures here that depend on its weights.
FIGURES = """
import sys
from yolofleet.cli import main
from yolofleet.training import validations

def figures(evaluation):
    loss = sum(evaluation.losses.values())
    return [1e5 * loss * (1 + number) % 1 for number in range(len(evaluation.metrics.per_class))]

validations._class_ap_of = figures
sys.exit(main(sys.argv[1:]))
"""
RUN = (sys.executable, "-c", FIGURES)
# 13 steps of 8 images: most epochs of 20 images end within a step
EPOCHS = ["--epochs", "5", "--set", "warmup_epochs=0", "--set", "fliplr=0.4"]


def arguments(data: Path, name: str, *more: str) -> list[str]:
    start = ["train", "--data", str(data), *SMALL, "--threads", "1", "--reduce", "exact", *EPOCHS]
    return [*start, "--name", name, *more]


def hash_of(folder: Path, name: str) -> str:
    return results(folder / "runs" / "train" / name)["weights_sha256"]


@pytest.mark.slow
def test_overlapped_validations_loaders_and_resumes_at_any_step_draw_the_same_images(
    folder: Path, data: Path
) -> None:
    device = ["--sampler", "weights", "--device", "cpu", "--save-every", "1steps", "--keep-last", "99"]
    ran(folder, *RUN, *arguments(data, "plain", *device))
    ran(folder, *RUN, *arguments(data, "overlap", *device, "--val-overlap", "--workers", "2"))
    ran(folder, *RUN, *arguments(data, "ahead", "--sampler", "weights", "--val-overlap", "--workers", "1",
                               "--device", "cpu"))  # fmt: skip
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
        ran(folder, *RUN, "train", "--resume", str(copy))
        assert hash_of(folder, copy.name) == hash_of(folder, "plain"), copy.name
