"""YOLOv5 with masks: equal bits on every fleet, with images, micro-batches and ranks without any object, and after a kill."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import called, in_ranks, killed_in_the_middle, results, small_shapes, working_in
from mask_data import small_masks

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.storage.caches import cache_folder

IMAGES, LABELLED = 24, 4
DATA = ["--data", "small shapes/data.yaml", "--img", "64", "--workers", "0", "--no-plots"]
RUN = [
    *("train", *DATA, "--model", "yolov5n-seg", "--batch", "8", "--nominal-batch", "8", "--micro-batch", "1"),
    *("--threads", "1", "--epochs", "2", "--reduce", "exact"),
    *("--set", "copy_paste=0.5", "--set", "mosaic=0.5", "--set", "warmup_epochs=0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with mostly background, and an object that has a box and no mask."""
    made = tmp_path_factory.mktemp("small masks")
    data = small_masks(made, images=IMAGES, val_images=4)
    labels = sorted((data.parent / "labels" / "train").iterdir())
    for number, file in enumerate(labels):
        if number % (IMAGES // LABELLED):
            file.write_text("")
    labels[0].write_text(labels[0].read_text() + "1 0.5 0.5 0.4 0.3\n")
    return made


def trained(folder: Path, name: str, ranks: int, *more: str) -> str:
    in_ranks(folder, ranks, *RUN, "--name", name, *more)
    found: str = results(folder / "runs" / "train" / name)["weights_sha256"]
    return found


@pytest.fixture(scope="module")
def one(folder: Path) -> str:
    return trained(folder, "one", 1)


def test_every_number_of_processes_and_unequal_shares_give_the_same_weights(folder: Path, one: str) -> None:
    assert trained(folder, "three", 3) == one
    assert trained(folder, "uneven", 2, "--shares", "7,1") == one
    rows = [line.split(",") for line in (folder / "runs/train/one/results.csv").read_text().splitlines()]
    assert all(float(row[rows[0].index("train/mask_loss")]) > 0 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
def test_a_killed_run_that_is_resumed_on_fewer_processes_gives_the_same_weights(
    folder: Path, one: str
) -> None:
    run = folder / "runs" / "train" / "killed"
    killed_in_the_middle(folder, run, *RUN, "--save-every", "1steps", "--keep-last", "9")
    in_ranks(folder, 1, "train", "--resume", run)
    assert results(run)["weights_sha256"] == one


def test_data_without_masks_are_refused_with_an_option_that_trains_on_their_boxes(tmp_path: Path) -> None:
    small_shapes(tmp_path, images=8, val_images=4)
    command = [*RUN, "--device", "cpu", "--max-steps", "1", "--name", "boxes"]
    with working_in(tmp_path):
        refused = called(*command)
        assert refused.code and "no label of train has a mask, which the network needs" in refused.err
        way = refused.err.partition("label polygons or masks, or ")[2].split("\n")[0]
        assert way == "--task boxes"
        assert not called(*command, *way.split()).code
    assert "model: yolov5n\n" in (tmp_path / "runs" / "train" / "boxes" / "config.yaml").read_text()


def test_labels_with_masks_are_read_once(tmp_path: Path) -> None:
    small_masks(tmp_path, images=8, val_images=4)
    with working_in(tmp_path):
        assert not called(*RUN, "--device", "cpu", "--max-steps", "1").code
        assert len([*cache_folder("index").glob("*.arrays")]) == 2  # of train and of val


def test_weights_of_a_network_for_boxes_are_a_start_whose_head_is_new(folder: Path) -> None:
    # its head has the rows of one for 4 classes and masks
    model = build_model(describe("yolov5n"), 36, seed=3)
    write_weights(folder / "boxes.safetensors", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    start = ["--weights", "boxes.safetensors", "--freeze", "backbone", "--epochs", "1", "--max-steps", "2"]
    with working_in(folder):
        done = called(*RUN, *start, "--device", "cpu", "--name", "started")
    assert done.code == 0, done.err
    said = done.out + done.err
    assert (
        said.count("freshly initialised: model.24.m.0.weight (those in the file find boxes, and these masks)")
        == 1
    )
