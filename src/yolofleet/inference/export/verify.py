"""Verify an exported file: run the same images through the file and the network, and find the largest difference.

N images, K predictions of an image, C classes, n boxes of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.spec import DatasetSpec
from yolofleet.data.geometry.boxes import clip_xyxy, iou_matrix, xyxy_from_cxcywh
from yolofleet.data.geometry.letterbox import letterbox
from yolofleet.data.geometry.nms import detections
from yolofleet.data.images.decode import read_image
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.families.recipe_class import TrainingRecipe
from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.inference.export.runtime import Runtime
from yolofleet.support.errors import NumericsError

LIMITS = {False: (0.5, 1e-3), True: (8.0, 0.05)}  # by ``half``: difference of boxes in pixels, of scores
MIN_IMAGES = 4  # compared images, at least
GENERATED_PX = 640
LARGEST_PX = 1280  # side with which a file of any size is verified, unless it was traced with a larger one
MIN_AGREEMENT = 0.5  # of the boxes of an 8-bit file and of the network
SAME_IOU = 0.5  # overlap of two boxes of one class that count as one


@dataclass(frozen=True)
class Difference:
    """The largest differences over all images.

    Attributes:
        box_px: of a side of a box inside the image, pixels.
        score: of objectness, class probabilities, and their products.
        images: number of compared images.
        boxes: number of compared predictions, or of boxes after NMS.
    """

    box_px: float
    score: float
    images: int
    boxes: int

    @classmethod
    def largest(cls, found: Iterable[tuple[float, float, int]], images: int) -> Difference:
        """Return the largest of several differences in pixels and in scores, with their numbers of boxes."""
        boxes_px, scores, counts = zip(*found, strict=True)
        return cls(max(boxes_px), max(scores), images, sum(counts))

    def check(self, half: bool) -> None:
        """Raise NumericsError if rounding does not explain the difference, because it exceeds ``LIMITS``."""
        most_px, most_score = LIMITS[half]
        if not part_of_limits((self.box_px, self.score, 0), half) <= 1:
            raise NumericsError(
                f"the exported file differs from the network: boxes by {self.box_px:.3g} px (at most {most_px:g}), "
                f"scores by {self.score:.3g} (at most {most_score:g})",
                hint="the file was removed; verify with --data and images that the network was trained for, use another "
                "--format, or leave out --half and --simplify",
            )


def part_of_limits(found: tuple[float, float, int], half: bool) -> float:
    """Return the larger one of the differences in pixels and in scores, each as a part of its limit."""
    return max(found[0] / LIMITS[half][0], found[1] / LIMITS[half][1])


def compare(runtime: Runtime, network: Detector, batches: Sequence[Tensor]) -> Difference:
    """Return the differences of the predictions.

    Args:
        runtime: runs a file without NMS.
        network: in evaluation mode, on the CPU.
        batches: images, each [N, 3, H, W] float32 RGB in 0..1.
    """
    found, network, metadata = [], fuse(network), runtime.metadata
    for images in batches:
        size_hw = (images.shape[2], images.shape[3])
        with torch.inference_mode():
            ours, theirs = network.decode(network(images)), runtime(images)
            for i, row in enumerate(theirs.split(1)):
                one = decoded_difference(ours[i : i + 1], row, size_hw, in_order=network.needs_nms)
                others = iter(()) if metadata.int8 else network.choices(images[i : i + 1])
                while part_of_limits(one, metadata.half) > 1 and (other := next(others, None)) is not None:
                    again = decoded_difference(other, row, size_hw, in_order=network.needs_nms)
                    one = min(one, again, key=lambda each: part_of_limits(each, metadata.half))
                found.append(one)
    return Difference.largest(found, sum(map(len, batches)))


def compare_suppressed(runtime: Runtime, plain: Runtime, batches: Sequence[Tensor]) -> Difference:
    """Return the differences between the boxes of a file with NMS and our NMS of the predictions of ``plain``.

    ``plain`` runs the same file without NMS. The predictions of the network would not do: if two boxes have nearly equal
    scores, rounding decides which one NMS keeps.
    """
    nms = runtime.metadata.nms
    assert nms is not None and plain.metadata.nms is None
    found = []
    for images in batches:
        ours, _ = detections(plain(images), multi_label=False, **asdict(nms))
        for mine, row in zip(ours, runtime(images), strict=True):
            box_px, score = partners_difference(mine, row[row[:, 4] > 0], above=nms.conf + 1e-5)
            found.append((box_px, score, len(mine)))
    return Difference.largest(found, sum(map(len, batches)))


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

    Args:
        runtime, network, batches: as in :func:`compare`.
    """
    conf, iou = PredictConfig.model_fields["conf"].default, PredictConfig.model_fields["iou"].default
    iou = iou if network.needs_nms else None
    common, ours_count, theirs_count, network = 0, 0, 0, fuse(network)
    for images in batches:
        with torch.inference_mode():
            decoded = network.decode(network(images))
        ours, theirs = (
            detections(each, conf=conf, iou=iou, max_det=300, multi_label=False)[0]
            for each in (decoded, runtime(images))
        )
        for mine, found in zip(ours, theirs, strict=True):
            same = (iou_matrix(mine[:, :4], found[:, :4]) >= SAME_IOU) & (mine[:, None, 5] == found[:, 5])
            common += min(int(same.any(1).sum()), int(same.any(0).sum()))
            ours_count, theirs_count = ours_count + len(mine), theirs_count + len(found)
    total = ours_count + theirs_count
    return Agreement(2 * common / total if total else 1.0, ours_count)


def decoded_difference(
    ours: Tensor, theirs: Tensor, size_hw: tuple[int, int], *, in_order: bool = True
) -> tuple[float, float, int]:
    """Return the largest difference of box sides (pixels) and of scores, and the number of predictions.

    The differences are infinite if the arguments cannot be compared. Sides outside the image are first moved to its
    border, as in every detection. Some predictions without an object have a side ten images away, where rounding errors
    exceed a pixel.

    Args:
        ours, theirs: decoded predictions [N, K, 5 + C].
        size_hw: height and width of the images, pixels.
        in_order: row k of one stands for row k of the other; else both are sets of rows, matched one to one.
    """
    if ours.shape != theirs.shape or not (ours - theirs).isfinite().all():
        return float("inf"), float("inf"), 0
    mine, found = (
        torch.cat([clip_xyxy(xyxy_from_cxcywh(d[..., :4]), size_hw), d[..., 4:], d[..., 4:5] * d[..., 5:]], 2)
        for d in (ours, theirs)
    )
    if not in_order:
        from scipy.optimize import linear_sum_assignment  # no benchmark loads scipy

        units = torch.tensor(LIMITS[False]).repeat_interleave(torch.tensor([4, mine.shape[2] - 4]))
        costs = torch.cdist(mine / units, found / units, p=torch.inf)  # [N, K, K]
        partners = [linear_sum_assignment(cost)[1] for cost in costs.numpy()]
        found = torch.stack([rows[order] for rows, order in zip(found, partners, strict=True)])
    off = (mine - found).abs()
    return float(off[..., :4].max()), float(off[..., 4:].max()), ours.shape[0] * ours.shape[1]


def partners_difference(ours: Tensor, theirs: Tensor, *, above: float) -> tuple[float, float]:
    """Return the largest difference of sides (pixels) and scores between each box and its partner in the other set.

    The partner of a box is the nearest box of its class. The differences are infinite if a box has no partner.

    Args:
        ours, theirs: boxes of one image, [n, 6] x1, y1, x2, y2 (pixels), score, class.
        above: ignore boxes whose score is not above this.
    """
    worst_px, worst_score = 0.0, 0.0
    for some, others in ((ours, theirs), (theirs, ours)):
        for box in some[some[:, 4] > above]:
            same = others[others[:, 5] == box[5]]
            if not len(same):
                return float("inf"), float("inf")
            off_px = (same[:, :4] - box[:4]).abs().amax(1)
            partner = int(off_px.argmin())
            worst_px = max(worst_px, float(off_px[partner]))
            worst_score = max(worst_score, abs(float(same[partner, 4] - box[4])))
    return worst_px, worst_score


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
