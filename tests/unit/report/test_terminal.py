"""Progress fits terminals of every size, with every name. Pipes and files get no control characters."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest
from terminal import PseudoTerminal, Screen, pseudo_terminal

from yolofleet.runs.rank_status import RankStatus, parsed_status, write_status
from yolofleet.runs.report.clock import PHASES, Times
from yolofleet.runs.report.console import Console, NullConsole, StepView
from yolofleet.runs.report.fleet_screen import OTHER_ROWS, fleet_lines, slowest_rank, title_line
from yolofleet.runs.report.screen_table import aligned
from yolofleet.support.errors import ConfigError
from yolofleet.support.terminal import Progress, bar_line, fitted
from yolofleet.support.text import announcement, can_redraw, echo, set_quiet

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e人口密度の高い都市\U0001f600\u05e9\u05dc\u05d5\u05dd e\u0301\r\n" * 2
TIMES = Times(dict(zip(PHASES, (0.0, 1.0, 8.0, 1.0, 0.0, 0.0), strict=True)), 10, 100, 412.5)
LOSSES = {"box": 0.0512, "obj": 0.02, "cls": 0.012}
VIEW = StepView(LOSSES, TIMES, 0.01, memory_gib=2.13, left_s=7200.0)
SIZES = [(24, 80), (10, 40), (20, 60), (50, 200)]


@pytest.fixture(autouse=True)
def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("CI", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def ranks(count: int) -> list[RankStatus]:
    phases = ("compute", "exchange", "data")
    return [
        RankStatus(n, f"node-{n // 8}", f"cuda:{n % 8}", phases[n % 3], 120, 0.1, 100.0, 0.3, 12.3, 61.0)
        for n in range(count)
    ]


def screen_of(terminal: PseudoTerminal, rows: int, columns: int) -> Screen:
    text = terminal.text()
    while "END" not in text:
        time.sleep(0.01)
        text = terminal.text()
    return Screen(rows, columns).feed(text)


def train(console: NullConsole, *, epochs: int = 2) -> None:
    """What a training says."""
    console.header("yolofleet train", {"data": HOSTILE, "model": "yolov5n"}, [("name", HOSTILE, HOSTILE)])
    for epoch in range(1, epochs + 1):
        console.begin_epoch(epoch, epochs, 118287)
        for done in (64, 40000, 118287):
            console.step(done, lambda: VIEW)
        console.validating(1, 7)
        console.end_epoch(VIEW)
        console.table("validation", ["class", "AP"], [["all", "0.5"], [HOSTILE, "0.25"]])
    console.close()


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("count", [1, 2, 4096])
def test_a_training_on_a_terminal_wraps_nothing_and_ends_clean(rows: int, columns: int, count: int) -> None:
    with pseudo_terminal(rows, columns) as terminal:
        with Console(stream=terminal.stream, every_s=0, fleet=lambda: ranks(count)) as console:
            train(console)
        terminal.stream.write("END\n")
        terminal.stream.flush()
        screen = screen_of(terminal, rows, columns)
        text = terminal.text()
    assert "?25l" not in text  # the cursor was never hidden
    assert screen.cut == screen.wrapped == 0
    lines = [*screen.scrolled, *screen.text.splitlines()]
    assert lines[-1] == "END"  # no progress is left
    assert not any("━" in line or line.startswith("  rank") for line in lines)
    told = [line for line in lines if line.startswith("epoch 1/2")]
    assert told and "/s" in told[0]


def test_lines_fit_every_width() -> None:
    for columns in range(8, 200):
        for label in ("epoch 12/100", HOSTILE):
            parts = [("12320/118287", "31%"), *VIEW.parts("0:12 left")]
            for encoding in (None, "ascii"):
                assert bar_line(label, 0.31, parts, columns, encoding).cell_len <= columns
        for line in fleet_lines(ranks(20), columns, 24):
            assert line.cell_len <= columns
    wide = aligned(["class", "AP"], [[HOSTILE, "0.5"], ["all", "0.25"]], 40)
    assert len({line.index("0.") for line in wide[2:]}) == 1 and all(len(line) <= 40 for line in wide)


def test_a_table_that_is_too_wide_has_cells_of_several_lines() -> None:
    columns = ("fleet", "expected time of the run", "images of a second", "what binds the whole run")
    with pseudo_terminal(24, 50) as terminal:
        with Console(stream=terminal.stream) as console:
            console.table(
                "predicted", columns, [(HOSTILE, "1:02:05", "412.5", "the all-reduce of all ranks")] * 3
            )
        echo("END", to=terminal.stream)
        screen = screen_of(terminal, 24, 50)
    assert screen.wrapped == 0 and "binds" in "\n".join([*screen.scrolled, screen.text])


def test_a_bar_of_80_columns_has_the_figures_that_people_look_for() -> None:
    line = bar_line("epoch 12/100", 0.31, [("12320/118287", "31%"), *VIEW.parts("0:12 left")], 79).plain
    for words in ("epoch 12/100 ━", "31%", "412/s", "0:12 left", "ends ", "loss 0.0832", "2.1G"):
        assert words in line
    assert bar_line("x", 0.5, [], 79, "ascii").plain.startswith("x [####")


def test_the_last_figures_become_short_first_and_are_left_out_first() -> None:
    parts = [("aaaa", "a"), ("bbbb",), ("cccc", "c")]
    assert fitted(parts, 18) == ["aaaa", "bbbb", "cccc"]
    assert fitted(parts, 15) == ["aaaa", "bbbb", "c"]
    assert fitted(parts, 12) == ["a", "bbbb", "c"]
    assert fitted(parts, 9) == ["a", "bbbb", ""]


def test_a_table_for_4096_ranks_fits_and_shows_the_rank_that_hangs_and_the_slowest() -> None:
    fleet = ranks(4096)
    fleet[77] = RankStatus(77, HOSTILE, "cuda:5", "data", 119, 42.0, 100.0, 0.3, 12.3, 83.0)
    fleet[500] = RankStatus(500, "node-62", "cuda:4", "compute", 120, 0.1, 70.0, 0.0, 12.3, 61.0)
    for rows, columns in SIZES:
        lines = [line.plain for line in fleet_lines(fleet, columns, rows)]
        assert len(lines) <= max(rows - OTHER_ROWS, 1) + 2 and all("\x1b" not in line for line in lines)
        assert any(line.startswith("  77") and "loading 42.0 s" in line for line in lines)
        assert any(line.startswith("  500") and line.endswith("slowest") for line in lines)
        assert "more; of 4096: 1367 computing" in lines[-1]
        assert lines[-1].endswith("up to 83 C") or columns < 80
    assert slowest_rank(fleet) == 500
    assert slowest_rank(ranks(8)) == -1  # none stands out
    assert title_line(fleet, "exp", 0.0).startswith("exp: 4096 ranks on 513 hosts, step 120, ")


def test_a_table_has_no_column_without_figures() -> None:
    cold = [RankStatus(n, "a", "cpu", "start", 0, 0.0, 0.0, 0.0, 0.0, 0.0) for n in range(2)]
    assert fleet_lines(cold, 80, 24)[0].plain.split() == ["rank", "host", "device", "phase"]


def test_a_smaller_window_gets_shorter_lines() -> None:
    with pseudo_terminal(24, 120) as terminal:
        with Progress(terminal.stream, every_s=0, below=lambda c, r: fleet_lines(ranks(8), c, r)) as progress:
            progress.draw("epoch 1/2", 0.5, VIEW.parts("0:12 left"))
            terminal.text()
            terminal.resize(10, 40)
            progress.redraw()
            echo("END", to=terminal.stream)
        screen_of(terminal, 24, 120)
        text = terminal.text()
    second = text[text.index("\x1b[J", text.index("\x1b[?7h")) :]
    screen = Screen(10, 40).feed(second)
    assert screen.cut == screen.wrapped == 0 and screen.text == "END"


def test_a_line_of_another_process_replaces_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal(24, 80) as terminal:
        with Progress(terminal.stream, every_s=0, below=lambda c, r: fleet_lines(ranks(4), c, r)) as progress:
            progress.draw("epoch 1/2", 0.5, VIEW.parts("0:12 left"))
            monkeypatch.setattr(sys, "stderr", terminal.stream)
            os.write(terminal.stream.fileno(), announcement("stopping after this step").encode())
            progress.redraw()
            echo("END", to=terminal.stream)
        screen = screen_of(terminal, 24, 80)
        before = terminal.text()
        shown = Screen(24, 80).feed(before[: before.rindex("\x1b[J")].rstrip("\r"))
    assert shown.text.splitlines()[0] == "stopping after this step"
    assert shown.text.splitlines()[1].startswith("epoch 1/2")
    assert screen.text == "stopping after this step\nEND"


def test_the_table_changes_while_rank_0_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yolofleet.runs.report.console.REDRAW_S", 0.02)
    fleet = ranks(2)
    with pseudo_terminal(24, 80) as terminal:
        with Console(stream=terminal.stream, every_s=0, fleet=lambda: fleet) as console:
            console.begin_epoch(1, 2, 100)
            console.step(50, lambda: VIEW)
            console.step(51, lambda: VIEW)
            fleet[1] = RankStatus(1, "node-b", "cuda:1", "data", 3, 42.0, 0.0, 0.0, 0.0, 0.0)
            while "loading 42.0 s" not in terminal.text():  # `console` is not called
                time.sleep(0.01)
        terminal.stream.write("END\n")
        terminal.stream.flush()
        assert screen_of(terminal, 24, 80).text == "END"


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": ""}, {"CI": "true"}])
def test_a_terminal_that_cannot_draw_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pseudo_terminal(24, 80) as terminal:
        assert not can_redraw(terminal.stream)
        with Console(stream=terminal.stream, every_s=0, fleet=lambda: ranks(4)) as console:
            train(console)
        echo("END", to=terminal.stream)
        screen_of(terminal, 24, 80)
        assert "\x1b" not in terminal.text()
        assert "epoch 1/2 40000/118287  box 0.0512" in terminal.text()


def test_no_color_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with pseudo_terminal(24, 80) as terminal:
        with Console(stream=terminal.stream, every_s=0, fleet=lambda: ranks(4)) as console:
            train(console)
        echo("END", to=terminal.stream)
        screen_of(terminal, 24, 80)
        assert "\x1b[3" not in terminal.text() and "\x1b[1;3" not in terminal.text()
        assert "\x1b[J" in terminal.text()


def test_a_pipe_gets_a_line_now_and_then_without_commands() -> None:
    stream = io.StringIO()
    progress = Progress(stream, every_s=1000)
    for done in range(1000):
        progress.show("reading labels", done, 1000, "images")
    assert stream.getvalue() == ""
    progress = Progress(stream, every_s=0)
    progress.show(HOSTILE, 5, 10, "images")
    assert "5/10" in stream.getvalue() and all(c.isprintable() or c == "\n" for c in stream.getvalue())
    assert stream.getvalue().count("\n") == 1


def test_quiet_prints_only_the_result(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Console(tmp_path / "log", stream=stream, quiet=True, every_s=0) as console:
        console.warn("a warning")
        console.begin_epoch(1, 2, 100)
        console.step(50, lambda: pytest.fail("the figures cost a wait for the device"))
        console.end_epoch(VIEW)
        console.table("validation", ["class"], [["all"]])
        console.summary("trained 2 epochs", {"accuracy": "mAP50 0.5", "last": "last.safetensors"})
    assert stream.getvalue() == "trained 2 epochs, mAP50 0.5\n"
    assert "a warning" in (tmp_path / "log").read_text()
    set_quiet(True)
    try:
        progress = Progress(stream, every_s=0, live=True)
        progress.show("reading labels", 1, 2)
        assert progress.lines is None and stream.getvalue().count("\n") == 1
    finally:
        set_quiet(False)


# -- the status file


def test_the_status_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "ranks.json"
    before_s = time.time()
    write_status(file, ranks(3))
    written_at_s, found = parsed_status(file.read_bytes())
    assert found == ranks(3) and written_at_s >= before_s - 1
    assert [path.name for path in file.parent.iterdir()] == ["ranks.json"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"time": 1, "ranks": [[1]]}', '{"time": NaN, "ranks": []}', "[" * 100_000),
        json.dumps({"time": 1.0, "ranks": [[0, 7, "cpu", "start", 0, 0.0, 0.0, 0.0, 0.0, 0.0]]}),
        '{"time": 1, "ranks": [[0, "a", "cpu", "start", 0, 1e999, 0.0, 0.0, 0.0, 0.0]]}',
    ],
)
def test_a_status_file_that_is_none_is_an_error(content: str) -> None:
    with pytest.raises(ValueError):
        parsed_status(content.encode())


def test_fleet_status_shows_a_run_folder_and_says_when_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from yolofleet.cli.fleet import status_command

    status = status_command.callback
    assert status is not None
    write_status(tmp_path / "logs" / "ranks.json", ranks(20))
    assert status(None, None, str(tmp_path), False, "") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "20 ranks on 3 hosts, step 120" in lines[0] and len(lines) == 22
    assert status(None, None, str(tmp_path), False, "-") == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 20
    for run, words in ((str(tmp_path / "none"), "no run folder"), ("", "no run: expected the folder")):
        with pytest.raises(ConfigError, match=words):
            status(None, None, run, False, "")
    (tmp_path / "logs" / "ranks.json").unlink()
    with pytest.raises(ConfigError, match="has no ranks that report"):
        status(None, None, str(tmp_path), False, "")
