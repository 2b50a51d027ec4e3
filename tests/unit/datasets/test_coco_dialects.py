"""COCO files as tools and people write them: names of other machines, numbers as texts, sizes that differ, groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import SMALL, train_args, yolofleet
from label_rows import rows_of
from small_data import encoded, picture, with_exif_jpeg, write_picture

from yolofleet.data.datasets.annotations import flag_of, number_of
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.images.decode import read_image
from yolofleet.support.errors import ConfigError, DataError

BOX = [20, 15, 20, 15]
ROW = [0, 0.375, 0.375, 0.25, 0.25]  # of BOX in 80 x 60 pixels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


def image(number: Any, name: str, width: Any = 80, height: Any = 60) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": width, "height": height}


def label(number: Any, of: Any, category: Any = 1, bbox: Any = BOX, **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": of, "category_id": category, "bbox": bbox, "iscrowd": 0, **more}


def written(
    folder: Path, images: list[Any], labels: list[Any], categories: Any = ((1, "fox"),), **more: Any
) -> Path:
    path = folder / "set.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = [{"id": number, "name": name} for number, name in categories]
    path.write_text(json.dumps({"images": images, "annotations": labels, "categories": named, **more}))
    return path


def read(path: Path, split: str = "train") -> DataIndex:
    return build_index(load_dataset(str(path)), split)


def rows(index: DataIndex) -> dict[str, list[list[float]]]:
    return {
        Path(path).name: rows_of(index.labels(at)).astype(float).round(5).tolist()
        for at, path in enumerate(index.paths)
    }


def test_a_text_that_is_exactly_a_number_is_that_number() -> None:
    good = {"0": 0, "20.0": 20, "-1.5e1": -15, ".5": 0.5, 7: 7, 7.5: 7.5}
    assert {text: number_of(text) for text in good} == good
    for bad in (" 5", "5 ", "1,5", "0x10", "1_0", "nan", "inf", "", "five", True, None, [5], "٣", 10**400):
        assert np.isnan(number_of(bad)), bad
    assert [flag_of(f) for f in (0, 1, "0", "1", "True", False, None, 1.0)] == [
        False,
        True,
        False,
        True,
        True,
        False,
        False,
        True,
    ]
    assert {flag_of(flag) for flag in (2, "2", "yes", [0], -1)} == {None}


def test_names_written_on_windows_are_found_one_by_one(tmp_path: Path) -> None:
    for name in ("c1", "c2", "c3"):
        write_picture(tmp_path / "images" / f"{name}.png", 80, 60)
    write_picture(tmp_path / "images" / "sub" / "c4.png", 80, 60)
    names = [
        "images\\c1.png",
        "images/c2.png",
        "..\\..\\media\\upload\\4\\c3.png",
        "C:\\me\\images\\sub\\c4.png",
    ]
    path = written(tmp_path, [image(i, n) for i, n in enumerate(names)], [label(i, i) for i in range(4)])
    index = read(path)
    assert rows(index) == {f"c{n}.png": [ROW] for n in (1, 2, 3, 4)}
    assert index.problem_kinds == {"name-assumed": 3} and "c1.png" in index.assumed[0]


def test_a_file_that_two_names_would_share_is_taken_for_neither(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    names = ["a.png", "b.png", "cam1/c.png", "cam2/c.png"]
    index = build_index(
        load_dataset(
            str(
                written(tmp_path, [image(i, n) for i, n in enumerate(names)], [label(i, i) for i in range(4)])
            )
        ),
        "train",
    )
    assert sorted(rows(index)) == ["a.png", "b.png"] and index.problem_kinds == {"image-missing": 2}


def test_image_ids_and_numbers_as_texts(tmp_path: Path) -> None:
    for name in ("f1", "f2"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    polygon = [20, 15, 40, 15, 40, 30, 20, 30]
    path = written(
        tmp_path,
        [image(0, "f1.png"), image(1, "f2.png", -1, -1)],
        [
            label(
                "1",
                "0",
                "1",
                ["20.0", "15", 20, "15"],
                iscrowd="0",
                ignore="0",
                area="300",
                segmentation=polygon,
            ),
            label(2, "1"),
        ],
    )
    index = read(path)
    assert rows(index) == {"f1.png": [ROW], "f2.png": [ROW]} and index.area_px.tolist() == [300, 300]
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
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    labels = [label(1, 1), {**label(2, 2), **change}, label(3, 2)]
    index = read(written(tmp_path, [image(1, "a.png"), image(2, "b.png")], labels))
    assert rows(index) == {"a.png": [ROW], "b.png": [ROW]} and index.problem_kinds == {kind: 1}
    assert words in index.problems_text()


@pytest.mark.parametrize("flag", [{"iscrowd": "1"}, {"iscrowd": True}, {"ignore": 1}])
def test_crowd_regions_are_not_learned_and_are_counted(tmp_path: Path, flag: dict[str, Any]) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    index = read(written(tmp_path, [image(1, "a.png")], [{**label(1, 1), **flag}, label(2, 1)]))
    assert len(index.labels(0)) == 1 and index.totals()["crowd regions"] == 1


TURNED = [0, pytest.approx(0.75, abs=1e-4), 0.3, pytest.approx(0.16667, abs=1e-5), 0.4]


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ([66.667, 6, 16.667, 24], "boxes are taken as parts of the stated size, and may have to be rotated"),
        (
            [10, 10, 40, 10],
            "boxes are rotated with the image, as all are whole numbers, and may have to be scaled",
        ),
    ],
)
def test_the_size_before_a_rotation_by_exif_is_reported(tmp_path: Path, box: list[float], words: str) -> None:
    """Label Studio multiplies fractions of the visible image by that size; others draw on the pixels of the file."""
    (tmp_path / "a.jpg").write_bytes(with_exif_jpeg(encoded(picture(100, 60)), 6))  # shown as 60 x 100
    index = read(written(tmp_path, [image(1, "a.jpg", 100, 60)], [label(1, 1, bbox=box)]))
    text = index.problems_text()
    assert index.problem_kinds == {"size-unsure": 1}
    assert "is 60 x 100 pixels; the labels say 100 x 60, the size before the rotation by EXIF" in text
    assert f"{words}; look at the boxes with yolofleet data preview" in text
    assert rows_of(index.labels(0)).astype(float).round(5).tolist() == [TURNED]


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_and_polygons_are_rotated_as_the_pixels_are(tmp_path: Path, orientation: int) -> None:
    stored = np.zeros((64, 96, 3), np.uint8)
    stored[8:16, 24:64] = 255
    (tmp_path / "a.jpg").write_bytes(with_exif_jpeg(encoded(stored), orientation))
    polygon = [[24, 8, 64, 8, 64, 16, 24, 16]]
    labels = [label(1, 1, bbox=[24, 8, 40, 8], segmentation=polygon)]
    index = read(written(tmp_path, [image(1, "a.jpg", 96, 64)], labels))
    shown = read_image(index.path(0))[..., 0] > 127
    lines, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
    (_, x, y, w, h), (height, width) = rows_of(index.labels(0))[0].tolist(), shown.shape
    expected = [columns[0], lines[0], columns[-1] + 1, lines[-1] + 1]
    found = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
    assert np.allclose(found, expected, atol=1.5)
    points = index.outlines(0)[0][0] * [width, height]
    assert np.allclose([*points.min(0), *points.max(0)], expected, atol=1.5)


def test_sides_that_are_swapped_without_exif_do_not_scale_boxes(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    index = read(written(tmp_path, [image(1, "a.png", 60, 80)], [label(1, 1)]))
    assert rows(index) == {"a.png": [ROW]} and index.problem_kinds == {"size-unsure": 1}
    assert "the sides swapped: boxes are taken as pixels of the image, not scaled" in index.problems_text()


@pytest.mark.parametrize(
    ("stated", "box", "row", "kind"),
    [
        ((160, 120), [40, 30, 40, 30], ROW, "size-differs"),  # resized with its shape
        ((160, 121), [40, 30, 40, 30], [0, 0.375, 0.37190, 0.25, 0.24793], "size-differs"),  # a rounded side
        ((200, 60), [20, 15, 20, 15], ROW, "size-unsure"),  # another shape, and the boxes fit the image
        ((40, 30), [20, 15, 40, 30], [0, 0.5, 0.5, 0.5, 0.5], "size-unsure"),  # boxes exceed the stated size
        (
            (160, 60),
            [80, 15, 40, 15],
            [0, 0.625, 0.375, 0.25, 0.25],
            "size-unsure",
        ),  # stretched: they exceed the image
        ((0, 0), BOX, ROW, ""),
        ((None, ""), BOX, ROW, ""),
    ],
)
def test_boxes_are_scaled_only_if_the_stated_size_is_certain(
    tmp_path: Path, stated: tuple[Any, Any], box: list[int], row: list[float], kind: str
) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    index = read(written(tmp_path, [image(1, "a.png", *stated)], [label(1, 1, bbox=box)]))
    assert rows(index) == {"a.png": [row]}
    assert index.problem_kinds == ({kind: 1} if kind else {})
    assert ("data preview" in index.problems_text()) == (kind == "size-unsure")


def test_entries_of_one_image_are_joined(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    other = [0, 0, 40, 30]
    path = written(
        tmp_path,
        [image(1, "a.png"), image(2, "b.png"), image(3, "./a.png")],
        [label(1, 1), label(2, 2), label(3, 3, bbox=other), label(4, 3)],
    )
    index = read(path)
    assert index.image_ids.tolist() == [1, 2] and len(index.labels(0)) == 2 and len(index.labels(1)) == 1
    assert index.problem_kinds == {"image-twice": 1, "label-twice": 1}
    assert "images 1 and 3 are one file, ./a.png: labels joined" in index.problems_text()


def test_an_image_in_two_files_of_a_split_is_refused(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    for name in ("one", "two"):
        written(tmp_path, [image(1, "a.png")], [label(1, 1)]).rename(tmp_path / f"{name}.json")
    (tmp_path / "data.yaml").write_text("train: [one.json, two.json]\nval: one.json\n")
    with pytest.raises(DataError, match=r"a\.png is in two sources of one split"):
        read(tmp_path / "data.yaml")


def test_a_category_that_is_only_a_group_is_left_out(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        write_picture(tmp_path / part / "f.jpg", 80, 60)
        content = {
            "images": [image(0, "f.jpg")],
            "annotations": [label(0, 0, 1), label(1, 0, 2, [0, 0, 8, 6])],
            "categories": [
                {"id": 0, "name": "fish", "supercategory": "none"},
                {"id": 1, "name": "fish", "supercategory": "fish"},
                {"id": 2, "name": "cup", "supercategory": "fish"},
            ],
        }
        (tmp_path / part / "_annotations.coco.json").write_text(json.dumps(content))
    spec = load_dataset(str(tmp_path))
    assert spec.names == ("fish", "cup") and list(spec.splits) == ["train", "val"]
    assert "only parents of others are left out: 0 fish" in " ".join(spec.notes)
    assert rows(build_index(spec, "val")) == {"f.jpg": [ROW, [1, 0.05, 0.05, 0.1, 0.1]]}


def test_lvis_names_its_images_by_address_and_boxes_may_come_from_polygons(tmp_path: Path) -> None:
    write_picture(tmp_path / "val2017" / "a.jpg", 80, 60)
    entry = {"id": 1, "coco_url": "http://images.cocodataset.org/val2017/a.jpg", "width": 80, "height": 60}
    index = read(
        written(tmp_path, [entry], [label(1, 1, bbox=None, segmentation=[[20, 15, 40, 15, 40, 30]])])
    )
    assert rows(index) == {"a.jpg": [ROW]} and index.problem_kinds == {"box-derived": 1}


def test_ids_of_results_are_those_of_the_annotations(tmp_path: Path) -> None:
    """So pycocotools takes the results with the file of the annotations."""
    for name in ("a", "b", "c"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    images = [image("img-b", "b.png"), image("img-a", "a.png"), image("7", "c.png")]
    path = written(tmp_path, images, [label(1, one["id"], "f") for one in images], categories=(("f", "fox"),))
    yolofleet(
        tmp_path,
        *train_args(
            path, *SMALL, "--img", "64", "--epochs", "1", "--name", "run", "--batch", "2", "--device", "cpu"
        ),
    )
    weights = tmp_path / "runs/train/run/weights/last.safetensors"
    yolofleet(
        tmp_path,
        "val",
        "--weights",
        weights,
        "--data",
        path,
        "--save-json",
        "--conf",
        "0.00001",
        "--name",
        "v",
        "--device",
        "cpu",
    )
    results = json.loads((tmp_path / "runs/val/v/predictions.json").read_text())
    assert {row["image_id"] for row in results} == {"img-a", "img-b", "7"} and {
        row["category_id"] for row in results
    } == {"f"}
    yolofleet(tmp_path, "data", "convert", path, "--to", "coco", "--out", "out")
    content = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
    assert {one["id"] for one in content["images"]} == {"img-a", "img-b", "7"}


def test_long_ids_as_texts_are_compared_digit_by_digit(tmp_path: Path) -> None:
    """As a float, both ids are 9007199254740992."""
    low, high = 9007199254740992, 9007199254740993
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    other = [0, 0, 40, 30]
    path = written(
        tmp_path,
        [image(low, "a.png"), image(high, "b.png")],
        [label(1, str(low)), label(2, str(high), bbox=other)],
    )
    index = read(path)
    assert rows(index) == {"a.png": [ROW], "b.png": [[0, 0.25, 0.25, 0.5, 0.5]]}
    assert index.problem_kinds == {"id-as-number": 2} and "entries like this: 2" in index.assumed[0]


def test_a_class_that_is_its_own_parent_stays_without_labels(tmp_path: Path) -> None:
    """COCO's person; otherwise the numbers of all classes would shift with the images that a file happens to list."""
    write_picture(tmp_path / "a.png", 80, 60)
    path = written(tmp_path, [image(1, "a.png")], [label(1, 1, 2)])
    content = json.loads(path.read_text())
    content["categories"] = [
        {"id": 1, "name": "person", "supercategory": "person"},
        {"id": 2, "name": "car", "supercategory": "vehicle"},
    ]
    path.write_text(json.dumps(content))
    assert load_dataset(str(path)).names == ("person", "car")


def test_entries_of_one_image_with_different_sizes_are_refused(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    images = [image(1, "a.png"), image(2, "./a.png", 160, 120)]
    with pytest.raises(
        DataError, match=r"images 1 and 2 are one file, \./a\.png, with the sizes 80 x 60 and 160 x 120"
    ):
        read(written(tmp_path, images, [label(1, 1), label(2, 2, bbox=[100, 90, 40, 20])]))


def test_joined_entries_change_nothing_in_other_images(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
    images = [image(1, "a.png"), image(2, "b.png"), image(3, "./a.png")]
    polygon = [[20, 15, 40, 15, 40, 30, 20, 30]]
    labels = [
        label(1, 1),
        label(2, 2),
        label(3, 2, segmentation=polygon),
        label(4, 3),
        label(5, 3, bbox=[0, 0, 8, 6]),
    ]
    index = read(written(tmp_path, images, labels))
    assert rows(index) == {"a.png": [ROW, [0, 0.05, 0.05, 0.1, 0.1]], "b.png": [ROW, ROW]}
    assert index.problem_kinds == {"image-twice": 1, "label-twice": 1, "label-repeated": 1}
    assert [len(p) for p in index.outlines(1)] == [0, 1]


def test_two_names_of_one_file_are_one_image(tmp_path: Path) -> None:
    """As on a disk that does not distinguish upper and lower case."""
    write_picture(tmp_path / "a.png", 80, 60)
    (tmp_path / "A.PNG").hardlink_to(tmp_path / "a.png")
    index = read(written(tmp_path, [image(1, "a.png"), image(2, "A.PNG")], [label(1, 1), label(2, 2)]))
    assert rows(index) == {"a.png": [ROW]} and index.problem_kinds == {"image-twice": 1, "label-twice": 1}
    (tmp_path / "list.txt").write_text("a.png\nA.PNG\n")
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "data.yaml").write_text("train: list.txt\nval: list.txt\nnames: [fox]\n")
    index = read(tmp_path / "data.yaml")
    assert len(index) == 1 and index.problem_kinds["image-twice"] == 1


@pytest.mark.parametrize("train", ["[set.json, list.txt]", "[list.txt, set.json]"])
def test_an_image_with_labels_in_two_formats_is_refused(tmp_path: Path, train: str) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    (tmp_path / "a.txt").write_text("0 0.1 0.1 0.1 0.1\n")
    (tmp_path / "list.txt").write_text("a.png\n")
    written(tmp_path, [image(1, "a.png")], [label(1, 1)])
    (tmp_path / "data.yaml").write_text(f"train: {train}\nval: set.json\nnames: [fox]\n")
    with pytest.raises(DataError, match=r"a\.png is in two sources of one split"):
        read(tmp_path / "data.yaml")


def test_ids_that_repeat_are_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 80, 60)
        written(tmp_path, [image(7, f"{name}.png")], [label(1, 7)]).rename(tmp_path / f"{name}.json")
    (tmp_path / "data.yaml").write_text("train: [a.json, b.json]\nval: a.json\n")
    index = read(tmp_path / "data.yaml")
    assert index.problem_kinds == {"id-twice": 1} and "2 images have the id 7" in index.assumed[0]
    index = read(
        written(tmp_path, [image(1, "a.png"), image(2, "b.png")], [label(5, 1), label(5, 2), label(5, 2)])
    )
    assert index.problem_kinds == {"id-twice": 2, "label-repeated": 1}
    assert "another annotation has the id of annotation 5" in "".join(index.assumed)
    assert len(index.classes) == 3


def test_problems_of_a_file_have_a_count_and_its_words_for_an_annotation(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", 80, 60)
    labels = [
        label("first", 1),
        label("second", 1, bbox=[10, 10, 0, 5]),
        {**label(None, 1), "iscrowd": 5},
        label(4, 1, area="big"),
        label(5, 1, area="300"),
        label(6, 1, bbox=[], segmentation={"counts": "x", "size": [60, 80]}),
        label(7, 1, bbox=None, segmentation={"counts": "x", "size": [60, 80]}),
    ]
    index = read(written(tmp_path, [image(1, "a.png")], labels))
    assert index.problem_kinds == {
        "box-empty": 1,
        "label-unreadable": 1,
        "label-stray": 2,
        "area-unreadable": 1,
        "label-repeated": 2,
    }
    text = index.problems_text() + "\n".join(index.assumed)
    assert "annotation no. 2 of a.png: box" in text and "annotation no. 3: iscrowd is 5, not 0 or 1" in text
    assert "annotation 6: it has no bbox of four numbers and only a mask (RLE) (entries like this: 2)" in text
    assert "annotation 4: area is 'big', not a number: width x height is taken" in text
    assert index.area_px.tolist() == [300, 300, 300]


def test_names_as_other_systems_write_them(tmp_path: Path) -> None:
    files = (
        "my file.png",
        "Über 1.PNG",
        "0003.png",
        "sub/x.jpg",
        "e\u0301.png",
    )  # the last as macOS writes it
    for file in files:
        write_picture(tmp_path / "images" / file, 80, 60)
    (tmp_path / "images" / "0003.txt").touch()
    names = ("upload/my%20file.png", "%C3%BCber%201.png", "0003", "sub\\X.JPG", "\u00e9.png")
    images = [image(number, name) for number, name in enumerate(names)]
    index = read(written(tmp_path, images, [label(number, number) for number in range(5)]))
    assert sorted(rows(index)) == sorted(Path(file).name for file in files)
    assert index.problem_kinds == {"name-assumed": 5} and "names without a file: 5" in index.assumed[0]


def test_a_name_that_may_mean_two_files_is_not_guessed(tmp_path: Path) -> None:
    for file in ("a.png", "b.png", "C.png", "c.PNG", "d.png", "d.jpg"):
        write_picture(tmp_path / file, 80, 60)
    images = [image(number, name) for number, name in enumerate(("a.png", "b.png", "c.png", "d"))]
    index = read(written(tmp_path, images, [label(number, number) for number in range(4)]))
    assert sorted(rows(index)) == ["a.png", "b.png"] and index.problem_kinds == {"image-missing": 2}


def test_images_of_two_folders_are_not_joined_where_one_folder_has_all(tmp_path: Path) -> None:
    """Without their folders, both names mean one file, whose labels would be those of two pictures."""
    for name in ("1", "2", "3"):
        write_picture(tmp_path / "images" / f"{name}.png", 80, 60)
    names = ("day/1.png", "night/1.png", "day/2.png", "night/3.png")
    images = [image(number, name) for number, name in enumerate(names)]
    index = read(written(tmp_path, images, [label(number, number) for number in range(4)]))
    assert sorted(rows(index)) == ["2.png", "3.png"] and index.problem_kinds["image-missing"] == 2
    assert "image-twice" not in index.problem_kinds


def test_boxes_in_fractions_are_refused(tmp_path: Path) -> None:
    """They would be learned as boxes smaller than a pixel."""
    write_picture(tmp_path / "a.png", 80, 60)
    labels = [label(1, 1, bbox=[0.25, 0.25, 0.5, 0.5]), label(2, 1, bbox=[0, 0, 1, 1])]
    with pytest.raises(DataError, match="all 2 boxes lie between 0 and 1, such as"):
        read(written(tmp_path, [image(1, "a.png")], labels))
    assert len(read(written(tmp_path, [image(1, "a.png")], [*labels, label(3, 1)])).classes) == 3


@pytest.mark.parametrize("files", [["result.json"], ["annotations/one.json", "annotations/two.json"]])
def test_a_folder_with_coco_files_of_other_names_gets_them_named(tmp_path: Path, files: list[str]) -> None:
    """Not a YAML with the images alone, which would be a set without labels."""
    write_picture(tmp_path / "images" / "a.png", 80, 60)
    (tmp_path / "annotations").mkdir()
    for file in files:
        written(tmp_path, [image(1, "a.png")], [label(1, 1)]).rename(tmp_path / file)
    with pytest.raises(ConfigError) as caught:
        load_dataset(str(tmp_path))
    assert all(file in str(caught.value.hint) for file in files) and "--data" in str(caught.value.hint)
    assert rows(read(tmp_path / files[0])) == {"a.png": [ROW]}


def test_a_list_of_detections_is_named(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps([{"image_id": 1, "category_id": 1, "bbox": BOX, "score": 0.5}] * 3))
    with pytest.raises(ConfigError, match=r"predictions\.json is COCO's list of detections"):
        load_dataset(str(path))


def two_numberings(root: Path) -> None:
    """Files of two splits that number the same names differently, with one box of each class."""
    for split, ids in (("train", {"cup": 1, "plate": 2}), ("val", {"plate": 1, "cup": 7})):
        write_picture(root / "images" / f"{split}.png", 64, 48)
        boxes = {"cup": [0, 0, 16, 12], "plate": [32, 24, 16, 12]}
        annotations = [
            {"id": n, "image_id": 1, "category_id": ids[name], "bbox": box}
            for n, (name, box) in enumerate(boxes.items(), 1)
        ]
        content = {
            "images": [{"id": 1, "file_name": f"{split}.png", "width": 64, "height": 48}],
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for name, number in ids.items()],
        }
        (root / f"{split}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("names", [("cup", "plate"), ("plate", "bowl", "cup")])
def test_files_that_number_the_same_names_differently_are_matched_by_name(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    two_numberings(tmp_path)
    data = tmp_path / "data.yaml"
    data.write_text("path: images\ntrain: ../train.json\nval: ../val.json\n")
    with pytest.raises(ConfigError, match="category 1 is") as caught:
        load_dataset(str(data))
    assert "names: [FIRST, SECOND]" in (caught.value.hint or "")

    with data.open("a") as file:
        file.write(f"names: [{', '.join(names)}]\n")
    spec = load_dataset(str(data))
    for split in ("train", "val"):
        found = rows_of(build_index(spec, split).labels(0))
        assert {names[int(row[0])]: row[1] for row in found.tolist()} == {"cup": 0.125, "plate": 0.625}
    # predictions get the ids of val
    ids = spec.category_ids or ()
    assert {name: ids[names.index(name)] for name in ("cup", "plate")} == {"cup": 7, "plate": 1}


@pytest.mark.parametrize(
    ("rotation", "box"),
    [(0.0, [10, 18, 20, 4]), (90.0, [18, 10, 4, 20]), (-180, [10, 18, 20, 4]), ("270", [18, 10, 4, 20]),
     (30.0, [20 - 9.660, 20 - 6.732, 19.321, 13.464])],
)  # fmt: skip
def test_rotated_rectangles_of_cvat_are_learned_as_the_box_around_them(
    tmp_path: Path, rotation: object, box: list[float]
) -> None:
    write_picture(tmp_path / "a.png", 64, 48)
    label = {
        "id": 1,
        "image_id": 1,
        "category_id": 1,
        "bbox": [10, 18, 20, 4],
        "area": 80,
        "segmentation": [],
    }
    label["attributes"] = {"occluded": False, "rotation": rotation}
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 48}],
        "annotations": [label],
        "categories": [{"id": 1, "name": "cup"}],
    }
    (tmp_path / "a.json").write_text(json.dumps(content))
    index = build_index(load_dataset(str(tmp_path / "a.json")), "train")
    x, y, width, height = box
    expected = [(x + width / 2) / 64, (y + height / 2) / 48, width / 64, height / 48]
    assert index.boxes_cxcywh_unit[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert index.problem_kinds == ({"box-derived": 1} if rotation else {})
