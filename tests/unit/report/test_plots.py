import subprocess
import sys
import warnings

import cv2
import numpy as np
import pytest
import torch
from label_rows import shapes_of

from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.page import write_report
from yolofleet.runs.report.plots import or_note, plot_labels, plot_pictures, plot_results, training_pictures
from yolofleet.runs.report.results import ResultsTable
from yolofleet.tasks.boxes.coco import precision_recall
from yolofleet.tasks.boxes.plots import plot_confusion, plot_curves

pytestmark = pytest.mark.long

ODD_NAMES = ("$5_bill", "_under$core^2", "人")  # mathematics for matplotlib, and a letter it has no font for


def picture(path):
    image = cv2.imread(str(path))
    assert image is not None and image.std() > 1, f"{path} is empty"
    return image


def test_curves_of_a_run_are_drawn_from_one_epoch_on(tmp_path):
    table = ResultsTable(tmp_path / "results.csv", ("box", "obj", "cls"))
    plot_results_of = tmp_path / "plots" / "results.png"
    table.write({"epoch": 1, "train/box_loss": 0.1, "lr": 0.01, "data_share": 0.1, "compute_share": 0.9})
    plot_results(table.path, plot_results_of)  # no validation yet, no rate yet
    row = {"train/box_loss": 0.1, "metrics/mAP50": 0.5, "images_per_s": 10.0, "seconds": 5.0}
    table.write({"epoch": 2, **row, "val_seconds": 1.0, "device_memory_mib": 512.0})
    plot_results(table.path, plot_results_of)
    assert picture(plot_results_of).shape[1] > 1500


def test_evaluation_curves_and_odd_class_names_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    score = rng.random(60)
    hit = rng.random((60, 10)) < score[:, None]
    curves = precision_recall(hit, score, rng.integers(0, 3, 60), np.array([20, 0, 20]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves(curves, ODD_NAMES, tmp_path)
        plot_confusion(rng.integers(0, 9, (4, 4)), ODD_NAMES, tmp_path / "confusion_matrix.png")
    names = {"PR_curve.png", "P_curve.png", "R_curve.png", "F1_curve.png", "confusion_matrix.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        picture(tmp_path / name)


def test_nothing_found_and_nothing_labelled_is_not_an_error(tmp_path):
    none = precision_recall(np.zeros((0, 10), bool), np.zeros(0), np.zeros(0, int), np.array([0, 0]))
    plot_curves(none, ("a", "b"), tmp_path)
    assert not list(tmp_path.iterdir())
    plot_confusion(np.zeros((2, 2), int), ("a",), tmp_path / "c.png")
    plot_labels(np.zeros(0, int), np.zeros((0, 4)), ("a",), tmp_path / "l.png")
    plot_pictures([], ("a",), tmp_path / "p.jpg")


def test_label_statistics_of_many_classes_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    boxes = rng.uniform(0.1, 0.9, (500, 4))
    plot_labels(rng.integers(0, 300, 500), boxes, [f"class {i}" for i in range(300)], tmp_path / "labels.png")
    picture(tmp_path / "labels.png")


def test_a_picture_that_fails_is_a_note_and_not_the_end_of_a_run(tmp_path):
    notes: list[str] = []
    (tmp_path / "file").write_text("")
    boxes, path = np.full((1, 4), 0.5), tmp_path / "file" / "labels.png"
    assert not or_note(notes.append, path, plot_labels, np.zeros(1, int), boxes, ["a"], path)
    assert not or_note(notes.append, "report.html", write_report, RunFolder(tmp_path / "none"))
    assert len(notes) == 2 and notes[0].startswith(f"cannot write {path}: ")
    assert notes[1].startswith("cannot write report.html: ")
    assert all(note.endswith("; the command continues without it") for note in notes)
    assert or_note(notes.append, "p.jpg", plot_pictures, [], ["a"], tmp_path / "p.jpg")


def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_confusion(np.ones((2, 2), int), ("a",), tmp_path / "c.png")
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_is_imported_only_when_something_is_drawn():
    code = "import sys, yolofleet.runs.report.plots; print('matplotlib' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


def test_a_training_batch_becomes_pictures_with_boxes_in_pixels(tmp_path):
    images = torch.zeros((2, 3, 40, 80), dtype=torch.uint8)
    images[:, 0] = 200  # red
    labels = shapes_of([[1, 2, 0.5, 0.5, 0.5, 0.25]])
    first, second = training_pictures(images, labels, ["a.jpg"])
    assert len(first.boxes_xyxy_px) == 0 and first.title == "a.jpg"
    assert second.boxes_xyxy_px.tolist() == [[20, 15, 60, 25]] and second.classes.tolist() == [2]
    assert second.image[0, 0].tolist() == [0, 0, 200]  # BGR
    plot_pictures([first, second], ("a", "b", "c"), tmp_path / "train_batch0.jpg")
    picture(tmp_path / "train_batch0.jpg")
