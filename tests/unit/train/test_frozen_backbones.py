"""A network whose published backbone has constant norms and a constant stem, trained from scratch, resumed, and from weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from commands import called, small_shapes, working_in

from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.value import Weights

SMALL = Path(__file__).resolve().parents[2] / "detr_family" / "small_detr.py"
NOTE = "the backbone of dfine-frozen starts without trained weights"
STEM, MEAN = "backbone.stem.stem1.conv.weight", "backbone.stem.stem1.bn.running_mean"


def trained(folder: Path, name: str, *more: str) -> tuple[Weights, str]:
    new = ["--data", "small shapes/data.yaml", "--name", name, "--epochs", "2", "--img", "64", "--batch", "4"]
    new += ["--nominal-batch", "4", "--micro-batch", "2", "--workers", "0", "--no-plots", "--device", "cpu"]
    found = called(
        "train", "--recipe-class", "small_detr.py:Small", *([] if "--resume" in more else new), *more
    )
    assert found.code == 0, found
    return read_weights(folder / "runs/train" / name / "weights/last.safetensors"), found.err + found.out


@pytest.mark.slow
def test_a_frozen_backbone_is_trained_from_scratch_and_after_a_resume_and_stays_frozen_from_weights(
    tmp_path,
) -> None:
    shutil.copy(SMALL, tmp_path)
    small_shapes(tmp_path, images=4, val_images=2)
    with working_in(tmp_path):
        first, said = trained(tmp_path, "a", "--model", "dfine-frozen", "--max-steps", "1")
        assert said.count(NOTE) == 1
        assert not first.description.is_frozen  # type: ignore[attr-defined]
        assert first.tensors[MEAN].any(), "statistics of the images"
        later, said = trained(tmp_path, "a", "--resume", "runs/train/a", "--max-steps", "2")
        assert NOTE not in said
        assert not later.description.is_frozen  # type: ignore[attr-defined]
        assert not torch.equal(later.tensors[STEM], first.tensors[STEM])
        weights = ("--weights", "runs/train/a/weights/last.safetensors")
        tuned, said = trained(tmp_path, "b", "--model", "dfine-frozen", *weights, "--max-steps", "1")
        assert NOTE not in said
        assert tuned.description.is_frozen  # type: ignore[attr-defined]
        assert torch.equal(tuned.tensors[STEM], later.tensors[STEM])
