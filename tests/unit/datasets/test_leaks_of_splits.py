"""`yolofleet data split` divides neither equal images nor frames of one video, under any names and in any folders."""

from __future__ import annotations

import itertools
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from commands import called
from label_rows import index_of
from small_data import write_picture, yolo_set

from yolofleet.data.datasets.divide import groups_by_name

VIDEOS, FRAMES = 5, 4
# the path of frame n of video v below the folder of images
LAYOUTS = {
    "folder": "clip{v}/{name}{n:04d}.png",
    "split folder": "{part}/clip{v}/{name}{n:04d}.png",
    "folder of images": "clip{v}/images/{name}{n:04d}.png",
    "two folders": "day{d}/cam{v}/{name}{n:04d}.png",
    "counted on": "clip{v}/{name}{m:04d}.png",
    "flat": "clip{v}_{name}{n:04d}.png",
    "split, flat": "{part}/clip{v}_{name}{n:04d}.png",
}
NAMES = ["frame_", "frame", "img", "IMG_", "out", "thumb-", ""]


def frames_of(layout: str, name: str) -> dict[str, int]:
    """The video of each frame, by its path."""
    every = itertools.product(range(VIDEOS), range(FRAMES))
    return {
        LAYOUTS[layout].format(
            v=v, n=n, m=v * FRAMES + n, d=v % 2, part="val" if n == 3 else "train", name=name
        ): v
        for v, n in every
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_frames_of_one_video_are_one_group(layout, name):
    if (layout, name) == ("counted on", ""):
        return  # 000123 in VOC2007 and in VOC2012: those are no videos
    videos = frames_of(layout, name)
    found = dict(zip(videos, groups_by_name(list(videos)), strict=True))
    groups = defaultdict(set)
    for path, video in videos.items():
        groups[video].add(found[path])
    assert all(len(group) == 1 for group in groups.values()), found
    assert len(set(found.values())) == VIDEOS, found


def write_frames(root: Path, videos: dict[str, int]) -> None:
    for number, path in enumerate(videos):
        write_picture(root / "images" / path, seed=number)
        label = (root / "labels" / path).with_suffix(".txt")
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("0 0.5 0.5 0.4 0.4\n")
    (root / "data.yaml").write_text("train: images\nval: images\nnames: [a]\n")


def lists(out: Path) -> dict[str, list[str]]:
    return {split: list(index_of(out, split).paths) for split in ("train", "val")}


@pytest.mark.parametrize(("layout", "name"), [("folder", "frame_"), ("split folder", "out"), ("flat", "img")])
def test_a_split_divides_no_video_and_check_sees_one_that_is_divided(folder, layout, name):
    videos = frames_of(layout, name)
    write_frames(folder / "set", videos)
    done = called("data", "split", "set", "--out", "out")
    assert done.code == 0 and f"{VIDEOS} groups of images stay together" in done.out, done.err
    home = f"{folder / 'set' / 'images'}/"
    parts = [{videos[path.removeprefix(home)] for path in paths} for paths in lists(folder / "out").values()]
    assert not parts[0] & parts[1] and all(parts)
    checked = called("data", "check", "out", "--duplicates")
    assert checked.code == 0 and "frames of one video" not in checked.out
    assert called("data", "split", "set", "--out", "alone", "--group", "none", "--seed", "1").code == 0
    checked = called("data", "check", "alone", "--duplicates")
    assert "seem to be frames of one video" in checked.out and "no problem found" not in checked.out


@pytest.mark.parametrize("group", ["auto", "none", r"\w(\d)\w*\.jpg"])
@pytest.mark.parametrize("target", ["yolo", "coco"])
def test_equal_images_stay_in_one_split(folder, target, group):
    """As in sets of photographs that were collected twice: 000.jpg, and the same bytes as q7a.jpg."""
    rows = "0 0.5 0.5 0.4 0.4\n"
    yolo_set(folder / "set", {f"x{n}{n}": rows for n in range(10)}, names="[a]")
    for n in range(10):
        shutil.copy(f"set/images/train/x{n}{n}.jpg", f"set/images/train/q{(n * 7) % 10}a.jpg")
        Path(f"set/labels/train/q{(n * 7) % 10}a.txt").write_text(rows)
    if target == "coco":
        assert called("data", "convert", "set", "--to", "coco", "--out", "coco").code == 0
        shutil.rmtree("set")
        shutil.move("coco", "set")
    done = called("data", "split", "set", "--out", "out", "--val", "0.3", "--group", group)
    assert done.code == 0 and "20 images have only 10 contents: equal ones stay in one split" in done.out
    contents = {
        split: {Path(p).read_bytes() for p in paths} for split, paths in lists(folder / "out").items()
    }
    assert not contents["train"] & contents["val"] and sum(map(len, lists(folder / "out").values())) == 20
    checked = called("data", "check", "out", "--duplicates")
    assert checked.code == 0, checked.err


def test_images_of_a_test_split_that_stays_are_in_no_other(folder):
    yolo_set(folder / "set", {f"{n:03d}": "0 0.5 0.5 0.4 0.4\n" for n in range(10)}, names="[a]")
    shutil.copytree("set/labels/train", "set/labels/test")
    write_picture(folder / "set" / "images" / "test" / "own.jpg", seed=50)
    shutil.copy("set/images/train/003.jpg", "set/images/test/copy.jpg")
    Path("set/data.yaml").write_text("train: images/train\ntest: images/test\nnames: [a]\n")
    done = called("data", "split", "set", "--out", "out")
    assert done.code == 0 and "1 images are also in test: left out of the others" in done.out, done.err
    assert called("data", "check", "out", "--duplicates").code == 0


@pytest.mark.parametrize("target", ["yolo", "coco", "voc"])
def test_the_result_moves_with_the_images(folder, target):
    yolo_set(folder / "all" / "source", {f"{n:03d}": "0 0.5 0.5 0.4 0.4\n" for n in range(6)}, names="[a]")
    source, out = "all/sets/deep/images of it", "all/results/out"
    assert called("data", "convert", "all/source", "--to", target, "--out", source).code == 0
    assert called("data", "split", source, "--out", out).code == 0
    shutil.rmtree("all/source")
    shutil.move("all", "elsewhere")
    assert sum(map(len, lists(folder / "elsewhere" / "results" / "out").values())) == 6
    assert called("data", "check", "elsewhere/results/out", "--duplicates").code == 0


def test_a_check_of_one_set_as_train_and_val_finds_a_problem(folder):
    yolo_set(folder / "set", {f"{n:03d}": "0 0.5 0.5 0.4 0.4\n" for n in range(3)}, names="[a]")
    found = called("data", "check", "set")
    assert "train and val are the same 3 images" in found.out and "no problem found" not in found.out
