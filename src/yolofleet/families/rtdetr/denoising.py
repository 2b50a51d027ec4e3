"""Contrastive denoising queries (DINO, arXiv:2203.03605, section 3.3): noisy labels, which the decoder has to restore.

N images, G labels of the image that has most, D denoising queries of the image that has most, C classes, n labels of one
image. The loader makes the queries. The noise of an image follows from its key alone: seed, epoch and position.

The originals make as many groups of queries for all images as the image with the most labels allows. Here each image has
the groups that its own labels allow, because one forward pass may hold several micro-batches, or a part of one
(``--micro-batches-per-pass``, ``--sync-bn``). Images with equal numbers of labels get the queries of the originals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yolofleet.data.geometry.boxes import cxcywh_from_xyxy, xyxy_from_cxcywh
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.losses.loss import Key
from yolofleet.support.random_numbers import generator

if TYPE_CHECKING:
    from yolofleet.families.rtdetr.hyperparameters import RtdetrHyperparameters

MOST_LABELS = 300  # of an image that get noise, chosen at random: the memory of a pass stays bounded


@dataclass(frozen=True)
class Targets:
    """Labels of a micro-batch and its denoising queries, padded to the image that has most. Boxes are cx, cy, w, h in 0..1."""

    boxes: np.ndarray  # float32 [N, G, 4]
    classes: np.ndarray  # int64 [N, G]; -1 where an image has fewer labels
    noisy_boxes: np.ndarray  # float32 [N, D, 4]
    noisy_classes: np.ndarray  # int64 [N, D]; C where an image has fewer queries
    noise_group: np.ndarray  # int64 [N, D]; queries of one group see each other; -1: no query
    noise_label: np.ndarray  # int64 [N, D]; the label that a near copy restores; -1: a far copy, or none
    noise_weight: np.ndarray  # float32 [N]; labels / near copies
    counts: np.ndarray  # int64 [T]


def padded(
    labels: Shapes, images: int, terms: int, keys: Sequence[Key], recipe: RtdetrHyperparameters, nc: int
) -> Targets:
    """Return the targets of a micro-batch.

    Args:
        terms: T; ``counts`` has the number of labels for each of them.
        keys: of each image.
    """
    of_image = [labels.rows(labels.image == i) for i in range(images)]
    most = max(map(len, of_image), default=0)
    boxes, classes = np.zeros((images, most, 4), np.float32), np.full((images, most), -1)
    weight, made = np.ones(images, np.float32), []
    for i, (mine, key) in enumerate(zip(of_image, keys, strict=True)):
        n = len(mine)
        boxes[i, :n], classes[i, :n] = mine.boxes, mine.classes
        made.append(noisy_copies(boxes[i, :n], classes[i, :n], key, recipe, nc))
        weight[i] = n / max((made[i][3] >= 0).sum(), 1)
    queries = max((len(group) for _, _, group, _ in made), default=0)
    noisy = np.zeros((images, queries, 4), np.float32)
    named = np.full((images, queries), nc)
    group, label = np.full((2, images, queries), -1)
    for i, parts in enumerate(made):
        for array, part in zip((noisy, named, group, label), parts, strict=True):
            array[i, : len(part)] = part
    return Targets(boxes, classes, noisy, named, group, label, weight, np.full(terms, len(labels), np.int64))


def denoising_groups(labels: int, wanted: int) -> int:
    """Return the groups of denoising queries of an image; each has two queries for each label."""
    return max(wanted // labels, 1) if labels and wanted else 0


def noisy_copies(
    boxes: np.ndarray, classes: np.ndarray, key: Key, recipe: RtdetrHyperparameters, nc: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return boxes, classes, group numbers and labels (-1: a far copy) of one image's queries.

    Each group has a near copy of every label, then a far copy of each, whose shift is between once and twice as large. There
    are ``denoising`` // n groups, at least one.

    Args:
        boxes: float32 [n, 4]. classes: int64 [n].
    """
    rng, chosen = generator(key[0], "denoising", *key[1:]), np.arange(len(boxes) if recipe.denoising else 0)
    if len(chosen) > MOST_LABELS:
        chosen = np.sort(np.argsort(rng.random(len(boxes)), kind="stable")[:MOST_LABELS])
    n = len(chosen)
    groups = denoising_groups(n, recipe.denoising)
    drawn = rng.random((groups, 2, n, 10))  # 4 directions, 4 sizes, whether the class changes, to which
    sizes = drawn[..., 4:8] + np.array([0, 1])[:, None, None]
    half = boxes[chosen][:, [2, 3, 2, 3]] / 2
    shift = np.where(drawn[..., :4] < 0.5, -1, 1) * sizes * half * recipe.box_noise
    corners = (xyxy_from_cxcywh(boxes[chosen]) + shift).clip(0, 1)  # [groups, 2, n, 4]
    # a far copy's left side may come to lie right of its right side
    ends = corners[..., :2], corners[..., 2:]
    corners = np.concatenate([np.minimum(*ends), np.maximum(*ends)], -1)
    any_class = (drawn[..., 9] * nc).astype(np.int64)
    named = np.where(drawn[..., 8] < recipe.label_noise / 2, any_class, classes[chosen])
    labels = np.broadcast_to(np.where([[True], [False]], chosen, -1), (groups, 2, n))
    numbers = np.broadcast_to(np.arange(groups)[:, None, None], (groups, 2, n))
    noisy = cxcywh_from_xyxy(corners).reshape(-1, 4)
    return noisy, named.reshape(-1), numbers.reshape(-1), labels.reshape(-1)
