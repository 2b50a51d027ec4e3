"""Labels with instance masks: outlines that move with their boxes. ``rings.py`` says what a mask is.

n labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.rings import Rings
from yolofleet.data.geometry.shapes import LARGEST_ASPECT, SMALLEST_AREA_LEFT, SMALLEST_SIDE_PX, Shapes
from yolofleet.data.geometry.view import Look, View

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class MaskShapes(Shapes):
    """Labels with masks.

    Attributes:
        rings: [n]. A label without a ring has a box and no mask.
    """

    rings: Rings

    @classmethod
    def of_image(
        cls, classes: np.ndarray, boxes: np.ndarray, rings: Sequence[list[np.ndarray]] | None = None
    ) -> Self:
        """Return the labels of one image, with the rings [k, 2] of each; without ``rings`` they have no masks."""
        rings = [[] for _ in classes] if rings is None else rings
        return cls(rings=Rings.of(rings), **vars(Shapes.of_image(classes, boxes)))

    @property
    def has_mask(self) -> np.ndarray:
        """bool [n]."""
        return self.rings.counts > 0

    def mapped(self, places: np.ndarray, view: View, look: Look) -> Self:
        """Return the labels as the network sees them; drop those of which too little is left.

        The box of a mask that was cut or turned is the box of what is left of it. It is never larger than the moved box.
        """
        boxes = Shapes(np.arange(len(self)), self.classes, self.boxes).mapped(places, view, look)
        kept = boxes.image
        rings, at = self.rings[kept], places[kept]
        moved = type(self)(image=self.image[kept], classes=boxes.classes, boxes=boxes.boxes, rings=rings)
        if not len(rings.points):
            return moved

        shown = np.array(view.shown_hw[::-1])
        flips = np.array([look.mirrored, look.upside_down])
        stretch = np.where(flips, -1, 1) / shown  # from pixels of the output to fractions of what is shown
        shift = flips - (view.output_px - shown) / 2 * stretch
        matrix, canvas = view.to_output, np.array([[0.0], [view.canvas_px]]) * np.ones(2)
        low, high = np.zeros(2), np.ones(2)
        moves: tuple[np.ndarray | None, np.ndarray | None] = None, None
        if view.is_crop:
            factor, offset = view.scale * stretch, matrix[:2, 2] * stretch + shift
            moves = at[:, :2] * factor, at[:, 2:] * factor + offset
            border = np.sort(canvas * factor + offset, axis=0)
            low, high = np.maximum(border[0], low), np.minimum(border[1], high)
        else:
            rings = rings.cut(canvas[0], canvas[1], at[:, :2].copy(), at[:, 2:].copy()).rings
            x, y = rings.points.T
            terms = matrix[:, :1] * x + matrix[:, 1:2] * y + matrix[:, 2:]  # [3, P]
            rings = replace(rings, points=np.stack(list(terms[:2] / terms[2]), axis=1) * stretch + shift)
        cut = rings.cut(low, high, *moves, turned=look.mirrored != look.upside_down)
        rings = Rings(cut.rings.points.astype(np.float32), cut.rings.lengths, cut.rings.counts)
        moved = type(self)(image=moved.image, classes=moved.classes, boxes=boxes.boxes.copy(), rings=rings)
        new = np.flatnonzero(cut.is_cut if view.is_crop else self.rings.counts[kept] > 0)
        if not len(new):
            return moved
        whole, rest = moved.boxes[new].astype(np.float64), cut.boxes[new]
        middle, half = whole[:, :2], whole[:, 2:] / 2
        low, high = np.maximum(rest[:, :2], middle - half), np.minimum(rest[:, 2:], middle + half)
        width, height = ((high - low) * shown).T
        before = _area_in_canvas(self.boxes[kept[new]], at[new], view)
        shorter, longer = np.minimum(width, height), np.maximum(width, height)
        is_left = (shorter > SMALLEST_SIDE_PX) & (longer < LARGEST_ASPECT * shorter) & moved.has_mask[new]
        is_left &= shorter * longer > SMALLEST_AREA_LEFT * before
        low, high, keep = low[is_left], high[is_left], np.ones(len(moved), bool)
        moved.boxes[new[is_left]] = np.concatenate([(low + high) / 2, high - low], axis=1)
        keep[new] = is_left
        return moved if keep.all() else moved.rows(keep)

    def letterboxed(self, size_wh: np.ndarray, back: Letterbox) -> Self:
        size, pad = np.array(back.size_hw[::-1]), np.array([back.pad_left, back.pad_top])
        rings = self.rings.scaled(size_wh * back.scale_xy / size, pad / size)
        rings = replace(rings, points=rings.points.astype(np.float32))
        return replace(super().letterboxed(size_wh, back), rings=rings)

    def with_pasted(
        self, pasted: Sequence[tuple[int, np.ndarray, list[np.ndarray]]], size_wh: np.ndarray
    ) -> Self:
        """Return these labels without what the pasted objects hide, and those of the objects, each on top of those before."""
        labels = self
        width, height = size_wh.tolist()
        for number, box, polygons in pasted:
            middle, sides = (box[:2] + box[2:]) / 2 / size_wh, (box[2:] - box[:2]) / size_wh
            rings = [[polygon / size_wh for polygon in polygons]]
            new = self.of_image(np.array([number]), np.concatenate([middle, sides])[None], rings)
            corners = labels.corners_px(width, height)
            meets = ((corners[:, :2] < box[2:]) & (corners[:, 2:] > box[:2])).all(axis=1) & labels.has_mask
            below = labels.rows(meets)._without(new.rings, size_wh)
            labels = (
                self.joined([labels.rows(~meets), below, new]) if meets.any() else self.joined([labels, new])
            )
        return labels

    def _without(self, hiding: Rings, size_wh: np.ndarray) -> Self:
        """Return what of these masks is left beside the rings of a label, and without the labels of which nothing is left.

        A side of a box moves if more than a pixel of it is hidden.
        """
        width, height = size_wh.tolist()
        boxes, rings, is_left = self.corners_px(width, height), [], np.ones(len(self), bool)
        for label, (own, box) in enumerate(zip(self.rings.lists(), boxes, strict=True)):
            cover = hiding.cut(box[:2] / size_wh, box[2:] / size_wh, turned=True).rings
            # where parts of the mask overlap, its winding is their number
            rings.append([*own, *cover.lists()[0] * len(own)])
            is_seen = Rings.of(rings[-1:]).rasters((height, width))[0] > 127
            rows, columns = (np.flatnonzero(is_seen.any(axis=axis)) for axis in (1, 0))
            is_left[label] = len(rows)
            if len(rows):
                seen = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
                inner = np.append(np.maximum(seen[:2], box[:2]), np.minimum(seen[2:], box[2:]))
                box[:] = np.where(np.abs(inner - box) > 1, inner, box)
        low, high = boxes[:, :2] / size_wh, boxes[:, 2:] / size_wh
        changed = np.concatenate([(low + high) / 2, high - low], axis=1).astype(np.float32)
        return replace(self, boxes=changed, rings=Rings.of(rings)).rows(is_left)

    def rasters(self, size_hw: tuple[int, int]) -> np.ndarray:
        """See :meth:`Rings.rasters`."""
        return self.rings.rasters(size_hw)

    def in_windows(self, size_hw: tuple[int, int], windows: np.ndarray) -> np.ndarray:
        """See :meth:`Rings.in_windows`."""
        return self.rings.in_windows(size_hw, windows)


def _area_in_canvas(boxes: np.ndarray, places: np.ndarray, view: View) -> np.ndarray:
    """Return the area of the part of each box within the canvas, in pixels of the output: [n]."""
    centre = boxes[:, :2] * places[:, :2] + places[:, 2:]
    half = boxes[:, 2:] * places[:, :2] / 2
    sides = np.minimum(centre + half, view.canvas_px) - np.maximum(centre - half, 0)
    area: np.ndarray = (sides * view.scale).prod(axis=1)
    return area
