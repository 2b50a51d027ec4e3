"""Denoising queries: groups, size of the noise, keys, bounds."""

from __future__ import annotations

import numpy as np
import pytest
from label_rows import of_images, shapes_of

from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.rtdetr.denoising import MOST_LABELS, Targets, padded
from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters

CLASSES = 7


def rows(*counts: int, seed: int = 0) -> Shapes:
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(len(counts)), counts)
    boxes = np.concatenate(
        [rng.uniform(0.4, 0.6, (len(image), 2)), rng.uniform(0.05, 0.2, (len(image), 2))], 1
    )
    return shapes_of(np.column_stack([image, rng.integers(0, CLASSES, len(image)), boxes]))


def made(labels: Shapes, images: int, epoch: int = 0, queries: int = 100) -> Targets:
    recipe = RtdetrHyperparameters(denoising=queries, label_noise=0.5, box_noise=1.0)
    return padded(labels, images, 5, [(3, epoch, position) for position in range(images)], recipe, CLASSES)


def test_each_image_has_the_groups_that_its_labels_allow() -> None:
    targets = made(rows(3, 0, 40, 120), 4)
    assert targets.noisy_boxes.shape == (4, 240, 4)
    for i, (labels, groups) in enumerate([(3, 33), (0, 0), (40, 2), (120, 1)]):
        used = 2 * groups * labels
        assert (targets.noise_group[i, used:] == -1).all()
        assert (targets.noise_label[i, used:] == -1).all()
        assert (targets.noisy_classes[i, used:] == CLASSES).all()
        assert (targets.noisy_boxes[i, used:] == 0).all()
        group = targets.noise_group[i, :used].reshape(groups, 2, labels)
        assert (group == np.arange(groups)[:, None, None]).all()
        label = targets.noise_label[i, :used].reshape(groups, 2, labels)
        assert (label[:, 0] == np.arange(labels)).all()
        assert (label[:, 1] == -1).all()
        assert targets.noise_weight[i] == pytest.approx(1 / groups if groups else 0)
    assert targets.counts.tolist() == [163] * 5


def test_near_copies_move_corners_by_up_to_half_a_box_and_far_ones_by_half_to_a_whole_one() -> None:
    labels = rows(5)
    targets = made(labels, 1)
    boxes, noisy = (
        np.concatenate([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1)
        for b in (targets.boxes[0], targets.noisy_boxes[0])
    )
    moved = np.abs(noisy.reshape(20, 2, 5, 4) - boxes) / np.tile(targets.boxes[0, :, 2:], 2)
    assert 0.45 < moved[:, 0].max() <= 0.5001
    assert moved[:, 0].mean() == pytest.approx(0.25, abs=0.03)
    # two far corners that pass each other change places, so each may be nearer to the label
    assert 0.9 < moved[:, 1].max() <= 2.0001
    assert (targets.noisy_boxes >= 0).all() and (targets.noisy_boxes <= 1).all()


def test_a_quarter_of_the_copies_draws_a_class() -> None:
    labels = rows(*[20] * 50)
    targets = made(labels, 50)
    changed = targets.noisy_classes.reshape(50, 5, 2, 20) != targets.classes[:, None, None]
    assert changed.mean() == pytest.approx(0.25 * (1 - 1 / CLASSES), abs=0.01)
    assert set(np.unique(targets.noisy_classes)) == set(range(CLASSES))


def test_equal_keys_give_equal_noise_in_any_company_and_other_epochs_other_noise() -> None:
    labels = rows(4, 9)
    both, again, later = made(labels, 2), made(labels, 2), made(labels, 2, epoch=1)
    assert np.array_equal(both.noisy_boxes, again.noisy_boxes)
    first = made(of_images(labels, 0, 1), 1)
    queries = first.noisy_boxes.shape[1]
    assert np.array_equal(both.noisy_boxes[0, :queries], first.noisy_boxes[0])
    is_query = both.noise_group >= 0
    assert not np.isclose(both.noisy_boxes, later.noisy_boxes).all(-1)[is_query].any()
    assert (both.noisy_classes != later.noisy_classes).any()


def test_an_image_with_very_many_labels_has_a_bounded_number_of_queries() -> None:
    targets = made(rows(2000), 1)
    assert targets.noisy_boxes.shape == (1, 2 * MOST_LABELS, 4)
    chosen = targets.noise_label[0, :MOST_LABELS]
    assert len(set(chosen.tolist())) == MOST_LABELS
    assert 700 < chosen.mean() < 1300, "chosen from all"
    assert targets.noise_weight[0] == pytest.approx(2000 / MOST_LABELS), "the labels weigh as much as all"


def test_without_labels_or_denoising_there_are_no_queries() -> None:
    for targets in (made(rows(0, 0), 2), made(rows(), 0), made(rows(3), 1, queries=0)):
        assert targets.noisy_boxes.shape[1] == 0
        assert targets.noise_group.shape == targets.noisy_classes.shape == targets.noisy_boxes.shape[:2]
    assert made(rows(0, 0), 2).boxes.shape == (2, 0, 4)
