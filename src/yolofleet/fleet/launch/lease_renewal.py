"""The launcher's side of a detached run: the order of the standby launchers, and the lease (``fleet/hosts/lease.py``).

Each host stores the order as a file beside the lease: which run, on which hosts.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from yolofleet.fleet.hosts import jobs
from yolofleet.fleet.hosts.fleet import Fleet, Host
from yolofleet.fleet.hosts.lease import LEASE_LOST, Lease, clock, is_majority
from yolofleet.fleet.hosts.remote import Remote, argv_on
from yolofleet.storage.atomic import write_text
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import ClusterError
from yolofleet.support.text import inform

START_S = 60.0
MOST_ORDER_BYTES = 16 << 20
READY = "ready"
RENEW_S = 1.0
MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Order:
    """Settings of the standby launcher of one host."""

    # job, title: as in ``jobs.Record``
    job: str
    title: str
    here: str  # name of its host
    fleet: Fleet  # all hosts
    run: Mapping[str, Any]  # the configuration, and the folder that the run resumes
    folder: str  # the working folder
    begins: bool = False  # the run begins, so no host has a lease yet

    def write(self) -> None:
        """Write the order to this host's file. Raise StorageError: the disk refused."""
        write_text(jobs.file_of(self.job, "order"), ORDER.dump_json(self).decode())

    def newest(self) -> Order:
        """Return the order of this host's file, which the launcher writes again when a host joins."""
        try:
            text = read_foreign(jobs.file_of(self.job, "order"), limit_bytes=MOST_ORDER_BYTES, follow=False)
            return ORDER.validate_json(text)
        except (OSError, ValueError, ClusterError):
            return self

    def with_hosts(self, hosts: tuple[Host, ...]) -> Order:
        """Return the order for a run that has begun, with these hosts too, as all hosts see them."""
        before = {host.name: host for host in self.fleet.hosts}
        both = before | {host.name: replace(host, is_here=False) for host in hosts}
        starts_on = self.fleet.starts_on and self.fleet.starts_on + len(both) - len(before)
        fleet = replace(self.fleet, hosts=tuple(both.values()), starts_on=starts_on)
        return replace(self, fleet=fleet, begins=False)


def named_in_full(remote: Remote) -> Host:
    """Return a host with its working folder and interpreter, as every other host must see them. Raises ClusterError."""
    folder = str(remote.ask("enter", folder="."))
    return replace(remote.host, folder=folder, python=remote.host.python or sys.executable)


def appoint(host: Host, order: Order) -> None:
    """Start the standby launcher of a host; one that runs there takes the new order. Raise ClusterError if it does not start."""
    argv = argv_on(host, "yolofleet.fleet.launch.detached.standby")
    message = ORDER.dump_json(replace(order, here=host.name, folder=host.folder))
    try:
        done = subprocess.run(argv, input=message, capture_output=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ClusterError(
            f"{host.name}: the standby launcher of this run does not start: {problem}"
        ) from None
    if done.returncode or READY.encode() not in done.stdout.splitlines():
        words = done.stderr.decode("utf-8", "replace").strip()
        raise ClusterError(
            f"{host.name}: the standby launcher of this run does not start", source=words or None
        )


@dataclass(frozen=True)
class Supervision:
    """How this process supervises a run."""

    order: Order  # order of the standby launcher that started this launcher
    # term, voters, version: of the lease
    term: int
    voters: Sequence[Sequence[str]]
    version: int
    fleet: Fleet | None = None  # the hosts that can be reached now
    absent: tuple[Host, ...] = ()  # the others, which take part when they can
    folder: str = ""  # folder of the run to take over; "" = a new run


ORDER, SUPERVISION = TypeAdapter(Order), TypeAdapter(Supervision)


class LeaseLost(ClusterError):
    """This process must not supervise the run any longer."""

    exit_code = LEASE_LOST


class LeaseRenewal:
    """Renew a lease in the background until :meth:`close`.

    Args:
        remotes: returns the connections to all hosts.
        folder: returns the run's folder on a host, from the number of its connection.
    """

    def __init__(
        self,
        supervision: Supervision,
        title: str,
        lasts_s: float,
        remotes: Callable[[], Sequence[Remote]],
        folder: Callable[[int], str],
    ) -> None:
        self.why_lost = ""  # why this process must not supervise any longer, which is final; "" while it may
        self._remotes, self._folder = remotes, folder
        self._order, s = supervision.order, supervision
        voters = tuple(map(tuple, s.voters))
        self._lease = Lease(s.order.job, title, s.term, s.order.here, voters, s.version, lasts_s)
        self._renewed_s: dict[str, float] = {}  # when the request was sent that a host has answered
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def take_members(self, names: Sequence[str]) -> bool:
        """Let the votes of these hosts count from now on; return False if the lease is lost."""
        before, after = self._lease.voters, (tuple(names),)
        steps = [before] if before == after else [before + after, after]
        for voters in steps:
            version = self._lease.version + (voters != before)
            asked = replace(self._lease, voters=voters, version=version)
            numbers = [number for number, remote in enumerate(self._remotes()) if not remote.is_lost]
            answers = [self._pool.submit(self._renew, number, asked) for number in numbers]
            reached = {name for answer in answers if (name := answer.result())}
            if not self.why_lost and not is_majority(voters, reached):
                self._lose()
            if self.why_lost:
                return False
            self._lease = asked
        if not self._thread.is_alive():
            self._thread.start()
        return True

    def appoint(self, hosts: Sequence[Host], numbers: Sequence[int]) -> None:
        """Give the standby launchers of some hosts an order that names all ``hosts``, in the background; start missing ones."""
        self._order = order = self._order.with_hosts(tuple(hosts))

        def one(host: Host) -> None:
            try:
                appoint(host, order)
            except ClusterError as problem:
                inform(f"\nwarning: {host.name} cannot take over the run: {problem.what}")

        for number in numbers:
            self._pool.submit(one, hosts[number])

    def close(self) -> None:
        """Stop renewing."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self) -> None:
        asked: dict[int, Future[str]] = {}
        while not self._closed.wait(RENEW_S) and not self.why_lost:
            lease, now = self._lease, clock()
            recent = [name for name, at_s in list(self._renewed_s.items()) if now - at_s < lease.lasts_s]
            if not is_majority(lease.voters, recent):
                self._lose()
                return
            for number, remote in enumerate(self._remotes()):
                if not remote.is_lost and (number not in asked or asked[number].done()):
                    asked[number] = self._pool.submit(self._renew, number, lease)

    def _renew(self, number: int, lease: Lease) -> str:
        """Renew the lease on one host; return the host's name, or "" if it has not answered."""
        remote, sent_s = self._remotes()[number], clock()
        values = asdict(lease) | {"folder": self._folder(number)}
        try:
            granted = remote.ask("renew_lease", lease.lasts_s, **values)
        except ClusterError:
            return ""
        if not granted:
            self.why_lost = f"another host supervises this run now, as {remote.name} says"
            return ""
        self._renewed_s[remote.name] = sent_s
        return remote.name

    def _lose(self) -> None:
        """The lease is lost for good, also if the hosts answer again."""
        self.why_lost = (
            f"{self._lease.holder} reaches too few of {', '.join(self._lease.voters[-1])}: another host may "
            "supervise this run now"
        )
