"""The examples of docs/extend.md run: callbacks, and an own model, loss and data set, on one and two processes and resumed."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import called, killed_at_step, results, small_shapes, working_in, yolofleet

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = [
    "--img",
    "64",
    "--batch",
    "4",
    "--nominal-batch",
    "4",
    "--micro-batch",
    "2",
    "--no-plots",
    "--epochs",
    "2",
]
RUN = [*SMALL, "--threads", "1", "--workers", "0", "--reduce", "exact"]
ALL = """
from my_data import CsvData
from my_loss import SmallLogits
from my_model import TinyModel

class All(TinyModel, SmallLogits, CsvData):
    pass
"""
BROKEN = """
from yolofleet import Callback

class Broken(Callback):
    def epoch(self, epoch, row):
        raise ValueError("no disk")

class Stopping(Callback):
    def step(self, step):
        if step.step == 2:
            self.request_stop("enough")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the examples, a data set, and the same labels as a table."""
    made = tmp_path_factory.mktemp("own code")
    data = small_shapes(made, images=8, val_images=4)
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, made)
    (made / "all_parts.py").write_text(ALL)
    (made / "broken.py").write_text(BROKEN)
    with (data.parent / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("split", "image", "class", "x1", "y1", "x2", "y2"))
        for label in sorted((data.parent / "labels").rglob("*.txt")):
            split = label.parent.name
            (image,) = (data.parent / "images" / split).glob(f"{label.stem}.*")
            for line in label.read_text().splitlines():
                number, x, y, w, h = (float(value) for value in line.split())
                sides = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
                table.writerow((split, image.relative_to(data.parent), f"class {number:.0f}", *sides))
    return made


@pytest.fixture(scope="module")
def own(folder: Path) -> list[str]:
    """The command of a run whose model, loss and data set are the user's, with both callbacks."""
    code = ["--recipe-class", "all_parts.py:All", "--callbacks", "my_limit.py:LimitBiases"]
    return [
        "train",
        "--data",
        "small shapes/labels.csv",
        *code,
        "--callbacks",
        "my_callbacks.py:Journal",
        *RUN,
    ]


@pytest.fixture(scope="module")
def one(folder: Path, own: list[str]) -> Path:
    with working_in(folder):
        done = called(*own, "--device", "cpu", "--name", "one")
    assert done.code == 0, done.err
    return folder / "runs" / "train" / "one"


def journal(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


def test_an_example_has_at_most_40_lines() -> None:
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) <= 40, example


def test_callbacks_see_the_events_of_a_run(one: Path) -> None:
    events = journal(one)
    assert events[0] == {"event": "start", "step": 0, "ranks": 1, "resumed": False}
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [1, 2]
    assert [e["epoch"] for e in events if e["event"] == "validation"] == [1, 2]
    assert {"best.safetensors", "last.safetensors", "step-00000004.safetensors"} <= {
        e["file"] for e in events if e["event"] == "save"
    }
    assert events[-1] == {"event": "stop", "reason": "finished", "step": 4}


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
def test_two_processes_and_a_resumed_run_train_the_same_weights(
    folder: Path, own: list[str], one: Path
) -> None:
    run = folder / "runs" / "train" / "two"
    killed_at_step(
        folder, 2, run, *own, "--device", "cpu:2", "--name", "two", "--save-steps", "1", "--keep-last", "9"
    )
    for state in run.glob("checkpoints/step-*[4-9].safetensors"):  # it may have reached its end
        state.unlink()
    (run / "results.json").unlink(missing_ok=True)
    resumed = ["train", "--resume", str(run), "--recipe-class", "all_parts.py:All"]
    refused = yolofleet(folder, "train", "--resume", run, code=2).err
    assert "loads only code that you name again" in refused and "--recipe-class all_parts.py:All" in refused
    refused = yolofleet(folder, *resumed, code=3).err
    assert "with other settings: callbacks was LimitBiases" in refused
    code = ["--callbacks", "my_limit.py:LimitBiases", "--callbacks", "my_callbacks.py:Journal"]
    yolofleet(folder, *resumed, *code)
    assert results(run)["weights_sha256"] == results(one)["weights_sha256"]
    assert journal(run)[-1]["event"] == "stop" and any(event.get("resumed") for event in journal(run))


def test_the_own_model_can_be_validated_exported_and_used(folder: Path, one: Path) -> None:
    weights, code = str(one / "weights" / "best.safetensors"), ["--recipe-class", "all_parts.py:All"]
    picture = next((folder / "small shapes" / "images" / "val").iterdir())
    with working_in(folder):
        val = ["val", "--weights", weights, "--data", "small shapes/labels.csv", "--img", "64", "--no-plots"]
        assert called(*val, *code, "--workers", "0").code == 0
        assert called("predict", "--weights", weights, "--source", picture, "--img", "64", *code).code == 0
        assert called("export", "--weights", weights, "--format", "torchscript", *code).code == 0
        assert called("bench", "--weights", weights, "--img", "64", "--passes", "2", *code).code == 0


@pytest.mark.parametrize("part", ["my_loss.py:SmallLogits", "my_data.py:CsvData"])
def test_a_part_can_be_replaced_alone(folder: Path, part: str) -> None:
    data = "small shapes/labels.csv" if "data" in part else "small shapes/data.yaml"
    with working_in(folder):
        done = called(
            "train", "--model", "yolov5n", "--data", data, *RUN, "--max-steps", "1", "--recipe-class", part
        )
        assert done.code == 0, done.err


def test_a_failing_callback_ends_the_run_with_its_line(folder: Path, own: list[str]) -> None:
    command = ["train", "--model", "yolov5n", "--data", "small shapes/data.yaml", *RUN, "--callbacks"]
    failed = yolofleet(folder, *command, "broken.py:Broken", "--device", "cpu:2", code=2).err
    assert "the callback Broken.epoch failed: ValueError: no disk" in failed and "broken.py:6" in failed
    assert "Traceback" not in failed
    code = [*own[own.index("--recipe-class") :][:6], "--callbacks", "broken.py:Stopping"]
    stopped = yolofleet(folder, *own, *code[-2:], "--device", "cpu:2", code=75).err
    assert "callback: enough" in stopped and "the state is saved" in stopped
    assert " ".join(code) in stopped, "the command that resumes the run names its code"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken.py", "does not name a class"),
        ("absent.py:A", "the file absent.py does not exist"),
        ("broken.py:Brokn", "did you mean Broken?"),
        ("no_such_module:A", "ModuleNotFoundError"),
        ("wrong.py:A", "SyntaxError"),
        ("other/json.py:A", "the name of another module, json"),
    ],
)
def test_wrong_names_are_one_clear_message(folder: Path, name: str, message: str) -> None:
    (folder / "wrong.py").write_text("def :\n")
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "json.py").write_text("")
    with working_in(folder):
        command = ["train", "--model", "yolov5n", "--data", "small shapes/data.yaml", *RUN]
        failed = called(*command, "--callbacks", name)
    assert failed.code == 2 and message in failed.err and "Traceback" not in failed.err


def test_no_file_can_name_code(folder: Path) -> None:
    for name, value in (("callbacks", "[broken.py:Broken]"), ("recipe_class", "broken.py:Broken")):
        (folder / "settings.yaml").write_text(f"{name}: {value}\n")
        with working_in(folder):
            failed = called("train", "--config", "settings.yaml", "--data", "shapes", "--model", "yolov5n")
        assert failed.code == 2 and f"{name}: cannot be set in a file" in failed.err


def test_weights_of_an_own_model_name_what_they_need(folder: Path, one: Path) -> None:
    weights = one / "weights" / "best.safetensors"
    failed = yolofleet(folder, "val", "--weights", weights, "--data", "small shapes/data.yaml", code=3).err
    assert "--recipe-class FILE.py:All" in failed
