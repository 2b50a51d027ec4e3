"""Settings of a deputy: which run, on which hosts. Each host stores them as a file beside the lease."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from yolofleet.errors import ClusterError
from yolofleet.files.atomic import write_text
from yolofleet.files.foreign import read_foreign
from yolofleet.hosts.fleet import Fleet, Host
from yolofleet.hosts.lease import file_of
from yolofleet.hosts.remote import Remote, argv_on

START_S = 60.0
MOST_ORDER_BYTES = 16 << 20
READY = "ready"


@dataclass(frozen=True)
class Order:
    """Settings of the deputy of one host.

    Attributes:
        job, title: as in ``jobs.Record``.
        here: name of its host.
        fleet: all hosts.
        supervisor: the module that runs the supervisor.
        run: opaque settings for the supervisor.
        folder: the working folder.
        begins: the run begins, so no host has a lease yet.
    """

    job: str
    title: str
    here: str
    fleet: Fleet
    supervisor: str
    run: Mapping[str, Any]
    folder: str
    begins: bool = False

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Order:
        """Return the order of the values that :func:`dataclasses.asdict` makes."""
        return cls(**{**values, "fleet": Fleet.of_values(values["fleet"])})

    def write(self) -> None:
        """Write the order to this host's file. Raise StorageError: the disk refused."""
        write_text(file_of(self.job, "order"), json.dumps(asdict(self)))

    def newest(self) -> Order:
        """Return the order of this host's file, which the supervisor writes again when a host joins."""
        try:
            text = read_foreign(file_of(self.job, "order"), limit_bytes=MOST_ORDER_BYTES, follow=False)
            return Order.of_values(json.loads(text))
        except (OSError, ValueError, TypeError, LookupError, ClusterError):
            return self

    def for_host(self, host: Host) -> Order:
        """Return the order for another host of the run."""
        return replace(self, here=host.name, folder=host.folder)

    def with_hosts(self, hosts: tuple[Host, ...]) -> Order:
        """Return the order for a run that has begun, with these hosts too, as all hosts see them."""
        before = {host.name: host for host in self.fleet.hosts}
        both = before | {host.name: replace(host, is_here=False) for host in hosts}
        starts_on = self.fleet.starts_on and self.fleet.starts_on + len(both) - len(before)
        fleet = replace(self.fleet, hosts=tuple(both.values()), starts_on=starts_on)
        return replace(self, fleet=fleet, begins=False)


def named_in_full(remote: Remote) -> Host:
    """Return a host with its working folder and interpreter, as every other host must see them.

    Raises:
        ClusterError: it does not answer.
    """
    folder = str(remote.ask("enter", folder="."))
    return replace(remote.host, folder=folder, python=remote.host.python or sys.executable)


def appoint(host: Host, order: Order) -> None:
    """Start the deputy of a host; one that runs there takes the new order.

    Raises:
        ClusterError: it does not start.
    """
    argv = argv_on(host, "yolofleet.launch.detached.deputy")
    message = json.dumps(asdict(order.for_host(host))).encode()
    try:
        done = subprocess.run(argv, input=message, capture_output=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ClusterError(f"{host.name}: the deputy of this run does not start: {problem}") from None
    if done.returncode or READY.encode() not in done.stdout.splitlines():
        words = done.stderr.decode("utf-8", "replace").strip()
        raise ClusterError(f"{host.name}: the deputy of this run does not start", source=words or None)
