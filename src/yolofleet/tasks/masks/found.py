"""The masks that a network finds in an image: as coefficients and prototypes first, then as run lengths.

n objects, D prototypes, h x w cells of the map, H x W pixels of the image as it was read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from yolofleet.data.geometry import rle
from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.table import as_objects
from yolofleet.tasks.boxes.found import FoundBoxes

_PIXELS_AT_ONCE = 1 << 20  # of a window: 4 MiB for each of its temporaries


class OnMap(NamedTuple):
    """A mask before it is computed: see ``DecodedMasks``."""

    coefficients: NDArray[np.float32]  # [D]
    prototypes: Tensor  # [D, h, w], shared by the objects of an image


@dataclass(frozen=True)
class FoundMasks(FoundBoxes):
    """Boxes with masks, highest score first.

    Attributes:
        masks: object [n]: ``OnMap``; in pixels of the image as it was read, ``rle.Mask``.
    """

    masks: np.ndarray

    def native(self, back: Letterbox) -> FoundMasks:
        """Return the objects in pixels of the image as it was read; the masks are computed one by one."""
        boxes = back.to_native(self.boxes_xyxy_px)
        # all masks of an image have the same prototypes, which may be on another device
        prototypes = self.masks[0].prototypes.cpu().numpy() if len(self) else np.zeros((0, 0, 0), np.float32)
        masks = [
            native_mask(mask.coefficients, prototypes, box, back)
            for mask, box in zip(self.masks, boxes, strict=True)
        ]
        return replace(self, boxes_xyxy_px=boxes, masks=as_objects(masks))


def native_mask(
    coefficients: NDArray[np.float32],
    prototypes: NDArray[np.float32],
    box_xyxy_px: NDArray[np.floating],
    back: Letterbox,
) -> rle.Mask:
    """Return the pixels of an image whose centre lies in the box and at which the logit is above 0.

    The logits go from the cells of the map to the pixels of the image in one bilinear step: the centre of a pixel lies at
    ``(x + 0.5) * ratio + pad`` of the input, and there between the centres of cells, those at the border reaching outwards. Another
    step by way of the input would only blur. The logits of the cells under the box, and a band of its pixels, are the largest arrays.

    Args:
        box_xyxy_px: [4] in pixels of the image.
    """
    height, width = back.native_hw
    sides = np.array([width, height, width, height])
    # the first pixel whose centre is not before an edge; an exported file of others may give NaN
    edges = np.clip(np.ceil(np.nan_to_num(box_xyxy_px) - 0.5), 0, sides).astype(int)
    left, top, right, bottom = map(int, (*edges[:2], *np.maximum(edges[:2], edges[2:])))
    x0, x1, across = _between(left, right, back.pad_left, back, prototypes.shape[2], 1)
    y0, y1, down = _between(top, bottom, back.pad_top, back, prototypes.shape[1], 0)
    inside = np.zeros((right - left, bottom - top), bool)  # column by column, as run lengths are
    if inside.size:
        first_x, first_y = x0[0], y0[0]
        window = prototypes[:, first_y : y1[-1] + 1, first_x : x1[-1] + 1]
        # einsum adds in one order for any number of threads, unlike BLAS
        cells = np.einsum("d,dyx->xy", coefficients, window)
        band = max(1, _PIXELS_AT_ONCE // (bottom - top))
        for start in range(0, right - left, band):
            of = slice(start, start + band)
            columns = _mixed(cells[x0[of] - first_x], cells[x1[of] - first_x], across[of, None])
            upper, lower = (np.take(columns, at - first_y, axis=1) for at in (y0, y1))
            logits = _mixed(upper, lower, down)
            np.greater(logits, 0, out=inside[of])
    return rle.Mask(back.native_hw, rle.encode(inside.T, back.native_hw, (left, top)))


def _between(
    first: int, last: int, pad: float, back: Letterbox, cells: int, axis: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return the two cells around each of the pixels, and the weight of the second one."""
    place = (np.arange(first, last) + 0.5) * back.scale_xy[1 - axis] + pad
    place = np.clip(place * (cells / back.size_hw[axis]) - 0.5, 0, cells - 1)
    before = place.astype(np.int64)
    return before, np.minimum(before + 1, cells - 1), (place - before).astype(np.float32)


def _mixed(
    one: NDArray[np.float32], other: NDArray[np.float32], weight: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return ``one + (other - one) * weight`` in place of ``other``."""
    other -= one
    other *= weight
    other += one
    return other
