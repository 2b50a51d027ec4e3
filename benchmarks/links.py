"""Machines in miniature: network namespaces joined by a switch whose ports can be slowed down.

Linux and root only; needs ``ip`` and, for a rate, ``tc`` (Debian package iproute2). The switch lives in a
namespace of its own, so that nothing of this machine's network is touched and deleting the namespaces removes
everything.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERFACE = "eth0"  # of every machine


def address_of(machine: int) -> str:
    return f"10.77.0.{machine + 1}"


@contextmanager
def machines(count: int, rate: str = "") -> Iterator[list[str]]:
    """``count`` network namespaces that see each other as ``address_of(0)``, ``address_of(1)``, ...

    Args:
        rate: of every port in each direction, as ``tc`` writes it (``1gbit``, ``100mbit``); "" = no limit.
    Yields:
        Their names, for ``ip netns exec NAME command``. They are gone when the block is left, also by an
        exception or SIGTERM; processes that were started in them are the caller's to end.
    """
    for tool in ("ip", *(("tc",) if rate else ())):
        if shutil.which(tool) is None:
            raise SystemExit(f"network namespaces need {tool} (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    hub, *names = [f"links-{os.getpid()}-{part}" for part in ("hub", *range(count))]
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", hub, "link", "set", "switch", "up")
        for machine, name in enumerate(names):
            _ip("netns", "add", name)
            port = f"port{machine}"
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", hub, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address_of(machine)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            if rate:
                _limit(hub, port, rate)
                _limit(name, INTERFACE, rate)
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)
        signal.signal(signal.SIGTERM, before)


def sent_bytes() -> int:
    """What this machine (the namespace of the calling process) has sent, packet headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == INTERFACE:
            return int(figures.split()[8])
    raise LookupError(f"no interface {INTERFACE} here")


def _limit(namespace: str, interface: str, rate: str) -> None:
    """A token bucket on what leaves ``interface``."""
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
    _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", *bucket)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
