"""Masks of labels: every form of COCO, YOLO's seams, and hostile run lengths. Numbers by hand or by pycocotools."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import coco_files
import cv2
import numpy as np
import pytest
import small_data
from coco_files import write_coco
from commands import called
from label_rows import index_of
from pycocotools import mask as pycoco
from small_data import write_picture

from yolofleet.data.datasets import cocojson
from yolofleet.data.datasets.check import MASK_COUNTS, mask_counts
from yolofleet.data.datasets.combine import merge_datasets, split_dataset
from yolofleet.data.datasets.convert import convert
from yolofleet.data.datasets.divide import UNIT
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.maskrows import rings_of
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry import rle
from yolofleet.data.geometry.mask_shapes import MaskShapes
from yolofleet.runs.report.plots import training_pictures
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.masks.task import MASKS

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


def test_what_is_learned_is_the_mask_that_the_metric_has(tmp_path: Path) -> None:
    polygons = {
        "crosses itself": [5, 5, 25, 25, 25, 5, 5, 25],
        "crosses itself, with unequal parts": [5, 5, 30, 25, 30, 5, 5, 12],
        "leaves the image": [20, 6, 76, 15, 20, 24],
        "star": [20, 2, 26, 26, 4, 10, 36, 10, 12, 26],
        "goes around twice": [5, 5, 25, 5, 25, 25, 5, 25] * 2,
        "a hole in the direction of its ring": [
            4,
            4,
            9,
            9,
            20,
            9,
            20,
            20,
            9,
            20,
            9,
            9,
            4,
            4,
            34,
            4,
            34,
            26,
            4,
            26,
        ],
        "narrow": [4, 5, 14, 5.2, 14, 5.3, 4, 5.1],  # inside of no pixel, but to be learned
    }
    index = indexed(tmp_path, *([polygon] for polygon in polygons.values()))
    learned = rasters(index) / 255
    for name, polygon, bitmap, own in zip(polygons, polygons.values(), bitmaps(index), learned, strict=True):
        assert (bitmap == pycoco.decode(pycoco.frPyObjects([polygon], HEIGHT, WIDTH)[0])).all(), name
        assert np.abs(own - bitmap).sum() <= (1.1 if name == "narrow" else 0), name
    assert learned[-1].sum() > 0.9


@pytest.mark.parametrize(
    ("segmentation", "said"),
    [
        ([[4, 5, 14, 5, 14, 15, 4], [20, 20, 30, 20, 30, 28]], "a polygon has 7 numbers, not pairs"),
        ([[4, 5, float("nan"), 5, 14, 15]], "nan, 5, 14, 15] is not a row of numbers"),
        ([[[4, 5], [14, 5], [14, 15]]], "[[4, 5], [14, 5], [14, 15]] is not a row"),
        ([{"size": [HEIGHT, WIDTH], "counts": [1200]}], "is not a row of numbers"),
        ([[4, 5, 14, 15]], "a polygon has 2 points"),
    ],
)
def test_polygons_that_cannot_be_read_leave_a_box(tmp_path: Path, segmentation: Any, said: str) -> None:
    index = indexed(tmp_path, segmentation, [[4, 5, 14, 5, 14, 15], [1, 2, 3, 4]], [], [[]], None)
    assert index.problem_kinds == {"mask-unreadable": 1} and said in index.problems_text()
    assert [len(rings) for rings in index.outlines(0)] == [0, 1, 0, 0, 0]


def test_other_polygons_with_the_same_box_are_other_objects(tmp_path: Path) -> None:
    upper, lower = [4, 5, 14, 5, 14, 15], [4, 5, 14, 15, 4, 15]
    apart = [[4, 5, 14, 5, 14, 15, 4, 15], [10, 8, 20, 8, 20, 18, 10, 18]]  # parts that overlap
    box = {"bbox": [4, 5, 10, 10]}
    index = indexed(tmp_path, [upper], [lower], [lower], apart, **box)
    done = convert(load_dataset(str(tmp_path / "set.json")), tmp_path / "yolo", "yolo", masks=True)
    assert done.splits["train"] == (1, 3)  # two are equal
    copy = index_of(tmp_path / "yolo/data.yaml", masks=True)
    assert copy.problem_count == 0
    for one, at in zip(bitmaps(copy), (0, 1, 3), strict=True):
        assert np.array_equal(one, bitmaps(index)[at])
    labels = tmp_path / "yolo/labels/train/a.txt"
    centre_and_sides = " ".join(map(str, copy.boxes_cxcywh_unit[0].tolist()))
    labels.write_text(labels.read_text() + f"0 {centre_and_sides}\n" + labels.read_text())
    again = index_of(tmp_path / "yolo/data.yaml", masks=True)
    assert len(again.classes) == 3 and again.problem_kinds == {"label-twice": 4}


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


def labelme(folder: Path, *shapes: dict[str, Any], **more: Any) -> DataIndex:
    """Return the index, with masks, of an image with these shapes."""
    write_picture(folder / "images/train/a.png", WIDTH, HEIGHT)
    content = {"imagePath": "a.png", "imageWidth": WIDTH, "imageHeight": HEIGHT, "shapes": shapes, **more}
    (folder / "images/train/a.json").write_text(json.dumps(content))
    (folder / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [fox]\n")
    return index_of(folder / "data.yaml", masks=True)


def shape(kind: str, points: Any, **more: Any) -> dict[str, Any]:
    return {"label": "fox", "shape_type": kind, "points": points, **more}


def png(bitmap: np.ndarray) -> str:
    return base64.b64encode(cv2.imencode(".png", bitmap.astype(np.uint8) * 255)[1].tobytes()).decode()


def test_shapes_of_labelme_are_masks(tmp_path: Path) -> None:
    bitmap = ring_with_hole()
    mask = shape("mask", [[4, 5], [13, 14]], mask=png(bitmap[5:15, 4:14]))
    square = [[20, 5], [26, 5], [26, 9], [20, 9]]
    index = labelme(
        tmp_path,
        mask,
        shape("polygon", square),
        shape("circle", [[30, 20], [30, 25]]),
        shape("rectangle", [[1, 1], [5, 6]]),
        {**mask, "group_id": 1},
        shape("polygon", square, group_id=1),
        shape("polygon", square, group_id=2),
        shape("polygon", square[::-1], group_id=2),
    )
    found = bitmaps(index)
    ring, part = bitmap.copy(), np.zeros_like(bitmap)
    ring[20:], part[5:9, 20:26] = False, True
    assert (found[0] == ring).all() and (found[1] == part).all() and (found[4] == part).all()
    assert abs(found[2].sum() - np.pi * 25) < 5
    assert not len(index.runs(3)) and (found[3] == ring | part).all()
    assert index_of(tmp_path / "data.yaml", masks=None).has_runs


def test_bitmaps_of_labelme_that_fit_no_box_leave_a_box(tmp_path: Path) -> None:
    inside = np.ones((10, 10), bool)
    good = png(inside)
    bomb = bytearray(base64.b64decode(good))
    bomb[16:24] = (1 << 30).to_bytes(4, "big") * 2
    cases = (
        None,
        5,
        "",
        "!",
        "é",
        base64.b64encode(b"\xff\xd8 no PNG").decode(),
        base64.b64encode(bomb).decode(),
        base64.b64encode(base64.b64decode(good)[:40]).decode(),
        png(np.ones((10, 11), bool)),
    )
    shapes = [shape("mask", [[4, 5], [13, 14 + n]], mask=text) for n, text in enumerate(cases)]
    shapes += [shape("mask", [[34, 5], [43, 14]], mask=good), shape("mask", [[-3, 5], [6, 14]], mask=good)]
    index = labelme(tmp_path, *shapes, shape("mask", [[4, 5], [13, 14]], mask=good))
    assert index.problem_kinds["mask-unreadable"] == len(cases) + 2 and len(index.classes) == len(cases) + 3
    assert [len(index.runs(row)) > 0 for row in range(len(index.classes))] == [False] * (len(cases) + 2) + [
        True
    ]
    scaled = labelme(
        tmp_path / "scaled", shape("mask", [[4, 5], [13, 14]], mask=good), imageWidth=20, imageHeight=15
    )
    assert "the labels state another size of the image" in scaled.problems_text()


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """A COCO set with a mask that has a hole and two parts, a polygon, a box, and a crowd."""
    write_picture(tmp_path / "set/a.png", WIDTH, HEIGHT)
    write_picture(tmp_path / "set/b.png", WIDTH + 1, HEIGHT)
    labels = [
        label(1, 1, bbox=[4, 5, 32, 17], segmentation=compressed(ring_with_hole())),
        label(2, 1, bbox=[20.25, 5, 6, 4.5], segmentation=[[20.25, 5, 26.25, 5, 26.25, 9.5, 20.25, 9.5]]),
        label(3, 1),
        label(4, 1, bbox=[0, 0, 9, 9], segmentation=uncompressed(ring_with_hole())) | {"iscrowd": 1},
        label(5, 2, bbox=[1, 2, 3, 1], segmentation=[[1, 2, 4, 2, 4, 3, 1, 3]]),
    ]
    images = [image(1, "a.png"), {**image(2, "b.png"), "width": WIDTH + 1}]
    return write_coco(tmp_path / "set/set.json", images, labels)


def masks_by_name(index: DataIndex) -> dict[str, list[str]]:
    names = [Path(path).name for path in index.paths]
    rows = [range(*index.offsets[at : at + 2]) for at in range(len(index))]
    return {
        name: [
            rle.to_text(index.runs(row)) if len(index.runs(row)) else ""
            for row in own
            if not index.crowd[row]
        ]
        for name, own in zip(names, rows, strict=True)
    }


def test_conversions_keep_masks(tmp_path: Path, masked: Path) -> None:
    spec, source = load_dataset(str(masked)), index_of(masked, masks=True)
    convert(spec, tmp_path / "coco", "coco")
    copy = index_of(tmp_path / "coco/data.yaml", masks=True)
    assert copy.run_lengths.tolist() == source.run_lengths.tolist() and copy.crowd.sum() == 1
    done = convert(spec, tmp_path / "yolo", "yolo", masks=True)
    assert any(
        "3 masks are written as polygons: seams join the parts of 1 and the holes of 1" in n
        for n in done.notes
    )
    assert masks_by_name(index_of(tmp_path / "yolo/data.yaml", masks=True)) == masks_by_name(source)
    done = convert(spec, tmp_path / "boxes", "yolo")
    assert any(
        "3 masks: only their boxes are written; --masks writes polygons" in note for note in done.notes
    )
    assert not len(index_of(tmp_path / "boxes/data.yaml").points)
    with pytest.raises(ConfigError, match="COCO's format keeps them"):
        convert(spec, tmp_path / "no", "coco", masks=True)


def test_split_and_merge_keep_masks(tmp_path: Path, masked: Path) -> None:
    spec = load_dataset(str(masked))
    half = UNIT // 2
    split_dataset(spec, tmp_path / "split", {"train": half, "val": UNIT - half})
    merge_datasets([load_dataset(str(tmp_path / "split/data.yaml"))], tmp_path / "merged")
    for folder in ("split", "merged"):
        found: dict[str, list[str]] = {}
        for split in ("train", "val"):
            found |= masks_by_name(index_of(tmp_path / folder / "data.yaml", split, masks=True))
        assert found == masks_by_name(index_of(masked, masks=True))
    cocojson._load_table.cache_clear()  # closes the stored tables


def test_a_check_counts_what_is_wrong_with_masks(tmp_path: Path, masked: Path) -> None:
    outcome = called("data", "check", masked)
    assert outcome.code == 0, outcome
    # label 3 has none; the third part of the first ring ends within its box; the last mask has 3 pixels of 16 x 16 px at 640 px
    index = index_of(masked, masks=True)
    assert mask_counts(index) == dict(zip(MASK_COUNTS, (1, 0, 0), strict=True))
    # of a training
    assert index.totals_text() == "train: 2 images, 4 labels, 1 crowd region, 1 label without a mask"
    assert MASK_COUNTS[0] not in index_of(masked).totals()
    moved = index_of(masked, masks=True).with_rows(np.arange(5) != 3)
    moved.boxes_cxcywh_unit[0, 2] /= 2
    assert mask_counts(moved)[MASK_COUNTS[1]] == 1


def test_a_preview_draws_masks(tmp_path: Path, masked: Path) -> None:
    index = index_of(masked, masks=True)
    labels = MASKS.labels(index, 0)
    pixels = np.full((1, 3, HEIGHT * 2, WIDTH * 2), 100, np.uint8)
    [picture] = training_pictures(pixels, labels)
    changed = (picture.image != 100).any(axis=2)[::2, ::2]
    assert changed[:, :15].sum() == ring_with_hole()[:, :15].sum()


def two_objects() -> np.ndarray:
    numbers = np.zeros((HEIGHT, WIDTH), np.uint16)
    numbers[5:15, 4:14], numbers[20:26, 20:30] = 3, 700
    return numbers


def test_images_of_masks_are_read_in_each_layout(tmp_path: Path) -> None:
    numbers = two_objects()
    colours = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    colours[numbers == 3], colours[numbers == 700] = (0, 0, 128), (0, 128, 0)

    def write(path: Path, pixels: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".png", pixels)[1].tobytes())

    of_object = [((numbers == number) * 255).astype(np.uint8) for number in (3, 700)]
    for root, image, masks in (
        ("numbers", "images/train/a.png", {"masks/train/a.png": numbers}),
        ("colours", "train/images/a.png", {"train/masks/a.png": colours}),
        ("files", "images/a.png", {"masks/a/1.png": of_object[0], "masks/a/2.png": of_object[1]}),
        ("bowl", "x1/images/x1.png", {"x1/masks/p.png": of_object[0], "x1/masks/q.png": of_object[1]}),
    ):
        write_picture(tmp_path / root / image, WIDTH, HEIGHT)
        for name, pixels in masks.items():
            write(tmp_path / root / name, pixels)
        index = index_of(tmp_path / root, masks=None)
        assert index.names == ("object",) and len(index) == 1 and index.problem_count == 0, root
        found = sorted(bitmaps(index), key=lambda bitmap: -bitmap.sum())
        assert (found[0] == (numbers == 3)).all() and (found[1] == (numbers == 700)).all(), root
        boxes = index.boxes_cxcywh_unit * [WIDTH, HEIGHT, WIDTH, HEIGHT]
        assert np.allclose(sorted(boxes.tolist()), [[9, 10, 10, 10], [25, 23, 10, 6]], atol=1e-4)
    convert(load_dataset(str(tmp_path / "bowl")), tmp_path / "coco", "coco")
    assert len(index_of(tmp_path / "coco/data.yaml", masks=True).run_lengths)


def test_images_that_are_no_masks_leave_their_image_out(tmp_path: Path) -> None:
    for name in "abc":
        write_picture(tmp_path / f"images/{name}.png", WIDTH, HEIGHT)
    masks = tmp_path / "masks"
    write_picture(masks / "b.png", WIDTH + 1, HEIGHT)
    (masks / "a.png").write_bytes(cv2.imencode(".png", two_objects())[1].tobytes())
    (masks / "c").mkdir()
    (masks / "c/1.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (masks / "c/2.png").write_bytes(cv2.imencode(".png", np.zeros((HEIGHT, WIDTH), np.uint8))[1].tobytes())
    index = index_of(tmp_path, masks=True)
    assert [Path(path).name for path in index.paths] == ["a.png", "c.png"] and len(index.classes) == 2
    assert index.problem_kinds == {"labels-unreadable": 1, "label-unreadable": 1, "box-empty": 1}


def test_files_of_masks_without_an_image_are_reported(tmp_path: Path) -> None:
    for name in "abcd":
        write_picture(tmp_path / f"images/{name}.png", WIDTH, HEIGHT)
    (tmp_path / "masks").mkdir()
    for name in ("a.png", "b.PNG", "c_mask.png", "d.jpg"):
        (tmp_path / "masks" / name).write_bytes(cv2.imencode(".png", two_objects())[1].tobytes())
    index = index_of(tmp_path, masks=True)
    assert len(index.classes) == 4 and index.unlabelled == 2
    assert index.problem_kinds == {"labels-without-image": 2} and "c_mask.png" in index.problems_text()


@pytest.mark.parametrize("orientation", [1, 2, 3, 4])
def test_a_rotation_that_no_size_shows_is_said(tmp_path: Path, orientation: int) -> None:
    index = indexed(tmp_path, compressed(ring_with_hole()))
    assert "image-rotated" not in index.problem_kinds
    photo = small_data.encoded(np.zeros((HEIGHT, WIDTH, 3), np.uint8), ".jpg")
    (tmp_path / "a.png").write_bytes(small_data.with_exif_jpeg(photo, orientation))
    kinds = index_of(tmp_path / "set.json", masks=True).problem_kinds
    assert kinds == ({"image-rotated": 1} if orientation > 1 else {})


def test_masks_with_blended_edges_leave_their_image_out(tmp_path: Path) -> None:
    """A mask that was resized as a photograph has an object for each shade of its edges."""
    (tmp_path / "masks").mkdir()
    masks = {"a": two_objects(), "b": cv2.GaussianBlur((two_objects() > 0) * np.uint8(255), (0, 0), 1.5)}
    for name, pixels in masks.items():
        write_picture(tmp_path / f"images/{name}.png", WIDTH, HEIGHT)
        (tmp_path / f"masks/{name}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    index = index_of(tmp_path, masks=True)
    assert [Path(path).name for path in index.paths] == ["a.png"] and len(index.classes) == 2
    assert index.problem_kinds == {"labels-unreadable": 1} and "edges are blended" in index.problems_text()
