"""`yolofleet data` as a person uses it: check, stats, convert, download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from commands import Outcome, called, working_in
from small_data import encoded, picture, write_picture, yolo_set

from yolofleet.data.datasets import check
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.stats import advice, figures

GOOD = "0 0.5 0.5 0.2 0.4\n"


@pytest.fixture
def data(tmp_path):
    """``yolofleet data ...`` in a folder of its own; no traceback, one message for a failure."""

    def run(*words: str | Path) -> Outcome:
        done = called("data", *words)
        assert "Traceback" not in done.err and (done.code == 0) == (done.err == ""), done.err
        return done

    with working_in(tmp_path, COLUMNS="200"):
        yield run


def two_splits(root: Path) -> Path:
    """Six images to learn from and two to validate on, of one kind each."""
    yolo_set(root, {f"t{number}": GOOD for number in range(6)}, names="[cat, dog]")
    for number in range(2):
        write_picture(root / "images" / "val" / f"v{number}.jpg", seed=100 + number)
        (root / "labels" / "val").mkdir(exist_ok=True)
        (root / "labels" / "val" / f"v{number}.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")
    return root


# check


def test_check_and_stats_count_the_same_images_as_background(data, tmp_path):
    root = two_splits(tmp_path / "set")
    for number in range(2):
        (root / "labels" / "train" / f"t{number}.txt").write_text("")
    (root / "labels" / "train" / "t2.txt").unlink()
    words = data("check", "set").words
    for row in ("images 6 2", "labels 3 2", "images without labels 3 0", "images without a label file 1 0",
                "empty label files 2 0"):  # fmt: skip
        assert row in words
    assert words.endswith("no problem found")
    assert "no labels 3 images" in data("stats", "set").words


def test_check_names_every_problem_with_file_and_line_and_counts_by_kind(data, tmp_path):
    root = two_splits(tmp_path / "set")
    label = root / "labels" / "train" / "t0.txt"
    rows = ["5 .5 .5 .1 .1", "0 .5 .5 .1", "0 nan .5 .1 .1", "0 30 .5 .1 .1", "0 .5 .5 0 .1", "0 -1 .5 .1 .1"]
    rows += ["0 .99 .5 .1 .1", *[GOOD.strip()] * 6]
    label.write_text("\n".join(rows))
    (root / "images" / "train" / "t1.jpg").write_bytes(b"")
    done = data("check", "set")
    assert done.code == 3 and "set loses images or labels; the problems are listed above" in done.err
    assert "train refuses this data set" in done.err
    for line, part in enumerate(
        ["class 5 but", "4 columns", "not finite", "pixels?", "no width", "lies outside", "sticks out"], 1
    ):
        assert f"labels/train/t0.txt:{line}: " in done.out and part in done.out
    assert "images/train/t1.jpg: is empty" in done.out
    for row in ("wrong-class train refuses 1 0", "label-unreadable dropped 1 0", "box-sticks-out clipped 1 0",
                "label-twice counted once 5 0", "image-unreadable image left out 1 0"):  # fmt: skip
        assert row in done.words
    for row in (
        "images 5 2",
        "labels 6 2",
        "labels clipped 1 0",
        "labels left out 6 0",
        "images left out 1 0",
    ):
        assert row in done.words
    assert "train: all images have 64 x 48 px; 1 of 2 classes have no label: dog" in done.out

    done = data("check", "set", "--limit", "2")
    assert "... and 11 more in train (--limit 0 shows all)" in done.out and "lies outside" not in done.out
    assert data("check", "set", "--limit", "0").out.count("labels/train/t0.txt:") == 12

    done = data("check", "set", "--json", "report.json", "--limit", "1")
    report = json.loads(Path("report.json").read_text())
    assert report["names"] == ["cat", "dog"] and report["unusable"] == {}
    train = report["splits"]["train"]
    assert (train["images"], train["labels"], train["kinds"]["label-twice"]) == (5, 6, 5)
    assert len(train["problems"]) == 13
    first = train["problems"][1]
    assert first == {"path": "labels/train/t0.txt", "line": 1, "kind": "wrong-class", "action": "train refuses",
                     "what": "class 5 but names has 2 (0..1)"}  # fmt: skip
    done = data("check", "set", "--json", "-")
    assert done.facts["splits"]["val"]["labels_of_class"] == {"cat": 0, "dog": 2}


def test_more_problems_than_are_stored_are_shown_when_asked_for(data, tmp_path):
    root = two_splits(tmp_path / "set")
    good = "".join(f"0 0.5 0.5 0.{number:04d} 0.1\n" for number in range(1, 1600))
    (root / "labels" / "train" / "t0.txt").write_text(good + "0 .5 .5 0 .1\n" * 1500)
    assert "and 1450 more" in data("check", "set").out
    assert data("check", "set", "--limit", "0").out.count("has no width") == 1500
    assert "and 300 more" in data("check", "set", "--limit", "1200").out


def test_a_split_that_cannot_be_used_is_named_and_the_others_are_checked(data, tmp_path):
    root = two_splits(tmp_path / "set")
    shutil.rmtree(root / "images" / "val")
    done = data("check", "set")
    assert done.code == 3 and "images/val do not exist" in done.out and "images 6 labels 6" in done.words
    assert data("check", "set", "--json", "-").facts["unusable"]["val"]["what"].endswith("do not exist")


def test_numbers_that_start_at_one_are_suspected(data, tmp_path):
    root = two_splits(tmp_path / "set")
    for label in (root / "labels").rglob("*.txt"):
        label.write_text("1 .5 .5 .1 .1\n2 .3 .3 .1 .1\n")
    done = data("check", "set")
    assert done.code == 3 and "are they numbered from 1?" in done.out


def test_decode_finds_what_headers_do_not_show(data, tmp_path):
    root = two_splits(tmp_path / "set")
    (root / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n")  # each split starts processes
    large = bytearray(encoded(picture(640, 480)))
    large[9000:9400] = bytes(400)
    (root / "images" / "train" / "t1.jpg").write_bytes(large)
    damaged = bytearray(encoded(picture(640, 480, 1), ".png"))
    damaged[9000:9400] = bytes(400)
    (root / "images" / "train" / "t2.jpg").write_bytes(damaged)
    assert data("check", "set").code == 0
    done = data("check", "set", "--decode")
    assert done.code == 3
    assert "images/train/t1.jpg: decoder warning: Corrupt JPEG data" in done.out
    assert "images/train/t2.jpg: cannot be decoded -> stops a training" in done.out
    assert "image-undecodable stops a training 1" in done.words
    assert "image-damaged used as it is 1" in done.words
    (root / "images" / "train" / "t2.jpg").unlink()
    assert data("check", "set", "--decode").code == 0  # a complaint loses nothing


def test_duplicates_between_splits_are_found(data, tmp_path):
    root = two_splits(tmp_path / "set")
    shutil.copy(root / "images" / "train" / "t1.jpg", root / "images" / "train" / "t5.jpg")
    assert data("check", "set").code == 0
    done = data("check", "set", "--duplicates")
    assert (
        done.code == 0 and "the same image 2 times" in done.out and "image-copy used twice 1 0" in done.words
    )
    shutil.copy(root / "images" / "train" / "t3.jpg", root / "images" / "val" / "again.jpg")
    done = data("check", "set", "--duplicates")
    assert done.code == 3 and "has the same images in several splits" in done.err
    assert "image-in-two-splits used in both 1 1" in done.words
    (first, *_) = data("check", "set", "--duplicates", "--json", "-").facts["same_images"]
    assert [(item["split"], Path(item["path"]).name) for item in first] == [
        ("train", "t3.jpg"),
        ("val", "again.jpg"),
    ]
    (root / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [cat, dog]\n")
    assert data("check", "set", "--duplicates").code == 0  # on purpose


def test_images_are_compared_by_content_not_by_length(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    root = two_splits(tmp_path / "set")
    for number in range(6):  # all files of one length
        path = root / "images" / "train" / f"t{number}.jpg"
        path.write_bytes(encoded(picture(64, 48, number // 4), ".bmp"))
    spec = load_dataset(str(root))
    groups = check.same_images([build_index(spec, "train"), build_index(spec, "val")])
    assert [[Path(path).name for _, path in group] for group in groups] == [
        [f"t{n}.jpg" for n in range(4)],
        ["t4.jpg", "t5.jpg"],
    ]


# stats


def hand_made(root: Path) -> Path:
    """Images of 320 x 160; at --img 640 everything is twice as long."""
    for name in "abc":
        write_picture(root / "images" / f"{name}.jpg", 320, 160)
    boxes = {  # pixels of the image
        "a": [(0, 15, 15), (0, 16, 16), (1, 47, 47), (1, 48, 48)],  # 30, 32, 94, 96 px at 640
        "b": [(0, 3, 60)],  # 6 px wide at 640
    }
    for name, rows in boxes.items():
        (root / "labels").mkdir(exist_ok=True)
        text = "".join(f"{c} 0.5 0.5 {w / 320} {h / 160}\n" for c, w, h in rows)
        (root / "labels" / f"{name}.txt").write_text(text)
    (root / "data.yaml").write_text("train: images\nnames: [cat, dog, bird]\n")
    return root


def test_figures_are_those_worked_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    index = build_index(load_dataset(str(hand_made(tmp_path / "set"))), "train")
    found = figures(index, 640)
    assert (found.images, found.labels, found.images_without_labels, found.crowd) == (3, 5, 1, 0)
    # areas 900, 1024, 8836, 9216, 6 x 120 = 720; borders 1024 and 9216
    assert (found.small, found.medium, found.large) == (2, 2, 1)
    cat, dog, bird = found.classes
    assert (cat.labels, cat.images, cat.small, cat.medium, cat.median_wh_px) == (3, 2, 2, 1, (30.0, 32.0))
    assert (dog.labels, dog.images, dog.medium, dog.large, dog.median_wh_px) == (2, 1, 1, 1, (95.0, 95.0))
    assert (bird.labels, bird.images) == (0, 0)
    assert found.labels_per_image == (1.67, 1.0, 3.7, 4)
    assert found.image_sizes == ((320, 160, 3),) and found.image_wh_px == ((320,) * 3, (160,) * 3)
    assert found.narrow[640] == 0.2 and found.narrow[1280] == 0.0 and found.narrow[320] == 0.2
    told = "\n".join(advice(found))
    assert "at --img 640, 20.0% of the labels are less than 8 px wide or high" in told
    assert "1 classes without a label: bird" in told
    assert "2 classes with fewer than 20 labels: cat 3, dog 2" in told
    assert figures(index, 320).small == 3


def test_stats_say_what_follows_for_a_training(data, tmp_path):
    hand_made(tmp_path / "set")
    done = data("stats", "set")
    assert "train: 3 images, 5 labels" in done.out and "cat 3 2 2 1 0 30 x 32" in done.words
    assert "all 5 2 2 2 1" in done.words and "YOLOv5's anchors can match" in done.out
    report = data("stats", "set", "--img", "320", "--json", "-").facts
    assert report["splits"]["train"]["small"] == 3 and report["splits"]["train"]["img_px"] == 320
    data("stats", "set", "--json", "x.json")
    assert json.loads(Path("x.json").read_text())["splits"]["train"]["classes"][0]["name"] == "cat"
    done = data("stats", "set", "--split", "val")
    assert done.code == 2 and "no split 'val'" in done.err


def test_advice_on_the_training_size(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    make_shapes(tmp_path / "set", images=8, val_images=1, img=160)
    index = build_index(load_dataset(str(tmp_path / "set")), "train")
    assert "so --img 160 keeps all detail and is faster" in advice(figures(index, 640))[0]
    assert "faster" not in advice(figures(index, 160))[0]
    tiny = 4 / 1280
    write_picture(tmp_path / "tiny" / "images" / "a.jpg", 1280, 960)
    (tmp_path / "tiny" / "labels").mkdir()
    # 10 px of 1280
    (tmp_path / "tiny" / "labels" / "a.txt").write_text(f"0 0.5 0.5 {2.5 * tiny} {5 * tiny}\n")
    (tmp_path / "tiny" / "data.yaml").write_text("train: images\nnames: [x]\n")
    index = build_index(load_dataset(str(tmp_path / "tiny")), "train")
    assert (
        "100.0% of the labels are less than 8 px wide or high: hard to find; at --img 1280 0.0%"
        in advice(figures(index))[0]
    )


# convert


def test_convert_says_what_it_wrote(data, tmp_path):
    two_splits(tmp_path / "set")
    done = data("convert", "set", "--to", "coco", "--out", "made/coco")
    assert "train 6 6" in done.words
    assert "val 2 2" in done.words
    assert f"{Path('made/coco/data.yaml')} (hard links)" in done.out
    assert data("check", "made/coco").code == 0
    done = data(
        *("convert", "made/coco", "--to", "voc", "--out", "voc", "--splits", "val", "--names", "dog"),
        *("--images", "copy"),
    )
    assert list(load_dataset("voc").splits) == ["val"] and load_dataset("voc").names == ("dog",)
    done = data("convert", "set", "--to", "voc", "--out", "voc")
    assert done.code == 2 and "--out voc is not an empty folder" in done.err
    done = data("convert", "set", "--to", "yolo", "--out", "x", "--names", "dgo")
    assert done.code == 2 and "did you mean dog?" in done.err
    assert data("convert", "set", "--to", "tfrecord", "--out", "x").code == 2
    assert data("convert", "set", "--to", "yolo").code == 2
    assert not Path("x").exists()


# download


def test_a_preview_draws_training_images_by_their_keys(data, tmp_path):
    made = two_splits(tmp_path / "set")
    sheets = []
    for name, more in (("a.png", []), ("b.png", []), ("c.png", ["--seed", 1]), ("d.jpg", ["--rect", "--epoch", 3]),
                       ("e.png", ["--sampler", "balanced", "--fraction", 0.5, "--set", "cutout=1"])):  # fmt: skip
        out = data("preview", made, "--img", 64, "--count", 5, "--out", name, *more)
        assert out.out.strip().endswith(name)
        sheets.append(np.asarray(cv2.imread(str(tmp_path / name))))
    assert all(sheet.std() > 10 for sheet in sheets)
    assert np.array_equal(sheets[0], sheets[1]) and not np.array_equal(sheets[0], sheets[2])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "x.gif"], "--out x.gif is not a .png or .jpg file"),
        (["--recipe", "nowhere"], "recipe nowhere is neither built in nor a file"),
        (["--set", "albumentations=[Lambda]"], "Lambda is not a transform that a recipe may have"),
        (["--set", "copy_paste=2"], "is above 1"),
        (["--fraction", "0"], "is not above 0"),
        (["--epoch", "0"], "--epoch"),
        (["--out", "set/data.yaml/x.png"], "x.png"),
    ],
)
def test_a_preview_that_cannot_be_made_says_why(data, tmp_path, words, says):
    out = data("preview", two_splits(tmp_path / "set"), *words)
    assert out.code in (2, 3) and says in out.err


def test_single_cls_reads_labels_of_any_class(data, tmp_path):
    yolo_set(tmp_path, {"a": "16 0.375 0.375 0.25 0.25\n1 0.7 0.7 0.1 0.1\n"}, names="[x]")
    refused = data("check", "data.yaml")
    assert refused.code == 3 and "labels/train/a.txt:1: class 16 but names has 1" in refused.words
    done = data("check", "data.yaml", "--single-cls", "--json", "-")
    assert done.code == 0 and done.facts["splits"]["train"]["labels_of_class"] == {"x": 2}
    assert data("stats", "data.yaml", "--single-cls", "--json", "-").facts["splits"]["train"]["labels"] == 2
    out = tmp_path / "preview.jpg"
    assert data("preview", "data.yaml", "--single-cls", "--img", "64", "--count", "1", "--out", out).code == 0
    assert out.stat().st_size
