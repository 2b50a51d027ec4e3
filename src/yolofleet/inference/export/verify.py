"""Verify an exported file: run the same images through the file and the network, and find the largest difference.

N images, K predictions of an image, C classes, n boxes of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.spec import DatasetSpec
from yolofleet.data.geometry.letterbox import letterbox
from yolofleet.data.images.decode import read_image
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.families.recipe_class import TrainingRecipe
from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.inference.export.runtime import Runtime
from yolofleet.support.errors import NumericsError
from yolofleet.tasks.boxes.differences import partners_difference, shared
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.table import task_of
from yolofleet.tasks.task import Difference, Limits

# by ``half``: largest difference of places in pixels, and of scores and masks
LIMITS = {False: (0.5, 1e-3), True: (8.0, 0.05)}
MIN_IMAGES = 4  # compared images, at least
GENERATED_PX = 640
LARGEST_PX = 1280  # side with which a file of any size is verified, unless it was traced with a larger one
MIN_AGREEMENT = 0.5  # of the boxes of an 8-bit file and of the network
MOST_COMPARED = 300  # boxes of an image


def largest(found: Iterable[Difference]) -> Difference:
    """Return the largest differences of several, and the sum of what was compared."""
    places, scores, counts, masks = zip(
        *((one.place, one.score, one.compared, one.mask) for one in found), strict=True
    )
    of_masks = [mask for mask in masks if mask is not None]
    return Difference(max(places), max(scores), sum(counts), max(of_masks, default=None))


def check_difference(found: Difference, half: bool) -> None:
    """Raise NumericsError if rounding does not explain a difference, because it exceeds ``LIMITS``."""
    most_px, most_score = LIMITS[half]
    if not part_of_limits(found, half) <= 1:
        masks = "" if found.mask is None else f", masks by {found.mask:.3g} (at most {most_score:g})"
        raise NumericsError(
            f"the exported file differs from the network: places by {found.place:.3g} px (at most {most_px:g}), "
            f"scores by {found.score:.3g} (at most {most_score:g}){masks}",
            hint="the file was removed; verify with --data and images that the network was trained for, use another "
            "--format, or leave out --half and --simplify",
        )


def part_of_limits(found: Difference, half: bool) -> float:
    """Return the largest one of the differences of places, scores and masks, each as a part of its limit."""
    most_px, most_score = LIMITS[half]
    return max(found.place / most_px, found.score / most_score, (found.mask or 0) / most_score)


def compare(runtime: Runtime, network: Detector, batches: Sequence[Tensor]) -> Difference:
    """Return the differences of the predictions.

    Args:
        runtime: runs a file without NMS.
        network: in evaluation mode, on the CPU.
        batches: images, each [N, 3, H, W] float32 RGB in 0..1.
    """
    found, network, metadata, task = [], fuse(network), runtime.metadata, task_of(network)
    for images in batches:
        size_hw = (images.shape[2], images.shape[3])
        with torch.inference_mode():
            pairs = zip(_each(network.decode(network(images))), _each(runtime(images)), images, strict=True)
            for ours, theirs, image in pairs:
                one = task.difference(ours, theirs, size_hw, in_order=network.needs_nms)
                others = iter(()) if metadata.int8 else network.choices(image[None])
                while part_of_limits(one, metadata.half) > 1 and (other := next(others, None)) is not None:
                    again = task.difference(other, theirs, size_hw, in_order=network.needs_nms)
                    one = min(one, again, key=lambda each: part_of_limits(each, metadata.half))
                found.append(one)
    return largest(found)


def _each(decoded: Any) -> list[Any]:
    """Return the decoded predictions of each image, [1, ...]."""
    return [type(decoded)(*parts) for parts in zip(*(part.split(1) for part in decoded), strict=True)]


def compare_suppressed(runtime: Runtime, plain: Runtime, batches: Sequence[Tensor]) -> Difference:
    """Return the differences between the boxes of a file with NMS and our NMS of the predictions of ``plain``.

    ``plain`` runs the same file without NMS. The predictions of the network would not do: if two boxes have nearly equal
    scores, rounding decides which one NMS keeps.
    """
    nms = runtime.metadata.nms
    assert nms is not None and plain.metadata.nms is None
    found = []
    for images in batches:
        ours, _ = BOXES.found(plain(images), Limits(**asdict(nms)))
        for mine, theirs in zip(ours, FoundBoxes.of_padded(runtime(images)), strict=True):
            found.append(partners_difference(mine, theirs, above=nms.conf + 1e-5))
    return largest(found)


@dataclass(frozen=True)
class Agreement:
    """The boxes after suppression that a quantized file and the network both find.

    Attributes:
        share: 2 x common boxes / all boxes of both; 1 without boxes.
        boxes: of the network.
    """

    share: float
    boxes: int

    def check(self) -> None:
        """Raise NumericsError if quantization does not explain the difference: the share is below ``MIN_AGREEMENT``."""
        if self.share < MIN_AGREEMENT:
            raise NumericsError(
                f"the 8-bit file and the network agree on {self.share:.0%} of the boxes (at least {MIN_AGREEMENT:.0%})",
                hint="the file was removed; use --data with the images that the network was trained for, more "
                "--calibration-images, or leave out --int8",
            )


def compare_quantized(runtime: Runtime, network: Detector, batches: Sequence[Tensor]) -> Agreement:
    """Return how many boxes an 8-bit file shares with the network.

    Rounding to 8 bits changes single predictions without an object by any amount, so only boxes with a score above the
    default threshold count.
    """
    limits = Limits(PredictConfig().conf, PredictConfig().iou if network.needs_nms else None, MOST_COMPARED)
    common, ours_count, theirs_count, network = 0, 0, 0, fuse(network)
    for images in batches:
        with torch.inference_mode():
            decoded = network.decode(network(images))
        ours, theirs = (BOXES.found(each, limits)[0] for each in (decoded, runtime(images)))
        common += sum(map(shared, ours, theirs))
        ours_count, theirs_count = ours_count + sum(map(len, ours)), theirs_count + sum(map(len, theirs))
    total = ours_count + theirs_count
    return Agreement(2 * common / total if total else 1.0, ours_count)


def sides_px(size_hw: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the smallest and the largest side that a file of any size is verified with, pixels.

    Args:
        size_hw: of the traced example, pixels.
    """
    side = max(size_hw)
    return stride, max(side, min(2 * side, LARGEST_PX) // stride * stride)


def forms(metadata: ExportMetadata, size_hw: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
    """Return (number of images, (height, width)) of each pass, so that they use all variable dimensions of the file."""
    counts, sizes = [metadata.batch] if metadata.batch else [1, 2], [size_hw]
    if metadata.size_hw is None:
        least, most = sides_px(size_hw, metadata.stride)
        beside = (size_hw[0] + metadata.stride, max(size_hw[1] - metadata.stride, metadata.stride))
        sizes += [(least, least), (most, most), beside]
    longest = range(max(len(counts), len(sizes)))
    passes = [(counts[i % len(counts)], sizes[i % len(sizes)]) for i in longest]
    while sum(count for count, _ in passes) < MIN_IMAGES:
        passes += passes[:1]
    return passes


def batches_of(
    metadata: ExportMetadata, size_hw: tuple[int, int], images: Iterator[np.ndarray]
) -> list[Tensor]:
    """Return batches for all :func:`forms`, float32 [N, 3, H, W] RGB in 0..1, from images uint8 [H, W, 3] BGR."""
    batches = []
    for count, size in forms(metadata, size_hw):
        pixels = [letterbox(image, size)[0][..., ::-1] for image in itertools.islice(images, count)]
        batches.append(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255)
    return batches


def dataset_images(spec: DatasetSpec) -> Iterator[np.ndarray]:
    """Yield images spread evenly over a data set's val split, uint8 [H, W, 3] BGR, in an endless cycle.

    Raises:
        ConfigError, DataError: the data set has no such images.
    """
    index = build_index(spec, "val")
    step = max(len(index) // MIN_IMAGES, 1)
    for i in itertools.cycle(range(0, len(index), step)):
        yield read_image(index.path(i))


def calibration_batches(
    recipe_class: TrainingRecipe, data: str, metadata: ExportMetadata, size_hw: tuple[int, int], count: int
) -> Iterator[np.ndarray]:
    """Yield batches of ``count`` images spread evenly over a data set's train split, float32 [N, 3, H, W] RGB in 0..1.

    Raises:
        ConfigError, DataError: the data set has no such images.
    """
    index = build_index(recipe_class.dataset(data), "train")
    chosen = np.linspace(0, len(index) - 1, min(count, len(index))).round().astype(int)
    size = metadata.batch or 1
    for start in range(0, len(chosen) - size + 1, size):
        pixels = [
            letterbox(read_image(index.path(i)), size_hw)[0][..., ::-1] for i in chosen[start : start + size]
        ]
        yield np.stack(pixels).transpose(0, 3, 1, 2).astype(np.float32) / 255


def generated_images() -> Iterator[np.ndarray]:
    """Yield smooth random colours with noise, uint8 [640, 640, 3] BGR, without end."""
    rng = np.random.default_rng(0)
    while True:
        colours = cv2.resize(
            rng.integers(0, 256, (9, 9, 3), np.uint8),
            (GENERATED_PX, GENERATED_PX),
            interpolation=cv2.INTER_CUBIC,
        )
        noise = rng.integers(0, 24, colours.shape, np.uint8)
        yield cv2.add(colours, noise)
