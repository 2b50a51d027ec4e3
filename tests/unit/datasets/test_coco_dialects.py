"""COCO files as tools and people write them: names of other machines, numbers as texts, sizes that differ, groups."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import coco_files
import numpy as np
import pytest
from coco_files import write_coco
from commands import called, train_args
from label_rows import index_of, rows_by_name, rows_of
from small_data import encoded, picture, with_exif_jpeg, write_picture

from yolofleet.data.datasets.annotations import flag_of, number_of
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.images.decode import read_image
from yolofleet.support.errors import ConfigError, DataError

BOX = [20, 15, 20, 15]
ROW = [0, 0.375, 0.375, 0.25, 0.25]  # of BOX in 80 x 60 pixels
image = partial(coco_files.image, width=80, height=60)
label = partial(coco_files.label, bbox=BOX)


def indexed(
    folder: Path, files: Sequence[str], images: Sequence[Any], labels: Sequence[Any], *categories: Any
) -> DataIndex:
    """Write pictures and a COCO file; return its index.

    Args:
        images: entries, or names, which get the ids from 1.
    """
    for name in files:
        write_picture(folder / name, 80, 60)
    entries = [image(n, one) if isinstance(one, str) else one for n, one in enumerate(images, 1)]
    return index_of(write_coco(folder / "set.json", entries, labels, *categories))


def test_a_text_that_is_exactly_a_number_is_that_number() -> None:
    good = {"0": 0, "20.0": 20, "-1.5e1": -15, ".5": 0.5, 7: 7, 7.5: 7.5}
    assert {text: number_of(text) for text in good} == good
    for bad in (" 5", "5 ", "1,5", "0x10", "1_0", "nan", "inf", "", "five", True, None, [5], "٣", 10**400):
        assert np.isnan(number_of(bad)), bad
    assert {flag_of(flag) for flag in (0, "0", False, None)} == {False}
    assert {flag_of(flag) for flag in (1, "1", "True", 1.0)} == {True}
    assert {flag_of(flag) for flag in (2, "2", "yes", [0], -1)} == {None}


def test_names_written_on_windows_are_found_one_by_one(tmp_path: Path) -> None:
    files = ["images/c1.png", "images/c2.png", "images/c3.png", "images/sub/c4.png"]
    names = [
        "images\\c1.png",
        "images/c2.png",
        "..\\..\\media\\upload\\4\\c3.png",
        "C:\\me\\images\\sub\\c4.png",
    ]
    index = indexed(tmp_path, files, names, [label(i, i) for i in range(1, 5)])
    assert rows_by_name(index) == {f"c{n}.png": [ROW] for n in (1, 2, 3, 4)}
    assert index.problem_kinds == {"name-assumed": 3} and "c1.png" in index.assumed[0]


@pytest.mark.parametrize(
    ("files", "names", "found"),
    [
        (["a.png", "b.png", "c.png"], ["a.png", "b.png", "cam1/c.png", "cam2/c.png"], ["a.png", "b.png"]),
        (["a.png", "b.png", "C.png", "c.PNG", "d.png", "d.jpg"], ["a.png", "b.png", "c.png", "d"], ["a.png", "b.png"]),
        (["images/1.png", "images/2.png", "images/3.png"], ["day/1.png", "night/1.png", "day/2.png", "night/3.png"], ["2.png", "3.png"]),
    ],
    ids=["one file has two names", "one name may mean two files", "without their folders two names are one"],
)  # fmt: skip
def test_names_that_are_not_certain_are_not_guessed(
    tmp_path: Path, files: list[str], names: list[str], found: list[str]
) -> None:
    index = indexed(tmp_path, files, names, [label(i, i) for i in range(1, 5)])
    assert sorted(rows_by_name(index)) == found
    assert index.problem_kinds["image-missing"] == 2 and "image-twice" not in index.problem_kinds


def test_image_ids_and_numbers_as_texts(tmp_path: Path) -> None:
    texts = {"bbox": ["20.0", "15", 20, "15"], "iscrowd": "0", "ignore": "0", "area": "300"}
    texts |= {"segmentation": [20, 15, 40, 15, 40, 30, 20, 30], "category": "1"}
    images = [image(0, "f1.png"), image(1, "f2.png", width=-1, height=-1)]
    index = indexed(tmp_path, ["f1.png", "f2.png"], images, [label("1", "0", **texts), label(2, "1")])
    assert rows_by_name(index) == {"f1.png": [ROW], "f2.png": [ROW]} and index.area_px.tolist() == [300, 300]
    assert index.problem_kinds == {"id-as-number": 3} and "taken as" in " ".join(index.assumed)
    assert len(index.outlines(0)[0]) == 1


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"bbox": [20, "15 px", 20, 15]}, "label-unreadable", "annotation 2: bbox has '15 px', not a number"),
        ({"iscrowd": "no"}, "label-unreadable", "annotation 2: iscrowd is 'no', not 0 or 1"),
        ({"ignore": 7}, "label-unreadable", "annotation 2: ignore is 7, not 0 or 1"),
        ({"bbox": None}, "label-stray", "annotation 2: it has no bbox of four numbers"),
        ({"image_id": "seven"}, "label-stray", "annotation 2 belongs to no listed image"),
    ],
)
def test_other_values_are_dropped_with_entry_field_and_value(
    tmp_path: Path, change: dict[str, Any], kind: str, words: str
) -> None:
    names = ["a.png", "b.png"]
    index = indexed(tmp_path, names, names, [label(1, 1), {**label(2, 2), **change}, label(3, 2)])
    assert rows_by_name(index) == {"a.png": [ROW], "b.png": [ROW]} and index.problem_kinds == {kind: 1}
    assert words in index.problems_text()


@pytest.mark.parametrize("flag", [{"iscrowd": "1"}, {"iscrowd": True}, {"ignore": 1}])
def test_crowd_regions_are_not_learned_and_are_counted(tmp_path: Path, flag: dict[str, Any]) -> None:
    index = indexed(tmp_path, ["a.png"], ["a.png"], [{**label(1, 1), **flag}, label(2, 1)])
    assert len(index.labels(0)) == 1 and index.totals()["crowd regions"] == 1


TURNED = [0, pytest.approx(0.75, abs=1e-4), 0.3, pytest.approx(0.16667, abs=1e-5), 0.4]


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ([66.667, 6, 16.667, 24], "boxes are taken as parts of the stated size, and may have to be rotated"),
        ([10, 10, 40, 10], "boxes are rotated with the image, as all are whole numbers, and may have to be scaled"),
    ],
)  # fmt: skip
def test_the_size_before_a_rotation_by_exif_is_reported(tmp_path: Path, box: list[float], words: str) -> None:
    """Label Studio multiplies fractions of the visible image by that size; others draw on the pixels of the file."""
    (tmp_path / "a.jpg").write_bytes(with_exif_jpeg(encoded(picture(100, 60)), 6))  # shown as 60 x 100
    index = indexed(tmp_path, [], [image(1, "a.jpg", width=100)], [label(1, 1, bbox=box)])
    text = index.problems_text()
    assert index.problem_kinds == {"size-unsure": 1}
    assert "is 60 x 100 pixels; the labels say 100 x 60, the size before the rotation by EXIF" in text
    assert f"{words}; look at the boxes with yolofleet data preview" in text
    assert rows_by_name(index) == {"a.jpg": [TURNED]}


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_and_polygons_are_rotated_as_the_pixels_are(tmp_path: Path, orientation: int) -> None:
    stored = np.zeros((64, 96, 3), np.uint8)
    stored[8:16, 24:64] = 255
    (tmp_path / "a.jpg").write_bytes(with_exif_jpeg(encoded(stored), orientation))
    polygon = [[24, 8, 64, 8, 64, 16, 24, 16]]
    labels = [label(1, 1, bbox=[24, 8, 40, 8], segmentation=polygon)]
    index = indexed(tmp_path, [], [image(1, "a.jpg", width=96, height=64)], labels)
    shown = read_image(index.path(0))[..., 0] > 127
    lines, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
    (_, x, y, w, h), (height, width) = rows_of(index.labels(0))[0].tolist(), shown.shape
    expected = [columns[0], lines[0], columns[-1] + 1, lines[-1] + 1]
    found = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
    assert np.allclose(found, expected, atol=1.5)
    points = index.outlines(0)[0][0] * [width, height]
    assert np.allclose([*points.min(0), *points.max(0)], expected, atol=1.5)


@pytest.mark.parametrize(
    ("stated", "box", "row", "kind", "words"),
    [
        ((160, 120), [40, 30, 40, 30], ROW, "size-differs", ""),  # resized with its shape
        ((160, 121), [40, 30, 40, 30], [0, 0.375, 0.37190, 0.25, 0.24793], "size-differs", ""),  # a rounded side
        ((200, 60), BOX, ROW, "size-unsure", "data preview"),  # another shape, and the boxes fit the image
        ((40, 30), [20, 15, 40, 30], [0, 0.5, 0.5, 0.5, 0.5], "size-unsure", "data preview"),  # they exceed the stated size
        ((160, 60), [80, 15, 40, 15], [0, 0.625, 0.375, 0.25, 0.25], "size-unsure", "data preview"),  # they exceed the image
        ((60, 80), BOX, ROW, "size-unsure", "the sides swapped: boxes are taken as pixels of the image, not scaled"),
        ((0, 0), BOX, ROW, "", ""),
        ((None, ""), BOX, ROW, "", ""),
    ],
)  # fmt: skip
def test_boxes_are_scaled_only_if_the_stated_size_is_certain(
    tmp_path: Path, stated: tuple[Any, Any], box: list[int], row: list[float], kind: str, words: str
) -> None:
    entry = image(1, "a.png", width=stated[0], height=stated[1])
    index = indexed(tmp_path, ["a.png"], [entry], [label(1, 1, bbox=box)])
    assert rows_by_name(index) == {"a.png": [row]}
    assert index.problem_kinds == ({kind: 1} if kind else {})
    text = index.problems_text()
    assert words in text and ("data preview" in text) == (kind == "size-unsure")


def test_entries_of_one_image_are_joined_and_change_nothing_in_other_images(tmp_path: Path) -> None:
    polygon = [[20, 15, 40, 15, 40, 30, 20, 30]]
    labels = [
        label(1, 1),
        label(2, 2),
        label(3, 2, segmentation=polygon),
        label(4, 3),
        label(5, 3, bbox=[0, 0, 8, 6]),
    ]
    index = indexed(tmp_path, ["a.png", "b.png"], ["a.png", "b.png", "./a.png"], labels)
    assert rows_by_name(index) == {"a.png": [ROW, [0, 0.05, 0.05, 0.1, 0.1]], "b.png": [ROW, ROW]}
    assert index.problem_kinds == {"image-twice": 1, "label-twice": 1, "label-repeated": 1}
    assert index.image_ids.tolist() == [1, 2] and [len(p) for p in index.outlines(1)] == [0, 1]
    assert "images 1 and 3 are one file, ./a.png: labels joined" in index.problems_text()


def test_entries_of_one_image_with_different_sizes_are_refused(tmp_path: Path) -> None:
    images = [image(1, "a.png"), image(2, "./a.png", width=160, height=120)]
    says = r"images 1 and 2 are one file, \./a\.png, with the sizes 80 x 60 and 160 x 120"
    with pytest.raises(DataError, match=says):
        indexed(tmp_path, ["a.png"], images, [label(1, 1), label(2, 2, bbox=[100, 90, 40, 20])])


@pytest.mark.parametrize("train", ["[one.json, two.json]", "[one.json, list.txt]", "[list.txt, one.json]"])
def test_an_image_in_two_sources_of_a_split_is_refused(tmp_path: Path, train: str) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    for name in ("one", "two"):
        write_coco(tmp_path / f"{name}.json", [image(1, "a.png")], [label(1, 1)])
    (tmp_path / "a.txt").write_text("0 0.1 0.1 0.1 0.1\n")
    (tmp_path / "list.txt").write_text("a.png\n")
    (tmp_path / "data.yaml").write_text(f"train: {train}\nval: one.json\nnames: [fox]\n")
    with pytest.raises(DataError, match=r"a\.png is in two sources of one split"):
        index_of(tmp_path / "data.yaml")


def group(number: int, name: str, parent: str) -> dict[str, Any]:
    return {"id": number, "name": name, "supercategory": parent}


def test_a_category_that_is_only_a_group_is_left_out(tmp_path: Path) -> None:
    groups = [group(0, "fish", "none"), group(1, "fish", "fish"), group(2, "cup", "fish")]
    labels = [label(0, 0), label(1, 0, category=2, bbox=[0, 0, 8, 6])]
    for part in ("train", "valid"):
        write_picture(tmp_path / part / "f.jpg", 80, 60)
        write_coco(tmp_path / part / "_annotations.coco.json", [image(0, "f.jpg")], labels, groups)
    spec = load_dataset(str(tmp_path))
    assert spec.names == ("fish", "cup") and list(spec.splits) == ["train", "val"]
    assert "only parents of others are left out: 0 fish" in " ".join(spec.notes)
    assert rows_by_name(index_of(tmp_path, "val")) == {"f.jpg": [ROW, [1, 0.05, 0.05, 0.1, 0.1]]}


def test_a_class_that_is_its_own_parent_stays_without_labels(tmp_path: Path) -> None:
    """COCO's person; otherwise the numbers of all classes would shift with the images that a file happens to list."""
    groups = [group(1, "person", "person"), group(2, "car", "vehicle")]
    path = write_coco(tmp_path / "set.json", [image(1, "a.png")], [label(1, 1, category=2)], groups)
    assert load_dataset(str(path)).names == ("person", "car")


def test_lvis_names_its_images_by_address_and_boxes_may_come_from_polygons(tmp_path: Path) -> None:
    entry = {"id": 1, "coco_url": "http://images.cocodataset.org/val2017/a.jpg", "width": 80, "height": 60}
    polygon = label(1, 1, bbox=None, segmentation=[[20, 15, 40, 15, 40, 30]])
    index = indexed(tmp_path, ["val2017/a.jpg"], [entry], [polygon])
    assert rows_by_name(index) == {"a.jpg": [ROW]} and index.problem_kinds == {"box-derived": 1}


def test_ids_of_results_are_those_of_the_annotations(folder: Path) -> None:
    """So pycocotools takes the results with the file of the annotations."""
    images = [image("img-b", "b.png"), image("img-a", "a.png"), image("7", "c.png")]
    indexed(folder, ["a.png", "b.png", "c.png"], images, [label(1, one["id"], category="f") for one in images], [("f", "fox")])  # fmt: skip
    train = ("--batch", "2", "--epochs", "1", "--name", "run", "--device", "cpu")
    assert called(*train_args(folder / "set.json", *train)).code == 0
    weights = "runs/train/run/weights/last.safetensors"
    val = ("--data", "set.json", "--save-json", "--conf", "0.00001", "--name", "v", "--device", "cpu")
    assert called("val", "--weights", weights, *val).code == 0
    results = json.loads(Path("runs/val/v/predictions.json").read_text())
    assert {row["image_id"] for row in results} == {"img-a", "img-b", "7"}
    assert {row["category_id"] for row in results} == {"f"}
    assert called("data", "convert", "set.json", "--to", "coco", "--out", "out").code == 0
    content = json.loads(Path("out/annotations/instances_train.json").read_text())
    assert {one["id"] for one in content["images"]} == {"img-a", "img-b", "7"}


def test_long_ids_as_texts_are_compared_digit_by_digit(tmp_path: Path) -> None:
    """As a float, both ids are 9007199254740992."""
    low, high = 9007199254740992, 9007199254740993
    images = [image(low, "a.png"), image(high, "b.png")]
    labels = [label(1, str(low)), label(2, str(high), bbox=[0, 0, 40, 30])]
    index = indexed(tmp_path, ["a.png", "b.png"], images, labels)
    assert rows_by_name(index) == {"a.png": [ROW], "b.png": [[0, 0.25, 0.25, 0.5, 0.5]]}
    assert index.problem_kinds == {"id-as-number": 2} and "entries like this: 2" in index.assumed[0]


def test_two_names_of_one_file_are_one_image(tmp_path: Path) -> None:
    """As on a disk that does not distinguish upper and lower case."""
    write_picture(tmp_path / "a.png", 80, 60)
    (tmp_path / "A.PNG").hardlink_to(tmp_path / "a.png")
    index = indexed(tmp_path, [], ["a.png", "A.PNG"], [label(1, 1), label(2, 2)])
    assert rows_by_name(index) == {"a.png": [ROW]}
    assert index.problem_kinds == {"image-twice": 1, "label-twice": 1}
    (tmp_path / "list.txt").write_text("a.png\nA.PNG\n")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "data.yaml").write_text("train: list.txt\nval: list.txt\nnames: [fox]\n")
    index = index_of(tmp_path / "data.yaml")
    assert len(index) == 1 and index.problem_kinds["image-twice"] == 1


def test_ids_that_repeat_are_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
        write_coco(tmp_path / f"{name}.json", [image(7, f"{name}.png")], [label(1, 7)])
    (tmp_path / "data.yaml").write_text("train: [a.json, b.json]\nval: a.json\n")
    index = index_of(tmp_path / "data.yaml")
    assert index.problem_kinds == {"id-twice": 1} and "2 images have the id 7" in index.assumed[0]
    index = indexed(tmp_path, [], ["a.png", "b.png"], [label(5, 1), label(5, 2), label(5, 2)])
    assert index.problem_kinds == {"id-twice": 2, "label-repeated": 1}
    assert "another annotation has the id of annotation 5" in "".join(index.assumed)
    assert len(index.classes) == 3


def test_problems_of_a_file_have_a_count_and_its_words_for_an_annotation(tmp_path: Path) -> None:
    mask = {"counts": "x", "size": [60, 80]}
    labels = [
        label("first", 1),
        label("second", 1, bbox=[10, 10, 0, 5]),
        {**label(None, 1), "iscrowd": 5},
        label(4, 1, area="big"),
        label(5, 1, area="300"),
        label(6, 1, bbox=[], segmentation=mask),
        label(7, 1, bbox=None, segmentation=mask),
    ]
    index = indexed(tmp_path, ["a.png"], ["a.png"], labels)
    kinds = {
        "box-empty": 1,
        "label-unreadable": 1,
        "label-stray": 2,
        "area-unreadable": 1,
        "label-repeated": 2,
    }
    assert index.problem_kinds == kinds
    text = index.problems_text() + "\n".join(index.assumed)
    assert "annotation no. 2 of a.png: box" in text and "annotation no. 3: iscrowd is 5, not 0 or 1" in text
    assert (
        "annotation 6: it has no bbox, and its mask cannot be read: counts has characters other than" in text
    )
    assert "annotation 4: area is 'big', not a number: width x height is taken" in text
    assert index.area_px.tolist() == [300, 300, 300]


def test_names_as_other_systems_write_them(tmp_path: Path) -> None:
    of_macos = unicodedata.normalize("NFD", "é.png")
    files = ["my file.png", "Über 1.PNG", "0003.png", "sub/x.jpg", of_macos]
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0003.txt").touch()
    names = [
        "upload/my%20file.png",
        "%C3%BCber%201.png",
        "0003",
        "sub\\X.JPG",
        unicodedata.normalize("NFC", of_macos),
    ]
    index = indexed(tmp_path, [f"images/{file}" for file in files], names, [label(n, n) for n in range(1, 6)])
    assert sorted(rows_by_name(index)) == sorted(Path(file).name for file in files)
    assert index.problem_kinds == {"name-assumed": 5} and "names without a file: 5" in index.assumed[0]


def test_boxes_in_fractions_are_refused(tmp_path: Path) -> None:
    """They would be learned as boxes smaller than a pixel."""
    labels = [label(1, 1, bbox=[0.25, 0.25, 0.5, 0.5]), label(2, 1, bbox=[0, 0, 1, 1])]
    with pytest.raises(DataError, match="all 2 boxes lie between 0 and 1, such as"):
        indexed(tmp_path, ["a.png"], ["a.png"], labels)
    assert len(indexed(tmp_path, [], ["a.png"], [*labels, label(3, 1)]).classes) == 3


@pytest.mark.parametrize("files", [["result.json"], ["annotations/one.json", "annotations/two.json"]])
def test_a_folder_with_coco_files_of_other_names_gets_them_named(tmp_path: Path, files: list[str]) -> None:
    """Not a YAML with the images alone, which would be a set without labels."""
    write_picture(tmp_path / "images" / "a.png", 80, 60)
    for file in files:
        write_coco(tmp_path / file, [image(1, "a.png")], [label(1, 1)])
    with pytest.raises(ConfigError) as caught:
        load_dataset(str(tmp_path))
    assert all(file in str(caught.value.hint) for file in files) and "--data" in str(caught.value.hint)
    assert rows_by_name(index_of(tmp_path / files[0])) == {"a.png": [ROW]}


def test_a_list_of_detections_is_named(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps([{"image_id": 1, "category_id": 1, "bbox": BOX, "score": 0.5}] * 3))
    with pytest.raises(ConfigError, match=r"predictions\.json is COCO's list of detections"):
        load_dataset(str(path))


@pytest.mark.parametrize("names", [("cup", "plate"), ("plate", "bowl", "cup")])
def test_files_that_number_the_same_names_differently_are_matched_by_name(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    boxes = {"cup": [0, 0, 20, 15], "plate": [40, 30, 20, 15]}
    for split, ids in (("train", {"cup": 1, "plate": 2}), ("val", {"plate": 1, "cup": 7})):
        write_picture(tmp_path / "images" / f"{split}.png", 80, 60)
        labels = [label(n, 1, category=ids[name], bbox=box) for n, (name, box) in enumerate(boxes.items(), 1)]
        categories = [(number, name) for name, number in ids.items()]
        write_coco(tmp_path / f"{split}.json", [image(1, f"{split}.png")], labels, categories)
    data = tmp_path / "data.yaml"
    data.write_text("path: images\ntrain: ../train.json\nval: ../val.json\n")
    with pytest.raises(ConfigError, match="category 1 is 'cup' in one file and 'plate' in another") as caught:
        load_dataset(str(data))
    assert "names: [FIRST, SECOND]" in (caught.value.hint or "")

    with data.open("a") as file:
        file.write(f"names: [{', '.join(names)}]\n")
    for split in ("train", "val"):
        found = rows_of(index_of(data, split).labels(0))
        assert {names[int(row[0])]: row[1] for row in found.tolist()} == {"cup": 0.125, "plate": 0.625}
    # predictions get the ids of val
    ids_of_val = load_dataset(str(data)).category_ids or ()
    assert {name: ids_of_val[names.index(name)] for name in ("cup", "plate")} == {"cup": 7, "plate": 1}


@pytest.mark.parametrize(
    ("rotation", "box"),
    [(0.0, [10, 18, 20, 4]), (90.0, [18, 10, 4, 20]), (-180, [10, 18, 20, 4]), ("270", [18, 10, 4, 20]),
     (30.0, [20 - 9.660, 20 - 6.732, 19.321, 13.464])],
)  # fmt: skip
def test_rotated_rectangles_of_cvat_are_learned_as_the_box_around_them(
    tmp_path: Path, rotation: object, box: list[float]
) -> None:
    rotated = label(1, 1, bbox=[10, 18, 20, 4], attributes={"occluded": False, "rotation": rotation})
    index = indexed(tmp_path, ["a.png"], ["a.png"], [rotated])
    x, y, width, height = box
    expected = [(x + width / 2) / 80, (y + height / 2) / 60, width / 80, height / 60]
    assert index.boxes_cxcywh_unit[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert index.problem_kinds == ({"box-derived": 1} if rotation else {})
