"""Masks of labels: every form of COCO, YOLO's seams, and hostile run lengths. Numbers by hand or by pycocotools."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import coco_files
import numpy as np
import pytest
from coco_files import write_coco
from label_rows import index_of
from pycocotools import mask as pycoco
from small_data import write_picture

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.maskrows import rings_of
from yolofleet.data.geometry import rle
from yolofleet.data.geometry.mask_shapes import MaskShapes

WIDTH, HEIGHT = 40, 30
image = partial(coco_files.image, width=WIDTH, height=HEIGHT)
label = partial(coco_files.label, bbox=[4, 5, 10, 10])


def indexed(folder: Path, *segmentations: Any, **more: Any) -> DataIndex:
    """Return the index, with masks, of an image with a label for each segmentation."""
    write_picture(folder / "a.png", WIDTH, HEIGHT)
    labels = [
        label(n, 1, **{"segmentation": one, "bbox": [4, 5, 10, 10 + n], **more})
        for n, one in enumerate(segmentations, 1)
    ]
    return index_of(write_coco(folder / "set.json", [image(1, "a.png")], labels), masks=True)


def bitmaps(index: DataIndex) -> list[np.ndarray]:
    size = HEIGHT, WIDTH
    return [rle.decode(index.runs(row), size) for row in range(len(index.classes)) if len(index.runs(row))]


def rasters(index: DataIndex) -> np.ndarray:
    """Return the masks that a training would learn, at the size of the image."""
    shapes = index.labels(0)
    return MaskShapes.of_image(shapes.classes, shapes.boxes, index.outlines(0)).rasters((HEIGHT, WIDTH))


def compressed(bitmap: np.ndarray) -> dict[str, Any]:
    found = pycoco.encode(np.asfortranarray(bitmap.astype(np.uint8)))
    return {"size": list(found["size"]), "counts": found["counts"].decode()}


def uncompressed(bitmap: np.ndarray) -> dict[str, Any]:
    return {"size": [HEIGHT, WIDTH], "counts": rle.encode(bitmap).tolist()}


def ring_with_hole() -> np.ndarray:
    bitmap = np.zeros((HEIGHT, WIDTH), bool)
    bitmap[5:15, 4:14], bitmap[8:12, 7:11], bitmap[20:22, 30:36] = True, False, True
    return bitmap


def test_run_lengths_are_read_with_holes_and_parts(tmp_path: Path) -> None:
    bitmap = ring_with_hole()
    index = indexed(tmp_path, compressed(bitmap), uncompressed(bitmap))
    assert index.problem_count == 0
    for found in bitmaps(index):
        assert (found == bitmap).all()
    assert [len(rings) for rings in index.outlines(0)] == [3, 3]
    assert (rasters(index) == bitmap * 255).all()
    assert index.area_px.tolist() == [bitmap.sum()] * 2  # no area is stated: that of the mask, not of the box
    boxes = index_of(tmp_path / "set.json")
    assert not boxes.has_runs and not len(boxes.points) and np.allclose(boxes.area_px, [110, 120])
    assert boxes.digest != index.digest
    assert index_of(tmp_path / "set.json", masks=None).digest == index.digest


def test_polygons_of_several_parts_are_those_of_pycocotools(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    polygons = [[(rng.random(14) * 40).tolist() for _ in range(n)] for n in (1, 2, 3, 1, 1)]
    polygons += [[(rng.random(12) * 30).round(digits).tolist()] for digits in (0, 1, 1, 2, 2)]
    index = indexed(tmp_path, *polygons)
    for found, parts in zip(bitmaps(index), polygons, strict=True):
        assert (found == pycoco.decode(pycoco.merge(pycoco.frPyObjects(parts, HEIGHT, WIDTH)))).all()
    # a part is inside whatever its direction, and where parts overlap
    square, inner = [4, 5, 14, 5, 14, 15, 4, 15], [6, 7, 6, 20, 10, 20, 10, 7]
    index = indexed(tmp_path, [square, inner], [inner[::-1], square])
    expected = np.zeros((HEIGHT, WIDTH), int)
    expected[5:15, 4:14], expected[7:20, 6:10] = 255, 255
    assert abs(rasters(index)[0].astype(int) - expected).max() <= 2


def test_crowds_have_masks_for_the_metric_and_none_to_learn(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", WIDTH, HEIGHT)
    bitmap = ring_with_hole()
    labels = [
        label(1, 1, segmentation=uncompressed(bitmap)) | {"iscrowd": 1},
        label(2, 1, segmentation=[[4, 5, 14, 5, 14, 15]]),
        label(3, 1),
    ]
    index = index_of(write_coco(tmp_path / "set.json", [image(1, "a.png")], labels), masks=True)
    assert (rle.decode(index.runs(0), (HEIGHT, WIDTH)) == bitmap).all() and index.crowd[0]
    assert [len(rings) for rings in index.outlines(0)] == [1, 0] and not len(index.runs(2))
    kept = index.with_rows(np.array([False, True, True]))
    assert kept.runs(0).tolist() == index.runs(1).tolist() and not len(kept.runs(1))


def test_a_label_without_bbox_gets_the_box_of_its_mask(tmp_path: Path) -> None:
    bitmap = ring_with_hole()
    for form in (compressed(bitmap), uncompressed(bitmap)):
        index = indexed(tmp_path, form, bbox=None)
        sides = [*index.boxes_cxcywh_unit[0] * [WIDTH, HEIGHT, WIDTH, HEIGHT]]
        assert np.allclose(sides, [20, 13.5, 32, 17])  # columns 4..36, rows 5..22
        assert index.problem_kinds == {"box-derived": 1}
    empty = indexed(tmp_path, uncompressed(np.zeros((HEIGHT, WIDTH), bool)), compressed(bitmap), bbox=None)
    assert "annotation 1: it has no bbox, and its mask cannot be read: it is empty" in empty.problems_text()


HOSTILE = {
    "beyond the image": [WIDTH * HEIGHT, 5],
    "too short": [3, 4],
    "negative": [-5, WIDTH * HEIGHT + 5],
    "huge": [1 << 62, 1 << 62],
    "not of 64 bits": [10**30],
    "fractions": [0.5, 1199.5],
    "texts": ["1", "2"],
    "lists": [[1], [2]],
    "nothing": [],
    "no list": None,
    "a number": 7,
    "control characters": "\x00\x1b[31m\x07",
    "not ASCII": "Sf>5i7é∞",
    "a number that does not end": "o" * 500,
    "unfinished": "o",
    "long": "0" * 100_000,
}


@pytest.mark.parametrize("counts", HOSTILE.values(), ids=HOSTILE)
def test_run_lengths_that_fit_no_image_leave_a_box(tmp_path: Path, counts: Any) -> None:
    index = indexed(tmp_path, {"size": [HEIGHT, WIDTH], "counts": counts}, compressed(ring_with_hole()))
    assert index.problem_kinds == {"mask-unreadable": 1}
    assert "annotation 1 of a.png: its mask cannot be read: " in index.problems_text()
    assert not len(index.runs(0)) and len(index.runs(1)) and len(index.labels(0)) == 2
    assert "\x1b" not in index.problems_text()
    stray = indexed(
        tmp_path, {"size": [HEIGHT, WIDTH], "counts": counts}, compressed(ring_with_hole()), bbox=None
    )
    assert stray.problem_kinds == {"label-stray": 1, "box-derived": 1}


@pytest.mark.parametrize(
    "size", [[20, 20], [WIDTH, HEIGHT], [1 << 40, 1 << 40], [-1, -1], ["x", None], None, 5]
)
def test_run_lengths_of_another_size_leave_a_box(tmp_path: Path, size: Any) -> None:
    mask = compressed(ring_with_hole()) | {"size": size}
    index = indexed(tmp_path, mask, compressed(ring_with_hole()))
    assert index.problem_kinds == {"mask-unreadable": 1} and not len(index.runs(0))


def test_the_parts_that_a_seam_joins_are_told_apart() -> None:
    def areas(points: list[list[int]]) -> list[float]:
        found = []
        for ring in rings_of(np.array(points, np.uint16)):
            x, y = ring.astype(float).T
            found.append(float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2))
        return sorted(found)

    square = [[0, 0], [10, 0], [10, 10], [0, 10]]
    assert areas(square) == areas(square[::-1]) == [100]
    assert areas([*square, square[0]]) == [100]  # closed by its first point
    # a line from (10, 10) to (20, 20) and back; the second part in either direction
    apart = [[20, 20], [30, 20], [30, 30], [20, 30]]
    for second in (apart, [apart[0], *apart[:0:-1]]):
        joined = [*square[:3], *second, second[0], square[2], square[3]]
        assert areas(joined) == [100, 100]
    # three parts in a row: the one in the middle is walked in two halves
    last = [[40, 40], [50, 40], [50, 50], [40, 50]]
    chain = [*square[:3], *apart[:3], *last, last[0], apart[2], apart[3], apart[0], square[2], square[3]]
    assert areas(chain) == [100, 100, 100]
    # a hole that a line joins to the ring around it
    hole = [[2, 2], [2, 5], [5, 5], [5, 2]]
    assert areas([square[0], *hole, hole[0], *square]) == [-9, 100]
    assert areas([[0, 0], [5, 5], [9, 9]]) == [] == areas([[3, 3]] * 5)


def test_yolo_polygons_are_read_with_their_seams(tmp_path: Path) -> None:
    write_picture(tmp_path / "images/train/a.png", WIDTH, HEIGHT)
    (tmp_path / "labels/train").mkdir(parents=True)
    square, apart = [[4, 5], [14, 5], [14, 15], [4, 15]], [[20, 20], [20, 26], [30, 26], [30, 20]]
    points = [*square[:3], *apart, apart[0], square[2], square[3]]
    row = " ".join(f"{x / WIDTH:.6f} {y / HEIGHT:.6f}" for x, y in points)
    (tmp_path / "labels/train/a.txt").write_text(f"0 {row}\n0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [fox]\n")
    index = index_of(tmp_path / "data.yaml", masks=True)
    expected = np.zeros((HEIGHT, WIDTH), int)
    expected[5:15, 4:14], expected[20:26, 20:30] = 255, 255
    assert (bitmaps(index)[0] * 255 == expected).all()
    assert abs(rasters(index)[0].astype(int) - expected).max() <= 2 and not rasters(index)[1].any()


NUCLEI = Path(__file__).resolve().parents[4] / "shared/data/nuclei"


@pytest.mark.skipif(not NUCLEI.is_dir(), reason=f"{NUCLEI} is not there")
def test_masks_of_nuclei_are_those_of_pycocotools() -> None:
    index = index_of(NUCLEI, "val", masks=True)
    content = json.loads((NUCLEI / "annotations/instances_val.json").read_text())
    by_image: dict[int, list[Any]] = {}
    for one in content["annotations"]:
        by_image.setdefault(one["image_id"], []).append(one)
    for at in range(10):
        own = by_image[int(index.image_ids[at])]
        start = int(index.offsets[at])
        for row, one in enumerate(own, start):
            assert rle.to_text(index.runs(row)) == one["segmentation"]["counts"]
