"""Tables of masks in several images for the matching of ``tasks/boxes/matching.py``: overlaps are those of pixels.

Legend: D detections, M labels, R runs of all masks, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry import rle
from yolofleet.data.geometry.table import Table
from yolofleet.tasks.boxes.matching import Labels, ScoredBoxes, labels_of, rows_of

if TYPE_CHECKING:
    from typing_extensions import Self

_RUNS_AT_ONCE = 1 << 18  # of masks that are looked at together: about 20 MB


@dataclass(frozen=True)
class _Masks(Table):
    """The masks of a table. ``runs`` is the only column without a row for each object.

    Attributes:
        lengths: int64 [n] number of runs of each mask.
        pixels: int64 [n] area of each mask.
        around_xywh_px: int64 [n, 4] box around the pixels of each mask.
        runs: uint32 [R], of one mask after another, as of ``rle``.
    """

    lengths: NDArray[np.int64]
    pixels: NDArray[np.int64]
    around_xywh_px: NDArray[np.int64]
    runs: NDArray[np.uint32]

    @staticmethod
    def columns(masks: Sequence[NDArray[np.uint32]], heights: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of this class, of masks in images of these heights."""
        lengths = np.array([len(runs) for runs in masks], np.int64)
        pixels, around = [np.zeros(0, np.int64)], [np.zeros((0, 4), np.int64)]
        for part in rle.slices_of(lengths, _RUNS_AT_ONCE):
            table = rle.RunTable(np.concatenate(masks[part]), lengths[part])
            pixels.append(table.areas)
            around.append(table.boxes_xywh(heights[part]))
        return {
            "lengths": lengths,
            "pixels": np.concatenate(pixels),
            "around_xywh_px": np.concatenate(around),
            "runs": np.concatenate([np.zeros(0, np.uint32), *masks]),
        }

    def rows(self, chosen: Any) -> Self:
        columns = {name: getattr(self, name)[chosen] for name in self.__match_args__ if name != "runs"}
        return type(self)(**columns, runs=self.runs_of(np.arange(len(self))[chosen]))

    def runs_of(self, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the runs of these rows, one after another."""
        stops = np.cumsum(self.lengths)
        starts = stops - self.lengths
        pieces = [self.runs[a:b] for a, b in zip(starts[rows].tolist(), stops[rows].tolist(), strict=True)]
        return np.concatenate(pieces) if pieces else self.runs[:0]

    def masks(self) -> list[NDArray[np.uint32]]:
        """Return the runs of each row."""
        return np.split(self.runs, np.cumsum(self.lengths)[:-1]) if len(self) else []


@dataclass(frozen=True)
class ScoredMasks(_Masks, ScoredBoxes):
    """Detections of some images with their masks."""

    @property
    def areas_px(self) -> NDArray[np.float64]:
        return self.pixels.astype(np.float64)

    @property
    def boxes(self) -> ScoredBoxes:
        """The detections without masks."""
        return ScoredBoxes(self.image, self.classes, self.scores, self.boxes_xywh_px)


@dataclass(frozen=True)
class MaskLabels(_Masks, Labels):
    """True masks of some images. ``area_px`` is the annotated area, if there is one."""

    def overlaps(
        self, m: NDArray[np.int64], detections: Any, d: NDArray[np.int64], floor: float
    ) -> NDArray[np.float64]:
        """Return [P] the IoU of pixels; for a crowd the union is the detection alone.

        Pairs whose areas and boxes allow no IoU of ``floor`` are not compared and get 0.
        """
        found, true = detections.pixels[d], self.pixels[m]
        a, b = detections.around_xywh_px[d], self.around_xywh_px[m]
        sides = np.minimum(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
        most = np.minimum(np.minimum(found, true), np.maximum(sides, 0).prod(axis=1))
        whole = np.where(self.crowd[m], found, found + true)
        part = np.where(self.crowd[m], 0, 1)
        near = np.flatnonzero((most > 0) & (most >= floor * (whole - part * most)))
        both = self._shared(m[near], detections, d[near])
        iou = np.zeros(len(d))
        iou[near] = both / (whole[near] - part[near] * both)
        return iou

    def _shared(self, m: NDArray[np.int64], detections: Any, d: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [P] the number of pixels that are in both masks."""
        both = np.zeros(len(d), np.int64)
        for part in rle.slices_of(detections.lengths[d] + self.lengths[m], _RUNS_AT_ONCE):
            (rows_d, of_d), (rows_m, of_m) = (np.unique(rows[part], return_inverse=True) for rows in (d, m))
            table = rle.RunTable(
                np.concatenate([detections.runs_of(rows_d), self.runs_of(rows_m)]),
                np.concatenate([detections.lengths[rows_d], self.lengths[rows_m]]),
            )
            both[part] = table.intersections(of_d, of_m + len(rows_d))
        return both


def mask_labels_of(
    index: DataIndex, positions: NDArray[np.int64], classes: Sequence[int] | None = None
) -> MaskLabels:
    """Return the true masks of some images of an index, of some classes or all; ``image`` is the position.

    A label without a mask is its box, as a crowd: what was found there is neither right nor wrong.
    """
    labels = labels_of(index, positions)
    sizes = np.asarray(index.sizes_wh[labels.image], np.int64)
    masks = [index.runs(row) for row in rows_of(index, positions).tolist()]
    boxed = np.array([not len(runs) for runs in masks], bool)
    for row in np.flatnonzero(boxed).tolist():
        masks[row] = box_runs(labels.boxes_xywh_px[row], (int(sizes[row, 1]), int(sizes[row, 0])))
    found = MaskLabels(
        labels.image,
        labels.classes,
        labels.boxes_xywh_px,
        labels.area_px,
        labels.crowd | boxed,
        **_Masks.columns(masks, sizes[:, 1]),
    )
    return found if classes is None else found.rows(np.isin(found.classes, classes))


def box_runs(box_xywh_px: NDArray[np.float64], size_hw: tuple[int, int]) -> NDArray[np.uint32]:
    """Return the mask of the pixels that a box touches."""
    low = np.clip(np.floor(box_xywh_px[:2]), 0, size_hw[::-1]).astype(int)
    high = np.clip(np.ceil(box_xywh_px[:2] + box_xywh_px[2:]), low, size_hw[::-1]).astype(int)
    width, height = (high - low).tolist()
    return rle.encode(np.ones((height, width), bool), size_hw, (int(low[0]), int(low[1])))
