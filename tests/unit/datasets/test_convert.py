"""Conversion: the same boxes, classes and names in every form, whole or not at all, said what is lost."""

from __future__ import annotations

import json
import os
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_files import image, label, write_coco
from label_rows import index_of, rows_of
from reference import reference
from small_data import ODD_NAMES, encoded, picture, with_exif_jpeg, write_picture, yolo_set

from yolofleet.data.datasets.combine import merge_datasets
from yolofleet.data.datasets.convert import Target, convert
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.support.errors import ConfigError, DataError, StorageError

TARGETS: tuple[Target, ...] = ("yolo", "coco", "voc")
GOOD = "0 0.5 0.5 0.2 0.4\n"


def converted(source, out, target, **choices):
    return convert(load_dataset(str(source)), out, target, **choices)


def stems(index: DataIndex) -> list[str]:
    return [Path(path).stem for path in index.paths]


def assert_alike(first: DataIndex, second: DataIndex, *, without_crowd: bool = False) -> None:
    """Labels image by image, whatever the order of the images is; boxes to 0.01 pixels."""
    assert first.names == second.names
    assert sorted(stems(first)) == sorted(stems(second))
    place = {stem: at for at, stem in enumerate(stems(second))}
    for at, stem in enumerate(stems(first)):
        other = place[stem]
        assert first.sizes_wh[at].tolist() == second.sizes_wh[other].tolist()
        a, b = (slice(*index.offsets[i : i + 2].tolist()) for index, i in ((first, at), (second, other)))
        keep = ~first.crowd[a] if without_crowd else np.ones(a.stop - a.start, bool)
        assert first.classes[a][keep].tolist() == second.classes[b].tolist(), stem
        assert first.crowd[a][keep].tolist() == second.crowd[b].tolist(), stem
        boxes = first.boxes_cxcywh_unit[a][keep].astype(float) - second.boxes_cxcywh_unit[b]
        assert np.abs(boxes * np.tile(first.sizes_wh[at], 2)).max(initial=0) < 0.01, stem


def rich_set(root: Path) -> Path:
    """COCO with everything that it can say: ids, a category without labels, crowds, areas, equal boxes, unlabelled
    and turned images, folders."""
    rng = np.random.default_rng(0)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, name in enumerate(("b/x.jpg", "a/y y.png", "z.jpg", "a/empty.jpg", "turned.jpg")):
        width, height = 64 + 16 * number, 48
        path = write_picture(root / "images" / "train2017" / name, width, height, seed=number)
        if name == "turned.jpg":
            path.write_bytes(with_exif_jpeg(encoded(picture(48, width)), 6))
        images.append(image(70 - number, name, width, height))
        for _ in range(0 if "empty" in name else 6):
            left, top = rng.uniform(0, 30, 2)
            box = [left, top, *rng.uniform(1, 18, 2)]
            area = {"area": box[2] * box[3] / 2} if rng.random() < 0.5 else {}
            more = {"category": int(rng.choice([3, 9]))} | area | {"iscrowd": int(rng.random() < 0.2)}
            annotations.append(label(len(annotations) * 3, 70 - number, box, **more))
    annotations.append({**annotations[0], "id": 1000, "iscrowd": 0})
    annotations.append({**annotations[0], "id": 1001, "iscrowd": 0})
    categories = [(9, "dog"), (3, 'Übung <cat> & "co"'), (5, "none")]
    return write_coco(root / "annotations" / "instances_train2017.json", images, annotations, categories)


# the same data in every form


@pytest.mark.parametrize("second", TARGETS)
@pytest.mark.parametrize("first", TARGETS)
def test_two_conversions_in_any_order_keep_what_both_forms_can_say(tmp_path, first, second):
    source = rich_set(tmp_path / "set")
    before = index_of(source)
    assert before.crowd.any() and (np.diff(before.offsets) == 0).any()
    converted(source, tmp_path / "one", first)
    middle = index_of(tmp_path / "one")
    converted(tmp_path / "one", tmp_path / "two", second)
    after = index_of(tmp_path / "two")
    for index, passed in ((middle, {first}), (after, {first, second})):
        assert index.names == before.names == ('Übung <cat> & "co"', "none", "dog")
        assert not index.problems
        assert len(index.classes) == len(before.classes) - ("yolo" in passed) * (before.crowd.sum() + 2)
        if "yolo" not in passed and "voc" not in passed:
            assert index.image_ids.tolist() == before.image_ids.tolist()
            assert np.allclose(index.area_px, before.area_px, atol=0.002)
            assert_alike(before, index)
    if "yolo" not in (first, second):
        names = ("turned", "a/empty", "z", "a/y y", "b/x")
        is_flat = "voc" in (first, second)
        assert stems(after) == [name.replace("/", "__") if is_flat else Path(name).name for name in names]


def test_yolo_keeps_every_bit_of_its_own_numbers(tmp_path):
    rng = np.random.default_rng(1)
    rows = rng.uniform(0.2, 0.3, (200, 4)).astype(np.float32)
    rows[:20, 2:] *= 1e-6
    text = "".join(f"2 {' '.join(map(repr, row.tolist()))}\n" for row in rows)
    yolo_set(tmp_path / "set", {"a": text, "b": GOOD})
    converted(tmp_path / "set", tmp_path / "out", "yolo")
    before, after = index_of(tmp_path / "set"), index_of(tmp_path / "out")
    assert after.boxes_cxcywh_unit.tobytes() == before.boxes_cxcywh_unit.tobytes()
    assert before.boxes_cxcywh_unit[:-1].tobytes() == rows.tobytes()
    assert after.digest == before.digest


def test_what_is_written_is_what_other_programs_read(tmp_path):
    """pycocotools, ElementTree and numpy against each other on pixels worked by hand."""
    from pycocotools.coco import COCO

    # 64 x 48 pixels: centre (32, 12), 16 wide, 24 high -> 24, 0, 40, 24
    yolo_set(tmp_path / "set", {"a": "1 0.5 0.25 0.25 0.5\n", "b": None, "c": GOOD})
    for target in TARGETS:
        converted(tmp_path / "set", tmp_path / target, target)
    coco = COCO(str(tmp_path / "coco" / "annotations" / "instances_train.json"))
    assert [image["file_name"] for image in coco.loadImgs(coco.getImgIds())] == ["a.jpg", "b.jpg", "c.jpg"]
    (annotation,) = coco.loadAnns(coco.getAnnIds(imgIds=[0]))
    assert annotation == {"id": 1, "image_id": 0, "category_id": 2, "bbox": [24.0, 0.0, 16.0, 24.0], "area": 384.0, "iscrowd": 0}  # fmt: skip
    assert coco.cats == {i + 1: {"id": i + 1, "name": name} for i, name in enumerate(("cat", "dog", "bird"))}
    root = ET.parse(tmp_path / "voc" / "Annotations" / "a.xml").getroot()
    assert [root.findtext(f"size/{side}") for side in ("width", "height")] == ["64", "48"]
    assert root.findtext("filename") == "a.jpg" and root.findtext("object/name") == "dog"
    corners = [root.findtext(f"object/bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
    assert corners == ["25", "1", "40", "24"]  # pixel numbers from 1
    assert (tmp_path / "voc" / "ImageSets" / "Main" / "train.txt").read_text() == "a\nb\nc\n"
    assert np.loadtxt(tmp_path / "yolo" / "labels" / "train" / "a.txt").tolist() == [1, 0.5, 0.25, 0.25, 0.5]
    assert (tmp_path / "yolo" / "labels" / "train" / "b.txt").read_text() == ""


@pytest.mark.parametrize("relative", ["data/bccd", "data/coco128val"])
def test_real_sets_come_back_from_the_way_around(tmp_path, relative):
    first = source = reference(relative)
    for number, target in enumerate(("coco", "voc", "yolo")):
        out = tmp_path / f"{number}"
        done = converted(source, out, target)
        assert not any("cannot store" in note for note in done.notes)
        source = out
    for split in ("train", "val"):
        before, after = index_of(first, split), index_of(source, split)
        assert_alike(before, after)
        assert stems(before) == stems(after)
        assert before.image_ids.tolist() == after.image_ids.tolist()
        assert [Path(p).stat().st_size for p in before.paths] == [Path(p).stat().st_size for p in after.paths]


# splits, names, images


def test_splits_of_the_same_files_are_written_once(tmp_path):
    yolo_set(tmp_path / "set", {"a": GOOD})  # train and val are one folder
    for target in TARGETS:
        done = converted(tmp_path / "set", tmp_path / target, target)
        assert done.splits == {"train": (1, 1)}
        assert "val has the same files as train: written once" in done.notes
        assert_alike(index_of(tmp_path / target, "val"), index_of(tmp_path / target, "train"))
    converted(tmp_path / "set", tmp_path / "val", "yolo", splits=["val"])
    assert list(load_dataset(str(tmp_path / "val")).splits) == ["val"]
    with pytest.raises(ConfigError, match="no split 'test'"):
        converted(tmp_path / "set", tmp_path / "test", "yolo", splits=["test"])


def test_names_choose_classes_and_their_order(tmp_path):
    source = rich_set(tmp_path / "set")
    before = index_of(source)
    converted(source, tmp_path / "out", "coco", names=["dog", "none"])
    after = index_of(tmp_path / "out")
    assert after.names == ("dog", "none") and len(after) == len(before)
    assert after.class_counts().tolist() == [before.class_counts()[2], 0]
    content = json.loads((tmp_path / "out" / "annotations" / "instances_train.json").read_text())
    assert [(c["id"], c["name"]) for c in content["categories"]] == [(9, "dog"), (5, "none")]
    with pytest.raises(ConfigError, match="no class dgo") as caught:
        converted(source, tmp_path / "no", "coco", names=["dgo"])
    assert caught.value.hint == "did you mean dog?"
    with pytest.raises(ConfigError, match="dog occurs twice"):
        converted(source, tmp_path / "no", "yolo", names=["dog", "dog"])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("images", ["link", "copy", "symlink"])
def test_images_are_linked_or_copied(tmp_path, target, images):
    if images == "symlink" and sys.platform == "win32":
        pytest.skip("symbolic links need a privilege there")
    yolo_set(tmp_path / "set", {"a": GOOD})
    done = converted(tmp_path / "set", tmp_path / "out", target, images=images)
    source, path = tmp_path / "set" / "images" / "train" / "a.jpg", Path(index_of(tmp_path / "out").path(0))
    assert path.read_bytes() == source.read_bytes()
    assert (path.stat().st_ino == source.stat().st_ino) == (images != "copy")
    assert path.is_symlink() == (images == "symlink") and done.copied == (images == "copy")


def test_where_the_disk_has_no_links_images_are_copied(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(18, "Invalid cross-device link")

    yolo_set(tmp_path / "set", {"a": GOOD, "b": GOOD})
    monkeypatch.setattr(os, "link", refused)
    assert converted(tmp_path / "set", tmp_path / "out", "yolo").copied == 2
    assert len(index_of(tmp_path / "out")) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_labels_alone_fit_images_that_are_put_there_later(tmp_path, target):
    yolo_set(tmp_path / "set", {name: GOOD for name in ("a", "b c", "d e 1")})
    done = converted(tmp_path / "set", tmp_path / "out", target, images="none")
    assert done.splits == {"train": (3, 3)}
    assert not list((tmp_path / "out").rglob("*.jpg"))
    place = tmp_path / "out" / ("JPEGImages" if target == "voc" else "images/train")
    shutil.copytree(tmp_path / "set" / "images" / "train", place, dirs_exist_ok=True)
    assert_alike(index_of(tmp_path / "set"), index_of(tmp_path / "out"))


def test_labels_alone_are_refused_where_images_would_need_new_names(tmp_path):
    yolo_set(tmp_path / "set", {"a": GOOD})
    write_picture(tmp_path / "set" / "images" / "train" / "a.png")
    with pytest.raises(ConfigError, match="1 images need other names in coco's layout"):
        converted(tmp_path / "set", tmp_path / "out", "coco", images="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="these names exist on Linux only")
@pytest.mark.parametrize("target", TARGETS)
def test_any_file_name_finds_its_place(tmp_path, target):
    """Names that a layout cannot have are changed; every image keeps its labels."""
    names = [
        *ODD_NAMES,
        ".hidden",
        "a",
        "A",
        "images/b",
        "labels/images/b",
        "sub/JPEGImages/c",
        "sub/a",
        "x 1",
        "x",
    ]
    names += ["new\nline", "tab\t", os.fsdecode(b"caf\xe9"), "end ", "__a"]
    root, listed = tmp_path / "set" / "pictures", []
    for number, name in enumerate(names):
        path = write_picture(tmp_path / "one.png", 32 + number, 40, seed=number)
        to = root / f"{name}{('.jpg', '', '.heic')[number % 3]}"
        to.parent.mkdir(parents=True, exist_ok=True)
        path.rename(to)
        listed.append(image(number, str(to.relative_to(root)), 32 + number, 40))
    labels = [label(number, number, [number, 2, 3, 4]) for number in range(len(names))]
    source = write_coco(root / "pictures.json", listed, labels)
    done = converted(source, tmp_path / "out", target, splits=["train"])
    assert done.splits == {"train": (len(names), len(names))}
    assert any("images have new names" in note for note in done.notes)
    after = index_of(tmp_path / "out")
    assert sorted(after.sizes_wh[:, 0].tolist()) == [32 + number for number in range(len(names))]
    for at, width in enumerate(after.sizes_wh[:, 0].tolist()):
        ((_, centre, *_),) = rows_of(after.labels(at)).tolist()
        assert centre * width == pytest.approx(width - 32 + 1.5, abs=0.01)
    out = (tmp_path / "out").resolve()
    assert all(out in Path(os.path.normpath(path)).parents for path in after.paths)


def test_names_that_lead_out_of_the_folder_stay_inside(tmp_path):
    write_picture(tmp_path / "set" / "pictures" / "a.jpg")
    write_picture(tmp_path / "b.jpg", 32, 32)
    outside = ("../set/pictures/a.jpg", "../b.jpg", str(tmp_path / "b.jpg"))
    images = [image(number, name, 32, 32) for number, name in enumerate(outside)]
    path = write_coco(tmp_path / "set" / "x.json", images, [label(i, i, [1, 1, 2, 2]) for i in range(3)])
    for target in TARGETS:
        converted(path, tmp_path / "deep" / "out" / target, target)
        made = [p for p in tmp_path.rglob("*") if p.is_file() and "cache" not in p.parts]
        assert all({"set", "deep"} & set(p.relative_to(tmp_path).parts) or p.name == "b.jpg" for p in made)
        assert len(index_of(tmp_path / "deep" / "out" / target)) == 2  # two names are those of one file


def test_splits_share_vocs_folder_without_a_clash(tmp_path):
    yolo_set(tmp_path / "set", {"a": GOOD, "b": GOOD})
    write_picture(tmp_path / "set" / "images" / "val" / "b.jpg", 40, 40)
    (tmp_path / "set" / "labels" / "val").mkdir()
    (tmp_path / "set" / "labels" / "val" / "b.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    (tmp_path / "set" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [x, y]\n")
    converted(tmp_path / "set", tmp_path / "out", "voc")
    train, val = (index_of(tmp_path / "out", split) for split in ("train", "val"))
    assert stems(train) == ["a", "b"] and stems(val) == ["val-b"] and val.class_counts().tolist() == [0, 1]


# what is lost is said


def test_what_a_form_cannot_say_is_said(tmp_path):
    source = rich_set(tmp_path / "set")
    before = index_of(source)
    crowds = int(before.crowd.sum())
    notes = "\n".join(converted(source, tmp_path / "yolo", "yolo").notes)
    assert f"train: yolo cannot store {crowds} crowd regions or difficult objects: left out" in notes
    assert "2 repeated labels: written once" in notes
    assert (
        "areas of outlines" in notes
        and "image ids: predictions in COCO's format then have other ids" in notes
    )
    notes = "\n".join(converted(source, tmp_path / "voc", "voc").notes)
    assert "areas of outlines" in notes and "crowd" not in notes
    notes = "\n".join(converted(source, tmp_path / "coco", "coco").notes)
    assert "cannot store" not in notes


def test_labels_that_cannot_be_used_are_reported_and_wrong_classes_refused(tmp_path):
    yolo_set(tmp_path / "set", {"a": GOOD + "1 0.5 0.5 0 0.1\n", "b": GOOD, "c": GOOD})
    notes = "\n".join(converted(tmp_path / "set", tmp_path / "out", "coco").notes)
    assert "labels/train/a.txt:2: box 0.5 0.5 0 0.1 has no width or height -> dropped" in notes
    (tmp_path / "set" / "labels" / "train" / "a.txt").write_text("7 .5 .5 .1 .1")
    with pytest.raises(DataError, match="class 7 but names has 3"):
        converted(tmp_path / "set", tmp_path / "no", "coco")
    assert not (tmp_path / "no").exists()


def test_class_names_that_a_form_cannot_write_are_refused(tmp_path):
    for target, names, fault in (
        ("voc", "['a\\u0001', b]", "cannot be stored in XML"),
        ("voc", "[' a', b]", "cannot be stored in XML"),
        ("voc", "[a, a]", "occurs twice"),
        ("coco", "[a, a]", "occurs twice"),
    ):
        yolo_set(tmp_path / "set", {"a": GOOD}, names=names.replace("'a\\u0001'", '"a\\u0001"'))
        with pytest.raises(ConfigError, match=fault):
            converted(tmp_path / "set", tmp_path / "out", target)
        assert not (tmp_path / "out").exists()
        converted(tmp_path / "set", tmp_path / "yolo", "yolo")
        assert index_of(tmp_path / "yolo").names == index_of(tmp_path / "set").names
        shutil.rmtree(tmp_path / "yolo")


def test_names_that_other_readers_take_for_booleans_or_numbers_come_back(tmp_path):
    names = ("yes", "No", "OFF", "010", "1e3", "y")
    yolo_set(tmp_path / "set", {"a": GOOD}, names=str([*names]))
    for target in ("yolo", "coco", "voc"):
        converted(tmp_path / "set", tmp_path / target, target)
        assert index_of(tmp_path / target).names == names


def test_what_a_conversion_assumed_is_a_note(tmp_path):
    yolo_set(tmp_path / "set", {"a": "0 0.5 0.3 0.7 0.5 0.5 0.7 0.3 0.5\n"})
    done = converted(tmp_path / "set", tmp_path / "out", "coco")
    assert any("read as the box around 4 corners: 1" in note for note in done.notes)


def test_specks_are_left_out_where_pixels_cannot_show_them(tmp_path):
    yolo_set(tmp_path / "set", {"a": "0 0.5 0.5 1e-9 0.1\n0 0.5 0.5 1e-6 1e-6\n", "b": GOOD})
    for target, labels in (("yolo", 3), ("coco", 2), ("voc", 2)):
        done = converted(tmp_path / "set", tmp_path / target, target)
        assert done.splits["train"] == (2, labels)
        assert any("1 boxes smaller than a millionth" in note for note in done.notes) == (labels == 2)
        index = index_of(tmp_path / target)
        assert len(index.classes) == labels and (index.boxes_cxcywh_unit[:, 2:] > 0).all()


# whole or not at all


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("set", "cache"))


def test_existing_folders_are_left_alone(tmp_path):
    yolo_set(tmp_path / "set", {"a": GOOD})
    (tmp_path / "out").mkdir()
    converted(tmp_path / "set", tmp_path / "out", "yolo")  # an empty folder is as good as none
    before = sorted((tmp_path / "out").rglob("*"))
    for taken in (tmp_path / "out", tmp_path / "set" / "data.yaml"):
        with pytest.raises(ConfigError, match="is not an empty folder"):
            converted(tmp_path / "set", taken, "coco")
    assert sorted((tmp_path / "out").rglob("*")) == before


@pytest.mark.parametrize("stage", ["writing labels", "placing images", "reading back train"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, stage):
    yolo_set(tmp_path / "set", {"a": GOOD})
    seen = []

    def interrupt(what, *_):
        seen.append(what)
        if what == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(tmp_path / "set", tmp_path / "out", "coco", on_progress=interrupt)
    assert stage in seen and leftovers(tmp_path) == []


@pytest.mark.parametrize("images", ["link", "copy"])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, images):
    yolo_set(tmp_path / "set", {"a": GOOD})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageError, match="No space left"):
        converted(tmp_path / "set", tmp_path / "out", "yolo", images=images)
    assert leftovers(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    yolo_set(tmp_path / "set", {"a": GOOD})
    (tmp_path / "file").touch()
    with pytest.raises((StorageError, ConfigError), match="file"):
        converted(tmp_path / "set", tmp_path / "file" / "out", "yolo")
    with pytest.raises(ConfigError, match="cannot be used"):
        converted(tmp_path / "set", tmp_path / "a\0b", "yolo")


@pytest.mark.parametrize("damage", ["row", "image", "class", "box", "lost"])
def test_what_does_not_read_back_gets_no_name(tmp_path, monkeypatch, damage):
    yolo_set(tmp_path / "set", {"a": GOOD + "1 0.3 0.3 0.1 0.1\n", "b": GOOD})
    copy = shutil.copyfile

    def damaged(source, to):  # the disk that is written to
        copy(source, to)
        image = Path(to)
        if image.stem != "a":
            return
        rows = image.parents[2] / "labels" / image.parent.name / "a.txt"
        text = rows.read_text()
        if damage == "image":
            image.write_bytes(b"short")
        elif damage == "lost":
            image.unlink()
        else:
            new = {
                "row": text.splitlines()[0],
                "class": text.replace("1 0.3", "2 0.3"),
                "box": text.replace("0.3", "0.301"),
            }
            rows.write_text(new[damage])

    monkeypatch.setattr(shutil, "copyfile", damaged)
    with pytest.raises(StorageError, match="train differs when it is read back"):
        converted(tmp_path / "set", tmp_path / "out", "yolo", images="copy")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("target", ["yolo", "coco", "voc"])
def test_key_points_that_are_not_written_are_said(tmp_path: Path, target: Target) -> None:
    yaml = yolo_set(tmp_path / "pose", {"a": "0 0.5 0.5 0.2 0.4 0.5 0.5 0.6 0.6\n"})
    yaml.write_text(yaml.read_text() + "kpt_shape: [2, 2]\n")
    done = convert(load_dataset(str(yaml)), tmp_path / "out", target)
    assert "pose has key points: left out, only the boxes are written" in done.notes
    merged = merge_datasets([load_dataset(str(yaml))] * 2, tmp_path / "merged")
    assert any("key points" in note for note in merged.notes)
