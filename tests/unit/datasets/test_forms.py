"""What the numbers of boxes mean: the same boxes written in each form, and sets of real kinds, which must stay as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from coco_files import label, write_coco
from label_rows import index_of
from small_data import write_picture

from yolofleet.data.datasets import forms
from yolofleet.data.datasets.index import DataIndex
from yolofleet.support.errors import DataError

W, H = 96, 64
FOUR = ((10, 8, 40, 28), (50, 30, 90, 60), (60, 10, 94, 40), (5, 30, 45, 62))  # x1, y1, x2, y2


def in_form(form: int, corners: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    low, high = np.split(np.array(corners, float).reshape(-1, 4), 2, axis=1)
    first = (low + high) / 2 if form == forms.CENTRE else low
    return np.concatenate([first, high if form == forms.CORNERS else high - low], axis=1)


def evidence(numbers: np.ndarray, area: np.ndarray | None = None) -> np.ndarray:
    return forms.evidence_of(numbers, np.tile([W, H], (len(numbers), 1)), area)


def corners_of(index: DataIndex) -> list[list[int]]:
    low, high = forms.low_and_high(forms.CENTRE, index.boxes_cxcywh_unit * [W, H, W, H])
    return np.rint(np.concatenate([low, high], axis=1)).astype(int).tolist()


def random_corners(boxes: int, seed: int, largest: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sides = rng.uniform(0.03, largest, (boxes, 2)) * [W, H]
    low = rng.uniform(0, 1, (boxes, 2)) * ([W, H] - sides)
    return np.concatenate([low, low + sides], axis=1)


@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("usual", range(3))
@pytest.mark.parametrize("boxes", [30, 1000])
def test_the_boxes_of_a_file_show_their_form(form: int, usual: int, boxes: int) -> None:
    numbers = in_form(form, random_corners(boxes, seed=boxes))
    assert forms.form_of(evidence(numbers), usual) == form


@pytest.mark.parametrize("usual", range(3))
@pytest.mark.parametrize(
    "corners",
    [
        [],
        [[0, 0, W, H]],
        [[0, 0, W, H]] * 50,
        [[1, 1, W - 1, H - 1]] * 3,
        [[40, 20, 50, 30]],
        [[5, 5, 20, 20], [8, 3, 30, 12]],
        [[-3, 0, 40, 30], [50, 30, W + 4, H + 4], *([[30, 20, 50, 40]] * 30)],
        [[70, 20, W + 12, 40]],
    ],
    ids=["none", "whole", "wholes", "nearly whole", "one", "two", "two of many stick out", "one sticks out"],
)  # fmt: skip
def test_small_sets_and_a_few_boxes_that_stick_out_change_nothing(
    usual: int, corners: list[list[int]]
) -> None:
    assert forms.form_of(evidence(in_form(usual, corners)), usual) == usual


def test_areas_decide_where_both_forms_fit() -> None:
    corners = np.array([[5, 5, 20, 20], [8, 3, 30, 12], [2, 2, 40, 30]], float)
    as_corners = (corners[:, 2:] - corners[:, :2]).prod(1)
    assert forms.form_of(evidence(corners), forms.SIDES) == forms.SIDES
    assert forms.form_of(evidence(corners, as_corners), forms.SIDES) == forms.CORNERS
    four = np.array(FOUR, float)
    assert forms.form_of(evidence(four), forms.SIDES) == forms.CORNERS
    assert forms.form_of(evidence(four, four[:, 2] * four[:, 3]), forms.SIDES) == forms.SIDES


@pytest.mark.parametrize(
    ("boxes", "are"),
    [
        ([[0.1, 0.2, 0.4, 0.5], [0, 0, 1, 1]], True),
        ([[0.1, 0.2, 0.4, 1.0004]], True),
        ([[0, 0, 1, 1]], None),  # a whole image, or a pixel
        ([[1, 1, 1, 1]], False),  # the first pixel of a VOC file
        ([[5, 7, 6, 8]], False),
        ([[0.1, 0.2, 0.4, 0.5], [10, 10, 20, 20]], False),
        ([], False),
    ],
)
def test_fractions_are_told_from_pixels(boxes: list[list[float]], are: bool | None) -> None:
    assert forms.are_fractions(boxes) is are


def coco_file(root: Path, split: str, boxes: Sequence[Sequence[float]], *, sized: bool = True) -> None:
    names = [f"{split}{number}.png" for number in range(len(boxes))]
    for number, name in enumerate(names):
        write_picture(root / "images" / name, W, H, seed=number)
    size = {"width": W, "height": H} if sized else {}
    images = [{"id": number, "file_name": name, **size} for number, name in enumerate(names)]
    write_coco(root / f"{split}.json", images, [label(n + 1, n, list(box)) for n, box in enumerate(boxes)])
    (root / "data.yaml").write_text("path: images\ntrain: ../train.json\nval: ../val.json\n")


@pytest.mark.parametrize("form", [forms.CORNERS, forms.CENTRE])
def test_coco_boxes_of_another_form_are_read_with_a_note(tmp_path: Path, form: int) -> None:
    corners = random_corners(20, seed=1).round(3)
    coco_file(tmp_path, "train", in_form(form, corners).tolist())
    coco_file(tmp_path, "val", in_form(form, corners[:1]).tolist())
    for split, boxes in (("train", corners), ("val", corners[:1])):  # one box of val shows nothing by itself
        index = index_of(tmp_path / "data.yaml", split)
        assert np.abs(np.array(corners_of(index)) - boxes).max() <= 0.51
        assert index.problem_kinds == {"numbers-assumed": len(boxes)}
        assert f"taken as {forms.FORMS[form]}" in index.assumed[0]


def test_a_coco_file_of_another_form_than_the_other_split_is_read_by_itself(tmp_path: Path) -> None:
    for split, form in (("train", forms.SIDES), ("val", forms.CORNERS)):
        coco_file(tmp_path, split, in_form(form, FOUR).tolist())
    for split in ("train", "val"):
        assert corners_of(index_of(tmp_path / "data.yaml", split)) == [list(box) for box in FOUR]


def test_coco_corners_without_sizes_of_images_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        coco_file(tmp_path, split, FOUR, sized=False)
    with pytest.raises(DataError, match="3 of 4 boxes do not fit their images as x, y, width, height"):
        index_of(tmp_path / "data.yaml")


@pytest.mark.parametrize("form", [forms.SIDES, forms.CORNERS])
@pytest.mark.parametrize("in_pixels", [False, True])
def test_yolo_rows_of_another_form_are_refused_with_the_form_that_fits(
    tmp_path: Path, form: int, in_pixels: bool
) -> None:
    rows = in_form(form, random_corners(40, seed=2)) / (1 if in_pixels else np.array([W, H, W, H]))
    for number, row in enumerate(rows):
        write_picture(tmp_path / f"images/train/{number}.png", W, H, seed=number)
        path = tmp_path / f"labels/train/{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"0 {' '.join(map(str, row))}\n")
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [cup]\n")
    with pytest.raises(DataError) as caught:
        index_of(tmp_path / "data.yaml", strict=False)
    assert re.search(f"[;,] 0 as {re.escape(forms.FORMS[form])}", caught.value.what)
    assert ("pixels" in caught.value.what) == in_pixels
