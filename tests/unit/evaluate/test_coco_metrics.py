import numpy as np
import pytest
from detection_sets import random_set

from yolofleet.tasks.boxes.coco import FIGURES, summarize
from yolofleet.tasks.boxes.matching import (
    Labels,
    ScoredBoxes,
    confusion_matrix,
    match_detections,
    merge,
    unpacked,
)
from yolofleet.tasks.boxes.task import BOXES


def labels_at(*boxes, image=0, class_idx=0, crowd=False):
    """Labels of one image and class, xywh px; the area is the box's."""
    xywh = np.array(boxes, np.float64).reshape(-1, 4)
    every = np.ones(len(xywh), np.int64)
    return Labels(image * every, class_idx * every, xywh, xywh[:, 2] * xywh[:, 3], np.full(len(xywh), crowd))


def found_at(*boxes_and_scores, image=0, class_idx=0):
    table = np.array(boxes_and_scores, np.float64).reshape(-1, 5)
    every = np.ones(len(table), np.int64)
    return ScoredBoxes(image * every, class_idx * every, table[:, 4], table[:, :4])


def figures(labels, found, classes=1):
    records = match_detections(labels, found, classes=classes, images_seen=1)
    return summarize(records, [f"c{c}" for c in range(classes)])


def test_perfect_detections_score_one():
    metrics = figures(
        labels_at((0, 0, 50, 50), (100, 0, 50, 50)), found_at((0, 0, 50, 50, 0.9), (100, 0, 50, 50, 0.8))
    )
    assert metrics.figures["mAP50-95"] == pytest.approx(1.0, abs=1e-12)
    assert metrics.figures["AR1"] == 0.5  # one box an image finds one of two
    assert metrics.figures["AR10"] == metrics.figures["AR100"] == 1.0
    assert metrics.figures["mAP-small"] == metrics.figures["mAP-large"] == -1.0  # 50 x 50 px is medium
    assert metrics.figures["P"] == metrics.figures["R"] == 1.0
    row = metrics.per_class["c0"]
    assert (row["images"], row["labels"], row["P"], row["R"]) == (1, 2, 1.0, 1.0)


def test_one_false_alarm_above_the_only_hit_halves_the_precision():
    metrics = figures(labels_at((0, 0, 50, 50)), found_at((200, 0, 50, 50, 0.9), (0, 0, 50, 50, 0.8)))
    assert metrics.figures["mAP50"] == pytest.approx(0.5, abs=1e-12)  # precision 1/2 at every recall point


def test_overlap_of_the_matched_box_decides_at_which_thresholds_it_counts():
    # 50 x 50 against 50 x 40 inside it: IoU 0.8 exactly counts at 0.50, 0.55 ... 0.80, 7 of 10 thresholds
    metrics = figures(labels_at((0, 0, 50, 50)), found_at((0, 0, 50, 40, 0.9)))
    assert metrics.figures["mAP50-95"] == pytest.approx(0.7, abs=1e-12)
    assert metrics.figures["mAP75"] == pytest.approx(1.0, abs=1e-12)


def test_detection_whose_best_label_is_taken_takes_another_within_reach():
    # second detection: IoU 48/52 with the label that the first holds, 45/55 with the other
    labels = labels_at((0, 0, 50, 10), (5, 0, 50, 10))
    found = found_at((0, 0, 50, 10, 0.9), (2, 0, 50, 10, 0.8))
    assert figures(labels, found).figures["AR100"] > 0.5


def test_crowd_takes_any_number_of_detections_and_counts_as_nothing():
    labels = labels_at((0, 0, 200, 200), crowd=True)
    found = found_at((0, 0, 50, 50, 0.9), (100, 100, 50, 50, 0.8), (10, 10, 50, 50, 0.7))
    records = match_detections(labels, found, classes=1, images_seen=1)
    assert not records.hit.any() and not records.miss.any()
    assert records.objects[0].tolist() == [0, 0, 0, 0]
    metrics = summarize(records, ["c"])
    assert all(metrics.figures[name] == -1.0 for name in FIGURES)
    assert BOXES.judgement.fitness(metrics.figures) == 0.0 and metrics.figures["P"] == 0.0


def test_area_comes_from_the_label_for_hits_and_from_the_box_for_false_alarms():
    labels = labels_at((0, 0, 40, 40))  # medium
    found = found_at((0, 0, 30, 34, 0.9), (300, 300, 10, 10, 0.8))  # hit with a small box; small false alarm
    records = match_detections(labels, found, classes=1, images_seen=1)
    hit, miss = unpacked(records.hit)[0], unpacked(records.miss)[0]  # IoU 0.5: [areas, detections]
    assert hit.tolist() == [[1, 0], [0, 0], [1, 0], [0, 0]]
    assert miss.tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]


def test_only_the_first_hundred_of_an_image_and_class_are_kept():
    found = found_at(*[(10 * i, 0, 5, 5, 1 - i / 1000) for i in range(130)])
    records = match_detections(labels_at((1290, 0, 5, 5)), found, classes=1, images_seen=1)
    assert len(records.scores) == 100 and not records.hit.any()


@pytest.mark.parametrize("empty", ["labels", "found", "both"])
def test_nothing_to_find_or_nothing_found(empty):
    labels = labels_at((0, 0, 50, 50)) if empty == "found" else labels_at()
    found = found_at((0, 0, 50, 50, 0.9)) if empty == "labels" else found_at()
    metrics = figures(labels, found)
    assert metrics.figures["mAP50"] == (0.0 if empty == "found" else -1.0)
    assert metrics.figures["P"] == metrics.figures["R"] == metrics.figures["F1"] == 0.0


def test_a_repeated_class_name_loses_no_class():
    records = match_detections(labels_at(), found_at(), classes=2, images_seen=0)
    assert list(summarize(records, ["cat", "cat"]).per_class) == ["cat", "cat (1)"]


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 30])
def test_figures_are_equal_to_the_last_bit_for_any_sharding(shards):
    everything = random_set(5, images=25, classes=4, most_labels=8, most_found=40)
    order = np.random.default_rng(shards).permutation(everything.image_ids)
    parts = []
    for mine in np.array_split(order, shards):  # 30 shards of 25 images: five ranks have nothing to do
        labels = everything.labels.rows(np.isin(everything.labels.image, mine))
        found = everything.found.rows(np.isin(everything.found.image, mine))
        parts.append(match_detections(labels, found, classes=4, images_seen=len(mine)))
    merged = merge(parts)
    whole = match_detections(everything.labels, everything.found, classes=4, images_seen=25)
    assert all(np.array_equal(array, vars(whole)[name]) for name, array in vars(merged).items())
    ours, theirs = (summarize(records, list("abcd")) for records in (merged, whole))
    assert ours.figures == theirs.figures and ours.per_class == theirs.per_class


def test_confusion_matrix_counts_pairs_of_highest_overlap_and_the_rest_as_background():
    labels = Labels(
        image=np.zeros(3, np.int64),
        classes=np.array([0, 0, 1]),
        boxes_xywh_px=np.array([(10, 10, 40, 40), (100, 100, 40, 40), (200, 200, 40, 40)], float),
        area_px=np.full(3, 1600.0),
        crowd=np.zeros(3, bool),
    )
    found = ScoredBoxes(
        image=np.zeros(5, np.int64),
        classes=np.array([0, 1, 1, 0, 1]),
        boxes_xywh_px=np.array(
            [(12, 10, 40, 40), (10, 10, 40, 40), (100, 100, 40, 36), (400, 0, 9, 9), (200, 200, 40, 40)],
            float,
        ),
        scores=np.array([0.9, 0.8, 0.7, 0.6, 0.25]),  # the last is not above 0.25: a missed label
    )
    # label 0 goes to the exact box of class 1, label 1 to class 1, label 2 to nobody
    assert confusion_matrix(labels, found, 2).tolist() == [[0, 0, 2], [2, 0, 0], [0, 1, 0]]


def test_confusion_matrix_leaves_out_crowds_and_what_lies_on_them():
    labels = labels_at((0, 0, 100, 100), crowd=True)
    found = found_at((10, 10, 20, 20, 0.9), (500, 500, 20, 20, 0.9))
    assert confusion_matrix(labels, found, 1).tolist() == [[0, 1], [0, 0]]
