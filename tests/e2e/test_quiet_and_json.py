"""Every verb that runs long: with --quiet only errors and the result, with --json - only JSON on standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    Outcome,
    called,
    environment,
    ran,
    small_shapes,
    started,
    train_args,
    working_in,
    yolofleet,
)
from terminal import Screen, pseudo_terminal
from walks import chosen

RUN = ["--device", "cpu", "--threads", "1", "--workers", "0"]
WEIGHTS = "runs/train/exp/weights/last.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, and a trained run in runs/train/exp."""
    made = tmp_path_factory.mktemp("quiet")
    data = small_shapes(made)
    data.parent.rename(made / "set")
    with working_in(made):
        done = called(*train_args(Path("set/data.yaml"), *RUN, "--epochs", "1", "--quiet"))
    assert done.code == 0, done.err
    assert done.err == "" and done.out.startswith("trained 1 epoch, ") and done.out.count("\n") == 1
    return made


SLOW = """
import time
from yolofleet import Callback

class Slow(Callback):
    def step(self, step):
        time.sleep(1.5)
"""


def train(*more: str) -> list[str]:
    return [*map(str, train_args(Path("set/data.yaml"), *RUN, "--epochs", "1")), *more]


# verb -> lines of its result with --quiet; the fixture above tests `train`
QUIET = {
    "val": (["val", "--weights", WEIGHTS, "--data", "set/data.yaml", "--img", "64", *RUN, "--no-plots"], 1),
    "predict": (["predict", "--weights", WEIGHTS, "--source", "set/images/val", "--img", "64", "--device", "cpu", "--save", "none"], 1),
    "export": (["export", "--weights", WEIGHTS, "--format", "torchscript", "--out", "quiet.torchscript"], 1),
    "bench": (["bench", "--weights", WEIGHTS, "--passes", "1", "--img", "64", "--device", "cpu"], 1),
    "data make": (["data", "make", "shapes", "--out", "made", "--images", "2", "--val-images", "1", "--img", "32"], 1),
    "data check": (["data", "check", "set/data.yaml", "--decode", "--duplicates"], 0),
    "data convert": (["data", "convert", "set/data.yaml", "--to", "coco", "--out", "converted"], 1),
    "data preview": (["data", "preview", "set/data.yaml", "--count", "1", "--img", "64"], 1),
    "doctor": (["doctor", "--quick"], None),
}  # fmt: skip
JSON = {
    "train": train("--name", "json"),
    **{
        verb: QUIET[verb][0]
        for verb in ("val", "predict", "export", "bench", "data check", "doctor")
        if verb != "export"
    },
    "export": ["export", "--weights", WEIGHTS, "--format", "torchscript", "--out", "json.torchscript"],
    "data stats": ["data", "stats", "set/data.yaml", "--img", "64"],
}


def is_plain(done: Outcome) -> bool:
    return all(character.isprintable() or character in "\n\t" for character in done.out + done.err)


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow if verb == "data check" else ()) for verb in QUIET]
)
def test_quiet_leaves_only_the_result(folder: Path, verb: str) -> None:
    words, lines = QUIET[verb]
    with working_in(folder):
        done = called(*words, "--quiet")
    assert done.code in ((0, 4) if verb == "doctor" else (0,)), done.err  # 4: this machine has a fault
    assert done.err == "" and is_plain(done)
    if lines is not None:
        assert done.out.count("\n") == lines, done.out


@pytest.mark.parametrize("verb", chosen(JSON, *(verb for verb in JSON if verb != "data check")))
@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_json_has_standard_output_for_itself(folder: Path, verb: str, quiet: bool) -> None:
    if quiet and verb in ("train", "export"):
        pytest.skip("the same code as without --quiet")
    with working_in(folder):
        done = called(*JSON[verb], "--json", "-", *(["--quiet"] if quiet else []))
    found = json.loads(done.out)
    assert done.code == (4 if verb == "doctor" and found["worst"] == "fault" else 0), done.err
    assert found or (verb == "predict" and found == [])
    assert is_plain(done)
    if quiet:
        assert done.err.count("\n") <= 1, done.err


def test_errors_are_printed_all_the_same(folder: Path) -> None:
    with working_in(folder):
        done = called(
            "val", "--weights", "none.safetensors", "--data", "set/data.yaml", "--quiet", "--json", "-"
        )
    assert done.code and not done.out and "none.safetensors" in done.err
    with working_in(folder):
        after = called("data", "check", "set/data.yaml")
    assert "images" in after.out  # the next command of this process is not quiet


def test_a_run_that_this_command_does_not_wait_for_has_no_json(folder: Path) -> None:
    with working_in(folder):
        done = called(*train("--json", "-", "--detach", "--hosts", "a"))
    assert done.code == 2 and "--json cannot be used with --detach" in done.err


@pytest.mark.parametrize("device", ["cpu", "cpu:2"])
def test_a_command_says_what_it_starts_before_torch_is_loaded(
    folder: Path, tmp_path: Path, device: str
) -> None:
    # it writes the cause before the launcher starts an attempt, and ends afterwards
    cause = "import sys, time\nprint('torch begins', file=sys.stderr, flush=True)\ntime.sleep(2)\nraise SystemExit(1)"
    (tmp_path / "torch.py").write_text(cause)
    words = [sys.executable, "-m", "yolofleet", *train("--name", "slow start"), "--device", device]
    done = ran(folder, *words, code=None, variables={"PYTHONPATH": str(tmp_path)})
    first, _, rest = done.err.partition("\n")
    many = "1 process" if device == "cpu" else "2 processes"
    assert first.startswith(f"starting {many} (") and first.endswith(", set/data.yaml): loading PyTorch")
    assert "torch begins" in rest


def test_two_processes_print_json_alone(folder: Path) -> None:
    words = [*train("--name", "two", "--json", "-"), "--device", "cpu:2"]
    done = yolofleet(folder, *words)
    assert json.loads(done.out)["fleet"]["processes"] == 2
    assert "trained 1 epoch" in done.err and is_plain(done)
    assert not (folder / "runs/train/two/logs/ranks.json").exists()


@pytest.mark.slow
def test_the_status_of_a_run_is_shown_while_it_lasts(folder: Path) -> None:
    run = started(folder, *train("--name", "watched", "--epochs", "5000"), "--device", "cpu:2")
    ranks: list[dict[str, float]] = []
    try:
        while not (ranks and all(rank["rate_img_s"] for rank in ranks)):
            assert run.poll() is None, run.communicate()
            with working_in(folder):
                done = called("fleet", "status", "runs/train/watched", "--json", "-")
            ranks = json.loads(done.out)["ranks"] if done.code == 0 else []
            time.sleep(0.2)
        with working_in(folder):
            shown = called("fleet", "status", "runs/train/watched").out.splitlines()
    finally:
        run.send_signal(signal.SIGINT)
        run.communicate()
    assert run.returncode == 75
    assert [rank["rank"] for rank in ranks] == [0, 1] and all(rank["memory_gib"] for rank in ranks)
    assert "watched: 2 ranks on 1 host, step " in shown[0]
    assert shown[1].split()[:4] == ["rank", "host", "device", "phase"]
    assert len(shown) == 4
    with working_in(folder):
        after = called("fleet", "status", "runs/train/watched")
    assert after.code == 2 and "has no ranks that report" in after.err


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_two_processes_on_a_narrow_terminal_leave_a_clean_screen(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)  # ranks write their states every two seconds
    words = [*train("--name", "narrow", "--epochs", "2", "--callbacks", "slow.py:Slow"), "--device", "cpu:2"]
    variables = environment(folder) | {"TERM": "xterm-256color"}
    variables.pop("CI", None)
    with pseudo_terminal(12, 50) as terminal:
        done = subprocess.run(
            [sys.executable, "-m", "yolofleet", *words],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=terminal.stream,
            stderr=terminal.stream,
        )
        terminal.stream.write("END\n")
        terminal.stream.flush()
        while "END" not in terminal.text():
            pass
        text = terminal.text()
    screen = Screen(12, 50).feed(text)
    assert done.returncode == 0, text
    assert screen.cut == 0 and "\x1b[?25l" not in text
    assert "  rank" in text and screen.text.endswith("END")
    assert "  rank" not in "\n".join([*screen.scrolled, screen.text])  # the table is gone
