"""The batches of a validation: a fixed list, and the images and labels of each.

Legend: m images of a batch, n labels, H x W pixels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import cv2
import numpy as np
from torch import Tensor

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry.letterbox import Letterbox, letterbox
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.loader import Loader
from yolofleet.data.input.read_ahead import ReadAhead
from yolofleet.data.input.shared_buffers import image_buffer
from yolofleet.tasks.task import Task

PAD = 0.5  # strides: YOLOv5's padding of a batch
PREFETCH = 4  # batches that each loader process prepares ahead


@dataclass(frozen=True)
class ValBatch:
    """Validation images of one shape.

    Attributes:
        image_idx: the numbers of the images in the index, ascending.
        size_hw: padded (height, width), pixels.
    """

    ordinal: int
    image_idx: tuple[int, ...]
    size_hw: tuple[int, int]


class Loaded(NamedTuple):
    """The images of a batch, uint8 [m, 3, H, W] RGB (channels-last), and what maps boxes back to the pixels of each."""

    batch: ValBatch
    images: Tensor
    letterboxes: list[Letterbox]


def val_batches(
    index: DataIndex, img: int, batch: int, stride: int, *, shares_shape: bool = False
) -> list[ValBatch]:
    """Return the fixed list of validation batches: images grouped by padded shape, in the order of the index.

    The longer side becomes ``img``, and each side is padded to ``ceil(side / stride + PAD) * stride`` (YOLOv5's
    shape for a batch of one image). The shape depends on the image alone, so predictions depend neither on
    ``batch`` nor on which rank computes which part of the list.

    Args:
        shares_shape: sort the images by aspect ratio, and pad each batch to the largest shape of its images, as YOLOv5's
            validation does. Predictions then depend on ``batch``.
    """
    sizes_wh = np.asarray(index.sizes_wh, np.float64)  # [N, 2]
    sides = sizes_wh / sizes_wh.max(axis=1, keepdims=True) * img
    padded = np.ceil(sides / stride + PAD).astype(np.int64) * stride
    if shares_shape:
        order = np.argsort(sizes_wh[:, 1] / sizes_wh[:, 0], kind="stable")
        members_of = [np.sort(order[start : start + batch]) for start in range(0, len(order), batch)]
        return [
            ValBatch(ordinal, tuple(members.tolist()), tuple(padded[members].max(axis=0)[::-1].tolist()))
            for ordinal, members in enumerate(members_of)
        ]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (width, height) in enumerate(padded.tolist()):
        groups[height, width].append(number)
    batches: list[ValBatch] = []
    for shape in sorted(groups):
        members = groups[shape]
        for start in range(0, len(members), batch):
            batches.append(ValBatch(len(batches), tuple(members[start : start + batch]), shape))
    return batches


def shares_of(batches: Sequence[ValBatch], ranks: int) -> list[list[ValBatch]]:
    """Return the batches of each rank: the largest batch first, to the rank with the fewest pixels so far."""
    shares: list[list[ValBatch]] = [[] for _ in range(ranks)]
    pixels = [0] * ranks
    sizes = [len(b.image_idx) * b.size_hw[0] * b.size_hw[1] for b in batches]
    for i in sorted(range(len(batches)), key=lambda i: -sizes[i]):
        rank = pixels.index(min(pixels))
        shares[rank].append(batches[i])
        pixels[rank] += sizes[i]
    return shares


def val_loader(
    index: DataIndex,
    batches: Sequence[ValBatch],
    img: int,
    *,
    workers: int,
    cache: ImageCache | None = None,
    pin_memory: bool = False,
) -> Loader[ValBatch, Loaded]:
    """Return a loader of batches.

    Args:
        batches: from ``val_batches``, or this rank's part of them.
        cache: decoded images of this index at this size; default: decode each image from its file.
    """
    cache = cache or ImageCache(index, img, "none")
    made = partial(_val_images, index, cache)
    workers = min(workers, len(batches))
    ahead = ReadAhead[ValBatch](attrgetter("image_idx"), cache) if index.is_mirrored else None
    return Loader(made, batches, workers=workers, prefetch=PREFETCH, pin_memory=pin_memory, read_ahead=ahead)


def _val_images(index: DataIndex, cache: ImageCache, batch: ValBatch) -> Loaded:
    images, pixels = image_buffer(len(batch.image_idx), *batch.size_hw)
    letterboxes = []
    for i, number in enumerate(batch.image_idx):
        width, height = index.sizes_wh[number].tolist()
        image, fitted = letterbox(cache.get(number), batch.size_hw, enlarge=False, native_hw=(height, width))
        cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=pixels[i])
        letterboxes.append(fitted)
    return Loaded(batch, images, letterboxes)


def letterboxed_labels(
    task: Task, index: DataIndex, batch: ValBatch, letterboxes: Sequence[Letterbox]
) -> Shapes:
    """Return the labels of a batch as fractions of the padded images; no crowds."""
    sizes_wh = np.asarray(index.sizes_wh[list(batch.image_idx)], np.float64)
    parts = [
        task.labels(index, image).letterboxed(size_wh, back)
        for image, size_wh, back in zip(batch.image_idx, sizes_wh, letterboxes, strict=True)
    ]
    return parts[0].of_images(parts)
