"""Pascal VOC's XML as tools and people write it: with and without lists, beside images, with other names and sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from label_rows import index_of, rows_by_name
from small_data import write_picture

from yolofleet.data.datasets import vocxml
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.support.errors import DataError

ROW = [0, 0.375, 0.375, 0.25, 0.25]  # of the box below in 160 x 120 pixels


def xml(
    path: Path,
    *,
    size: tuple[object, object] = (160, 120),
    box: tuple[object, ...] = (41, 31, 80, 60),
    more: str = "",
    name: str = "fire",
) -> None:
    corners = "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>"
        f"<object><name>{name}</name>{more}<bndbox>{corners}</bndbox></object></annotation>"
    )


def described(folder: Path, train: str, val: str) -> Path:
    (folder / "data.yaml").write_text(f"train: {train}\nval: {val}\nnames: [fire]\n")
    return folder / "data.yaml"


@pytest.mark.parametrize("place", ["", "ImageSets/Main"])
def test_lists_of_pairs(tmp_path: Path, place: str) -> None:
    for number, split in ((1, "train"), (2, "val")):
        write_picture(tmp_path / "JPEGImages" / f"t {number}.jpg", 160, 120)
        xml(tmp_path / "Annotations" / f"t{number}.xml", more="<difficult>Unspecified</difficult>")
        listing = tmp_path / place / f"{split}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text(f"./JPEGImages/t {number}.jpg ./Annotations/t{number}.xml\r\n")
    data = tmp_path if place else described(tmp_path, "train.txt", "val.txt")
    for number, split in ((1, "train"), (2, "val")):
        index = index_of(data, split)
        assert rows_by_name(index) == {f"t {number}.jpg": [ROW]} and not index.problem_kinds


@pytest.mark.parametrize("line", ["a", "a.jpg", "JPEGImages/a.jpg", "VOC\\JPEGImages\\a.jpg", "a 1", "a  -1"])
def test_names_of_lists(tmp_path: Path, line: str) -> None:
    write_picture(tmp_path / "JPEGImages" / "a.jpg", 160, 120)
    xml(tmp_path / "Annotations" / "a.xml")
    for split in ("train", "val"):
        path = tmp_path / "ImageSets" / "Main" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{line}\n")
    index = index_of(tmp_path)
    assert rows_by_name(index) == {"a.jpg": [ROW]}
    assert index.problem_kinds == ({"name-assumed": 1} if "." in line else {})


@pytest.mark.parametrize("folders", [("images", "annotations"), ("pictures", "pictures"), ("images", "xmls")])
def test_xml_without_lists(tmp_path: Path, folders: tuple[str, str]) -> None:
    for name in ("m1", "m2"):
        write_picture(tmp_path / folders[0] / f"{name}.png", 160, 120)
        xml(tmp_path / folders[1] / f"{name}.xml")
    xml(tmp_path / folders[1] / "m3.xml")
    expected = {"m1.png": [ROW], "m2.png": [ROW]}
    spec = load_dataset(str(tmp_path))
    assert spec.names == ("fire",) and list(spec.splits) == ["train", "val"]
    index = build_index(spec, "train")
    assert rows_by_name(index) == expected and index.problem_kinds == {"labels-without-image": 1}
    assert "m3.xml: belongs to no image" in index.problems_text()
    assert rows_by_name(index_of(described(tmp_path, folders[0], folders[0]))) == expected


def test_folders_of_splits_are_splits(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        write_picture(tmp_path / split / f"{split}.png", 160, 120)
        xml(tmp_path / split / f"{split}.xml")
    spec = load_dataset(str(tmp_path))
    assert rows_by_name(build_index(spec, "train")) == {"train.png": [ROW]}
    assert rows_by_name(build_index(spec, "val")) == {"valid.png": [ROW]}


@pytest.mark.parametrize(
    ("size", "box", "row", "kind"),
    [
        ((320, 240), (81, 61, 160, 120), ROW, "size-differs"),
        ((120, 160), (41, 31, 80, 60), ROW, "size-unsure"),  # a program exchanged the sides
        ((160, 90), (41, 31, 80, 60), ROW, "size-unsure"),
        ((0, 0), (41, 31, 80, 60), ROW, ""),
        (("", "?"), (41, 31, 80, 60), ROW, ""),
        ((160, 120), ("41.0", "31", "8.0e1", "60"), ROW, ""),
    ],
)
def test_the_stated_size_scales_boxes_only_if_it_is_certain(
    tmp_path: Path, size: tuple[object, object], box: tuple[object, ...], row: list[float], kind: str
) -> None:
    write_picture(tmp_path / "a.png", 160, 120)
    xml(tmp_path / "a.xml", size=size, box=box)
    index = index_of(tmp_path)
    assert rows_by_name(index) == {"a.png": [row]} and index.problem_kinds == ({kind: 1} if kind else {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"box": (41, "3l", 80, 60)}, "ymin is '3l', not a number"),
        ({"box": (41, "nan", 80, 60)}, "ymin is 'nan', not a number"),
        ({"more": "<difficult>maybe</difficult>"}, "difficult is 'maybe', not 0 or 1"),
    ],
)
def test_other_values_are_dropped_with_field_and_value(tmp_path: Path, change: dict, words: str) -> None:
    for name in ("a", "b", "c"):
        write_picture(tmp_path / f"{name}.png", 160, 120)
        xml(tmp_path / f"{name}.xml", **(change if name == "b" else {}))
    index = index_of(tmp_path)
    assert rows_by_name(index) == {"a.png": [ROW], "b.png": [], "c.png": [ROW]}
    assert index.problem_kinds == {"label-unreadable": 1}
    assert f"object 1 (fire): {words}" in index.problems_text()


@pytest.mark.parametrize("difficult", ["1", "True"])
def test_difficult_objects_are_crowd_regions(tmp_path: Path, difficult: str) -> None:
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 160, 120)
        xml(tmp_path / f"{name}.xml", more=f"<difficult>{difficult}</difficult>" if name == "a" else "")
    index = index_of(tmp_path)
    assert rows_by_name(index) == {"a.png": [], "b.png": [ROW]} and index.totals()["crowd regions"] == 1


def voc_folder(root: Path, folders: tuple[str, str, str], lists: dict[str, str]) -> None:
    """Images a, b, c and d with a label each, and lists; folders: of images, XML files and lists."""
    for stem in "abcd":
        write_picture(root / folders[0] / f"{stem}.jpg", 160, 120)
        xml(root / folders[1] / f"{stem}.xml")
    for name, text in lists.items():
        path = root / folders[2] / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


USUAL = ("JPEGImages", "Annotations", "ImageSets/Main")


@pytest.mark.parametrize(
    "folders", [("jpegimages", "annotations", "imagesets/main"), ("Images", "ANNOTATIONS", "ImageSets/main")]
)
def test_lists_in_folders_of_other_case_divide_the_images(
    tmp_path: Path, folders: tuple[str, str, str]
) -> None:
    voc_folder(tmp_path, folders, {"train": "a\nb\n", "val": "c\n"})
    assert rows_by_name(index_of(tmp_path)) == {"a.jpg": [ROW], "b.jpg": [ROW]}
    assert rows_by_name(index_of(tmp_path, "val")) == {"c.jpg": [ROW]}
    voc_yaml = described(tmp_path, f"{folders[2]}/train.txt", ".")
    assert sorted(rows_by_name(index_of(voc_yaml))) == ["a.jpg", "b.jpg"]
    assert sorted(rows_by_name(index_of(voc_yaml, "val"))) == ["c.jpg"]


@pytest.mark.parametrize("val", ["val", "valid"])
def test_a_folder_of_paddle_is_divided_by_its_lists_and_numbered_by_its_names(
    tmp_path: Path, val: str
) -> None:
    pairs = {stem: f"JPEGImages/{stem}.jpg Annotations/{stem}.xml\n" for stem in "abc"}
    voc_folder(tmp_path, (*USUAL[:2], ""), {"train": pairs["a"] + pairs["b"], val: pairs["c"]})
    (tmp_path / "label_list.txt").write_text("smoke\nfire\n")
    spec = load_dataset(str(tmp_path))
    assert spec.names == ("smoke", "fire") and "names from label_list.txt: smoke, fire" in spec.notes
    row = [1, *ROW[1:]]
    assert rows_by_name(index_of(tmp_path)) == {"a.jpg": [row], "b.jpg": [row]}
    assert rows_by_name(index_of(tmp_path, "val")) == {"c.jpg": [row]}


def test_a_list_of_pairs_says_which_other_names_it_used(tmp_path: Path) -> None:
    lines = "JPEGImages\\a.jpg Annotations\\a.xml\nJPEGImages/b.jpg Annotations/b.xml\n"
    voc_folder(tmp_path, (*USUAL[:2], ""), {"train": lines, "val": lines})
    (tmp_path / "label_list.txt").write_text("smoke\nfire\n")
    index = index_of(tmp_path)
    assert len(index) == 2 and index.problem_kinds == {"name-assumed": 2}
    assert "names without a file: 2; others are used, as JPEGImages\\a.jpg -> " in index.assumed[0]


def test_trainval_is_not_learned_beside_a_list_of_val(tmp_path: Path) -> None:
    voc_folder(tmp_path, USUAL, {"trainval": "a\nb\nc\n", "val": "c\n"})
    with pytest.raises(DataError, match="has no list of its train images") as caught:
        index_of(tmp_path)
    assert "train.txt" in caught.value.hint and "none that another list has" in caught.value.hint
    assert rows_by_name(index_of(tmp_path, "val")) == {"c.jpg": [ROW]}
    (tmp_path / "ImageSets/Main/val.txt").rename(tmp_path / "ImageSets/Main/test.txt")
    assert len(index_of(tmp_path)) == 3


@pytest.mark.parametrize(
    "points",
    [
        "<x1>41</x1><y1>31</y1><x2>80</x2><y2>31</y2><x3>60</x3><y3>60</y3>",
        "<pt><x>41</x><y>60</y></pt><pt><x>80</x><y>31</y></pt>",
    ],
)
def test_an_object_with_a_polygon_alone_has_the_box_around_it(tmp_path: Path, points: str) -> None:
    voc_folder(tmp_path, USUAL, {"train": "a\nb\n", "val": "c\n"})
    path = tmp_path / "Annotations" / "a.xml"
    path.write_text(re.sub("<bndbox>.*</bndbox>", f"<polygon>{points}</polygon>", path.read_text()))
    assert rows_by_name(index_of(tmp_path)) == {"a.jpg": [ROW], "b.jpg": [ROW]}


def test_a_name_that_two_images_share_is_refused_if_a_list_has_it(tmp_path: Path) -> None:
    voc_folder(tmp_path, USUAL, {"train": "a\nb\n", "val": "c\n"})
    write_picture(tmp_path / "JPEGImages" / "d.png", 40, 40)
    assert len(index_of(tmp_path)) == 2
    write_picture(tmp_path / "JPEGImages" / "a.png", 40, 40)
    with pytest.raises(DataError, match=r"may mean .*a\.jpg or .*a\.png"):
        index_of(tmp_path)


def test_a_line_of_a_list_that_leads_elsewhere_opens_no_other_folder(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "set", tmp_path / "elsewhere"
    write_picture(elsewhere / "deep" / "b.jpg", 160, 120)
    for name in ("c", "d", "e"):
        write_picture(root / "JPEGImages" / f"{name}.jpg", 160, 120)
        xml(root / "Annotations" / f"{name}.xml")
    xml(root / "Annotations" / "b.xml")
    listing = root / "ImageSets" / "Main" / "train.txt"
    listing.parent.mkdir(parents=True)
    listing.write_text(f"c\nd\ne\n{elsewhere}/x\n/dev/fd/999/x\n")
    index = index_of(root)
    assert list(rows_by_name(index)) == ["c.jpg", "d.jpg", "e.jpg"]
    assert index.problem_kinds == {"image-missing": 2, "labels-without-image": 1}


def two_splits(root: Path, objects: str, *, head: str = "", encoding: str = "utf-8") -> Path:
    """A folder with lists, one image of 96 x 64 pixels in each split, and these objects."""
    size = "<size><width>96</width><height>64</height></size>"
    for split in ("train", "val"):
        write_picture(root / "JPEGImages" / f"{split}.png", 96, 64)
        for place, text in (("Annotations", "xml"), ("ImageSets/Main", "txt")):
            file = root / place / f"{split}.{text}"
            file.parent.mkdir(parents=True, exist_ok=True)
            content = f"{head}<annotation>{size}{objects}</annotation>" if text == "xml" else split
            file.write_bytes(content.encode(encoding))
    return root


def one_object(box: str, name: str = "cup") -> str:
    return f"<object><name>{name}</name>{box}</object>"


def corners(*numbers: float) -> str:
    tags = zip(("xmin", "ymin", "xmax", "ymax"), numbers, strict=True)
    return f"<bndbox>{''.join(f'<{tag}>{number}</{tag}>' for tag, number in tags)}</bndbox>"


@pytest.mark.parametrize(
    ("declared", "codec", "name"),
    [
        ("GBK", "gbk", "杯子"), ("gb2312", "gbk", "杯子"), ("GB18030", "gb18030", "杯子"), ("Big5", "big5", "杯子"),
        ("Shift_JIS", "shift_jis", "カップ"), ("EUC-JP", "euc_jp", "カップ"), ("euc-kr", "euc_kr", "컵"),
        ("ISO-8859-1", "latin-1", "tasse à thé"), ("utf-16", "utf-16", "杯子"),
    ],
)  # fmt: skip
def test_encodings_that_tools_write_are_read(tmp_path: Path, declared: str, codec: str, name: str) -> None:
    head = f'<?xml version="1.0" encoding="{declared}"?>'
    index = index_of(
        two_splits(tmp_path, one_object(corners(11, 9, 40, 28), name), head=head, encoding=codec)
    )
    assert index.names == (name,) and len(index.classes) == 1 and not index.problem_kinds


@pytest.mark.parametrize(
    ("head", "encoding", "reason"),
    [
        ('<?xml version="1.0"?><!DOCTYPE annotation>', "utf-8", "has a document type (DOCTYPE)"),
        ('<?xml version="1.0" encoding="rot13"?>', "utf-8", "is not readable XML"),
        ('<?xml version="1.0" encoding="utf-7"?>', "utf-8", "is not readable XML"),
        ('<?xml version="1.0" encoding="GBK"?>', "latin-1", "is not text in gb18030"),
        ("<<", "utf-8", "is not XML"),
    ],
)
@pytest.mark.parametrize("has_names", [False, True])
def test_a_file_that_cannot_be_read_is_named_with_its_reason(
    tmp_path: Path, head: str, encoding: str, reason: str, has_names: bool
) -> None:
    two_splits(tmp_path, one_object(corners(11, 9, 40, 28), "é"), head=head, encoding=encoding)
    with pytest.raises(DataError) as caught:
        index_of(described(tmp_path, ".", ".") if has_names else tmp_path)
    assert "Annotations/train.xml" in str(caught.value) and reason in str(caught.value)


def test_the_first_of_several_boxes_of_an_object_is_taken_and_said(tmp_path: Path) -> None:
    two = one_object(corners(11, 9, 40, 28) + corners(51, 31, 90, 60))
    part = f"<part><name>handle</name>{corners(1, 1, 5, 5)}</part>"
    index = index_of(two_splits(tmp_path, two + one_object(part + corners(51, 31, 90, 60))))
    expected = [(10 + 40) / 2 / 96, (8 + 28) / 2 / 64, 30 / 96, 20 / 64], [70 / 96, 45 / 64, 40 / 96, 30 / 64]
    assert index.boxes_cxcywh_unit.tolist() == [pytest.approx(box) for box in expected]
    assert index.problem_kinds == {"box-derived": 1} and "objects with several bndbox" in index.assumed[0]


def test_rotated_boxes_of_rolabelimg_are_learned_as_the_box_around_them(tmp_path: Path) -> None:
    box = "<robndbox><cx>48</cx><cy>32</cy><w>40</w><h>10</h><angle>1.57079633</angle></robndbox>"
    index = index_of(two_splits(tmp_path, one_object(box)))
    assert index.boxes_cxcywh_unit.tolist() == [pytest.approx([0.5, 0.5, 10 / 96, 40 / 64], abs=1e-5)]
    assert index.problem_kinds == {"box-derived": 1} and "rotated boxes" in index.assumed[0]


def test_exchanged_corners_are_named(tmp_path: Path) -> None:
    good = one_object(corners(11, 9, 40, 28))
    index = index_of(two_splits(tmp_path, good + good + one_object(corners(40, 9, 11, 28))))
    assert index.problem_kinds["box-empty"] == 1 and "xmin > xmax" in str(index.problems[0])


def test_whole_images_of_a_set_in_fractions_are_fractions_too(tmp_path: Path) -> None:
    root = two_splits(tmp_path, one_object(corners(0, 0, 1, 1)))
    whole = (root / "Annotations/val.xml").read_text()
    (root / "Annotations/train.xml").write_text(whole.replace("<xmin>0", "<xmin>0.5"))
    write_picture(root / "JPEGImages" / "val.png", 96, 64)
    (root / "ImageSets/Main/train.txt").write_text("val\ntrain\n")
    index = index_of(root)
    assert index.boxes_cxcywh_unit.tolist() == [[0.5, 0.5, 1, 1], [0.75, 0.5, 0.5, 1]]
    assert index.problem_kinds == {"numbers-assumed": 2}


def test_a_box_of_one_pixel_is_no_whole_image_where_other_files_have_pixels(tmp_path: Path) -> None:
    """Some programs write the box 0, 0, 1, 1 for an image without objects."""
    root = two_splits(tmp_path, one_object(corners(11, 9, 40, 28)))
    (root / "Annotations/empty.xml").write_text(f"<annotation>{one_object(corners(0, 0, 1, 1))}</annotation>")
    write_picture(root / "JPEGImages" / "empty.png", 96, 64)
    (root / "ImageSets/Main/train.txt").write_text("empty\ntrain\n")
    index = index_of(root)
    assert index.boxes_cxcywh_unit[:, 2:].max() < 0.4 and "numbers-assumed" not in index.problem_kinds


@pytest.mark.parametrize("box", [(11, 9, 40, 28), (40, 9, 11, 28), (900, 900, 999, 999)])
def test_a_file_with_many_problems_is_not_read_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: tuple[float, ...]
) -> None:
    others = "".join(
        one_object(corners(n % 50 + 1, n % 30 + 1, n % 50 + 40, n % 30 + 20)) for n in range(300)
    )
    root = two_splits(tmp_path, others + one_object(corners(*box)) * 100)
    calls, read_labels = list[Any](), vocxml.read_labels

    def counted(*given: Any) -> Any:
        calls.append(given)
        return read_labels(*given)

    monkeypatch.setattr(vocxml, "read_labels", counted)
    assert sum(index_of(root).problem_kinds.values()) >= 99
    assert len(calls) <= 8  # names, labels and lines of two splits
