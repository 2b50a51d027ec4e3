"""`yolofleet data split` and `data merge`: every image once, by class and group, at its place, and readable at once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import called, train_args
from label_rows import index_of, rows_of
from small_data import write_picture, yolo_set

from yolofleet.data.datasets.convert import convert
from yolofleet.data.datasets.divide import Stratification, groups_by_name
from yolofleet.data.datasets.sources import load_dataset


def stems(root: Path, split: str) -> set[str]:
    return {Path(path).stem for path in index_of(root, split).paths}


def boxes(root: Path, split: str) -> dict[str, list[tuple[str, float]]]:
    """Class and width of the labels of each image, by its stem."""
    index = index_of(root, split)
    return {
        Path(path).stem: sorted(
            (index.names[int(row[0])], round(float(row[3]), 3)) for row in rows_of(index.labels(at))
        )
        for at, path in enumerate(index.paths)
    }


def many(root: Path) -> Path:
    """30 images: a class in all, one in ten, one in three, and five images without a label."""
    labels: dict[str, str | None] = {}
    for number in range(30):
        rows = ["0 0.5 0.5 0.2 0.4"] * (number >= 5)
        rows += ["1 0.2 0.2 0.1 0.1"] * (number % 3 == 2) + ["2 0.8 0.8 0.1 0.2"] * (number % 10 == 7)
        labels[f"{number:04d}"] = "".join(f"{row}\n" for row in rows)
    return yolo_set(root, labels)


def test_a_split_has_each_class_at_its_share_and_trains(folder):
    many(folder / "set")
    done = called("data", "split", "set", "--out", "out", "--val", "0.2", "--test", "0.1")
    assert done.code == 0, done.err
    parts = {split: stems(folder / "out", split) for split in ("train", "val", "test")}
    assert sorted(stem for part in parts.values() for stem in part) == [f"{n:04d}" for n in range(30)]
    assert [len(part) for part in parts.values()] == [21, 6, 3]
    counts = {split: index_of(folder / "out", split).class_counts().tolist() for split in parts}
    # 25, 10 and 3 labels: shares of 0.7, 0.2 and 0.1
    assert np.abs(np.array(list(counts.values())) - np.outer([0.7, 0.2, 0.1], [25, 10, 3])).max() <= 1.5
    table = " ".join(done.out.split())
    assert f"all 21 {sum(counts['train'])} 6 {sum(counts['val'])} 3 {sum(counts['test'])}" in table
    assert "val has the same files as train" in done.out
    assert called("data", "check", "out", "--duplicates").code == 0
    assert not [*(folder / "out").rglob("*.jpg")]
    assert called(*train_args(folder / "out" / "data.yaml", "--epochs", "1", "--name", "run")).code == 0


def test_the_files_of_two_splits_with_one_seed_are_equal_wherever_the_set_lies(folder):
    many(folder / "a" / "set")
    many(folder / "b" / "set")
    for name, seed in (("a", "1"), ("b", "1"), ("a", "2")):
        out = f"{name}/out{seed}"
        assert called("data", "split", f"{name}/set", "--out", out, "--seed", seed).code == 0
    one, same, other = (Path(at, "val.txt").read_text() for at in ("a/out1", "b/out1", "a/out2"))
    assert one == same != other
    shutil.move("a", "moved")  # the result lies beside the set, so it moves with it
    assert len(index_of(folder / "moved" / "out1", "train")) == 24


@pytest.mark.parametrize("target", ["yolo", "coco", "voc"])
def test_a_set_of_any_format_is_split_with_its_labels(folder, target):
    many(folder / "source")
    convert(load_dataset("source"), folder / "set", target)
    before = boxes(folder / "set", "train")
    assert called("data", "split", "set", "--out", "out").code == 0
    assert boxes(folder / "out", "train") | boxes(folder / "out", "val") == before
    assert (folder / "out" / "train.txt").exists() == (target != "coco")
    assert called("data", "check", "out").code == 0


def test_labelme_files_in_another_folder_are_split_too(folder):
    for number in range(10):
        write_picture(folder / "set" / "pictures" / f"{number}.jpg", seed=number)
        shape = {"label": "cat", "points": [[1, 1], [20 + number, 1], [20, 30]], "shape_type": "polygon"}
        about = {
            "shapes": [shape],
            "imagePath": f"../pictures/{number}.jpg",
            "imageWidth": 64,
            "imageHeight": 48,
        }
        (folder / "set" / "labels").mkdir(exist_ok=True)
        (folder / "set" / "labels" / f"{number}x.json").write_text(json.dumps(about))
    before = boxes(folder / "set", "train")
    done = called("data", "split", "set", "--out", "out")
    assert done.code == 0 and "later changes of the source are not seen" in done.out, done.err
    assert boxes(folder / "out", "train") | boxes(folder / "out", "val") == before
    assert len(index_of(folder / "out", "train").points) == 3 * 8  # for copy_paste


def test_frames_of_a_video_stay_together(folder):
    labels: dict[str, str | None] = {
        f"{clip}_{n:03d}": "0 0.5 0.5 0.2 0.4\n" for clip in "abcdefghij" for n in range(4)
    }
    yolo_set(folder / "set", labels)
    done = called("data", "split", "set", "--out", "out")
    assert done.code == 0 and "10 groups of images stay together" in done.out
    train, val = ({stem[0] for stem in stems(folder / "out", split)} for split in ("train", "val"))
    assert not train & val and len(val) == 2
    assert called("data", "split", "set", "--out", "alone", "--group", "none").code == 0
    train, val = ({stem[0] for stem in stems(folder / "alone", split)} for split in ("train", "val"))
    assert train & val
    assert called("data", "split", "set", "--out", "by-number", "--group", r"_(\d+)").code == 0
    train, val = ({stem[-3:] for stem in stems(folder / "by-number", split)} for split in ("train", "val"))
    assert not train & val
    rows = "".join(f"{name}.jpg,{'one' if name[0] in 'abcd' else name[0]}\n" for name in labels)
    Path("groups.csv").write_text(f"image,place\n{rows}")
    assert called("data", "split", "set", "--out", "by-place", "--groups", "groups.csv:place").code == 0
    firsts = [{stem[0] for stem in stems(folder / "by-place", split)} for split in ("train", "val")]
    assert any(set("abcd") <= part for part in firsts)


def test_names_that_are_classes_are_no_videos(folder):
    labels: dict[str, str | None] = {
        f"{name}_{n:02d}": f"{c} 0.5 0.5 0.2 0.4\n"
        for c, name in enumerate(("cat", "dog"))
        for n in range(10)
    }
    yolo_set(folder / "set", labels, names="[cat, dog]")
    done = called("data", "split", "set", "--out", "out")
    assert "not grouped by name, because 2 of 2 classes would be in one group only" in done.out
    assert index_of(folder / "out", "val").class_counts().tolist() == [2, 2]


def test_two_groups_of_equal_size_are_divided_by_image(folder):
    yolo_set(folder / "set", {f"{clip}_{n:02d}": "0 0.5 0.5 0.2 0.4\n" for clip in "ab" for n in range(10)})
    done = called("data", "split", "set", "--out", "out")
    assert (
        done.code == 0 and "not grouped by name, because a split would get none of the 2 groups" in done.out
    )
    assert [len(stems(folder / "out", split)) for split in ("train", "val")] == [16, 4]
    done = called("data", "split", "set", "--out", "never", "--group", "name")
    assert done.code == 2 and "val would get none of the 20 images in 2 groups" in done.err


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["clip_0001.jpg", "clip_0002.jpg"], 1),
        (["train/clip 1.jpg", "val/clip 2.jpg"], 1),
        (["000001.jpg", "000002.jpg"], 2),
        (["IMG_0001.jpg", "IMG_0002.jpg"], 2),
        (["2007_000027.jpg", "2007_000032.jpg"], 2),
        (["IMG_1_jpg.rf.0a1b.jpg", "IMG_1_jpg.rf.2c3d.jpg", "IMG_2_jpg.rf.2c3d.jpg"], 2),
        (["cat.jpg", "dog.jpg", "x/cat.jpg"], 3),
    ],
)
def test_names_of_one_group(names, groups):
    assert len(set(groups_by_name(names))) == groups


def test_groups_of_many_classes_come_near_their_shares():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(2000), rng.poisson(3, 2000))
    classes = rng.integers(0, 20, len(owner))
    groups = [f"g{image // 5}" for image in range(2000)]
    chosen = Stratification(groups, owner, classes, 20, 0).split([700_000, 200_000, 100_000])
    total = np.bincount(classes)
    for split, share in enumerate((0.7, 0.2, 0.1)):
        mine = np.bincount(classes[chosen[owner] == split], minlength=20)
        assert np.abs(mine / total - share).max() < 0.03
        assert abs((chosen == split).mean() - share) < 0.02
    assert all(len(set(chosen[at : at + 5].tolist())) == 1 for at in range(0, 2000, 5))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--val", "1.5"], "--val"),
        (["--val", "0.6", "--test", "0.5"], "leave no images for train"),
        (["--group", "("], "not a regular expression"),
        (["--groups", "no.csv:place"], "cannot be read"),
        (["--groups", "a.csv:else"], "no column else"),
        (["--group", "none", "--groups", "a.csv:place"], "mutually exclusive"),
        (["--group", "jpg"], "val would get none"),
    ],
)
def test_a_split_that_cannot_be_made_leaves_nothing(folder, words, says):
    many(folder / "set")
    Path("a.csv").write_text("image,place\n0001.jpg,x\n")
    done = called("data", "split", "set", "--out", "out", *words)
    assert done.code == 2 and says in done.err and "Traceback" not in done.err
    assert not (folder / "out").exists()


def test_a_test_split_is_kept_unless_it_gets_a_share(folder):
    many(folder / "set")
    write_picture(folder / "set" / "images" / "test" / "only.jpg", seed=99)
    (folder / "set" / "data.yaml").write_text("train: images/train\ntest: images/test\nnames: [a, b, c]\n")
    assert called("data", "split", "set", "--out", "out").code == 0
    assert stems(folder / "out", "test") == {"only"} and len(stems(folder / "out", "train")) == 24
    assert called("data", "split", "set", "--out", "anew", "--test", "0.2").code == 0
    assert len(stems(folder / "anew", "test")) == 6


# -- merge -----------------------------------------------------------------------------------------------------


def two_sets(folder: Path) -> None:
    """``a`` with cats and dogs, ``b`` with dogs, birds and cats in COCO's format; no image is in both."""
    yolo_set(folder / "a", {"a0": "0 0.5 0.5 0.2 0.4\n", "a1": "1 0.5 0.5 0.3 0.4\n"}, names="[cat, dog]")
    (folder / "a" / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n")
    yolo_set(folder / "c", {"c0": "0 0.5 0.5 0.2 0.4\n", "c1": "1 0.5 0.5 0.5 0.4\n2 0.2 0.2 0.1 0.2\n"})
    for number, path in enumerate(sorted((folder / "c").rglob("*.jpg"))):
        write_picture(path, seed=50 + number)
    (folder / "c" / "data.yaml").write_text(
        "train: images/train\nval: images/train\nnames: [dog, bird, cat]\n"
    )
    convert(load_dataset("c"), folder / "b", "coco", splits=["train"])


def test_sets_of_two_formats_are_merged_by_the_names_of_classes(folder):
    two_sets(folder)
    done = called("data", "merge", "a", "b", "--out", "out")
    assert done.code == 0, done.err
    assert load_dataset("out").names == ("cat", "dog", "bird")
    assert boxes(folder / "out", "train") == boxes(folder / "a", "train") | boxes(folder / "b", "train")
    assert "a does not have bird (1 labels)" in done.out
    assert not [*(folder / "out").rglob("*.jpg")]
    assert called("data", "check", "out", "--duplicates").code == 0
    run = called(*train_args(folder / "out" / "data.yaml", "--epochs", "1", "--name", "run"))
    assert run.code == 0 and "no val split" in run.out


def test_an_image_of_another_sets_val_is_not_trained_on(folder):
    two_sets(folder)
    shutil.copy("c/images/train/c0.jpg", "a/images/train/copy.jpg")
    Path("c/data.yaml").write_text("train: c1.txt\nval: c0.txt\nnames: [dog, bird, cat]\n")
    for name in ("c0", "c1"):
        Path(f"c/{name}.txt").write_text(f"images/train/{name}.jpg\n")
    done = called("data", "merge", "a", "c", "--out", "out")
    assert done.code == 0 and "1 images of train are also in val or test" in done.out
    assert "copy.jpg" in done.out
    assert stems(folder / "out", "train") == {"a0", "a1", "c1"} and stems(folder / "out", "val") == {"c0"}
    assert called("data", "check", "out", "--duplicates").code == 0


def test_labels_of_one_image_in_two_sets_are_joined(folder):
    """The second set's labels of classes that the first one has would be the same objects again."""
    two_sets(folder)
    shutil.copy("c/images/train/c1.jpg", "a/images/train/copy.jpg")
    Path("a/labels/train/copy.txt").write_text("0 0.3 0.3 0.15 0.2\n")
    done = called("data", "merge", "a", "c", "--out", "out")
    assert done.code == 0 and "train: 1 images are in several sets" in done.out
    found = boxes(folder / "out", "train")
    assert found["copy"] == [("bird", 0.5), ("cat", 0.15)] and "c1" not in found


def test_similar_names_are_named(folder):
    yolo_set(folder / "a", {"a": "0 0.5 0.5 0.2 0.4\n"}, names="[Traffic Light]")
    yolo_set(folder / "b", {"b": "0 0.5 0.5 0.2 0.4\n"}, names="[traffic_light]")
    write_picture(folder / "b" / "images" / "train" / "b.jpg", seed=9)
    done = called("data", "merge", "a", "b", "--out", "out")
    assert "names that nearly agree are classes of their own: Traffic Light and traffic_light" in done.out


def test_one_set_and_images_of_the_cache_are_refused(folder):
    many(folder / "set")
    done = called("data", "merge", "set", "--out", "out")
    assert done.code == 2 and "only one data set" in done.err
    done = called("data", "split", "shapes:4", "--out", "out")
    assert done.code == 2 and "data convert" in done.err and not Path("out").exists()


def test_categories_of_coco_keep_their_ids(folder):
    many(folder / "source")
    convert(load_dataset("source"), folder / "set", "coco")
    file = folder / "set" / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    number = {1: 7, 2: 30, 3: 90}
    for entry in content["annotations"]:
        entry["category_id"] = number[entry["category_id"]]
    for entry in content["categories"]:
        entry["id"] = number[entry["id"]]
    file.write_text(json.dumps(content))
    assert called("data", "split", file, "--out", "out").code == 0
    assert load_dataset("out").category_ids == (7, 30, 90)


def test_making_shapes_shows_progress(folder):
    from yolofleet.data.datasets.shapes import make_shapes

    seen: list[tuple[int, int]] = []
    make_shapes(folder / "s", images=3, val_images=2, img=32, on_progress=lambda *now: seen.append(now))
    assert seen == [(number, 5) for number in range(1, 6)]
    assert Counter(total for _, total in seen) == {5: 5}
