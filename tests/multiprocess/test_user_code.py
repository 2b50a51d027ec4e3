"""The examples of docs/extend.md run: callbacks, and an own model, loss and data set, on one and two processes and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import called, in_ranks, killed_in_the_middle, results, working_in, yolofleet
from small_files import TINY
from user_code_example import CALLBACKS, CODE, EXAMPLES, OWN_RUN, RUN, make_user_code

from yolofleet.config.user_code import source_files

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


BROKEN_PARTS = """
from yolofleet import TrainingRecipe

class Failing(TrainingRecipe):
    def loss(self, model, recipe, img):
        return {}["gain"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the examples, a data set, and the same labels as a table."""
    made = tmp_path_factory.mktemp("own code")
    make_user_code(made)
    (made / "broken.py").write_text(BROKEN)
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    with working_in(folder):
        done = called(*OWN_RUN, "--device", "cpu", "--name", "one")
    assert done.code == 0, done.err
    return folder / "runs" / "train" / "one"


def journal(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


def test_an_example_has_at_most_40_lines() -> None:
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) <= 40, example


def test_the_files_of_own_code_are_found_without_executing_them(folder: Path, tmp_path: Path) -> None:
    names = ["all_parts.py", "my_data.py", "my_loss.py", "my_model.py"]
    assert source_files(str(folder / "all_parts.py")) == [str(folder / name) for name in names]
    with working_in(folder):
        assert source_files("all_parts.py") == names
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(1)\n")
    assert source_files(str(broken)) == [str(broken)]
    broken.write_text("def :")
    assert source_files(str(broken)) == [str(broken)]
    (tmp_path / "folder").mkdir()  # without __init__.py
    (tmp_path / "other.py").touch()
    broken.write_text("import folder\nimport folder.part\nimport other\n")
    assert source_files(str(broken)) == [str(broken), str(tmp_path / "other.py")]


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
def test_two_processes_and_a_resumed_run_train_the_same_weights(folder: Path, one: Path) -> None:
    run = folder / "runs" / "train" / "two"
    killed_in_the_middle(folder, run, *OWN_RUN, "--save-every", "1steps", "--keep-last", "9")
    resumed = ["train", "--resume", str(run), "--recipe-class", "all_parts.py:All"]
    refused = in_ranks(folder, 1, "train", "--resume", run, code=2)
    assert "loads only code that you name again" in refused and "--recipe-class all_parts.py:All" in refused
    refused = in_ranks(folder, 1, *resumed, code=3)
    assert "with other settings: callbacks was LimitBiases" in refused
    in_ranks(folder, 2, *resumed, *CALLBACKS)
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
            "train", "--model", str(TINY), "--data", data, *RUN, "--max-steps", "1", "--recipe-class", part
        )
        assert done.code == 0, done.err


def test_a_failing_callback_ends_the_run_with_its_line(folder: Path) -> None:
    command = ["train", "--model", str(TINY), "--data", "small shapes/data.yaml", *RUN, "--callbacks"]
    failed = yolofleet(folder, *command, "broken.py:Broken", "--device", "cpu:2", code=2).err
    assert "the callback Broken.epoch failed: ValueError: no disk" in failed and "broken.py:6" in failed
    assert "Traceback" not in failed
    code = [*CODE, "--callbacks", "broken.py:Stopping"]
    stopped = in_ranks(folder, 1, *OWN_RUN, *code[-2:], code=75)
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
        command = ["train", "--model", str(TINY), "--data", "small shapes/data.yaml", *RUN]
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
    with working_in(folder):
        failed = called("val", "--weights", weights, "--data", "small shapes/data.yaml")
    assert failed.code == 3 and "--recipe-class FILE.py:All" in failed.err


def test_a_failing_part_is_one_clear_message(folder: Path) -> None:
    (folder / "failing_parts.py").write_text(BROKEN_PARTS)
    command = ["train", "--model", str(TINY), "--data", "no table.csv", *RUN, "--recipe-class"]
    with working_in(folder):
        failed = called(*command, "my_data.py:CsvData").err
    assert "CsvData.dataset failed: FileNotFoundError" in failed and "no table.csv" in failed
    assert "my_data.py:" in failed and "Traceback" not in failed
    command[command.index("no table.csv")] = "small shapes/data.yaml"
    failed = in_ranks(folder, 1, *command, "failing_parts.py:Failing", code=2)
    assert "Failing.loss failed: KeyError: 'gain'" in failed and "failing_parts.py:6" in failed
    assert "Traceback" not in failed


@pytest.mark.slow
def test_a_study_trains_the_own_parts_and_goes_on_with_them(folder: Path) -> None:
    pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")
    (folder / "space.yaml").write_text("lr0: [0.001, 0.1, log]\n")
    study = [
        "tune",
        *OWN_RUN[1:],
        *("--epochs", "1", "--space", "space.yaml", "--trials", "1", "--device", "cpu"),
    ]
    yolofleet(folder, *study)
    run = folder / "runs" / "tune" / "exp"
    refused = yolofleet(folder, "tune", "--resume", "auto", "--trials", "2", code=2).err
    assert "--recipe-class all_parts.py:All" in refused
    yolofleet(folder, "tune", "--resume", "auto", "--trials", "2", *CODE)
    assert [json.loads(file.read_text())["metrics"] for file in run.glob("trials/*/results.json")]
    assert (run / "trials" / "0001" / "journal.jsonl").is_file()
