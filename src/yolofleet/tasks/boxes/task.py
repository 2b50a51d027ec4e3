"""The task of boxes. C classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.nms import MAX_CANDIDATES, detections
from yolofleet.runs.report.results import MAP, OF_BOXES
from yolofleet.tasks.boxes.coco import CocoMetrics, summarize
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.boxes.matching import (
    AREA_RANGES_PX,
    Labels,
    MatchRecords,
    ScoredBoxes,
    confusion_matrix,
    labels_of,
    match_detections,
    merge,
)
from yolofleet.tasks.task import Arrays, Difference, Limits, Task

_NONE = np.zeros(0, np.int64)


class Boxes(Task):
    """Boxes of objects, judged by the rules of COCO."""

    name = "boxes"
    decoded, outputs = Decoded, ("decoded",)
    nothing = ScoredBoxes(_NONE, _NONE, np.zeros(0), np.zeros((0, 4)))
    columns, of_class, fitness_of = OF_BOXES.columns, OF_BOXES.of_class, OF_BOXES.fitness_of

    def found(self, decoded: Decoded | list[Decoded], limits: Limits) -> tuple[list[FoundBoxes], int]:
        per_image, cut = detections(decoded, **asdict(limits))
        every = torch.cat(per_image).cpu().numpy()  # one copy from the device
        ends = np.cumsum([len(found) for found in per_image])[:-1]
        return [FoundBoxes.of_rows(rows) for rows in np.split(every, ends)], cut

    def busiest(self, decoded: Decoded) -> Decoded:
        classes = -(-MAX_CANDIDATES // decoded.rows.shape[1])
        decoded.objectness[:], decoded.probabilities[:] = 1, 0
        decoded.probabilities[..., :classes] = 1
        return decoded

    def collected(
        self, images: Sequence[int], found: Sequence[FoundBoxes], backs: Sequence[Letterbox], one_class: bool
    ) -> ScoredBoxes:
        parts = [self.nothing]
        for image, one, back in zip(images, found, backs, strict=True):
            low, high = np.split(back.to_native(one.boxes_xyxy_px.astype(np.float64)), 2, axis=1)
            parts.append(
                ScoredBoxes(
                    image=np.full(len(one), image),
                    classes=one.classes * (not one_class),
                    scores=one.scores.astype(np.float64),
                    boxes_xywh_px=np.concatenate([low, high - low], axis=1),
                )
            )
        return ScoredBoxes.joined(parts)

    def judged(
        self, index: DataIndex, images: np.ndarray, results: ScoredBoxes, classes: Sequence[int] | None
    ) -> Arrays:
        return compared(index, images, labels_of(index, images, classes), results)

    def metrics(self, parts: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> CocoMetrics:
        records = merge([MatchRecords(*(part[one.name] for one in fields(MatchRecords))) for part in parts])
        confusion = np.sum([part["confusion"] for part in parts], axis=0)
        return replace(summarize(records, names), confusion=confusion)

    def difference(
        self, ours: Decoded, theirs: Decoded, size_hw: tuple[int, int], *, in_order: bool
    ) -> Difference:
        from yolofleet.tasks.boxes.differences import decoded_difference

        return decoded_difference(ours, theirs, size_hw, in_order=in_order)

    def draw(self, image: np.ndarray, found: FoundBoxes, names: Sequence[str], **style: Any) -> np.ndarray:
        from yolofleet.runs.report.draw import draw_boxes

        return draw_boxes(image, found.boxes_xyxy_px, found.classes, names, found.scores, **style)

    def to_json(self, found: FoundBoxes, names: Sequence[str]) -> list[dict[str, Any]]:
        """Boxes are rounded to 0.01 px, scores to 0.00001."""
        from yolofleet.runs.report.draw import class_name

        return [
            {
                "class": c,
                "name": class_name(names, c),
                "score": round(score, 5),
                "box_xyxy_px": [round(side, 2) for side in box],
            }
            for c, score, box in zip(
                found.classes.tolist(), found.scores.tolist(), found.boxes_xyxy_px.tolist(), strict=True
            )
        ]

    def yolo_values(self, found: FoundBoxes, size_wh: tuple[int, int]) -> list[np.ndarray]:
        low, high = np.split(found.boxes_xyxy_px.astype(np.float64), 2, axis=1)
        wh = high - low
        return list(np.concatenate([low + wh / 2, wh], axis=1) / (size_wh * 2))

    def yolo_texts(self, results: ScoredBoxes, index: DataIndex, *, scores: bool) -> dict[int, str]:
        from yolofleet.tasks.boxes.files import detections_as_yolo_txt

        return detections_as_yolo_txt(results, index, scores=scores)

    def coco_results(
        self, results: ScoredBoxes, index: DataIndex, category_ids: Sequence[Any] | None
    ) -> list[dict[str, Any]]:
        from yolofleet.tasks.boxes.files import detections_as_coco_json

        return detections_as_coco_json(results, index.ids, category_ids)

    def analysed(self, *asked: Any) -> dict[str, Any]:
        from yolofleet.tasks.boxes.files import analysed

        return analysed(*asked)

    def tables(self, metrics: CocoMetrics) -> list[tuple[str, list[str], list[list[str]]]]:
        from yolofleet.runs.report.screen_table import figure_text

        sizes = [size for size in AREA_RANGES_PX if size != "all"]
        areas = [f"{low:g} to {high:g} px" for low, high in ((0, 32), (32, 96), (96, math.inf))]
        rows = [
            [size, area, *(figure_text(metrics.figures[f"{name}-{size}"]) for name in ("mAP", "AR"))]
            for size, area in zip(sizes, areas, strict=True)
        ]
        return [("by size", ["size", "square root of area", MAP, "AR100"], rows)]

    def plots(
        self,
        metrics: CocoMetrics,
        results: ScoredBoxes,
        index: DataIndex,
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        from yolofleet.tasks.boxes.plots import draw_validation

        draw_validation(metrics, results, index, folder, note)

    def page(self, metrics: CocoMetrics, results: ScoredBoxes, index: DataIndex) -> dict[str, Any]:
        from yolofleet.tasks.boxes.page import page_of

        return page_of(metrics, results, index)

    def check(self, asked: Mapping[str, bool]) -> None:
        pass


def compared(index: DataIndex, images: np.ndarray, labels: Labels, results: ScoredBoxes) -> Arrays:
    """Return what ``Task.judged`` does of these labels."""
    # position -> order of ids
    place = np.argsort(np.argsort(np.asarray(index.image_ids), kind="stable"))
    records = match_detections(
        replace(labels, image=place[labels.image]),
        replace(results, image=place[results.image]),
        classes=len(index.names),
        images_seen=len(images),
    )
    return {**vars(records), "confusion": confusion_matrix(labels, results, len(index.names))}


BOXES = Boxes()
