"""Files and values of predictions and validations with masks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mask_sets import random_masks

from yolofleet.data.geometry import rle
from yolofleet.data.geometry.table import as_objects
from yolofleet.inference.predict.frames import Frame
from yolofleet.inference.predict.results import Prediction, Predictions, crops_of, imported
from yolofleet.inference.predict.run import as_txt
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.masks.draw import draw_masks
from yolofleet.tasks.masks.found import FoundMasks
from yolofleet.tasks.masks.task import MASKS

SIZE = (30, 40)


@pytest.fixture
def found() -> Prediction:
    """A square of 10 px with a hole of 4 px, and an object of which no pixel was found."""
    inside = np.zeros(SIZE, bool)
    inside[5:15, 10:20], inside[8:12, 13:17] = True, False
    masks = [rle.Mask(SIZE, rle.encode(inside)), rle.Mask(SIZE, rle.encode(np.zeros(SIZE, bool)))]
    rows = np.array([(10, 5, 20, 15, 0.75, 1), (0, 0, 2, 2, 0.5, 0)], np.float32)
    boxes = FoundBoxes.of_rows(rows)
    frame = Frame("a.jpg", np.zeros((*SIZE, 3), np.uint8))
    return Prediction(frame, FoundMasks(**vars(boxes), masks=as_objects(masks)), ("a", "b"), {}, MASKS)


def test_text_has_a_polygon_of_each_mask_and_boxes_for_voc(found: Prediction) -> None:
    line, *others = as_txt(found, "yolo", scores=True).splitlines()
    assert not others, "an object without a pixel has no polygon"
    number, *values, score = line.split()
    points = np.array(values, float).reshape(-1, 2) * SIZE[::-1]
    assert (number, score) == ("1", "0.75")
    assert np.allclose([points.min(0), points.max(0)], [(10, 5), (20, 15)], atol=1e-3)
    x, y = points.T
    assert (x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2 == pytest.approx(84, abs=1e-3)
    assert as_txt(found, "voc", scores=False).splitlines()[0] == "1 10 5 20 15"


def test_values_of_other_packages_have_the_masks(found: Prediction) -> None:
    assert found.masks.shape == (2, *SIZE) and found.masks.sum((1, 2)).tolist() == [84, 0]
    first, second = found.to_coco()["annotations"]
    assert (first["area"], first["bbox"], second["area"]) == (84, [10, 5, 10, 10], 0)
    json.dumps(Predictions([found]).to_coco())
    assert [crop.image.shape for crop in crops_of(found)] == [(10, 10, 3), (2, 2, 3)]
    assert Predictions([found]).rows()[0]["xmax"] == 20
    assert found.draw().any()
    decode = pytest.importorskip("pycocotools.mask").decode
    assert (decode(first["segmentation"]) == found.masks[0]).all()


def test_supervision_gets_the_masks(found: Prediction) -> None:
    pytest.importorskip("supervision")
    assert (imported("supervision") and found.to_supervision().mask == found.masks).all()


def test_a_network_of_boxes_has_no_masks() -> None:
    boxes = Prediction(
        Frame("a.jpg", np.zeros((*SIZE, 3), np.uint8)), FoundBoxes.of_rows(np.zeros((0, 6))), ("a",)
    )
    with pytest.raises(ConfigError, match="masks: the network finds boxes"):
        _ = boxes.masks


def test_files_of_a_validation_have_the_masks() -> None:
    index, table = random_masks(5, images=4, classes=2, most_labels=3, most_found=6)
    index.ids = [f"image {number}" for number in index.image_ids]
    rows = MASKS.coco_results(table, index, ["x", "y"])
    assert len(rows) == len(table)
    for row, image, runs, box in zip(
        rows, table.image, table.masks(), table.boxes_xywh_px.tolist(), strict=True
    ):
        assert (row["image_id"], row["bbox"]) == (index.ids[image], box)
        assert (
            rle.from_text(row["segmentation"]["counts"], tuple(row["segmentation"]["size"])) == runs
        ).all()
    texts = MASKS.yolo_texts(table, index, scores=True)
    assert sum(len(text.splitlines()) for text in texts.values()) == (table.pixels > 0).sum()
    assert not MASKS.yolo_texts(table.rows([]), index, scores=False)


def test_pictures_and_the_page_of_a_validation_have_the_masks(tmp_path, monkeypatch) -> None:
    index, table = random_masks(5, images=3, classes=2, most_labels=3, most_found=6)
    monkeypatch.setattr(
        "yolofleet.tasks.boxes.plots.read_image", lambda path: np.zeros((*_size(index, path), 3), np.uint8)
    )
    index.path = lambda image: f"{image}.png"
    metrics = MASKS.metrics([MASKS.judged(index, np.arange(3), table, None)], index.names)
    draw_masks(metrics, table, index, tmp_path, pytest.fail)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*g")}
    assert {
        "PR_curve.png",
        "masks/PR_curve.png",
        "masks/confusion_matrix.png",
        "val_predictions.jpg",
    } <= names
    page = MASKS.page(metrics, table, index)
    assert len(page["mask_curves"]["precision at recall"]) == 1 + len(page["mask_curves"]["classes"])


def _size(index, path):
    width, height = index.sizes_wh[int(path.split(".")[0])].tolist()
    return height, width
