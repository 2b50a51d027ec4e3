"""The status of a run: what is written while it goes on and at its end, and the requests that it takes."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from commands import DEADLINE_S, wait_until

from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import NumericsError, Stopped
from yolofleet.training import status as status_module
from yolofleet.training.parallel.world import World
from yolofleet.training.status import published_status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(status_module, "PERIOD_S", 0.01)
    made = RunFolder(tmp_path / "exp")
    made.make_tree()
    return made


def read(folder: RunFolder) -> dict:
    found: dict = json.loads(folder.status.read_text())
    return found


def test_values_and_requests(folder: RunFolder) -> None:
    stops: list[int] = []
    folder.request("save").touch()  # to the process before
    with published_status(folder, Clock(), World.single(), lambda: stops.append(1)) as status:
        assert read(folder)["state"] == "running" and read(folder)["phase"] == "start"
        status.note(step=3, rate_img_s=math.nan)
        wait_until(lambda: read(folder).get("step") == 3)
        assert read(folder)["rate_img_s"] is None and not status.take_save() and not stops
        folder.request("save").touch()
        wait_until(lambda: not folder.request("save").exists())
        wait_until(status.take_save)
        assert not status.take_save()
        folder.request("stop").touch()
        wait_until(lambda: stops)
    found = read(folder)
    assert found["state"] == "ended" and found["ranks"] == 1 and not found["phase"]
    assert sorted(path.name for path in folder.logs.iterdir()) == ["status.json"]


@pytest.mark.parametrize(
    ("problem", "state", "why"),
    [
        (Stopped("stopped on request", source="SIGTERM"), "stopped", "SIGTERM"),
        (KeyboardInterrupt("SIGUSR1"), "stopped", "SIGUSR1"),
        (NumericsError("the loss is NaN"), "failed", "NumericsError: the loss is NaN"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError: x"),
    ],
)
def test_the_end_decides_the_last_state(
    folder: RunFolder, problem: BaseException, state: str, why: str
) -> None:
    with pytest.raises(type(problem)), published_status(folder, Clock(), World.single()):
        raise problem
    assert (read(folder)["state"], read(folder)["why"]) == (state, why)


def test_a_disk_that_refuses_ends_no_run(folder: RunFolder) -> None:
    folder.logs.rename(folder.path / "away")
    folder.logs.write_text("a file")
    with published_status(folder, Clock(), World.single()) as status:
        status.note(step=1)


def test_a_disk_that_hangs_delays_the_end_of_a_run_by_a_known_time(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "END_S", 0.1)
    hangs, over, written = threading.Event(), threading.Event(), []

    def write(path: Path, content: bytes) -> None:
        written.append(json.loads(content)["state"])
        if len(written) == 2:
            hangs.set()
            over.wait(DEADLINE_S)

    monkeypatch.setattr(status_module, "write_unsynced", write)
    with published_status(folder, Clock(), World.single()):
        assert hangs.wait(DEADLINE_S)
    assert not over.is_set() and written == ["running", "running"]  # close() has returned before the disk
    over.set()
