"""A family of a user, tests/toy_family: matched by predictions, without suppression. It needs no change elsewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from commands import called, in_ranks, results, small_shapes, working_in

from yolofleet.config.stored.job import load_job

TOY = Path(__file__).resolve().parents[1] / "toy_family" / "toy.py"
CODE = ["--recipe-class", "toy.py:Toy"]
SMALL = ["--img", "64", "--batch", "6", "--nominal-batch", "6", "--micro-batch", "2", "--no-plots", "--workers", "0"]  # fmt: skip
RUN = ["train", "--data", "small shapes/data.yaml", "--model", "toy-n", *CODE, *SMALL, "--threads", "1"]
RUN += ["--epochs", "2", "--reduce", "exact"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("toy family")
    shutil.copy(TOY, made)
    small_shapes(made, images=12, val_images=4)
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    with working_in(folder):
        done = called(*RUN, "--device", "cpu", "--name", "one")
    assert done.code == 0, done.err
    return folder / "runs" / "train" / "one"


def test_it_is_one_folder_of_fewer_than_160_lines() -> None:
    files = list(TOY.parent.glob("*.*"))
    assert sum(len(file.read_text().splitlines()) for file in files) < 160


def test_it_trains_validates_and_predicts(folder: Path, one: Path) -> None:
    weights = str(one / "weights" / "best.safetensors")
    picture = next((folder / "small shapes" / "images" / "val").iterdir())
    val = ["val", "--weights", weights, "--data", "small shapes/data.yaml", "--img", "64", "--no-plots"]
    with working_in(folder):
        assert called(*val, *CODE, "--workers", "0").code == 0
        unused = called(*val, *CODE, "--iou", "0.5")
        assert unused.code == 2 and "--iou has no effect" in unused.err
        unknown = called(*val)
        assert unknown.code == 3 and "--recipe-class" in unknown.err and "'toy'" in unknown.err
        found = called(
            "predict", "--weights", weights, "--source", picture, "--conf", "0", "--json", "-", *CODE
        )
        assert found.code == 0 and found.out.count("box") >= 8, "all of its predictions are boxes"


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_an_exported_file_needs_no_suppression_and_no_code(folder: Path, one: Path, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    weights = one / "weights" / "best.safetensors"
    export: list[str | Path] = ["export", "--weights", weights, "--format", format, "--img", "64", *CODE]
    made = str(weights.with_suffix(f".{format}"))
    val = ["val", "--weights", made, "--data", "small shapes/data.yaml", "--no-plots"]
    with working_in(folder):
        if format == "onnx":
            refused = called(*export, "--nms")
            assert refused.code == 2 and "no suppression" in refused.err
        done = called(*export)
        assert done.code == 0 and "exported and verified" in done.out, done.err
        assert called(*val, "--workers", "0").code == 0
        assert "--iou has no effect" in called(*val, "--iou", "0.5").err


def test_three_processes_give_the_weights_of_one(folder: Path, one: Path) -> None:
    in_ranks(folder, 3, *RUN, "--name", "three")
    run = folder / "runs" / "train" / "three"
    assert results(run)["weights_sha256"] == results(one)["weights_sha256"]


def test_its_hyperparameters_are_set_checked_stored_and_resumed(folder: Path, one: Path) -> None:
    short, run = [*RUN, "--device", "cpu", "--max-steps", "2"], folder / "runs" / "train" / "gain"
    with working_in(folder):
        done = called(*short, "--name", "gain", "--set", "toy_gain=2")
        assert done.code == 0 and results(run)["weights_sha256"] != results(one)["weights_sha256"], done.err
        stored = load_job(run / "config.yaml").recipe
        assert stored is not None and dict(stored.value)["toy_gain"] == 2.0 and "box" not in stored.sources
        stored = load_job(one / "config.yaml").recipe
        assert stored is not None and stored.sources["toy_gain"] == "default"
        other = ["yolov5n" if word == "toy-n" else word for word in RUN]
        assert called(*other, "--device", "cpu", "--set", "toy_gain=2").code == 2
        shown = called(*RUN, "--set", "toy_gain=2", "--dry-run").out
        assert re.search(r"toy_gain +2.0 +command line", shown) and "autobalance" not in shown
        resume = ["train", "--resume", str(run), *CODE, "--max-steps", "3"]
        changed = called(*resume, "--set", "toy_gain=3")
        assert changed.code == 2 and "toy_gain 3 differs from the run's 2.0" in changed.err
        again = called(*resume)
        assert again.code == 0 and results(run)["steps"] == 3, again.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("box=1", "box belongs to yolov5 and darknet, and the network is of the family toy"),
        ("toy_gian=2", "did you mean toy_gain?"),
        ("toy_gain=-1", "--set toy_gain=-1 is below 0"),
        ("toy_gain=much", "--set toy_gain=much is not a finite number"),
    ],
)
def test_hyperparameters_that_it_does_not_have_are_refused(folder: Path, given: str, says: str) -> None:
    with working_in(folder):
        refused = called(*RUN, "--device", "cpu", "--set", given)
        assert refused.code == 2 and says in refused.err


def test_its_own_recipe_file_is_the_default(folder: Path) -> None:
    (folder / "toy.yaml").write_text("lr0: 0.02\ntoy_gain: 3.0\n")
    own = 'hyperparameters=ToyHyperparameters,\n        recipe=__file__.replace("own_toy.py", "toy.yaml"),'
    (folder / "own_toy.py").write_text(TOY.read_text().replace("hyperparameters=ToyHyperparameters,", own))
    run = ["own_toy.py:Toy" if word == "toy.py:Toy" else word for word in RUN]
    with working_in(folder):
        done = called(*run, "--device", "cpu", "--max-steps", "1", "--name", "own", "--set", "lr0=0.03")
    assert done.code == 0, done.err
    stored = load_job(folder / "runs/train/own/config.yaml").recipe
    assert stored is not None and (stored.value.lr0, dict(stored.value)["toy_gain"]) == (0.03, 3.0)
    assert stored.sources["toy_gain"].endswith("toy.yaml:2")


def test_a_family_that_fails_or_has_a_built_in_name_is_an_error_with_its_line(folder: Path) -> None:
    text = TOY.read_text()
    (folder / "failing_toy.py").write_text(text.replace("ToyLoss(recipe),", "None.loss,"))
    (folder / "taken_toy.py").write_text(text.replace('name="toy"', 'name="yolov5"'))
    with working_in(folder):
        run = ["failing_toy.py:Toy" if word == "toy.py:Toy" else word for word in RUN]
        failed = called(*run, "--device", "cpu")
        assert failed.code == 2 and "toy.loss failed" in failed.err and "failing_toy.py:" in failed.err
        taken = called(
            *["taken_toy.py:Toy" if word == "toy.py:Toy" else word for word in RUN], "--device", "cpu"
        )
        assert taken.code == 2 and "the family yolov5 is built in" in taken.err
