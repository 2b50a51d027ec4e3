"""Where images are kept, and how many processes there are, does not change what is learned."""

from __future__ import annotations

from pathlib import Path

from commands import in_ranks, small_shapes, train_args

from yolofleet.families.weights.format import read_tensors, tensors_sha256


def test_jpegs_and_staged_files_give_the_same_bits_on_every_fleet(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    exact = ("--reduce", "exact", "--cache", "jpeg")
    stage = tmp_path / "local disk"
    said = {
        "one": in_ranks(tmp_path, 1, *train_args(data, *exact, "--name", "one")),
        "two": in_ranks(tmp_path, 2, *train_args(data, *exact, "--name", "two", "--stage", stage)),
    }
    weights = {
        tensors_sha256(read_tensors(tmp_path / "runs" / "train" / name / "weights" / "last.safetensors")[0])
        for name in said
    }
    assert len(weights) == 1
    assert all("cache: jpeg, " in text for text in said.values())
    assert len(list(stage.glob("*.images"))) == 2  # training and validation
    assert said["two"].count("copied in") == 2
    changed = in_ranks(
        tmp_path, 1, "train", "--resume", tmp_path / "runs" / "train" / "one", "--cache", "ram", code=2
    )
    assert "--cache ram differs from the run's jpeg" in changed
