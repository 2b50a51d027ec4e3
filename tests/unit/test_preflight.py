"""Before a run on several hosts: files that every rank reads, and the port where they meet. ``ssh`` is a script here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from yolofleet.launch.fleet import Host
from yolofleet.launch.preflight import enter_folders, files
from yolofleet.launch.remote import Remote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
cd /
exec sh -c "$*"
"""


@pytest.fixture
def remotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Remote]]:
    """m1 and m2, each with a folder of its own that has a difficult name."""
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(SSH)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:
        made = []
        for name in ("m1", "m2"):
            folder = tmp_path / f"the disk's $HOME of {name}"
            folder.mkdir()
            made.append(stack.enter_context(closing(Remote(Host(name, "cpu", folder=str(folder))))))
            made[-1].open()
        enter_folders(made)
        yield made


def test_the_line_that_copies_a_file_to_a_host_can_be_typed(
    remotes: list[Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here & now"
    (here / "my models").mkdir(parents=True)
    monkeypatch.chdir(here)
    name = "my models/yolov5's.pt"
    Path(name).write_text("right")
    found = files(remotes, [name])
    assert [(f.code, f.where) for f in found] == [("file-missing", "m1"), ("file-missing", "m2")]
    assert "ssh m1 " in found[0].fix
    for finding in found:
        subprocess.run(finding.fix, shell=True, check=True)
    assert not files(remotes, [name])
    for remote in remotes:
        assert Path(remote.host.folder, name).read_text() == "right"


def test_a_file_that_only_another_host_has_comes_from_there(
    remotes: list[Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    m1, m2 = (Path(remote.host.folder) for remote in remotes)
    (m1 / "a.pt").write_text("right")
    (m2 / "a.pt").write_text("wrong")
    [found] = files(remotes, ["a.pt"])
    assert (found.code, found.where) == ("file-differs", "m2")
    subprocess.run(found.fix, shell=True, check=True)
    assert (m2 / "a.pt").read_text() == "right"
