"""Validate large images in tiles (``--tile``): cut each image, and merge the detections of its parts.

Legend: m parts of a batch, H x W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import cv2
import numpy as np
import torch

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry.letterbox import letterbox
from yolofleet.data.geometry.tiles import Place, check_tiles, merged_tiles, parts_of
from yolofleet.data.images.decode import read_image
from yolofleet.data.input.loader import Loader, new_buffer
from yolofleet.inference.evaluate.batches import Loaded, ValBatch
from yolofleet.inference.evaluate.gather import Detected
from yolofleet.inference.evaluate.matching import ScoredBoxes, joined
from yolofleet.support.errors import DataError


@dataclass(frozen=True)
class Tiling:
    """The parts of the images of an index: of each the whole image, and then its tiles.

    Attributes:
        size, stride: pixels; the parts are letterboxed to a side or (H, W), see ``data.geometry.letterbox.letterbox``.
        batch: parts that pass the network together, so that few are in memory.
    """

    index: DataIndex
    config: ValConfig
    size: int | tuple[int, int]
    stride: int | None
    batch: int

    def batches(self) -> list[ValBatch]:
        """Return one batch for each image, of its ``size_hw``. Raise ConfigError if an image has too many tiles."""
        sizes_wh = np.asarray(self.index.sizes_wh)
        for (width, height), image in zip(*np.unique(sizes_wh, axis=0, return_index=True), strict=True):
            path = self.index.path(image)
            check_tiles(height, width, self.config.tile, self.config.overlap, source=path)
        return [ValBatch(number, (number,), (h, w)) for number, (w, h) in enumerate(sizes_wh.tolist())]

    def loader(self, share: Sequence[ValBatch], *, workers: int) -> Loader[ValBatch, Loaded]:
        """Return a loader of whole images uint8 [H, W, 3] BGR, for this rank's part of the batches.

        A loader process prepares one image ahead, because an image may take 800 MB. :meth:`cut` cuts it.
        """
        workers = min(workers, len(share))
        return Loader(partial(_whole_image, self.index), share, workers=workers, prefetch=1, pin_memory=False)

    def _places(self, image: ValBatch) -> list[Place]:
        return parts_of(*image.size_hw, self.config.tile, self.config.overlap)

    def cut(self, images: Iterable[Loaded]) -> Iterator[Loaded]:
        """Yield the parts of each image as batches of ``val_loader``, with the numbers of the parts for those of images."""
        for whole, loaded, _ in images:
            image, places = loaded.numpy(), self._places(whole)
            for start, stop in pairwise([0, *range(1, len(places), self.batch), len(places)]):
                fitted = [
                    letterbox(image[y1:y2, x1:x2], self.size, stride=self.stride)
                    for x1, y1, x2, y2 in places[start:stop]
                ]
                pixels = np.stack(
                    [cv2.cvtColor(part, cv2.COLOR_BGR2RGB) for part, _ in fitted]
                )  # [m, H, W, 3]
                letterboxes = [back for _, back in fitted]
                numbers = ValBatch(0, tuple(range(start, stop)), letterboxes[0].size_hw)
                yield numbers, torch.from_numpy(pixels).permute(0, 3, 1, 2), letterboxes

    def whole(self, share: Iterable[ValBatch], found: Iterator[Detected]) -> Iterator[Detected]:
        """Yield the merged detections of each image of a rank, from those of its parts."""
        config = self.config
        for image in share:
            places = self._places(image)
            parts = list(islice(found, 1 + -(-(len(places) - 1) // self.batch)))
            began_s = time.perf_counter()
            boxes = joined([part.found for part in parts])  # their images are the numbers of the parts
            xy, wh = boxes.boxes_xywh_px[:, :2], boxes.boxes_xywh_px[:, 2:]
            xyxy = np.concatenate([xy, xy + wh], axis=1)
            ends = np.searchsorted(boxes.image, np.arange(len(places) + 1)).tolist()
            boxes_px, scores, classes = merged_tiles(
                [
                    (xyxy[start:stop], boxes.score[start:stop], boxes.class_idx[start:stop], place)
                    for (start, stop), place in zip(pairwise(ends), places, strict=True)
                ],
                iou=config.iou,
                max_det=config.max_det,
                agnostic=config.agnostic_nms or config.single_cls,
                fuse=config.merge == "wbf",
            )
            boxes_px = boxes_px.astype(np.float64)
            xywh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
            numbers = np.full(len(boxes_px), image.image_idx[0], np.int64)
            yield Detected(
                ScoredBoxes(numbers, classes, xywh_px, scores.astype(np.float64)),
                sum(part.candidates_cut for part in parts),
                image.ordinal,
                None,
                None,
                sum(part.forward_s for part in parts),
                sum(part.nms_s for part in parts) + time.perf_counter() - began_s,
            )


def _whole_image(index: DataIndex, batch: ValBatch) -> Loaded:
    path = index.path(batch.image_idx[0])
    image = read_image(path)
    if image.shape[:2] != batch.size_hw:
        raise DataError(
            f"image {path} has {image.shape[1]} x {image.shape[0]} pixels; the index has "
            f"{batch.size_hw[1]} x {batch.size_hw[0]}",
            hint="the file changed during the run: start again",
        )
    pixels = new_buffer(*image.shape)
    pixels.numpy()[:] = image
    return batch, pixels, []
