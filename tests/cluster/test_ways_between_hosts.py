"""Ways between hosts that break while a run trains, or before it starts; the launcher reaches every host all the time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes
from desk import Command, nothing_left, session_of
from machines import Lab, machines

pytestmark = pytest.mark.skipif(
    shutil.which("iptables") is None, reason="iptables missing (apt-get install iptables)"
)
ENDLESS = [
    *SMALL,
    *("--epochs", "100000", "--threads", "1", "--val-period", "0", "--no-plots", "--no-autoanchor"),
]
QUICK = ("--stall-s", "10", "--timeout-s", "60")
LONG = ("-m", "length", "--length", "1000:65535")  # as a router drops that does not tell its MTU


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tmp", "own"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def lab(folder: Path) -> Iterator[Lab]:
    """Three machines, each with its own disk."""
    with machines(3, private=[folder / "own"], environment=session_of(folder)) as made:
        yield made


def drop(lab: Lab, source: str, target: str, *which: str, chain: str = "-A") -> None:
    """Let ``target`` drop the packets of ``source``, all or some."""
    known = {machine.name: machine for machine in lab.machines}
    known[target].run("iptables", chain, "INPUT", "-s", known[source].address, *which, "-j", "DROP")


def started(lab: Lab, folder: Path, hosts: str = "m1:cpu:1,m2:cpu:1,m3:cpu:1", *more: str) -> Command:
    data = small_shapes(folder)
    return Command(lab, folder / "own", "train", "--data", data, *ENDLESS, *QUICK, "--hosts", hosts, *more)


def ended(lab: Lab, command: Command) -> str:
    """Send SIGINT to the command, and return its output."""
    command.process.send_signal(2)
    assert command.end() == 75, command.said
    nothing_left(lab)
    assert "Traceback" not in command.said and "DistStoreError" not in command.said, command.said
    return command.said


def test_a_host_that_drops_what_another_sends_is_left_out_and_comes_back(lab: Lab, folder: Path) -> None:
    command = started(lab, folder)
    command.wait_for("^epoch 3/")
    drop(lab, "m2", "m3")
    command.wait_for("going on with 2 processes on m1, m2")
    drop(lab, "m2", "m3", chain="-D")
    command.wait_for("started again as 3 processes")
    said = ended(lab, command)
    assert re.search("m3 is left out: .*\nfault way-dropped: m[23] -> m[32]: 10.77.0.", said), said
    assert "then more devices count" in said and "m3 is ready" in said, said


@pytest.mark.parametrize(
    ("hosts", "cut", "which", "goes_on", "left_out", "names"),
    [
        # m1 is the only host that reaches everybody
        ("m1:cpu:1,m2:cpu:1,m3:cpu:1", "m3", (), "2 processes on m1, m2", "m3", "way-dropped: m2 -> m3: 10.77.0.3"),
        ("m1:cpu:1,m2:cpu:1,m3:cpu:2", "m3", (), "3 processes on m1, m3", "m2", "way-dropped: m2 -> m3: 10.77.0.3"),
        ("m3:cpu:1,m2:cpu:1", "m3", LONG, "1 process on m3", "m2", "way-stalls: m[23] -> m[23]: short messages pass and long ones"),
    ],
    ids=["a star", "more devices", "long packets"],
)  # fmt: skip
def test_the_most_hosts_that_reach_each_other_go_on_after_a_link_breaks(
    lab: Lab,
    folder: Path,
    hosts: str,
    cut: str,
    which: tuple[str, ...],
    goes_on: str,
    left_out: str,
    names: str,
) -> None:
    command = started(lab, folder, hosts)
    command.wait_for("^epoch 3/")
    drop(lab, "m2", cut, *which)
    drop(lab, cut, "m2", *which)
    command.wait_for(f"^going on with {goes_on}$")
    command.wait_for("started again|resumed after step")
    said = ended(lab, command)
    assert re.search(f"{left_out} is left out: .*\nfault {names}", said), said
    assert "failed there before" not in said and "  try  : " in said, said


def test_a_way_that_drops_long_packets_is_named_before_the_start(lab: Lab, folder: Path) -> None:
    drop(lab, "m1", "m2", *LONG)
    command = started(lab, folder, "m1:cpu:1,m2:cpu:1")
    assert command.end() == 4, command.said
    assert "m1 -> m2: short messages pass and long ones do not" in command.said, command.said
    assert "mtu 1400" in command.said and "Traceback" not in command.said, command.said
    nothing_left(lab)
