"""The trial of memory before the first step. ``tests/accelerator/test_runs.py`` makes it on a device with little memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from label_rows import shapes_of
from small_training import small_run

from yolofleet.config.load import resolve_train
from yolofleet.config.schema import TrainConfig
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters
from yolofleet.families.rtdetr.loss import RtdetrLoss
from yolofleet.training.rank.memory_probe import (
    LargestPass,
    largest_that_fits,
    out_of_memory,
    probed_micro_batch,
)

CPU = torch.device("cpu")


def test_the_largest_size_that_fits_is_found_and_other_errors_pass() -> None:
    tried = []

    def attempt(images: int) -> None:
        tried.append(images)
        if images > 4:
            raise torch.OutOfMemoryError(f"{images} images")

    assert largest_that_fits([16, 8, 4, 2], attempt, CPU) == 4
    assert tried == [16, 8, 4]
    with pytest.raises(torch.OutOfMemoryError, match="8 images"):
        largest_that_fits([16, 8], attempt, CPU)

    def fault(_: int) -> None:
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        largest_that_fits([16, 8], fault, CPU)


@pytest.mark.parametrize("model", ["yolov3-narrow", pytest.param("ppyoloe-narrow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_trial_changes_no_bit_of_the_run(model: str, exact: bool) -> None:
    plain, tried = (small_run(model, exact=exact) for _ in range(2))
    LargestPass(tried.state, tried.loss, "fp32", 96, 5).run(3)
    for run in (plain, tried):
        run.do(2)
    found = tried.tensors()
    assert all(torch.equal(t, found[name]) for name, t in plain.tensors().items())


@pytest.mark.parametrize(
    ("batch", "hint"),
    [
        ("auto", "--batch 0.8, or"),
        ("0.8", "--batch 0.7, or"),
        ("0.25", "--batch 0.15, or"),
        ("0.1", "--batch 16, or"),
    ],
)
def test_a_share_that_does_not_fit_names_a_smaller_one(batch: str, hint: str) -> None:
    settings = resolve_train({"data": "d", "model": "yolov5n", "batch": batch})[0].value
    assert str(out_of_memory(RuntimeError("full"), settings, CPU).hint).startswith(hint)


def test_a_cpu_is_not_probed() -> None:
    run = small_run()
    largest = LargestPass(run.state, run.loss, "fp32", 1 << 20, 5)  # would need terabytes
    assert probed_micro_batch(TrainConfig(batch=16, micro_batch=-1), largest, run.world) == 8
    assert probed_micro_batch(TrainConfig(batch=16, micro_batch=2), largest, run.world) == 2


@pytest.mark.parametrize("most", [0, 1, 7, 51, 99, 150, 400])
def test_made_up_images_have_the_most_denoising_queries_that_fewer_labels_can_have(most: int) -> None:
    """50 labels have 200 queries, and 51 have 102."""
    loss = RtdetrLoss(RtdetrHyperparameters(denoising=100), 3)

    def queries(labels: Shapes, images: int) -> int:
        return loss.match(labels, images, (64, 64)).noisy_boxes.shape[1]

    largest = LargestPass(small_run().state, loss, "fp32", 64, most)
    for images in (1, 2):
        labels = largest._made_up_labels(images)
        fewer = (shapes_of([[0, 0.5, 0.5, 0.5, 0.5]] * n) for n in range(most + 1))
        assert queries(labels, images) == max(queries(part, 1) for part in fewer)
    assert (np.bincount(labels.image, minlength=2)[1:] == most).all()
