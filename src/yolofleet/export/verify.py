"""An exported file against our own network: the same pictures through both, the largest difference.

N images, K predictions of an image, C classes, n boxes of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from yolofleet.datasets.index import build_index
from yolofleet.datasets.sources import load_dataset
from yolofleet.errors import NumericsError
from yolofleet.export.export_metadata import ExportMetadata
from yolofleet.export.runtime import Runtime
from yolofleet.geometry.boxes import clip_xyxy, xyxy_from_cxcywh
from yolofleet.geometry.letterbox import letterbox
from yolofleet.geometry.nms import detections
from yolofleet.images.decode import read_image
from yolofleet.models.detector import Detector

LIMITS = {False: (0.5, 1e-3), True: (8.0, 0.05)}  # by ``half``: boxes px, scores
PICTURES = 4  # real ones that are looked at, at least
GENERATED_PX = 640


@dataclass(frozen=True)
class Difference:
    """The largest differences over all pictures.

    Attributes:
        box_px: of a side of a box, inside the image. score: of objectness, of a class probability, and of their product.
        images: how many were compared. boxes: predictions, or boxes after suppression.
    """

    box_px: float
    score: float
    images: int
    boxes: int

    def check(self, half: bool) -> None:
        """
        Raises:
            NumericsError: beyond what rounding explains.
        """
        most_px, most_score = LIMITS[half]
        if not (self.box_px <= most_px and self.score <= most_score):
            raise NumericsError(
                f"the exported file differs from the network: boxes by {self.box_px:.3g} px (at most {most_px:g}), "
                f"scores by {self.score:.3g} (at most {most_score:g})",
                hint="it was not kept; --data compares on pictures of the kind that the network knows, and another "
                "--format, or none of --half and --simplify, may be right",
            )


def compare(runtime: Runtime, network: Detector, batches: Sequence[Tensor]) -> Difference:
    """Predictions of both.

    Args:
        runtime: without suppression inside.
        network: fused, in evaluation mode, on the CPU.
        batches: [N, 3, H, W] float32 RGB in 0..1 each.
    """
    worst_px, worst_score, count = 0.0, 0.0, 0
    for images in batches:
        with torch.inference_mode():
            ours = network.decode(network(images))
        box_px, score, compared = decoded_difference(
            ours, runtime(images), (images.shape[2], images.shape[3])
        )
        worst_px, worst_score = max(worst_px, box_px), max(worst_score, score)
        count += compared
    return Difference(worst_px, worst_score, sum(map(len, batches)), count)


def compare_suppressed(runtime: Runtime, plain: Runtime, batches: Sequence[Tensor]) -> Difference:
    """Boxes of a file with suppression inside against our suppression of what the same file without it predicts:
    of two boxes with nearly equal scores rounding decides which is kept, so the network's own would not do."""
    nms = runtime.facts.nms
    assert nms is not None and plain.facts.nms is None
    worst_px, worst_score, count = 0.0, 0.0, 0
    for images in batches:
        ours, _ = detections(
            plain(images),
            conf=nms.conf,
            iou=nms.iou,
            max_det=nms.max_det,
            multi_label=False,
            agnostic=nms.agnostic,
        )
        for mine, row in zip(ours, runtime(images), strict=True):
            box_px, score = partners_difference(mine, row[row[:, 4] > 0], above=nms.conf + 1e-5)
            worst_px, worst_score = max(worst_px, box_px), max(worst_score, score)
            count += len(mine)
    return Difference(worst_px, worst_score, sum(map(len, batches)), count)


def decoded_difference(ours: Tensor, theirs: Tensor, size_hw: tuple[int, int]) -> tuple[float, float, int]:
    """Of two [N, K, 5 + C]: sides px, scores, number of predictions; infinity where they cannot be compared.

    Sides beyond the image of ``size_hw`` are moved to its border, as those of every detection are: of a side ten
    images away, which some predictions without an object have, rounding leaves no pixel in place.
    """
    if ours.shape != theirs.shape or not theirs.isfinite().all():
        return float("inf"), float("inf"), 0
    mine, found = (clip_xyxy(xyxy_from_cxcywh(decoded[..., :4]), size_hw) for decoded in (ours, theirs))
    products = [decoded[..., 4:5] * decoded[..., 5:] for decoded in (ours, theirs)]
    score = max(
        float((ours[..., 4:] - theirs[..., 4:]).abs().max()), float((products[0] - products[1]).abs().max())
    )
    return float((mine - found).abs().max()), score, ours.shape[0] * ours.shape[1]


def partners_difference(ours: Tensor, theirs: Tensor, *, above: float) -> tuple[float, float]:
    """Of two sets of boxes [n, 6] of an image (x1, y1, x2, y2, score, class): sides px and scores of partners.

    The partner of a box is the nearest one of its class on the other side; infinity where a box whose score is
    ``above`` has none.
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


def forms(facts: ExportMetadata, size_hw: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
    """(images, height and width) of the passes: every freedom of the file is used."""
    counts = [facts.batch] if facts.batch else [1, 2]
    sizes = [size_hw]
    if facts.size_hw is None:
        sizes.append((size_hw[0] + facts.stride, max(size_hw[1] - facts.stride, facts.stride)))
    passes = list(itertools.product(counts, sizes))
    while sum(count for count, _ in passes) < PICTURES:
        passes += passes[:1]
    return passes


def batches_of(
    facts: ExportMetadata, size_hw: tuple[int, int], pictures: Iterator[np.ndarray]
) -> list[Tensor]:
    """Pictures (uint8 [H, W, 3] BGR) letterboxed into batches of all :func:`forms`."""
    batches = []
    for count, size in forms(facts, size_hw):
        pixels = [letterbox(picture, size)[0][..., ::-1] for picture in itertools.islice(pictures, count)]
        batches.append(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255)
    return batches


def real_pictures(data: str) -> Iterator[np.ndarray]:
    """Pictures of a data set's val split, spread over it, again and again.

    Raises:
        ConfigError, DataError: there are none.
    """
    index = build_index(load_dataset(data), "val")
    step = max(len(index) // PICTURES, 1)
    for i in itertools.cycle(range(0, len(index), step)):
        yield read_image(index.path(i))


def generated_pictures() -> Iterator[np.ndarray]:
    """Coloured clouds with some grain."""
    rng = np.random.default_rng(0)
    while True:
        clouds = cv2.resize(
            rng.integers(0, 256, (9, 9, 3), np.uint8),
            (GENERATED_PX, GENERATED_PX),
            interpolation=cv2.INTER_CUBIC,
        )
        grain = rng.integers(0, 24, clouds.shape, np.uint8)
        yield cv2.add(clouds, grain)
