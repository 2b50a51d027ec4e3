"""What a data set in a store, or a list of class names, may name: its own files, by no way round."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from coco_files import image, write_coco
from commands import called, working_in
from small_data import voc_object, write_picture
from walks import sampled

CANARY = "CANARY4711"
XML = f"<annotation>{voc_object(CANARY, (1, 1, 9, 9))}</annotation>"
SHAPE = {"label": CANARY, "points": [[1, 1], [9, 9]], "shape_type": "rectangle"}
YAML = "train: train.txt\nval: images\nnames: [a]\n"


def description(entry: str) -> Callable[[str], dict[str, str]]:
    return lambda path: {"data.yaml": entry.format(path)}


def coco(path: str) -> dict[str, str]:
    content = {"images": [image(1, path)], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    return {"annotations/instances_train.json": json.dumps(content)}


# name -> the file outside, and the files of a data set that name it by a path
REFERENCES: dict[str, tuple[str, Callable[[str], dict[str, str]]]] = {
    "split": ("images", description("train: {}\nval: images\nnames: [a]\n")),
    "split list": ("list.txt", description("train: {}\nval: images\nnames: [a]\n")),
    "split JSON": ("coco.json", description("train: {}\nval: images\n")),
    "path": ("", description("path: {}\ntrain: images\nval: images\nnames: [a]\n")),
    "image of a list": ("images/a.jpg", lambda path: {"data.yaml": YAML, "train.txt": path}),
    "quoted image": ("images/a.jpg", lambda path: {"data.yaml": YAML, "train.txt": f'"{path}"'}),
    "label of a list": ("a.txt", lambda path: {"data.yaml": YAML, "train.txt": f"images/a.jpg {path}"}),
    "XML of a list": (
        "a.xml",
        lambda path: {"data.yaml": YAML.replace("names: [a]\n", ""), "train.txt": f"images/a.jpg {path}"},
    ),
    "XML of a folder's list": (
        "a.xml",
        lambda path: {name: f"images/a.jpg {path}" for name in ("train.txt", "val.txt")},
    ),
    "image beside JSON": ("labelme/b.jpg", lambda path: {"data.yaml": YAML, "train.txt": path}),
    "VOC list": (
        "a.xml",
        lambda path: {f"ImageSets/Main/{n}.txt": path.removesuffix(".xml") for n in ("train", "val")},
    ),
    "COCO image": ("a.txt", coco),
    "labelme image": (
        "a.txt",
        lambda path: {"images/a.json": json.dumps({"imagePath": path, "shapes": [SHAPE | {"label": "a"}]})},
    ),
    "hub image": (
        "a.txt",
        lambda path: {
            "metadata.jsonl": json.dumps({"file_name": path, "objects": {"bbox": [[1, 1, 5, 5]], "categories": [0]}})
        },
    ),
    "darknet names": (
        "names.txt",
        lambda path: {"obj.data": f"names = {path}\ntrain = images\n", "images/a.txt": "0 .5 .5 .2 .2"},
    ),
    "darknet list": (
        "list.txt",
        lambda path: {"obj.data": f"train = {path}\n", "obj.names": "a\n", "images/a.txt": "0 .5 .5 .2 .2"},
    ),
}  # fmt: skip
ESCAPES: dict[str, Callable[[Path, Path], str]] = {
    "absolute": lambda file, home: str(file),
    "above": lambda file, home: os.path.relpath(file, home),
    "above, from the images": lambda file, home: f"images/../{os.path.relpath(file, home)}",
    "root": lambda file, home: "../" * 30 + str(file).lstrip("/"),
    "address": lambda file, home: file.as_uri(),
    "Windows": lambda file, home: os.path.relpath(file, home).replace("/", "\\"),
}


@pytest.fixture
def home(tmp_path):
    """A data set beside private files, whose names are those of other data sets."""
    outside = tmp_path / "private"
    write_picture(outside / "images" / "a.jpg", seed=1)
    write_picture(outside / "labelme" / "b.jpg", seed=2)
    (outside / "a.txt").write_text(f"{CANARY} my secret\n")
    (outside / "labels").mkdir()
    (outside / "labels" / "a.txt").write_text(f"{CANARY} my secret\n")
    (outside / "a.xml").write_text(XML)
    (outside / "list.txt").write_text(f"images/a.jpg\n{CANARY}.jpg\n{CANARY}2.jpg\n")
    (outside / "names.txt").write_text(f"{CANARY}\n")
    (outside / "labelme" / "b.json").write_text(json.dumps({"imagePath": "b.jpg", "shapes": [SHAPE]}))
    write_coco(outside / "coco.json", [], [], [(1, CANARY)])
    write_picture(tmp_path / "set" / "images" / "a.jpg", seed=0)
    with working_in(tmp_path, YOLOFLEET_CACHE=str(tmp_path / "cache")):
        yield tmp_path / "set"


def answer(data: str | Path) -> str:
    """All that a check and a count of the data set print and write."""
    texts = []
    for verb in ("check", "stats"):
        done = called("data", verb, data, "--json", "facts.json")
        assert "Traceback" not in done.err and done.code in (0, 2, 3)
        texts += [done.out, done.err, Path("facts.json").read_text() if Path("facts.json").exists() else ""]
    return "".join(texts).replace("private/", "")


@pytest.mark.parametrize(("reference", "escape"), sampled(itertools.product(REFERENCES, ESCAPES), 5))
def test_no_reference_of_a_data_set_in_a_store_leads_out_of_it(home, reference, escape):
    outside, files = REFERENCES[reference]
    for name, text in files(ESCAPES[escape](home.parent / "private" / outside, home)).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    assert CANARY not in answer(f"file://{home}")


@pytest.mark.parametrize("folder", ["hub", "PaddleDetection", "darknet", "labels of darknet"])
def test_a_list_of_class_names_is_no_link_out_of_the_data_set(home, folder):
    """The names go into weights, which people share."""
    made = {
        "hub": ({"metadata.jsonl": '{"file_name": "images/a.jpg", "objects": {"bbox": [[1, 1, 5, 5]], "categories": [0]}}\n'}, "classes.txt"),
        "PaddleDetection": (
            {n: "images/a.jpg a.xml" for n in ("train.txt", "val.txt")} | {"a.xml": XML.replace(CANARY, "a")},
            "label_list.txt",
        ),
        "darknet": ({"images/a.txt": "0 .5 .5 .2 .2"}, "classes.txt"),
        "labels of darknet": ({"labels/a.txt": "0 .5 .5 .2 .2"}, "labels/classes.txt"),
    }  # fmt: skip
    files, link = made[folder]
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / link).symlink_to(home.parent / "private" / "names.txt")
    found = answer(home)
    assert CANARY not in found and ("leads out of the data set" in found or "not a data set" in found)
    (home / link).unlink()
    (home / link).write_text("mine\n")
    assert '"mine"' in answer(home)


def test_a_data_set_in_a_store_may_name_all_its_own_files(home):
    (home / "train.txt").write_text("images/a.jpg other/a.txt\n")
    (home / "other").mkdir()
    (home / "other" / "a.txt").write_text("0 .5 .5 .2 .2\n")
    (home / "data.yaml").write_text("train: train.txt\nval: images\nnames: [mine]\n")
    assert '"mine": 1' in answer(f"file://{home}")
