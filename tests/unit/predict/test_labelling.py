"""Predictions as tasks of labelling tools: files that our readers read back, and those of Label Studio."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from small_data import write_picture

from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry import rle
from yolofleet.data.geometry.table import as_objects
from yolofleet.data.images.decode import read_image
from yolofleet.inference.predict.frames import Frame, Video
from yolofleet.inference.predict.labelling import LabellingTasks
from yolofleet.inference.predict.results import Prediction, Predictions
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.masks.found import FoundMasks
from yolofleet.tasks.masks.task import MASKS

NAMES = ("cat", 'a <dog> & "it\'s" é')
SIZE = (48, 64)
ROWS = np.array([(16, 12, 32, 24, 0.75, 0), (40, 12, 56, 36, 0.5, 1)], np.float32)
BOXES_UNIT = np.array([(0.375, 0.375, 0.25, 0.25), (0.75, 0.5, 0.25, 0.5)])
DATA = {
    "yolo": "data.yaml",
    "coco": "annotations/instances_default.json",
    "cvat": "annotations/instances_default.json",
    "labelme": "",
}


def bitmaps() -> list[np.ndarray]:
    """A rectangle with a hole, and two parts."""
    first, second = np.zeros(SIZE, bool), np.zeros(SIZE, bool)
    first[12:24, 16:32], first[16:20, 20:26] = True, False
    second[12:20, 40:56], second[28:36, 44:56] = True, True
    return [first, second]


def found_in(root: Path, *, masks: bool = False) -> Predictions:
    """An image with two objects in a folder, an image without any, and a frame of a video."""
    paths = [
        str(write_picture(root / name, 64, 48, seed=at)) for at, name in enumerate(("in/a.jpg", "b.png"))
    ]
    frames = [
        Frame(path, np.zeros((*SIZE, 3), np.uint8), at, base=str(root)) for at, path in enumerate(paths)
    ]
    frames.append(Frame("clip.mp4", np.zeros((*SIZE, 3), np.uint8), 2, 7, Video(9, 25.0)))
    every = []
    for frame, rows in zip(frames, (ROWS, ROWS[:0], ROWS[:1]), strict=True):
        boxes = FoundBoxes.of_rows(rows)
        runs = as_objects([rle.Mask(SIZE, rle.encode(one)) for one in bitmaps()[: len(rows)]])
        found = FoundMasks(**vars(boxes), masks=runs) if masks else boxes
        every.append(Prediction(frame, found, NAMES, {}, MASKS if masks else BOXES))
    return Predictions(every)


def written(predictions: Predictions, folder: Path, form: str) -> Path:
    tasks = LabellingTasks(folder, form)
    for prediction, stem in zip(predictions, ("in/a", "b", "clip_7"), strict=True):
        tasks.add(prediction, stem)
    tasks.finish()
    return folder


def read(folder: Path, form: str, *, masks: bool) -> DataIndex:
    return build_index(load_dataset(str(folder / DATA[form])), "train", masks=masks)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("form", DATA)
def test_our_readers_read_the_tasks_back(tmp_path, form, masks):
    folder = written(found_in(tmp_path / "from", masks=masks), tmp_path / "tasks", form)
    index = read(folder, form, masks=masks)
    by_name = {Path(path).stem: at for at, path in enumerate(index.paths)}
    assert sorted(by_name) == ["a", "b", "clip_7"]  # an image without an object is a task, too
    assert index.problem_count == (masks and form == "labelme")  # it says which parts it has joined
    order = [index.names.index(name) for name in NAMES]
    for name, count in (("a", 2), ("b", 0), ("clip_7", 1)):
        assert read_image(index.paths[by_name[name]]).shape[:2] == SIZE
        rows = range(*index.offsets[by_name[name] : by_name[name] + 2].tolist())
        assert sorted(index.classes[list(rows)].tolist()) == sorted(order[:count])
        for row in rows:
            number = order.index(index.classes[row])
            assert np.allclose(index.boxes_cxcywh_unit[row], BOXES_UNIT[number], atol=1e-3)
            if masks:
                bits, expected = rle.decode(index.runs(row), SIZE), bitmaps()[number]
                if form in ("cvat", "labelme") and number == 0:
                    expected[12:24, 16:32] = True  # an outline has no hole
                assert (bits != expected).sum() <= (12 if form == "yolo" else 0)  # seams between parts


def test_scores_stand_where_the_format_has_a_place(tmp_path):
    predictions = found_in(tmp_path / "from")
    content = {
        form: json.loads((written(predictions, tmp_path / form, form) / file).read_text())
        for form, file in {**DATA, "labelme": "in/a.json", "label-studio": "tasks.json"}.items()
        if form != "yolo"
    }
    assert [one["score"] for one in content["coco"]["annotations"]] == [0.75, 0.5, 0.75]
    assert [one["attributes"]["score"] for one in content["cvat"]["annotations"]] == [0.75, 0.5, 0.75]
    assert [one["score"] for one in content["labelme"]["shapes"]] == [0.75, 0.5]
    prediction = content["label-studio"][0]["predictions"][0]
    assert (prediction["score"], [one["score"] for one in prediction["result"]]) == (0.5, [0.75, 0.5])


@pytest.mark.parametrize("masks", [False, True])
def test_tasks_of_label_studio_fit_the_interface_that_is_written(tmp_path, masks):
    folder = written(found_in(tmp_path / "from", masks=masks), tmp_path / "tasks", "label-studio")
    tasks = json.loads((folder / "tasks.json").read_text())
    tools = {tool.get("name"): tool for tool in ElementTree.parse(folder / "label-config.xml").getroot()}
    assert tools["image"].get("value") == "$image"
    assert [one.get("value") for one in tools["rectanglelabels"]] == list(NAMES)
    assert [task["data"]["image"].partition("?d=")[2] for task in tasks] == [
        "images/in/a.jpg",
        "images/b.png",
        "images/clip_7.jpg",
    ]
    assert all((folder / task["data"]["image"].partition("?d=")[2]).is_file() for task in tasks)
    results = tasks[0]["predictions"][0]["result"]
    assert len({one["id"] for one in results}) == len(results) == (3 if masks else 2)
    for one in results:
        kind = "polygonlabels" if masks else "rectanglelabels"
        assert one["type"] == one["from_name"] == kind and one["to_name"] == "image" and kind in tools
        assert one["value"][kind][0] in NAMES and (one["original_width"], one["original_height"]) == (64, 48)
    if masks:
        points = np.array(results[0]["value"]["points"])
        assert np.allclose([points.min(0), points.max(0)], [(25, 25), (50, 50)])
    else:
        value = results[0]["value"]
        assert [value[side] for side in ("x", "y", "width", "height")] == [25, 25, 25, 25]


def test_fiftyone_gets_boxes_as_fractions_and_masks_of_the_boxes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    found = found_in(tmp_path, masks=True)
    with pytest.raises(ConfigError, match="fiftyone"):
        found[0].to_fiftyone()
    monkeypatch.setitem(
        sys.modules, "fiftyone", SimpleNamespace(Detection=SimpleNamespace, Detections=SimpleNamespace)
    )
    (first, second), empty, _ = (one.detections for one in found.to_fiftyone())
    assert (first.label, first.confidence, first.bounding_box) == ("cat", 0.75, [0.25, 0.25, 0.25, 0.25])
    assert first.mask.shape == (12, 16) and first.mask.sum() == 12 * 16 - 24
    assert second.bounding_box == [0.625, 0.25, 0.25, 0.5] and not empty


def test_folders_of_a_layout_in_the_source_do_not_part_images_and_labels(tmp_path):
    """A reader of YOLO's format replaces the last ``images`` of a path."""
    predictions, tasks = found_in(tmp_path / "from"), LabellingTasks(tmp_path / "tasks", "yolo")
    stems = ("images/train/a", "images_/train/a", "Labels/a")
    for prediction, stem in zip((predictions[0],) * 3, stems, strict=True):
        tasks.add(prediction, stem)
    tasks.finish()
    index = read(tmp_path / "tasks", "yolo", masks=False)
    assert len(index) == 3 and np.diff(index.offsets).tolist() == [2, 2, 2]
