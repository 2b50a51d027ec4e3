"""Before a run on several hosts: files that every rank reads, and the port where they meet. ``ssh`` is a script here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yolofleet.cli import main
from yolofleet.config.load import resolve_val
from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.doctor.network import Endpoint
from yolofleet.fleet.hosts.fleet import Host, parse_hosts
from yolofleet.fleet.hosts.remote import Refused, Remote
from yolofleet.fleet.hosts.requests import hash_files
from yolofleet.fleet.launch.preflight import Meeting, enter_folders, files, firewall_line, free_port, inspect
from yolofleet.fleet.resources import estimate_of, resources_of
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.system.signals import handling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")

DEADLINE_S = 900
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
    found = files(remotes, [name, "yolov5s.yaml"])  # the second is a file nowhere
    assert [(f.code, f.where) for f in found] == [("file-missing", "m1"), ("file-missing", "m2")]
    assert "ssh m1 " in found[0].fix
    for finding in found:
        subprocess.run(finding.fix, shell=True, check=True)
    for remote in remotes:
        assert Path(remote.host.folder, name).read_text() == "right"
    Path(name).write_text("other")
    assert not files(remotes, [name]), "two hosts agree; this machine computes nothing"


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


def test_a_file_that_only_this_machine_cannot_read_is_judged_without_it(
    remotes: list[Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for remote in remotes:
        Path(remote.host.folder, "a.pt").write_text("right")
    Path("a.pt").symlink_to("/proc/self/mem")  # a file whose first byte nobody can read, not even root
    with pytest.raises(OSError):
        hash_files({"names": ["a.pt"]})
    assert not files(remotes, ["a.pt"])


def test_a_host_that_is_lost_is_not_taken_for_one_without_the_folder(remotes: list[Remote]) -> None:
    with pytest.raises(ConfigError, match="m2 has no folder /no/such"):
        remotes[1].host = replace(remotes[1].host, folder="/no/such")
        enter_folders(remotes)
    remotes[0].close()
    with pytest.raises(ClusterError, match="m1 is lost"):
        enter_folders(remotes[:1])


class Comparing(Remote):
    """A host that is busy with its files when it is asked for facts; then the user presses Ctrl-C."""

    def __init__(self, name: str) -> None:
        super().__init__(Host(name, "cpu"))
        self.comparing, self.interrupted, self.over = threading.Event(), threading.Event(), threading.Event()

    def on_interrupt(self, *_: object) -> None:
        self.interrupted.set()
        raise KeyboardInterrupt

    def ask(self, request: str, timeout_s: float = 0, **_: Any) -> Any:
        if request == "reserve_port":
            return 29500
        if request == "hash_files":
            self.comparing.set()
        else:
            assert self.comparing.wait(DEADLINE_S)
            # again and again: a signal just before the main thread starts to wait does not wake it
            while not self.interrupted.wait(0.2):
                os.kill(os.getpid(), signal.SIGINT)
        self.over.wait(DEADLINE_S)
        raise ClusterError(f"{self.name} is lost")


def test_ctrl_c_does_not_wait_for_files_that_are_compared() -> None:
    host = Comparing("m1")
    with handling(host.on_interrupt, [signal.SIGINT]), pytest.raises(KeyboardInterrupt):
        inspect(parse_hosts("m1:cpu"), [host], resources_of(TrainConfig()), ["a.pt"])
    assert not host.over.is_set()
    host.over.set()


# -- one machine alone ---------------------------------------------------------------------------------------


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="has GPUs, or may")
@pytest.mark.parametrize("verb", [("train", "--model", "yolov5n"), ("val", "--weights", "w.safetensors")])
def test_gpus_that_are_not_there_are_said_before_anything_starts(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*verb, "--data", "shapes:4", "--device", "0,1"]) == 2
    said = capsys.readouterr().err
    assert "--device 0,1: " in said and "yolofleet doctor: gpu-none" in said
    assert not list(tmp_path.iterdir())


def test_a_validation_needs_memory_for_its_own_batches_only() -> None:
    settings = resolve_val({"weights": "w", "data": "d", "batch": 48, "device": "cpu:2", "img": 320}).value
    asked = resources_of(settings)
    need = estimate_of(asked, 8, 0)
    assert (need.ranks, asked.micro_batch, asked.val_batch, asked.img) == (2, 1, 48, 320)
    assert asked.results == Path("runs", "val")


# -- the port ------------------------------------------------------------------------------------------------


def free_ports(count: int) -> int:
    """The first of so many that nobody uses."""
    for first in range(23000, 29000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        return first
    raise AssertionError("no free ports")


def test_what_an_ended_run_leaves_for_a_minute_keeps_no_port(remotes: list[Remote]) -> None:
    port = free_ports(1)
    with socket.create_server(("", port)) as store, socket.create_connection(("127.0.0.1", port)) as worker:
        store.accept()[0].close()  # who closes first has the connection in TIME_WAIT
        assert worker.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("", port))
    assert remotes[0].ask("reserve_port", first=port, count=1) == port


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_port_on_which_somebody_listens_is_passed_over(remotes: list[Remote], address: str) -> None:
    port = free_ports(2)
    with socket.create_server((address, port)):
        assert remotes[0].ask("reserve_port", first=port, count=2) == port + 1
        with pytest.raises(Refused, match="all in use"):
            remotes[0].ask("reserve_port", first=port, count=1)


def test_two_launchers_get_two_ports_and_torch_can_listen_on_each(remotes: list[Remote]) -> None:
    port = free_ports(2)
    fleet = replace(parse_hosts("m1:cpu,m2:cpu"), port=port)
    assert free_port(fleet, remotes) == port
    assert free_port(fleet, remotes[::-1]) == port + 1  # another host agent on the same machine
    with socket.create_server(("", port)):  # as the store does
        pass
    assert free_port(fleet, remotes, passed_over=[port + 1]) > port + 1


def test_the_firewall_line_covers_every_port_that_may_be_taken() -> None:
    plan = Meeting((Endpoint("10.0.0.1", "eth0"), Endpoint("10.0.0.2", "eth0")), 29507)
    line = firewall_line(parse_hosts("node-a:8,node-b:8"), plan).splitlines()[-1]
    page = (Path(__file__).parents[3] / "docs" / "several-machines.md").read_text(encoding="utf-8")
    assert "dport 29500-29599 " in line and line.strip() in page
