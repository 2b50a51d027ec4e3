"""Where images are kept, and how many processes there are, does not change what is learned."""

from __future__ import annotations

from pathlib import Path

from commands import small_shapes, train_args, yolofleet

from yolofleet.checkpoint.format import read_tensors, tensors_sha256


def test_jpegs_and_staged_files_give_the_same_bits_on_every_fleet(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    exact = ("--reduce", "exact", "--cache", "jpeg")
    stage = tmp_path / "local disk"
    said = {
        "one": yolofleet(tmp_path, *train_args(data, *exact, "--device", "cpu", "--name", "one")).out,
        "two": yolofleet(
            tmp_path, *train_args(data, *exact, "--device", "cpu:2", "--name", "two", "--stage", stage)
        ).out,
    }
    weights = {
        tensors_sha256(read_tensors(tmp_path / "runs" / "train" / name / "weights" / "last.safetensors")[0])
        for name in said
    }
    assert len(weights) == 1
    assert all("cache: jpeg, " in text for text in said.values())
    assert len(list(stage.glob("*.images"))) == 2  # training and validation
    assert said["two"].count("copied in") == 2
    changed = yolofleet(
        tmp_path, "train", "--resume", tmp_path / "runs" / "train" / "one", "--cache", "ram", code=2
    )
    assert "--cache ram differs from the run's jpeg" in changed.err
