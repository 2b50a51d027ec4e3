"""Nothing that a file, a host or a library says is obeyed by the terminal that shows it."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import cv2
import numpy as np
import pytest

import yolofleet
from yolofleet.cli.app import run
from yolofleet.cli.commands import Verbs
from yolofleet.data.datasets.labels import Problem
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.runs.report.console import Console
from yolofleet.runs.report.screen_table import ScreenTable
from yolofleet.support.errors import ClusterError, DataError, StorageError
from yolofleet.support.text import RelayedText, echo, screen_line, screen_text

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b6n\u202eevil\u2066\x00\r\x08\x7f\u200b\ud83d\U000e0041"
PACKAGE = Path(yolofleet.__file__).parent

# What prints without `echo` and `Console`, and why it may.
PRINTS = {
    "support/text.py:echo": "the one that cleans",
    "support/text.py:announce": "cleans, after the command that erases progress lines",
    "support/terminal.py:draw": "lines of `bar_line` and `fleet_lines`, which clean",
    "support/terminal.py:_write": "the same, with the commands that draw them in place",
    "runs/report/console.py:_print": "cleans each line",
    "runs/report/console.py:_draw": "cleaned before; rich draws a frame",
    "runs/report/screen_table.py:show": "ScreenTable.add_row cleans the cells",
    "cli/render.py:_write": "a script for a file or a program, as bytes; not to a screen",
    "fleet/doctor/subprocess_probes.py:answer": "JSON for the process that started it",
    "fleet/launch/nonblocking_stdout.py:_put": "text that `fleet/launch/watch.py` has cleaned",
    "fleet/launch/watch.py:_on_signal": "a fixed sentence, from a signal handler",
    "fleet/launch/local.py:on_signal": "the same",
    "training/requests.py:on_signal": "the same",
    "training/parallel/torchrun_agent.py:serve": "into the agent's log",
    "training/preempt_notice.py:_say": "into a pipe to the rank, which cleans it",
}


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """(name of the function around it, call) of all calls."""
    found = []

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
            if isinstance(child, ast.Call):
                found.append((inner, child))
            walk(child, inner)

    walk(tree, "")
    return found


def prints(call: ast.Call) -> bool:
    words = ast.unparse(call.func)
    last = words.rpartition(".")[2]
    streams = ("sys.stdout.", "sys.stderr.", "sys.__stdout__.", "sys.__stderr__.", "self._stream.", "stream.")
    return (
        last in ("print", "echo_via_pager", "secho", "print_exc", "print_exception", "print_stack", "print_json")
        or words == "click.echo"
        or (words.startswith(streams) and ("write" in last or ".buffer." in words) and last != "flush")
        or (words == "os.write" and ast.unparse(call.args[0]) in ("1", "2", "stream.fileno()"))
    )  # fmt: skip


def test_everything_that_is_shown_goes_through_one_sanitiser() -> None:
    strays = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        for function, call in calls(ast.parse(file.read_text(encoding="utf-8"))):
            if prints(call) and f"{name}:{function}" not in PRINTS:
                strays.append(f"{name}:{call.lineno} in {function}: {ast.unparse(call.func)}")
    assert not strays, "use yolofleet.support.text.echo or runs/report/console.py:\n" + "\n".join(strays)


def obeyed(text: str) -> list[str]:
    """Characters of ``text`` that a terminal acts on, or that hide or turn what follows."""
    return [c for c in text if c != "\n" and c != "\t" and not c.isprintable()]


def test_screen_text_escapes_what_a_terminal_obeys() -> None:
    assert not obeyed(screen_text(EVIL))
    assert screen_text("caf\u00e9 \u4e2d \U0001f600\ta\n") == "caf\u00e9 \u4e2d \U0001f600\ta\n"
    assert screen_line("a\nb\tc") == "a\\nb\\tc"
    assert screen_text("\x1b[31m") == "\\x1b[31m" and screen_text("\u202e") == "\\u202e"


def test_echo_cleans_and_goes_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    echo(EVIL)
    echo(EVIL, to=sys.stderr, end="")
    shown = capsys.readouterr()
    assert not obeyed(shown.out) and not obeyed(shown.err)
    assert shown.out.endswith("\n") and not shown.err.endswith("\n")


def test_text_of_another_machine_keeps_its_bar_and_no_other_command() -> None:
    bar = "\x1b[1mepoch\x1b[0m \x1b[38;5;237m---\x1b[0m\r\x1b[2K\x1b[1A\x1b[?25l\x1b[?25h"
    bar += "\r\x1b[J\x1b[?7lepoch\x1b[?7h\x1b[3A\r"  # and as terminal.py draws it
    assert RelayedText().clean(bar) == bar
    relayed = RelayedText()
    assert "".join(relayed.clean(piece) for piece in bar) == bar  # cut anywhere
    for command in (
        "\x1b]52;c;cm0=\x07",
        "\x1b[6n",
        "\x1bP+q\x1b\\",
        "\x1b[2J",
        "\x1b[?1049h",
        "\x9b6n",
        "\x1b]8;;x",
    ):
        relayed = RelayedText()
        shown = "".join(relayed.clean(piece) for piece in command + "end")
        assert "\x1b" not in shown and shown.endswith("end"), command


def test_the_console_cleans_names_facts_settings_and_tables(tmp_path: Path) -> None:
    for bar in (False, True):
        stream = io.StringIO()
        with Console(tmp_path / "log", stream=stream, bar=bar) as console:
            console.header(EVIL, {"data": EVIL}, [("name", EVIL, EVIL)])
            console.fact(EVIL)
            console.note(EVIL)
            console.warn(EVIL)
            console.table(EVIL, ("class", "AP"), [(EVIL, "0.5")])
            console.summary(EVIL, {"results": EVIL})
        text = stream.getvalue()
        assert "\x07" not in text and "\u202e" not in text and "]0;owned" in text
        assert "\x1b]" not in text and "\x9b" not in text and "\x1b[2J" not in text
        assert bar or not obeyed(text)
    assert not obeyed((tmp_path / "log").read_text(encoding="utf-8"))


def test_a_table_cleans_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = ScreenTable("class", "labels", numbers=("labels",))
    table.add_row(EVIL + "\n[bold]x[/bold]", "1")
    table.show()
    shown = capsys.readouterr().out
    assert not obeyed(shown) and "[bold]" in shown.replace("\n", "").replace(" ", "")


def test_a_problem_is_one_clean_line() -> None:
    problem = Problem(f"images/{EVIL}.jpg", 3, f"class {EVIL}\nsecond line", "wrong-class")
    assert not obeyed(str(problem)) and "\n" not in str(problem)
    assert str(problem).endswith("-> train refuses") and not problem.words.endswith("refuses")


# -- each place where a stranger's words reach a screen


def yolo_set(root: Path) -> Path:
    """A data set whose images, labels, classes and paths are all called like commands."""
    name = "\x1b]0;a\x07\u202e\x9b"
    for kind in ("images", "labels"):
        (root / kind / "train").mkdir(parents=True)
    cv2.imwrite(str(root / "good.png"), np.zeros((16, 16, 3), np.uint8))
    (root / "good.png").rename(root / "images" / "train" / f"{name}.png")
    (root / "images" / "train" / f"{name}bad.png").write_bytes(b"no image")
    (root / "images" / "train" / "b.png").write_bytes(
        (root / "images" / "train" / f"{name}.png").read_bytes()
    )
    (root / "labels" / "train" / f"{name}.txt").write_text("0 .5 .5 .5 .5\n\x1b[2J\n")
    quoted = json.dumps([EVIL[:20], "b"])
    text = f"train: images/train\nval: {json.dumps('images/' + name)}\nnames: {quoted}\n"
    (root / "data.yaml").write_text(text)
    return root / "data.yaml"


@pytest.mark.parametrize(
    "verb",
    [["check", "--duplicates"], ["stats"], ["convert", "--to", "yolo", "--splits", "train", "--out", "new"]],
)
def test_data_verbs_show_names_of_strangers_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    run(["data", verb[0], str(yolo_set(tmp_path / "set")), *verb[1:]])
    shown = capsys.readouterr()
    assert not obeyed(shown.out + shown.err)
    assert "\\x1b" in shown.out + shown.err


def test_coco_names_are_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((16, 16, 3), np.uint8))
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}
    images = [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}, {"id": 2, "file_name": EVIL[:20]}]
    file = tmp_path / "instances_train.json"
    file.write_text(
        json.dumps({"images": images, "annotations": [box], "categories": [{"id": 1, "name": EVIL}]})
    )
    for verb in ("check", "stats"):
        run(["data", verb, str(file)])
    shown = capsys.readouterr()
    assert not obeyed(shown.out + shown.err) and "\\x1b" in shown.out


def test_figures_as_json_on_a_screen_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    run(["data", "stats", str(yolo_set(tmp_path / "set")), "--split", "train", "--json", "-"])
    shown = capsys.readouterr().out
    assert not obeyed(shown)
    assert json.loads(shown)["splits"]["train"]["classes"][0]["name"] == EVIL[:20]


def test_a_source_and_a_command_line_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["predict", "--weights", EVIL[:20].replace("\0", ""), "--source", "x"],
        ["data", "check", f"{tmp_path}/\x1b[2J"],
        ["train", "--\x1b[2J"],
        ["\x1b[2J"],
        ["doctor", "--log", f"{tmp_path}/\x1b[2J"],
    ):
        assert run(words)
        shown = capsys.readouterr()
        assert not obeyed(shown.out + shown.err), words


def test_errors_and_findings_about_a_hosts_words_are_clean() -> None:
    for kind in (ClusterError, DataError, StorageError):
        assert not obeyed(kind(EVIL, source=EVIL, hint=EVIL).render())
    assert not obeyed(Finding("ssh-down", "fault", EVIL, EVIL, EVIL, EVIL).render())


def test_a_traceback_names_the_kind_of_an_error_once() -> None:
    error = DataError("x.jpg is cut", source="data.yaml", hint="copy it again")
    printed = "".join(traceback.format_exception_only(error))
    assert printed == f"{DataError.__module__}.{error.render()}\n" and printed.count("DataError") == 1


def test_too_little_memory_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Verbs, ctx: object) -> int:
        raise MemoryError

    monkeypatch.setattr(Verbs, "invoke", fail)
    assert run(["data", "list"]) == 3
    assert "too little memory" in capsys.readouterr().err


# -- standard output that cannot be written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [["train", "--help"], ["data", "list"]])
def test_a_full_standard_output_is_a_message(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "yolofleet", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 3
    assert "cannot write to standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="a folder in use cannot be deleted")
@pytest.mark.parametrize(
    "words", [["doctor", "--quick"], ["train", "--data", "shapes", "--model", "yolov5n"]]
)
def test_a_working_folder_that_was_deleted_is_a_message(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "gone").mkdir()
    script = (
        "import os, sys\nos.rmdir(os.getcwd())\nfrom yolofleet.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", script, *words],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "the working folder does not exist any more" in done.stderr
