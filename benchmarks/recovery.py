"""How long a training over three machines stands still after a fault, and the same trainer under elastic torchrun.

The machines are network namespaces on this one, each with its own disk, and share its cores (Linux, root, openssh-server).
Training stands still from the end of the last epoch before the fault to the end of the next one: an epoch has three steps
and takes a fraction of a second. For a host that returns it is the longest time between two epochs.

    python benchmarks/recovery.py [--times 5] [CASE ...]

``inf``: training did not go on within two minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "cluster"), str(TESTS)]

from commands import SMALL, small_shapes  # noqa: E402
from desk import Command, impatient, session_of, worker_of  # noqa: E402
from machines import Lab, machines, missing  # noqa: E402

ARGS = [*SMALL, "--threads", "1", "--val-period", "0", "--epochs", "2000"]
HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1,m3:cpu:1")
EPOCH = r"^epoch (\d+)/"
# without these settings, elastic torchrun waits for half a minute before each start on fewer machines, and no machine can
# come back
ELASTIC_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ELASTIC_CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,heartbeat_timeout=2,close_timeout=10,join_timeout=60"
SETTLED_S = 8.0  # a state is in memory by then
GIVES_UP_S = 120.0
Fault = Callable[[Lab, Command], None]
Start = Callable[[Lab, Path, Path], Command]


class NotGoingOn(Exception):
    """A training stood still for ``GIVES_UP_S``, or ended."""


def epochs(command: Command) -> list[float]:
    """When the lines of epochs came, in seconds."""
    return [at_s for at_s, line in list(command.lines) if line.startswith("epoch ") and ": box" in line]


def await_epochs(command: Command, count: int) -> None:
    """Wait for ``count`` more epochs."""
    wanted, gives_up_at_s = len(epochs(command)) + count, time.monotonic() + GIVES_UP_S
    while len(epochs(command)) < wanted:
        if command.process.poll() is not None or time.monotonic() > gives_up_at_s:
            raise NotGoingOn
        time.sleep(0.05)


def stood_still_s(command: Command, fault: Fault, lab: Lab) -> float:
    """Make a fault, wait until training goes on, and return the longest time between two epochs since then."""
    await_epochs(command, 3)
    if fault is host_returns:
        host_off(lab, command)
        await_epochs(command, 3)
    time.sleep(SETTLED_S)
    seen = len(epochs(command)) - 1
    fault(lab, command)
    await_epochs(command, 4)
    times = epochs(command)[seen:]
    return max(after - before for before, after in pairwise(times))


def kill_worker(lab: Lab, command: Command) -> None:
    os.kill(worker_of(lab.hosts[1]), signal.SIGKILL)
    await_epochs(command, 1)


def host_off(lab: Lab, command: Command) -> None:
    lab.hosts[2].power_off()
    command.wait_for("started again as 2 processes")


def first_host_off(lab: Lab, command: Command) -> None:
    lab.hosts[0].power_off()
    command.wait_for("started again as 2 processes")


def host_off_of_torchrun(lab: Lab, command: Command) -> None:
    lab.hosts[2].power_off()
    await_epochs(command, 1)


def link_down(lab: Lab, command: Command) -> None:
    lab.hosts[2].unplug()
    time.sleep(10)
    lab.hosts[2].plug()
    await_epochs(command, 1)
    assert "started again" not in command.said, command.said


def host_returns(lab: Lab, command: Command) -> None:
    lab.hosts[2].power_on()
    command.wait_for("started again as 3 processes")


def ours(silence_s: int = 20) -> Start:
    def start(lab: Lab, folder: Path, data: Path) -> Command:
        hosts = impatient(folder, HOSTS[1], silence_s)
        return Command(lab, folder / "own", "train", "--data", data, *ARGS, *hosts)

    return start


def torchrun(lab: Lab, folder: Path, data: Path) -> Command:
    """The same training on three machines that elastic torchrun joins; return the first one's command."""
    commands = []
    for machine in lab.hosts:
        commands.append(
            Command(
                lab,
                folder / "own",
                *("--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "20"),
                *("--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "m1:29400"),
                *("--rdzv-id", "1", "--rdzv-conf", ELASTIC_CONF, "-m", "yolofleet"),
                *("train", "--data", data, *ARGS, "--device", "cpu"),
                machine=machine,
                module="torch.distributed.run",
                variables=ELASTIC_ENV | {"GLOO_SOCKET_IFNAME": "eth0"},
            )
        )
    return commands[0]


CASES: dict[str, tuple[Start, Fault]] = {
    "worker": (ours(), kill_worker),
    "host_5": (ours(5), host_off),
    "host_20": (ours(), host_off),
    "first_host_5": (ours(5), first_host_off),
    "link": (ours(), link_down),
    "return": (ours(5), host_returns),
    "torchrun_worker": (torchrun, kill_worker),
    "torchrun_host": (torchrun, host_off_of_torchrun),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    if missing():
        print(missing())
        return 1
    for name in asked.cases or CASES:
        found = []
        for _ in range(asked.times):
            with TemporaryDirectory(prefix="yolofleet-recovery-") as made:
                folder = Path(made)
                for child in ("own", "tmp"):
                    (folder / child).mkdir()
                data = small_shapes(folder)
                with machines(3, private=[folder / "own"], environment=session_of(folder)) as lab:
                    try:
                        start, fault = CASES[name]
                        found.append(stood_still_s(start(lab, folder, data), fault, lab))
                    except NotGoingOn:
                        found.append(math.inf)
                os.chdir("/")
            print(f"{name}: {found[-1]:.1f} s", flush=True)
        print(
            f"{name:<16} median {median(found):5.1f} s, longest {max(found):5.1f} s of {len(found)}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
