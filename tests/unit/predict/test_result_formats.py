"""Predictions as values of other packages: COCO's format, pandas, supervision."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from label_rows import index_of

from yolofleet.inference.predict.frames import Frame, Video
from yolofleet.inference.predict.results import Prediction, Predictions
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.found import FoundBoxes

NAMES = ("circle", "star")


def made(path: str, *boxes: tuple[float, ...], video: Video | None = None, number: int = 0) -> Prediction:
    """Rows of x1, y1, x2, y2, score, class; the image has 40 x 30 px."""
    rows = np.array(boxes, np.float32).reshape(-1, 6)
    frame = Frame(path, np.zeros((30, 40, 3), np.uint8), video=video, number=number)
    return Prediction(frame, FoundBoxes.of_rows(rows), NAMES)


@pytest.fixture
def found() -> Predictions:
    two = made("a.jpg", (1, 2, 11, 22, 0.75, 1), (0.5, 0, 3, 4, 0.5, 0))
    frame = made("clip.mp4", (5, 6, 7, 8, 0.25, 1), video=Video(9, 25.0), number=3)
    return Predictions([two, made("empty.jpg"), frame])


def test_boxes_in_cocos_format(found: Predictions) -> None:
    size = {"width": 40, "height": 30}
    assert found.to_coco() == {
        "images": [
            {"id": 1, "file_name": "a.jpg", **size},
            {"id": 2, "file_name": "empty.jpg", **size},
            {"id": 3, "file_name": "clip.mp4", **size, "frame": 3},
        ],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1.0, 2.0, 10.0, 20.0], "area": 200.0, "iscrowd": 0, "score": 0.75},
            {"id": 2, "image_id": 1, "category_id": 0, "bbox": [0.5, 0.0, 2.5, 4.0], "area": 10.0, "iscrowd": 0, "score": 0.5},
            {"id": 3, "image_id": 3, "category_id": 1, "bbox": [5.0, 6.0, 2.0, 2.0], "area": 4.0, "iscrowd": 0, "score": 0.25},
        ],
        "categories": [{"id": 0, "name": "circle"}, {"id": 1, "name": "star"}],
    }  # fmt: skip
    assert found[0].to_coco() == Predictions(found[:1]).to_coco()
    assert Predictions().to_coco() == {"images": [], "annotations": [], "categories": []}


def test_pycocotools_reads_the_boxes_as_a_data_set_and_as_results(found: Predictions, tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    (tmp_path / "all.json").write_text(json.dumps(found.to_coco()))
    (tmp_path / "results.json").write_text(json.dumps(found.to_coco()["annotations"]))
    truth = coco.COCO(str(tmp_path / "all.json"))
    results = truth.loadRes(str(tmp_path / "results.json"))
    assert [truth.getAnnIds(imgIds=[number]) for number in (1, 2, 3)] == [[1, 2], [], [3]]
    assert [row["score"] for row in results.dataset["annotations"]] == [0.75, 0.5, 0.25]


def test_yolofleet_reads_the_boxes_as_labels(
    found: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions can become the labels of the next training."""
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    stills = Predictions(found[:2])
    for one in stills:
        (tmp_path / "train").mkdir(exist_ok=True)
        Predictions([one]).save(tmp_path / "train")
    (tmp_path / "train" / "_annotations.coco.json").write_text(json.dumps(stills.to_coco()))
    index = index_of(tmp_path)
    assert index.names == NAMES and index.classes.tolist() == [1, 0]
    assert index.boxes_cxcywh_unit[0].tolist() == pytest.approx([6 / 40, 12 / 30, 10 / 40, 20 / 30])


def test_a_data_frame_of_all_images_and_of_one(found: Predictions) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = found.pandas()
    assert isinstance(frame, pandas.DataFrame) and frame["path"].tolist() == ["a.jpg", "a.jpg", "clip.mp4"]
    assert frame.groupby("name")["confidence"].max().to_dict() == {"circle": 0.5, "star": 0.75}
    assert found[0].pandas()["xmin"].tolist() == [1.0, 0.5]
    assert found[1].pandas().columns.tolist() == frame.columns.tolist() and found[1].pandas().empty


def test_detections_of_supervision(found: Predictions) -> None:
    supervision = pytest.importorskip("supervision", reason="supervision is not installed")
    first, empty, _ = found.to_supervision()
    assert len(first) == 2 and len(empty) == 0
    assert first.xyxy.tolist() == [[1, 2, 11, 22], [0.5, 0, 3, 4]] and first.class_id.tolist() == [1, 0]
    assert first["class_name"].tolist() == ["star", "circle"]
    kept = supervision.Detections.merge([first[first.confidence > 0.6], empty])
    assert kept["class_name"].tolist() == ["star"]
    picture = supervision.BoxAnnotator().annotate(found[0].image_bgr.copy(), first)
    picture = supervision.LabelAnnotator().annotate(picture, first)
    assert picture.any()


@pytest.mark.parametrize(("package", "method"), [("pandas", "pandas"), ("supervision", "to_supervision")])
def test_a_missing_package_is_named(
    package: str, method: str, found: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for results in (found, found[0]):
        with pytest.raises(ConfigError, match=f"{package} cannot be imported: .*a_package_that") as caught:
            getattr(results, method)()
        assert f"pip install {package}" in str(caught.value.hint)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{package} is not installed"):
        getattr(found, method)()
