import json

import numpy as np
import pytest
import torch
from reference import parity

from yolofleet.data.geometry.boxes import iou_matrix
from yolofleet.tasks.boxes.coco import precision_recall
from yolofleet.tasks.boxes.matching import Labels, ScoredBoxes, confusion_matrix, match_detections, unpacked


def curves_of(hit, score, class_idx, labels_per_class):
    return precision_recall(
        np.array(hit, bool).reshape(-1, 1),
        np.array(score, float),
        np.array(class_idx),
        np.array(labels_per_class),
    )


def test_a_perfect_detector_has_precision_and_recall_one():
    curves = curves_of([1, 1], [0.9, 0.8], [0, 0], [2])
    assert (curves.means["P"], curves.means["R"]) == (1.0, 1.0)
    assert curves.means["F1"] == pytest.approx(1.0, abs=1e-12)


def test_the_working_point_is_where_f1_is_best():
    # ten hits above 0.6, then forty false alarms below 0.3: the best confidence lies between
    score = np.concatenate([np.linspace(0.9, 0.6, 10), np.linspace(0.3, 0.1, 40)])
    curves = curves_of([1] * 10 + [0] * 40, score, [0] * 50, [10])
    assert 0.3 < curves.confidence < 0.6
    assert curves.precision.tolist() == pytest.approx([1.0], abs=0.02)
    assert curves.recall.tolist() == [1.0]


def test_classes_without_labels_are_left_out_and_classes_never_found_count_as_zero():
    curves = curves_of([1, 0], [0.9, 0.8], [0, 1], [1, 0, 1])
    assert curves.classes.tolist() == [0, 2]
    assert curves.recall.tolist() == [1.0, 0.0]
    assert curves.means["R"] == 0.5


def test_no_labels_at_all_is_zero_not_nan():
    curves = curves_of([0], [0.5], [0], [0])
    assert (curves.means["P"], curves.means["R"], curves.means["F1"]) == (0.0, 0.0, 0.0)


def test_area_of_one_hit_between_two_labels():
    # recall 1/2 at precision 1, then nothing: the curve falls from (0.5, 1) to (1, 0), so the area is 0.5 and a
    # triangle of 0.25
    assert curves_of([1], [0.9], [0], [2]).ap[0, 0] == pytest.approx(0.75, abs=1e-12)


@pytest.mark.parametrize("name", ["coco128", "perfect"])
def test_figures_equal_those_of_the_original(name):
    answer = json.loads(parity("metrics/results.json").read_text())[name]["yolov5"]
    with np.load(parity(f"metrics/{name}_stats.npz")) as stats:
        labels = np.bincount(stats["target_cls"].astype(int), minlength=80)
        curves = precision_recall(stats["tp"], stats["conf"], stats["pred_cls"].astype(int), labels)
        np.testing.assert_allclose(curves.ap, stats["ap"], rtol=0, atol=1e-12)
    assert curves.classes.tolist() == answer["classes"]
    np.testing.assert_allclose(curves.precision, answer["p"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(curves.recall, answer["r"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(curves.f1, answer["f1"], rtol=0, atol=1e-12)
    assert curves.means["P"] == pytest.approx(answer["mp"], abs=1e-12)
    assert curves.means["R"] == pytest.approx(answer["mr"], abs=1e-12)
    map50, map50_95 = curves.ap[:, 0].mean(), curves.ap.mean()
    assert (map50, map50_95) == pytest.approx((answer["map50"], answer["map"]), abs=1e-12)
    assert 0.1 * map50 + 0.9 * map50_95 == pytest.approx(answer["fitness"], abs=1e-12)
    found = np.round(curves.recall * labels[curves.classes])  # hits at the best confidence
    assert found.tolist() == answer["tp"]
    alarms = np.round(found / (curves.precision + 1e-16) - found)
    assert alarms.tolist() == answer["fp"]


def one_image(case) -> tuple[Labels, ScoredBoxes]:
    """``labels`` class, xyxy; ``detections`` xyxy, score, class."""
    true, found = np.array(case["labels"]), np.array(case["detections"])
    boxes = np.concatenate([true[:, 1:3], true[:, 3:] - true[:, 1:3]], axis=1)
    return (
        Labels(
            np.zeros(len(true), np.int64),
            true[:, 0].astype(np.int64),
            boxes,
            boxes[:, 2] * boxes[:, 3],
            np.zeros(len(true), bool),
        ),
        ScoredBoxes(
            np.zeros(len(found), np.int64),
            found[:, 5].astype(np.int64),
            found[:, 4],
            np.concatenate([found[:, :2], found[:, 2:4] - found[:, :2]], axis=1),
        ),
    )


def test_hits_of_one_image_equal_those_of_the_original():
    case = json.loads(parity("metrics/results.json").read_text())["process_batch_case"]
    labels, found = one_image(case)
    overlap = iou_matrix(torch.tensor(case["labels"])[:, 1:], torch.tensor(case["detections"])[:, :4])
    np.testing.assert_allclose(overlap, case["iou"], rtol=0, atol=1e-6)
    records = match_detections(labels, found, classes=2, images_seen=1)
    order = np.lexsort((-found.scores, found.classes))  # rows of the records
    hits = unpacked(records.hit)[:, 0].T  # [D, T], every area
    assert hits.tolist() == np.array(case["correct"])[order].tolist()


def test_confusion_matrix_equals_that_of_the_original():
    answers = json.loads(parity("metrics/results.json").read_text())
    labels, found = one_image(answers["process_batch_case"])
    assert confusion_matrix(labels, found, 2).tolist() == answers["confusion_matrix_case"]
