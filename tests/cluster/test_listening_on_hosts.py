"""A run on three hosts listens on loopback and on the fleet's interface alone, and lets in nobody without its secret."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attack
import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes
from desk import Command, nothing_left, session_of
from machines import Lab, Machine, machines

from yolofleet.support.errors import Stopped

HOSTS = "m1:cpu:1,m2:cpu:2,m3:cpu:1"
ENDLESS = [*SMALL, "--epochs", "100000", "--threads", "1", "--val-period", "0", "--no-autoanchor"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shared")
    (made / "tmp").mkdir()
    return made


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    with machines(3, environment=session_of(folder)) as made:
        yield made


@contextmanager
def stranger(machine: Machine, mark: Path) -> Iterator[Callable[[str, int], str]]:
    """Somebody on a machine who is ready to attack."""
    with subprocess.Popen(
        machine.argv(sys.executable, attack.__file__, mark),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        words = process.stdout

        def tries(address: str, port: int) -> str:
            print(address, port, file=process.stdin, flush=True)
            return words.readline().strip()

        assert tries("127.0.0.1", 1) == "kept out"  # nobody listens there; it has imported torch by then
        yield tries


def test_a_run_on_three_hosts_lets_in_nobody_and_executes_nothing(lab: Lab, folder: Path) -> None:
    data = small_shapes(folder)
    mark = folder / "executed"
    with stranger(lab.desk, mark) as at_the_desk, stranger(lab.hosts[1], mark) as on_m2:
        command = Command(lab, folder, "train", "--data", data, *ENDLESS, "--hosts", HOSTS)
        command.wait_for("^epoch 1/")
        seen = {machine.name: machine.listening() for machine in lab.machines}
        (way,) = [port for address, port in seen["m2"] if address == "127.0.0.1"]
        (port,) = map(int, re.findall(r"meeting at 10\.77\.0\.1:(\d+)", command.said))
        words = [at_the_desk("10.77.0.1", port), on_m2("10.77.0.1", port), on_m2("127.0.0.1", way)]
    command.process.send_signal(signal.SIGINT)
    assert command.end() == Stopped.exit_code, command.said
    nothing_left(lab)
    assert words == ["kept out", "kept out", "let in"], "users of a host itself reach its end of the store"
    assert not mark.exists(), "the attack executed code"
    assert seen["desk"] == []
    for machine in lab.hosts:
        addresses = [address for address, _ in seen[machine.name]]
        assert set(addresses) == {"127.0.0.1", machine.address}, seen
        assert addresses.count("127.0.0.1") == 1, "the store, or the way to it"
    on_first = [port for address, port in seen["m1"] if address == "10.77.0.1"]
    assert port in on_first and len(on_first) == 2, "the relay, and the socket of gloo's group"
