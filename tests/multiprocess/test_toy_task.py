"""A task of a user, tests/toy_task: circles instead of boxes, from labels to an exported file. It needs no change elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import called, in_ranks, killed_in_the_middle, results, small_shapes, working_in

from yolofleet.families.family import Family
from yolofleet.families.recipe_class import load_recipe_class
from yolofleet.families.table import FAMILIES
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import read_run

TOY = Path(__file__).resolve().parents[1] / "toy_task" / "circles.py"
CODE = ["--recipe-class", "circles.py:Circular"]
SMALL = ["--img", "64", "--batch", "6", "--nominal-batch", "6", "--micro-batch", "2", "--workers", "0"]
RUN = ["train", "--data", "small shapes/data.yaml", "--model", "circles-n", *CODE, *SMALL, "--threads", "1"]
RUN += ["--epochs", "2", "--reduce", "exact"]
DATA = ["--data", "small shapes/data.yaml", "--img", "64", "--workers", "0", "--no-plots"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("toy task")
    shutil.copy(TOY, made)
    small_shapes(made, images=12, val_images=4)
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    with working_in(folder):
        done = called(*RUN, "--device", "cpu", "--name", "one")
    assert done.code == 0, done.err
    return folder / "runs" / "train" / "one"


def test_it_is_one_file_of_at_most_200_lines() -> None:
    (file,) = TOY.parent.glob("*.py")
    assert len(file.read_text().splitlines()) <= 200


def test_its_metric_chooses_the_best_weights_and_has_a_column(one: Path) -> None:
    header, *rows = [line.split(",") for line in (one / "results.csv").read_text().splitlines()]
    overlaps = [float(row[header.index("metrics/overlap")]) for row in rows]
    figures, best = results(one)["metrics"], results(one)["best"]
    assert figures["overlap"] == pytest.approx(overlaps[-1], abs=1e-5) and 0 < overlaps[-1] < 1
    assert best["epoch"] == 1 + int(np.argmax(overlaps))
    assert best["fitness"] == pytest.approx(max(overlaps), abs=1e-5)
    assert not any("mAP" in name for name in header) and (one / "plots" / "results.png").is_file()
    run = read_run(RunFolder(one))
    assert run["best"]["epoch"] == best["epoch"]
    assert run["best"]["main"] == pytest.approx(best["fitness"], abs=1e-5)
    assert run["task"]["main"] == "overlap" and run["figures"]["per_class"]


def test_it_validates_and_predicts_circles(folder: Path, one: Path) -> None:
    weights = str(one / "weights" / "last.safetensors")
    picture = next((folder / "small shapes" / "images" / "val").iterdir())
    with working_in(folder):
        val = called("val", "--weights", weights, *DATA, *CODE, "--json", "-")
        assert val.code == 0, val.err
        assert json.loads(val.out)["metrics"] == pytest.approx(results(one)["metrics"], abs=1e-6)
        for option in ("--save-txt", "--error-analysis"):
            refused = called("val", "--weights", weights, *DATA, *CODE, option)
            assert refused.code == 2 and f"{option}: it is for boxes" in refused.err, refused.err
        predict: list[str | Path] = [
            "predict",
            "--weights",
            weights,
            "--source",
            picture,
            *("--conf", "0", "--img", "64"),
            *CODE,
        ]
        found = called(*predict, "--json", "-")
        assert found.code == 0, found.err
        (image,) = json.loads(found.out)
        assert len(image["detections"]) == 8
        assert all(len(one["circle_px"]) == 3 for one in image["detections"])
        unknown = called("val", "--weights", weights, *DATA)
        assert unknown.code == 3 and "--recipe-class" in unknown.err


def test_labels_for_a_trial_of_memory_are_those_of_its_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "circles", Family("circles", list, list, list))  # forgotten after the test
    with working_in(folder):
        family = load_recipe_class("circles.py:Circular").family
    assert family is not None
    targets = family.loss(None, None, 64).match(family.task.made_up(3), 1, (64, 64))  # type: ignore[operator]
    assert targets.counts.tolist() == [3, 3]


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_an_exported_file_has_its_outputs_by_name(folder: Path, one: Path, format: str) -> None:
    weights = one / "weights" / "last.safetensors"
    made = weights.with_suffix(f".{format}")
    with working_in(folder):
        if format == "onnx":
            onnx = pytest.importorskip("onnx")
            pytest.importorskip("onnxruntime")
        done = called("export", "--weights", weights, "--format", format, "--img", "64", *CODE)
        assert done.code == 0 and "exported and verified" in done.out and "circles within" in done.out, (
            done.err
        )
        val = called("val", "--weights", made, *DATA, *CODE, "--json", "-")
        assert val.code == 0, val.err
        assert json.loads(val.out)["metrics"] == pytest.approx(results(one)["metrics"], abs=1e-4)
        lacking = called("val", "--weights", made, *DATA)
        assert lacking.code == 2 and "finds 'circles'" in lacking.err, lacking.err
    if format == "onnx":
        assert [output.name for output in onnx.load(made).graph.output] == ["circles", "scores"]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
def test_every_number_of_processes_and_a_resume_give_the_same_weights_and_figures(
    folder: Path, one: Path
) -> None:
    in_ranks(folder, 3, *RUN, "--name", "three")
    run = folder / "runs" / "train" / "three"
    assert results(run)["weights_sha256"] == results(one)["weights_sha256"]
    assert results(run)["metrics"] == results(one)["metrics"]
    run = folder / "runs" / "train" / "killed"
    killed_in_the_middle(folder, run, *RUN, "--save-every", "1steps", "--keep-last", "9")
    in_ranks(folder, 1, "train", "--resume", run, *CODE)
    assert results(run)["weights_sha256"] == results(one)["weights_sha256"]
