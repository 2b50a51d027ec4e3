"""What the launcher copies from the disk of rank 0 while a run goes on, and the requests that it passes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_runs import made_run

from yolofleet.fleet.hosts import requests
from yolofleet.fleet.hosts.messages import answer_of
from yolofleet.fleet.launch import run_on_hosts
from yolofleet.fleet.launch.run_on_hosts import LiveCopy
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError


class ThisMachine:
    """A host whose agent is in this process."""

    name = "m1"

    def __init__(self) -> None:
        self.is_lost, self.asked = False, list[str]()

    def ask(self, request: str, _timeout_s: float, **arguments: Any) -> Any:
        if self.is_lost:
            raise ClusterError("m1 is lost")
        self.asked.append(request)
        try:
            return answer_of(request, json.loads(json.dumps(requests.answer(request, arguments))))
        except OSError as problem:
            raise ClusterError(str(problem)) from None


def test_files_are_copied_when_they_have_changed(tmp_path: Path) -> None:
    there, here = made_run(tmp_path / "there", None), RunFolder(tmp_path / "here")
    there.status.write_text('{"step": 1}')
    here.make_tree()
    host = ThisMachine()
    copy = LiveCopy(here, lambda: False)
    copy.renew(host, str(there.path))  # type: ignore[arg-type]
    for name in ("results.csv", "events.jsonl", "logs/status.json"):
        assert (here.path / name).read_bytes() == (there.path / name).read_bytes(), name
    assert not here.config.exists(), "a host does not decide how the run continues"
    asked = len(host.asked)
    there.status.write_text('{"step": 2}')
    copy.renew(host, str(there.path))  # type: ignore[arg-type]
    assert here.status.read_text() == '{"step": 2}' and len(host.asked) - asked < asked
    (here.path / "results.csv").unlink()
    with there.results_csv.open("a") as file:
        file.write("7\n")
    copy.renew(host, str(there.path))  # type: ignore[arg-type]
    assert here.results_csv.read_text().endswith("7\n")


def test_requests_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here, stops = RunFolder(tmp_path / "there"), RunFolder(tmp_path / "here"), list[str]()
    there.make_tree()
    here.make_tree()
    monkeypatch.setattr(run_on_hosts, "request_stop", stops.append)
    host = ThisMachine()
    for kind in ("save", "stop"):
        here.request(kind).touch()
    LiveCopy(here, lambda: False).renew(host, str(there.path))  # type: ignore[arg-type]
    assert there.request("save").exists() and not there.request("stop").exists()
    assert stops and not list(here.logs.glob("*.request"))
    with pytest.raises(LookupError):
        requests.answer("request_run", {"folder": str(there.path), "kind": "../x"})


def test_nothing_is_written_after_the_end_or_behind_a_link(tmp_path: Path) -> None:
    there, here = made_run(tmp_path / "there", None), RunFolder(tmp_path / "here")
    there.status.write_text("{}")
    here.path.mkdir()
    (tmp_path / "elsewhere").mkdir()
    here.logs.symlink_to(tmp_path / "elsewhere")
    host = ThisMachine()
    LiveCopy(here, lambda: True).renew(host, str(there.path))  # type: ignore[arg-type]
    assert not here.results_csv.exists()
    LiveCopy(here, lambda: False).renew(host, str(there.path))  # type: ignore[arg-type]
    assert here.results_csv.exists() and not list((tmp_path / "elsewhere").iterdir())
    shutil.rmtree(here.path)
    host.is_lost = True
    LiveCopy(here, lambda: False).renew(host, str(there.path))  # type: ignore[arg-type]
    assert not here.path.exists()
