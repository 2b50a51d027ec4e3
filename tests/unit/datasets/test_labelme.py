"""labelme's and X-AnyLabeling's JSON. Images are 64 x 48 pixels; the usual box is x 16 to 32, y 12 to 24."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from commands import called
from label_rows import index_of, rows_by_name
from small_data import encoded, picture, with_exif_jpeg, write_picture

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.support.errors import ConfigError, DataError

BOX = [0.375, 0.375, 0.25, 0.25]
CORNERS = [[16, 12], [32, 24]]


def shape(label: Any, points: Any = CORNERS, kind: Any = "rectangle", **more: Any) -> dict[str, Any]:  # fmt: skip
    """A shape as labelme 5 writes it; X-AnyLabeling adds ``difficult`` and other keys."""
    return {"label": label, "points": points, "group_id": None, "description": "", "shape_type": kind, "flags": {}, "mask": None} | more  # fmt: skip


def label_file(path: Path, *shapes: Any, image: str | None = None, size_wh: tuple[Any, Any] = (64, 48)) -> Path:  # fmt: skip
    """A file as labelme writes it; a picture beside it unless ``image`` names another."""
    if image is None:
        image = write_picture(path.with_suffix(".jpg")).name
    content: dict[str, Any] = {
        "version": "5.5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": image,
        "imageData": None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "imageHeight": size_wh[1], "imageWidth": size_wh[0]}))
    return path


# shapes


@pytest.mark.parametrize(
    ("points", "kind", "box"),
    [
        pytest.param(CORNERS, "rectangle", BOX, id="two corners"),
        pytest.param([[32, 12], [16, 24]], "rectangle", BOX, id="other corners"),
        pytest.param([[32, 24], [16, 12]], "rectangle", BOX, id="corners from below"),
        pytest.param(
            [[16, 12], [32, 12], [32, 24], [16, 24]], "rectangle", BOX, id="X-AnyLabeling's corners"
        ),
        pytest.param([[16, 18], [24, 12], [32, 18], [24, 24]], "rotation", BOX, id="rotated"),
        pytest.param([[16, 12], [32, 14], [20, 24]], "polygon", BOX, id="polygon"),
        pytest.param([[16, 12], [32, 14], [20, 24]], None, BOX, id="without a type"),
        pytest.param([[24, 18], [24, 24]], "circle", [0.375, 0.375, 0.1875, 0.25], id="circle"),
        pytest.param([[16, 12], [31, 23]], "mask", BOX, id="mask, whose last pixel is stated"),
        pytest.param([["16", "12"], ["32", "24"]], "rectangle", BOX, id="numbers as texts"),
    ],
)
def test_the_box_of_a_shape(tmp_path: Path, points: Any, kind: str, box: list[float]) -> None:
    label_file(tmp_path / "set" / "a.json", shape("cat", points, kind))
    index = index_of(tmp_path / "set")
    assert rows_by_name(index) == {"a.jpg": [[0, *box]]} and not index.problems
    is_outline = kind not in ("rectangle", "circle", "mask")
    assert len(index.points) == (len(points) if is_outline else 0)


def test_shapes_without_a_box_are_counted_and_make_no_class(tmp_path: Path) -> None:
    root = tmp_path / "set"
    lines = [shape(kind, CORNERS, kind) for kind in ("point", "points", "line", "linestrip")]
    label_file(root / "a.json", *lines, shape("cat"))
    index = index_of(root)
    assert index.names == ("cat",) and rows_by_name(index) == {"a.jpg": [[0, *BOX]]}
    assert index.problem_kinds == {"shape-without-box": 4}
    assert str(index.problems[0]) == "a.json: shape 1: a point has no box (point) -> not used"
    done = called("data", "check", str(root))
    assert done.code == 0 and "shape-without-box" in done.out


def test_parts_of_one_group_are_one_object_but_rectangles_are_not_joined(tmp_path: Path) -> None:
    root = tmp_path / "set"
    left, right = [[16, 12], [20, 12], [20, 24]], [[28, 12], [32, 12], [32, 24]]
    label_file(
        root / "a.json",
        *(shape("cat", points, "polygon", group_id=1) for points in (left, right)),
        shape("dog", left, "polygon", group_id=1),
        *(shape("dog", group_id=2) for _ in range(2)),
    )
    index = index_of(root)
    narrow = [0.28125, 0.375, 0.0625, 0.25]
    assert rows_by_name(index)["a.jpg"] == [[0, *BOX], [1, *narrow], [1, *BOX], [1, *BOX]]
    assert index.problem_kinds == {"label-joined": 1, "label-repeated": 1}
    assert "shape 2: part of shape 1" in index.problems[0].what


@pytest.mark.parametrize(
    "bad",
    [
        "text", None, {"label": "cat"}, {"points": CORNERS}, shape("cat", [[1, 2]]), shape("cat", [[1, 2], [3]]), shape("cat", "12"),
        shape("cat", [[1, None], {}]), shape("cat", CORNERS, "polygon"), shape("cat", [[1, 2, 3], [4, 5, 6]]), shape("cat", [[10**400, 1], [2, 3]]),
        shape("cat", CORNERS, ["polygon"]), shape("cat", difficult="maybe"), shape(["cat"]), shape(""), shape("cat", [[1, 2], [3, 4], [5, 6]], "circle"),
    ],
)  # fmt: skip
def test_an_unreadable_shape_is_dropped_with_its_number(tmp_path: Path, bad: Any) -> None:
    label_file(tmp_path / "set" / "a.json", shape("cat"), bad, shape("dog"))
    index = index_of(tmp_path / "set")
    assert len(index.labels(0)) == 2 and index.problem_kinds == {"label-unreadable": 1}
    assert index.problems[0].what.startswith("shape 2: ")


# sizes


@pytest.mark.parametrize("size", [(None, None), (0, 0), (-1, -1), ("64", "48"), (64, True)])
def test_a_size_that_is_not_stated_is_that_of_the_image(tmp_path: Path, size: tuple[Any, Any]) -> None:
    label_file(tmp_path / "set" / "a.json", shape("cat"), size_wh=size)
    index = index_of(tmp_path / "set")
    assert rows_by_name(index) == {"a.jpg": [[0, *BOX]]} and not index.problems


def test_boxes_refer_to_the_size_that_the_file_states(tmp_path: Path) -> None:
    label_file(tmp_path / "set" / "a.json", shape("cat", [[32, 24], [64, 48]]), size_wh=(128, 96))
    index = index_of(tmp_path / "set")
    assert rows_by_name(index) == {"a.jpg": [[0, *BOX]]} and index.problem_kinds == {"size-differs": 1}
    assert index.problems[0].path == "a.jpg"


def test_labels_of_a_turned_photograph_refer_to_the_picture_as_it_is_shown(tmp_path: Path) -> None:
    path = label_file(tmp_path / "set" / "a.json", shape("cat", [[12, 16], [24, 32]]), size_wh=(48, 64))
    path.with_suffix(".jpg").write_bytes(with_exif_jpeg(encoded(picture(64, 48)), 6))
    index = index_of(tmp_path / "set")
    assert rows_by_name(index) == {"a.jpg": [[0, *BOX]]} and not index.problems


# where files lie


@pytest.mark.parametrize(
    ("stated", "note"),
    [
        ("../imgs/a.jpg", ""),
        ("..\\imgs\\a.jpg", "imagePath ..\\imgs\\a.jpg -> imgs/a.jpg (files like this: 1)"),
        ("C:\\Users\\me\\a.jpg", "imagePath C:\\Users\\me\\a.jpg -> imgs/a.jpg (files like this: 1)"),
        ("/home/me/a.jpg", "imagePath /home/me/a.jpg -> imgs/a.jpg (files like this: 1)"),
        ("a.jpg", "imagePath a.jpg -> imgs/a.jpg (files like this: 1)"),
    ],
)
def test_label_files_in_a_folder_of_their_own_find_their_images(
    tmp_path: Path, stated: str, note: str
) -> None:
    root = tmp_path / "set"
    write_picture(root / "imgs" / "a.jpg")
    write_picture(root / "imgs" / "b.jpg")
    label_file(root / "json" / "a.json", shape("cat"), image=stated)
    index = index_of(root)
    assert rows_by_name(index) == {"a.jpg": [[0, *BOX]], "b.jpg": []}
    assert [line.removeprefix("json/a.json: ") for line in index.assumed] == [note] * bool(note)
    assert index.unlabelled == 1 and index.problem_kinds == ({"name-assumed": 1} if note else {})


def test_a_folder_of_label_files_alone_finds_images_outside_of_it(tmp_path: Path) -> None:
    write_picture(tmp_path / "imgs" / "a.jpg")
    label_file(tmp_path / "json" / "a.json", shape("cat"), image="..\\imgs\\a.jpg")
    assert rows_by_name(index_of(tmp_path / "json")) == {"a.jpg": [[0, *BOX]]}


def test_a_name_that_two_folders_have_is_not_guessed(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for folder in ("x", "y"):
        label_file(root / folder / "b.json", shape("cat"))
        write_picture(root / folder / "a.jpg")
    label_file(root / "json" / "a.json", shape("cat"), image="a.jpg")
    index = index_of(root)
    assert index.problem_kinds == {"image-missing": 1}
    assert index.problems[0].path == "json/a.jpg" and len(index.classes) == 2


def test_a_renamed_pair_belongs_together_whatever_image_path_says(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write_picture(root / "new.jpg")
    label_file(root / "new.json", shape("cat"), image="old.jpg")
    index = index_of(root)
    assert rows_by_name(index) == {"new.jpg": [[0, *BOX]]} and not index.problems


def test_other_json_files_and_a_second_file_of_an_image_are_reported_once(tmp_path: Path) -> None:
    root = tmp_path / "set"
    label_file(root / "a.json", shape("cat"))
    label_file(root / "copy" / "a.json", shape("dog"), image="../a.jpg")
    (root / "classes.json").write_text('["cat"]')
    (root / "broken.json").write_text('{"shapes": [')
    index = index_of(root)
    assert index.problem_kinds == {"labels-without-image": 3} and len(index.problems) == 1
    assert str(index.problems[0]) == "broken.json: belongs to no image (files like this: 3) -> not used"
    assert index.totals()["label files without an image"] == 3


@pytest.mark.parametrize("names", [("train", "val", "test"), ("train", "valid"), ("train", "validation")])
def test_folders_named_as_splits_are_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        label_file(tmp_path / "set" / name / f"{name}.json", shape("cat" if name == "train" else "dog"))
    spec = load_dataset(str(tmp_path / "set"))
    assert spec.names == ("cat", "dog") and not spec.notes
    assert list(spec.splits) == ["train", "val", "test"][: len(names)]
    for split, name in zip(spec.splits, names, strict=True):
        assert list(rows_by_name(build_index(spec, split))) == [f"{name}.jpg"]


@pytest.mark.parametrize("yaml", ["", "train: images/train\nval: images/val\n"])
def test_the_layout_of_yolo_is_read_with_json_files_in_labels(tmp_path: Path, yaml: str) -> None:
    root = tmp_path / "set"
    for split in ("train", "val"):
        write_picture(root / "images" / split / f"{split}.jpg")
        label_file(root / "labels" / split / f"{split}.json", shape("cat"), image=f"{split}.jpg")
    data = described(root, yaml) if yaml else root
    for split in ("train", "val"):
        index = index_of(data, split)
        assert rows_by_name(index) == {f"{split}.jpg": [[0, *BOX]]} and not index.problem_kinds


def test_one_folder_is_both_splits_and_says_so(tmp_path: Path) -> None:
    label_file(tmp_path / "set" / "a.json", shape("cat"))
    spec = load_dataset(str(tmp_path / "set"))
    assert spec.splits["train"] == spec.splits["val"] and spec.notes == ()


def described(root: Path, text: str) -> Path:
    root.mkdir(exist_ok=True)
    (root / "data.yaml").write_text(text)
    return root / "data.yaml"


def test_a_description_numbers_the_classes_and_lists_divide_one_folder(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name in "abc":
        label_file(root / "all" / f"{name}.json", shape("cat"), shape("dog"))
    (root / "train.txt").write_text("all/a.jpg\nall/b.jpg\n")
    (root / "val.txt").write_text("all/c.jpg\n")
    yaml = described(root, "train: train.txt\nval: val.txt\nnames: [dog, cat]\n")
    assert rows_by_name(index_of(yaml)) == {name: [[1, *BOX], [0, *BOX]] for name in ("a.jpg", "b.jpg")}
    assert list(rows_by_name(index_of(yaml, "val"))) == ["c.jpg"]
    described(root, "train: all\nval: val.txt\n")  # names by alphabet
    assert rows_by_name(index_of(yaml, "val")) == {"c.jpg": [[0, *BOX], [1, *BOX]]}


def test_a_label_that_names_does_not_have_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    root = tmp_path / "set"
    label_file(root / "a.json", shape("cat"), shape("Dog"))
    yaml = described(root, "train: .\nval: .\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match=r"a.json: shape 2: class 'Dog' is not one of the 2 names \(nearest: dog\)"):  # fmt: skip
        index_of(yaml)


def test_yolo_labels_come_first(tmp_path: Path) -> None:
    root = tmp_path / "set"
    label_file(root / "a.json", shape("cat"))
    (root / "a.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    yaml = described(root, "train: .\nval: .\nnames: [cat, dog]\n")
    assert rows_by_name(index_of(yaml)) == {"a.jpg": [[1, 0.5, 0.5, 0.5, 0.5]]}
    described(root, "train: .\nval: .\n")
    with pytest.raises(ConfigError, match="no class names"):  # numbers of YOLO's labels are not labelme's
        load_dataset(str(yaml))


# files of strangers


def test_a_file_that_is_not_json_leaves_its_image_out(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name in "abcde":
        label_file(root / f"{name}.json", shape("cat"))
    bad = ["{", "[" * 100_000, "[]", '{"shapes": 1}']
    for name, text in zip("bcd", bad, strict=False):
        (root / f"{name}.json").write_text(text)
    with pytest.raises(DataError, match="3 of 5 images cannot be used"):
        index_of(root)
    label_file(root / "b.json", shape("cat"))
    index = index_of(root)
    assert index.problem_kinds == {"labels-unreadable": 2} and len(index) == 3


def test_files_with_a_copy_of_the_image_and_in_other_encodings_are_read(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name, encoding in (("a", "utf-8-sig"), ("b", "utf-16"), ("c", "utf-8")):
        path = label_file(root / f"{name}.json", shape("猫"))
        content = {"imageData": base64.b64encode(bytes(100_000)).decode(), **json.loads(path.read_text())}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding=encoding)
    index = index_of(root)
    assert index.names == ("猫",) and len(index.classes) == 3 and not index.problems


def test_a_changed_label_file_gets_a_new_index(tmp_path: Path) -> None:
    path = label_file(tmp_path / "set" / "a.json", shape("cat"))
    first = index_of(tmp_path / "set")
    label_file(path, shape("cat"), shape("zebra"))
    second = index_of(tmp_path / "set")
    assert first.key != second.key and second.names == ("cat", "zebra") and len(second.classes) == 2


# the next step


def test_one_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = label_file(tmp_path / "set" / "a.json", shape("cat"))
    done = called("data", "check", str(path))
    assert done.code == 2 and "a.json is labelme's JSON of one image" in done.err
    assert "name the folder of the files" in done.err


def test_labels_are_part_of_shards(tmp_path: Path) -> None:
    write_picture(tmp_path / "set" / "imgs" / "a.jpg")
    label_file(tmp_path / "set" / "json" / "a.json", shape("cat"), image="..\\imgs\\a.jpg")
    assert called("data", "shard", str(tmp_path / "set"), "--out", str(tmp_path / "packed")).code == 0
    assert rows_by_name(index_of(tmp_path / "packed")) == {"a.jpg": [[0, *BOX]]}


def test_a_shape_of_one_pixel_is_no_whole_image_where_other_files_have_pixels(tmp_path: Path) -> None:
    label_file(tmp_path / "a.json", shape("cup"))
    label_file(tmp_path / "b.json", shape("cup", [[0, 0], [1, 1]]))
    index = index_of(tmp_path)
    assert len(index.classes) == 2 and index.boxes_cxcywh_unit[:, 2:].max() < 0.5
    assert "numbers-assumed" not in index.problem_kinds
