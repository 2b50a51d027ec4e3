"""Random masks with everything that COCO's protocol has a rule for, pycocotools' answer, and predictions by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from detection_sets import run_cocoeval

from yolofleet.data.geometry import rle
from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.tasks.boxes.matching import ScoredBoxes
from yolofleet.tasks.masks.matching import ScoredMasks


@dataclass
class MaskIndex:
    """What the metric reads of an index with masks."""

    names: tuple[str, ...]
    sizes_wh: np.ndarray
    image_ids: np.ndarray
    offsets: np.ndarray
    classes: np.ndarray
    boxes_cxcywh_unit: np.ndarray
    area_px: np.ndarray
    crowd: np.ndarray
    masks: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.image_ids)

    def runs(self, row: int) -> np.ndarray:
        return self.masks[row]


def random_masks(
    seed: int, *, images: int, classes: int, most_labels: int, most_found: int
) -> tuple[Any, ScoredMasks]:
    """Not sorted ids, images of several sizes and without labels or detections, crowds, parts, holes, empty masks, twins, exact hits,
    equal scores, other areas, more than 100 masks of a class."""
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(40, 200)), int(rng.integers(40, 200))) for _ in range(images)]  # h, w
    labels, found, counts = [], [], []
    for image, size in enumerate(sizes):
        own: list[tuple[int, np.ndarray]] = []
        for _ in range(int(rng.integers(0, most_labels + 1))):
            c, runs = int(rng.integers(classes)), random_mask(rng, size)
            if own and rng.random() < 0.4:
                c, runs = own[-1][0], disturbed(rng, own[-1][1], size)
            own.append((c, runs))
            labels.append((c, runs, rle.area(runs) * rng.uniform(0.5, 1), bool(rng.random() < 0.15), size))
        counts.append(len(own))
        for _ in range(int(rng.integers(0, most_found + 1))):
            c, runs = int(rng.integers(classes)), random_mask(rng, size)
            if own and rng.random() < 0.7:
                c, runs = own[int(rng.integers(len(own)))]
                if rng.random() < 0.8:
                    runs = disturbed(rng, runs, size)
            found.append((image, c, runs, round(rng.random(), 2)))
    boxes = np.array([rle.box(runs, size[0]) for _, runs, _, _, size in labels], float).reshape(-1, 4)
    whole = np.array([size[::-1] for *_, size in labels], float).reshape(-1, 2)
    index = MaskIndex(
        names=tuple(map(str, range(classes))),
        sizes_wh=np.array(sizes)[:, ::-1],
        image_ids=rng.permutation(10 * images)[:images] + 1,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        classes=np.array([row[0] for row in labels], np.int32),
        boxes_cxcywh_unit=np.concatenate(
            [(boxes[:, :2] + boxes[:, 2:] / 2) / whole, boxes[:, 2:] / whole], 1
        ),
        area_px=np.array([row[2] for row in labels], float),
        crowd=np.array([row[3] for row in labels], bool),
        masks=[row[1] for row in labels],
    )
    return index, scored([(image, c, runs, score, sizes[image][0]) for image, c, runs, score in found])


def scored(rows: list[tuple[int, int, np.ndarray, float, int]]) -> ScoredMasks:
    """Detections of image, class, runs, score and the height of the image; the box is that around the mask."""
    heights = np.array([row[4] for row in rows], np.int64)
    boxes = np.array([rle.box(row[2], row[4]) for row in rows], float).reshape(-1, 4)
    table = ScoredBoxes(
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.int64),
        np.array([row[3] for row in rows], float),
        boxes,
    )
    return ScoredMasks(**vars(table), **ScoredMasks.columns([row[2] for row in rows], heights))


def random_mask(rng: np.random.Generator, size_hw: tuple[int, int]) -> np.ndarray:
    """A polygon, several parts, one with a hole, noise, or nothing."""
    height, width = size_hw
    kind = rng.random()
    if kind < 0.05:
        return rle.encode(np.zeros(size_hw, bool))
    if kind < 0.1:
        return rle.encode(rng.random(size_hw) < 0.3)
    parts = [_round(rng, height, width) for _ in range(int(rng.choice([1, 1, 1, 2, 3])))]
    runs = rle.from_polygons(parts, size_hw)
    if rng.random() < 0.2:
        inside = rle.decode(runs, size_hw).copy()
        inside &= ~rle.decode(rle.from_polygons([_round(rng, height, width)], size_hw), size_hw)
        runs = rle.encode(inside)
    return runs


def _round(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    turn = np.sort(rng.uniform(0, 2 * np.pi, int(rng.integers(3, 14))))
    radius = np.exp(rng.uniform(1, 4.5))
    centre = rng.uniform(0, [width, height])
    return centre + radius * np.stack([np.cos(turn), np.sin(turn)], axis=1)


def disturbed(rng: np.random.Generator, runs: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """The mask moved by some pixels, or without some columns."""
    inside = rle.decode(runs, size_hw)
    if rng.random() < 0.7:
        inside = np.roll(inside, rng.integers(-2, 3, 2), axis=(0, 1))
    else:
        inside = inside.copy()
        inside[:, : int(rng.integers(size_hw[1]))] &= rng.random() < 0.5
    return rle.encode(inside)


def coco_files(index: Any, found: ScoredMasks) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The labels and the results as pycocotools reads them. Results have no box, which would replace the mask's area."""
    owner = np.repeat(np.arange(len(index)), np.diff(index.offsets)).tolist()
    sizes = [(int(height), int(width)) for width, height in index.sizes_wh]
    size = np.array(sizes, float)[owner].reshape(-1, 2)[:, ::-1]
    wh = index.boxes_cxcywh_unit[:, 2:] * size
    boxes = np.concatenate([index.boxes_cxcywh_unit[:, :2] * size - wh / 2, wh], axis=1).tolist()
    truth = {
        "images": [
            {"id": int(i), "height": height, "width": width}
            for i, (height, width) in zip(index.image_ids, sizes, strict=True)
        ],
        "categories": [{"id": c} for c in range(len(index.names))],
        "annotations": [
            {
                "id": row + 1,
                "image_id": int(index.image_ids[image]),
                "category_id": int(index.classes[row]),
                "segmentation": rle.Mask(sizes[image], index.runs(row)).coco(),
                "bbox": boxes[row],
                "area": float(index.area_px[row]),
                "iscrowd": int(index.crowd[row]),
            }
            for row, image in enumerate(owner)
        ],
    }
    results = [
        {
            "image_id": int(index.image_ids[image]),
            "category_id": c,
            "segmentation": rle.Mask(sizes[image], runs).coco(),
            "score": score,
        }
        for image, c, runs, score in zip(
            found.image.tolist(), found.classes.tolist(), found.masks(), found.scores.tolist(), strict=True
        )
    ]
    return truth, results


def pycocotools_figures(
    truth: dict[str, Any], results: list[dict[str, Any]], kind: str = "segm"
) -> tuple[list[float], list[list[float]]]:
    """The twelve figures, and [AP, AP50] of each class."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return run_cocoeval(COCO, COCOeval, truth, results, kind)


def native(height: int, width: int) -> Letterbox:
    """The letterbox that changes nothing."""
    return Letterbox((1.0, 1.0), 0.0, 0.0, (height, width), (height, width))
