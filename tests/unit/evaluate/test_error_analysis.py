"""Kinds of errors and their cost: hand-made cases, and stored answers of the authors' package (tidecv 1.0.1)."""

import json

import numpy as np
import pytest
from reference import parity

from yolofleet.tasks.boxes.error_analysis import KINDS, analyse_errors, voc_ap
from yolofleet.tasks.boxes.matching import CONFUSION_SCORE, Labels, ScoredBoxes, confusion_matrix


def labelled(*table, crowd=()):
    """Rows of image, class, x, y, w, h."""
    values = np.array(table, np.float64).reshape(-1, 6)
    crowds = np.isin(np.arange(len(values)), crowd)
    image, class_idx = values[:, :2].astype(np.int64).T
    return Labels(image, class_idx, values[:, 2:], values[:, 4] * values[:, 5], crowds)


def detected(*table):
    """Rows of image, class, x, y, w, h, score."""
    values = np.array(table, np.float64).reshape(-1, 7)
    image, class_idx = values[:, :2].astype(np.int64).T
    return ScoredBoxes(image, class_idx, values[:, 6], values[:, 2:6])


TRUTH = labelled((0, 0, 0, 0, 10, 10), (0, 1, 50, 50, 10, 10))
SURE = ((0, 0, 0, 0, 10, 10, 0.9), (0, 1, 50, 50, 10, 10, 0.9))


@pytest.mark.parametrize(
    ("kind", "wrong", "gain"),
    [
        # the label of class 1 has only this box: AP of class 1 is 0, and 1 after the repair
        ("classification", [(0, 0, 50, 50, 10, 10, 0.5)], 0.5),
        ("localisation", [(0, 1, 50, 56, 10, 10, 0.5)], 0.5),  # IoU 40 / 160
        ("missed", [], 0.5),
        # the label of class 1 is found by SURE; what is added has a higher score, so AP of class 0 is 1/2
        ("duplicate", [SURE[1], (0, 0, 0, 0, 10, 9, 0.8)], 0.0),  # a lower score costs nothing
        ("background", [SURE[1], (0, 0, 80, 0, 10, 10, 0.95)], 0.25),
        ("both", [SURE[1], (0, 0, 50, 56, 10, 10, 0.95)], 0.25),  # IoU 0.25 with a label of class 1
    ],
)
def test_each_kind_of_error_is_told_and_costed(kind, wrong, gain):
    analysis = analyse_errors(TRUTH, detected(SURE[0], *wrong), 2)
    assert [name for name in KINDS if analysis.counts[name]] == [kind]
    assert analysis.gains[kind] == pytest.approx(gain)
    assert analysis.of_image == {0: 1}


def test_perfect_detections_have_no_errors_and_nothing_gives_nothing():
    perfect = analyse_errors(TRUTH, detected(*SURE), 2)
    assert perfect.ap50 == 1 and not any(perfect.counts.values()) and not perfect.of_image
    assert analyse_errors(labelled(), detected(), 2).ap50 == 0
    nothing = analyse_errors(TRUTH, detected(), 2)
    assert nothing.counts["missed"] == 2


def test_the_numbers_count_the_detections_of_the_confusion_matrix():
    """Without noise: one wrong class, and so one label that only this box finds."""
    seen = (SURE[0], (0, 0, 50, 50, 10, 10, CONFUSION_SCORE + 0.01))
    noise = [(0, 0, 50, 50, 10, 10, CONFUSION_SCORE)] * 9 + [(0, 1, 50, 50, 10, 10, 0.001)]
    boxes = detected(*seen, *noise)
    analysis = analyse_errors(TRUTH, boxes, 2)
    matrix = confusion_matrix(TRUTH, boxes, 2)
    assert matrix.sum() == 2 and matrix[0, 1] == 1  # predicted 0, true 1
    assert analysis.counts == dict.fromkeys(KINDS, 0) | {"classification": 1} and analysis.of_image == {0: 1}
    assert analysis.ap50 == 1  # the box of score 0.001 finds its label
    every = analyse_errors(TRUTH, boxes, 2, counted_above=0)
    assert every.counts["classification"] == 10 and every.gains == analysis.gains


def test_a_detection_on_a_crowd_does_not_count():
    truth = labelled((0, 0, 0, 0, 10, 10), (0, 0, 40, 40, 50, 50), crowd=[1])
    analysis = analyse_errors(truth, detected(SURE[0], (0, 0, 50, 50, 10, 10, 0.95)), 1)
    assert analysis.ap50 == 1 and not any(analysis.counts.values())


def test_figures_are_those_of_the_authors_package():
    stored = json.loads(parity("tide.json").read_text())
    boxes = detected(*stored["found"])
    found = analyse_errors(labelled(*stored["labels"]), boxes, stored["classes"], counted_above=-1)
    short = dict(zip(("Cls", "Loc", "Both", "Dupe", "Bkg", "Miss"), KINDS, strict=True))
    assert found.ap50 == pytest.approx(stored["ap50"] / 100, abs=1e-9)
    for theirs, ours in short.items():
        assert found.counts[ours] == stored["counts"].get(theirs, 0)
        assert found.gains[ours] == pytest.approx(stored["gains"][theirs] / 100, abs=1e-9)


def test_voc_ap_of_a_worked_example():
    # three labels; by score: hit, duplicate, hit. Recall 1/3, 1/3, 2/3; precision 1, 1/2, 2/3
    truth = labelled((0, 0, 0, 0, 10, 10), (0, 0, 50, 50, 10, 10), (1, 0, 0, 0, 10, 10))
    boxes = detected((0, 0, 0, 0, 10, 10, 0.9), (0, 0, 0, 0, 10, 9, 0.8), (0, 0, 50, 50, 10, 10, 0.7))
    # recalls 0 to 0.3: 1; 0.4 to 0.6: 2/3; above: 0
    assert voc_ap(truth, boxes, ["a"], "voc07") == pytest.approx({"a": (4 + 3 * 2 / 3) / 11})
    assert voc_ap(truth, boxes, ["a"], "voc12") == pytest.approx({"a": 1 / 3 + 2 / 3 / 3})


def test_voc_ap_ignores_difficult_objects():
    truth = labelled((0, 0, 0, 0, 10, 10), (0, 0, 50, 50, 10, 10), crowd=[1])
    boxes = detected((0, 0, 50, 50, 10, 10, 0.9), (0, 0, 0, 0, 10, 10, 0.8))
    for metric in ("voc07", "voc12"):
        assert voc_ap(truth, boxes, ["a"], metric) == pytest.approx({"a": 1.0})
