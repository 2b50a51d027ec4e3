"""A training from weights says when its images have another size than those that the weights were trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import called, small_shapes
from small_files import TINY

NOTE = "image size 640 px, but the weights were trained at 64 px: --img 64 trains at that size"


def test_a_training_names_both_sizes_unless_the_user_chose_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ("train", "--data", small_shapes(tmp_path), "--batch", "4", "--nominal-batch", "4", "--max-steps", "1",
             "--val-period", "0", "--no-plots", "--device", "cpu", "--threads", "1")  # fmt: skip
    assert called(*train, "--cfg", TINY, "--img", "64", "--name", "a").code == 0
    weights = ("--weights", "runs/train/a/weights/last.safetensors")
    found = called(*train, *weights)
    assert found.code == 0 and NOTE in found.out + found.err
    found = called(*train, *weights, "--img", "96")
    assert found.code == 0 and "were trained at" not in found.out + found.err
