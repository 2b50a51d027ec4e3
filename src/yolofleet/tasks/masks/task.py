"""The task of instance masks. Every mask has a box, so what is for boxes works as it does there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.labels import OUTLINE_UNIT
from yolofleet.data.geometry import rle
from yolofleet.data.geometry.boxes import DecodedMasks
from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.mask_shapes import MaskShapes
from yolofleet.data.geometry.nms import detections
from yolofleet.data.geometry.rings import Rings
from yolofleet.data.geometry.table import as_objects
from yolofleet.tasks.boxes.coco import CocoMetrics
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.boxes.task import BOXES, compared
from yolofleet.tasks.masks.found import FoundMasks, OnMap
from yolofleet.tasks.masks.matching import ScoredMasks, mask_labels_of
from yolofleet.tasks.task import Arrays, Difference, Limits, Task

MASK = "mask "  # before the figures of boxes, in those of masks
_REFUSED = ("--tile", "--nms", "--int8")


@dataclass(frozen=True, kw_only=True)
class MaskMetrics(CocoMetrics):
    """Figures of boxes, and those of masks with ``MASK`` before their names; the other attributes are of boxes.

    Attributes:
        masks: the same of masks.
    """

    masks: CocoMetrics


class Masks(Task):
    """Objects with boxes and masks, each judged by the rules of COCO."""

    name, decoded, reads_masks = "masks", DecodedMasks, True
    nothing = ScoredMasks(**vars(BOXES.nothing), **ScoredMasks.columns([], np.zeros(0, np.int64)))
    _columns = {name.replace("/", "/mask_"): MASK + figure for name, figure in BOXES.columns.items()}
    columns = MappingProxyType({**BOXES.columns, **_columns})
    _of_class = {MASK + name: MASK + figure for name, figure in BOXES.of_class.items()}
    of_class = MappingProxyType({**BOXES.of_class, **_of_class})
    _fitness = {MASK + name: weight for name, weight in BOXES.fitness_of.items()}
    fitness_of = MappingProxyType({**BOXES.fitness_of, **_fitness})

    def labels(self, index: DataIndex, image: int) -> MaskShapes:
        labels = index.labels(image)
        if not len(index.points):
            return MaskShapes(**vars(labels), rings=Rings.of([[]] * len(labels)))
        start, stop = index.offsets[image : image + 2].tolist()
        crowd, borders = index.crowd[start:stop], index.polygon_offsets[start : stop + 1]
        ends = index.point_offsets[borders[0] : borders[-1] + 1]
        points = index.points[ends[0] : ends[-1]].astype(np.float32) / OUTLINE_UNIT
        rings = Rings(points, ends[1:] - ends[:-1], borders[1:] - borders[:-1])
        return MaskShapes(**vars(labels), rings=rings[~crowd] if crowd.any() else rings)

    def made_up(self, objects: int) -> MaskShapes:
        square = np.array([(0.25, 0.25), (0.75, 0.25), (0.75, 0.75), (0.25, 0.75)], np.float32)
        return MaskShapes(**vars(super().made_up(objects)), rings=Rings.of([[square]] * objects))

    def found(self, decoded: DecodedMasks, limits: Limits) -> tuple[list[FoundMasks], int]:
        per_image, cut = detections(decoded.boxes, **vars(limits), numbered=True)
        found = []
        for rows, coefficients, prototypes in zip(
            per_image, decoded.coefficients, decoded.prototypes, strict=True
        ):
            chosen = coefficients[rows[:, 6].long()].cpu().numpy()
            boxes = FoundBoxes.of_rows(rows.cpu().numpy())
            masks = as_objects([OnMap(row, prototypes) for row in chosen])
            found.append(FoundMasks(**vars(boxes), masks=masks))
        return found, cut

    def busiest(self, decoded: DecodedMasks) -> DecodedMasks:
        BOXES.busiest(decoded.boxes)  # in place
        return decoded

    def collected(
        self, images: Sequence[int], found: Sequence[FoundMasks], backs: Sequence[Letterbox], one_class: bool
    ) -> ScoredMasks:
        parts = [self.nothing]
        for image, one, back in zip(images, found, backs, strict=True):
            boxes = BOXES.collected([image], [one], [back], one_class)
            masks = [mask.runs for mask in one.native(back).masks]
            heights = np.full(len(masks), back.native_hw[0])
            parts.append(ScoredMasks(**vars(boxes), **ScoredMasks.columns(masks, heights)))
        return ScoredMasks.joined(parts)

    def judged(
        self, index: DataIndex, images: np.ndarray, results: ScoredMasks, classes: Sequence[int] | None
    ) -> Arrays:
        of_masks = compared(index, images, mask_labels_of(index, images, classes), results)
        boxes = BOXES.judged(index, images, results.boxes, classes)
        return {**boxes, **{MASK + name: array for name, array in of_masks.items()}}

    def metrics(self, parts: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> MaskMetrics:
        boxes = BOXES.metrics(parts, names)
        of_masks = [
            {name.removeprefix(MASK): array for name, array in part.items() if name.startswith(MASK)}
            for part in parts
        ]
        masks = BOXES.metrics(of_masks, names)
        per_class = {
            name: {**row, **{MASK + figure: value for figure, value in masks.per_class[name].items()}}
            for name, row in boxes.per_class.items()
        }
        figures = {**boxes.figures, **{MASK + name: value for name, value in masks.figures.items()}}
        return MaskMetrics(**{**vars(boxes), "figures": figures, "per_class": per_class}, masks=masks)

    # -- exported files

    def difference(
        self, ours: DecodedMasks, theirs: DecodedMasks, size_hw: tuple[int, int], *, in_order: bool
    ) -> Difference:
        from yolofleet.tasks.masks.differences import masks_difference

        return masks_difference(ours, theirs, size_hw, in_order=in_order)

    # -- screens, pictures and files

    def draw(self, image: np.ndarray, found: FoundMasks, names: Sequence[str], **style: Any) -> np.ndarray:
        from yolofleet.tasks.masks.draw import painted

        return BOXES.draw(painted(image, found.masks, found.classes), found, names, **style)

    def to_json(self, found: FoundMasks, names: Sequence[str]) -> list[dict[str, Any]]:
        """As of boxes, with ``polygons`` (x, y, x, y, ... in pixels, holes in the other direction), simplified, and the exact mask
        as ``segmentation``, COCO's compressed run lengths, and its ``area_px``."""
        from yolofleet.tasks.masks.draw import polygons

        return [
            {
                **box,
                "area_px": rle.area(mask.runs),
                "segmentation": mask.coco(),
                "polygons": [polygon.ravel().tolist() for polygon in polygons(mask)],
            }
            for box, mask in zip(BOXES.to_json(found, names), found.masks, strict=True)
        ]

    def bitmaps(self, found: FoundMasks, size_hw: tuple[int, int]) -> np.ndarray:
        each = [rle.decode(mask.runs, size_hw) for mask in found.masks]
        return np.array(each, bool).reshape(-1, *size_hw)

    def yolo_values(self, found: FoundMasks, size_wh: tuple[int, int]) -> list[np.ndarray]:
        from yolofleet.tasks.masks.files import yolo_values

        return yolo_values(found.masks)

    def yolo_texts(self, results: ScoredMasks, index: DataIndex, *, scores: bool) -> dict[int, str]:
        from yolofleet.tasks.masks.files import masks_as_yolo_txt

        return masks_as_yolo_txt(results, index, scores=scores)

    def coco_results(
        self, results: ScoredMasks, index: DataIndex, category_ids: Sequence[Any] | None
    ) -> list[dict[str, Any]]:
        from yolofleet.tasks.masks.files import masks_as_coco_json

        return masks_as_coco_json(results, index, category_ids)

    def analysed(self, *asked: Any) -> dict[str, Any]:
        return BOXES.analysed(*asked)

    def tables(self, metrics: MaskMetrics) -> list[tuple[str, list[str], list[list[str]]]]:
        of_masks = BOXES.tables(metrics.masks)
        return [
            *BOXES.tables(metrics),
            *((f"masks {title}", columns, rows) for title, columns, rows in of_masks),
        ]

    def plots(
        self,
        metrics: MaskMetrics,
        results: ScoredMasks,
        index: DataIndex,
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        from yolofleet.tasks.masks.draw import draw_masks

        draw_masks(metrics, results, index, folder, note)

    def page(self, metrics: MaskMetrics, results: ScoredMasks, index: DataIndex) -> dict[str, Any]:
        from yolofleet.tasks.boxes.page import curves_of

        masks = {"mask_curves": curves_of(metrics.masks.curves, index.names)}
        return BOXES.page(metrics, results, index) | masks

    def check(self, asked: Mapping[str, bool]) -> None:
        super().check({flag: given for flag, given in asked.items() if flag in _REFUSED})


MASKS = Masks()
