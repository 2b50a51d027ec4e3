"""The fleet never changes the result: equal bits in exact mode for every partition, DataParallel included."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import results, yolofleet

from yolofleet.data.shapes import make_shapes

JOB = "--model yolov5n --img 128 --micro-batch 2 --batch 16 --nominal-batch 16 --reduce exact --no-plots".split()
ALONE: list[str] = ["--device", "cpu"]
FLEETS = {
    "two": ["--device", "cpu:2"],
    "three": ["--device", "cpu:3"],
    "four": ["--device", "cpu:4"],
    "7,1": ["--device", "cpu:2", "--shares", "7,1"],
    "1,5,2": ["--device", "cpu:3", "--shares", "1,5,2"],
    "4,2,2": ["--device", "cpu:3", "--shares", "4,2,2"],
    "dataparallel": ["--device", "cpu:2", "--parallel", "dp"],
    "dataparallel 1,3": ["--device", "cpu:2", "--parallel", "dp", "--shares", "1,3"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    make_shapes(folder / "shapes", images=48, val_images=4, img=128, seed=1)
    return folder


def trained(folder: Path, name: str, steps: int, *more: str) -> str:
    """SHA-256 of the averaged weights and batch-norm statistics after ``steps`` steps."""
    args = [
        "train",
        "--data",
        folder / "shapes" / "data.yaml",
        *JOB,
        "--epochs",
        "9",
        "--max-steps",
        str(steps),
    ]
    yolofleet(folder, *args, "--name", name, *more)
    return results(folder / "runs" / "train" / name)["weights_sha256"]


def test_one_hash_for_one_three_unequal_and_dataparallel(folder: Path) -> None:
    alone = trained(folder, "alone", 4, *ALONE)
    for name in ("1,5,2", "dataparallel"):
        assert trained(folder, name, 4, *FLEETS[name]) == alone, name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_one_hash_for_the_whole_matrix(folder: Path, optimizer: str) -> None:
    more = ["--optimizer", optimizer, *(["--set", "lr0=0.001"] if optimizer == "AdamW" else [])]
    alone = trained(folder, f"{optimizer} alone", 20, *ALONE, *more)
    hashes = {name: trained(folder, f"{optimizer} {name}", 20, *args, *more) for name, args in FLEETS.items()}
    print(f"\n{optimizer}: {alone}")
    assert hashes == dict.fromkeys(FLEETS, alone)
