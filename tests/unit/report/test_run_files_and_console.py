import errno
import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from run_events import read_events

from yolofleet.runs.report.clock import PHASES, Times
from yolofleet.runs.report.console import Console, NullConsole, StepView
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import read_events as read_history
from yolofleet.runs.report.results import EventLog
from yolofleet.runs.report.screen_table import aligned
from yolofleet.storage.atomic import jsonable, write_json, write_text
from yolofleet.support.errors import ConfigError, StorageError
from yolofleet.support.terminal import duration

TIMES = Times(dict(zip(PHASES, (0.0, 1.0, 8.0, 1.0, 0.0, 0.0), strict=True)), 10, 100, 12.5)
VIEW = StepView({"box": 0.05, "obj": 0.02}, TIMES, 0.01)

# -- folder ----------------------------------------------------------------------------------------------


def test_run_folders_are_numbered_when_taken(tmp_path):
    names = [RunFolder.create("train", project=tmp_path / "a b", name="exp").path.name for _ in range(3)]
    assert names == ["exp", "exp2", "exp3"]
    again = RunFolder.create("train", project=tmp_path / "a b", name="exp", exist_ok=True)
    assert again.path.name == "exp"


def test_runs_that_start_together_get_different_folders(tmp_path):
    found = []
    start = threading.Barrier(16)

    def create():
        start.wait()
        found.append(RunFolder.create("train", project=tmp_path).path)

    threads = [threading.Thread(target=create) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16


@pytest.mark.parametrize("name", ["", " ", "../up", "/etc"])
def test_a_run_name_cannot_leave_its_project(tmp_path, name):
    with pytest.raises(ConfigError, match="--name"):
        RunFolder.create("train", project=tmp_path, name=name)


def test_a_project_that_is_a_file_is_said(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        RunFolder.create("train", project=tmp_path / "runs")


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (errno.EACCES, "no permission")],
)
def test_a_refusing_disk_leaves_the_old_text_and_says_what_to_do(tmp_path, monkeypatch, code, words):
    path = tmp_path / "config.yaml"
    write_text(path, "old")

    def refuse(_descriptor):
        raise OSError(code, "refused")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(StorageError, match=words) as caught:
        write_text(path, "new")
    assert str(path) in caught.value.what
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_text_keeps_its_letters_and_line_ends(tmp_path):
    write_text(tmp_path / "a.txt", "Füße\n人\n")
    assert (tmp_path / "a.txt").read_bytes() == "Füße\n人\n".encode()


def test_json_has_no_nan_and_knows_numpy(tmp_path):
    write_json(
        tmp_path / "a.json", {"x": np.float32(0.5), "y": (1, float("nan")), "p": Path("a"), 3: np.arange(2)}
    )
    read = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert read == {"x": 0.5, "y": [1, None], "p": "a", "3": [0, 1]}
    assert jsonable(True) is True


# -- events ----------------------------------------------------------------------------------------------


def test_events_of_all_ranks_are_read_in_order_of_time(tmp_path):
    folder = RunFolder(tmp_path)
    with EventLog(folder.events(1), rank=1) as one, EventLog(folder.events(0), rank=0) as zero:
        zero.write("start", world=2)
        one.write("start", world=2)
        zero.write("epoch", epoch=1, loss=np.float32(0.25), bad=float("inf"))
    events = read_events(folder)
    assert sorted((e["rank"], e["kind"]) for e in events) == [(0, "epoch"), (0, "start"), (1, "start")]
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)
    epoch = next(e for e in events if e["kind"] == "epoch")
    assert epoch["loss"] == 0.25 and epoch["bad"] is None and epoch["host"]
    assert (tmp_path / "events.jsonl").is_file()


def test_a_line_cut_by_a_crash_costs_only_itself(tmp_path):
    folder = RunFolder(tmp_path)
    folder.events(0).write_text('{"time": 1, "rank": 0, "kind": "sta')
    with EventLog(folder.events(0)) as log:
        log.write("start")
    assert [e["kind"] for e in read_events(folder)] == ["start"]


def test_an_event_names_a_file_whose_name_is_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.jpg")
    with EventLog(RunFolder(tmp_path).events(0)) as log:
        log.write("unreadable", file=name)
    assert read_history(RunFolder(tmp_path).events(0))[0]["file"] == name


def test_an_event_that_a_crash_cut_inside_a_character_hides_no_other(tmp_path):
    path = RunFolder(tmp_path).events(0)
    path.write_bytes(
        b'{"time": 1, "kind": "a\xc2\x85"}\n{"time": 2, "kind": "caf\xc3\n{"time": 3, "kind": "b"}\n'
    )
    assert [event["time"] for event in read_history(path)] == [1, 3]


def test_a_full_disk_costs_the_events_and_one_warning(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "events.jsonl"
    path.symlink_to(full)
    warnings: list[str] = []
    log = EventLog(path, warn=warnings.append)
    for _ in range(5):
        log.write("step")
    log.close()
    assert len(warnings) == 1 and "no longer written" in warnings[0]


def test_events_without_a_folder_do_not_stop_a_run(tmp_path):
    (tmp_path / "logs").write_text("a file")
    warnings: list[str] = []
    log = EventLog(RunFolder(tmp_path).events(3), rank=3, warn=warnings.append)
    log.write("start")
    assert len(warnings) == 1


# -- console ---------------------------------------------------------------------------------------------


def talk(console):
    console.header("yolofleet train", {"model": "yolov5n"}, [("epochs", "3", "command line")])
    console.fact("a [fact] with brackets")
    console.note("anchors fit")
    console.warn("3 labels dropped")
    console.begin_epoch(1, 3, 100)
    console.step(50, lambda: VIEW)
    console.end_epoch(VIEW)
    console.table("validation", ["class", "P"], [["all", "0.5"], ["person", "0.25"]])
    console.summary("done", {"weights": "runs/exp/best"})
    console.close()


def test_a_log_file_is_plain_text_one_line_a_fact(tmp_path):
    stream = io.StringIO()
    talk(Console(tmp_path / "logs" / "rank-0.log", stream=stream, every_s=0))
    text = stream.getvalue()
    assert text.isprintable() or not any(ord(c) < 32 and c != "\n" for c in text)
    assert "epoch 1/3 50/100  box 0.0500  obj 0.0200  12.5 img/s  data 10% compute 80% comm 10%" in text
    assert "  person  0.25\n" in text and "epochs = 3  (command line)" in text
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    for said in ("a [fact] with brackets", "note: anchors fit", "epoch 1/3: box", "person", "runs/exp/best"):
        assert said in log and said in text
    assert "50/100" not in log  # progress is not a fact


def test_plain_progress_comes_only_every_few_seconds():
    stream = io.StringIO()
    console = Console(stream=stream, every_s=1000)
    console.begin_epoch(1, 3, 100)
    for done in range(100):
        console.step(done, lambda: pytest.fail("the figures cost a wait for the device"))
    assert stream.getvalue() == ""


def test_other_ranks_only_write_their_log(tmp_path, capsys):
    talk(NullConsole(tmp_path / "rank-1.log"))
    assert capsys.readouterr().out == ""
    assert "warning: 3 labels dropped" in (tmp_path / "rank-1.log").read_text()
    talk(NullConsole())


def test_a_bar_ends_with_the_epoch_and_keeps_brackets(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    talk(Console(stream=stream, bar=True, every_s=0))
    text = stream.getvalue()
    assert "a [fact] with brackets" in text and "50/100" in text
    assert "\x1b[?25l" not in text  # the cursor stays visible


def test_validation_moves_a_bar_that_ends_with_its_table(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    console = Console(stream=stream, bar=True)
    console.validating(1, 7)
    console.validating(2, 7)  # too soon to be drawn
    console.table("validation", ["class"], [["all"]])
    text = stream.getvalue()
    assert "1/7" in text and "2/7" not in text
    assert text.rindex("\x1b[J") < text.index("validation\n")  # the bar is erased before the table


def test_letters_that_the_stream_cannot_show_do_not_end_a_run(tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="cp1252", newline="\n")
    console = Console(tmp_path / "log", stream=stream)
    console.fact("café 人")
    assert raw.getvalue() == "café \\u4eba\n".encode("cp1252")
    assert "café 人" in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_closed_pipe_does_not_end_a_run():
    stream = io.StringIO()
    console = Console(stream=stream)
    stream.close()
    talk(console)


def test_tables_and_durations_are_aligned_for_people():
    assert aligned(["class", "P"], [["all", "0.5"]]) == ["class    P", "all    0.5"]
    assert [duration(s) for s in (3.44, 59.96, 125, 3725)] == ["3.4 s", "1:00", "2:05", "1:02:05"]
