"""Images that break after they were indexed: others replace them, equally on every fleet, and each is reported once."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from commands import events_of, results, small_shapes, train_args, working_in, yolofleet

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset

EXACT = ("--reduce", "exact", "--val-period", "0")


def junk(content: bytes) -> bytes:
    return b"J" * len(content)


def cut_off(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def of_another_size(content: bytes) -> bytes:
    small = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    return small + bytes(len(content) - len(small))


FAULTS = {3: junk, 11: cut_off, 17: of_another_size}


def shapes_that_break(folder: Path, split: str = "train", images: int = 20) -> Path:
    """Index a data set, then break some images; the index stays valid, because their sizes and times stay."""
    data = small_shapes(folder, images=images)
    with working_in(folder):
        for name in ("train", "val"):
            build_index(load_dataset(str(data)), name)
    files = sorted((data.parent / "images" / split).iterdir())
    for number, fault in FAULTS.items():
        if number < len(files):
            about = files[number].stat()
            files[number].write_bytes(fault(files[number].read_bytes()))
            os.utime(files[number], ns=(about.st_atime_ns, about.st_mtime_ns))
    return data


@pytest.mark.slow
def test_broken_images_are_replaced_alike_by_one_and_two_processes(tmp_path: Path) -> None:
    data = shapes_that_break(tmp_path)
    for name, more in (
        ("one", ("--device", "cpu", "--workers", "0", "--cache", "none")),
        ("two", ("--device", "cpu:2", "--workers", "1", "--cache", "ram")),
    ):
        said = yolofleet(tmp_path, *train_args(data, *EXACT, "--name", name, *more)).out
        told = [line for line in said.splitlines() if "another image replaces it" in line]
        assert len(told) == 3 and all(f"{n} of at most 3" in line for n, line in enumerate(told, 1)), said
        assert len(events_of(tmp_path / "runs/train" / name, "unreadable")) == 3
    one, two = (results(tmp_path / "runs/train" / name)["weights_sha256"] for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
def test_more_broken_images_than_are_allowed_end_the_run_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (5, 7):
        monkeypatch.setitem(FAULTS, number, junk)
    data = shapes_that_break(tmp_path)
    said = yolofleet(tmp_path, *train_args(data, *EXACT, "--device", "cpu:2"), code=3).err
    assert "images of 20 cannot be read, and at most 3 may be replaced" in said
    assert said.count("images/train/0000") >= 4 and "--decode" in said


@pytest.mark.slow
def test_a_broken_image_of_the_validation_ends_the_run(tmp_path: Path) -> None:
    data = shapes_that_break(tmp_path, "val")
    said = yolofleet(tmp_path, *train_args(data, "--device", "cpu", "--max-steps", "1"), code=3).err
    assert "images/val/000003" in said and "not in a known image format" in said
