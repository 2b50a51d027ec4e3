"""The lease of a detached run on this host: who supervises it. Standard library alone.

A run never has two launchers. The launcher renews the lease on all hosts, every second. It ends the attempt when
fewer than a majority of the hosts that trained last have renewed it within ``lasts_s``; half of them are enough if the
first is among them. Another host that wants to supervise needs the votes of such a majority. A host that has renewed a
lease gives no vote until the lease has been over for a while. So the old launcher has ended before the new one begins.

When hosts are lost or join, the list of those that vote changes: dynamic voting with linearly ordered copies (Jajodia
and Mutchler, Dynamic Voting Algorithms, ACM TODS 1990). While it changes, a majority of the old list and one of the new
list are needed (joint consensus: Ongaro and Ousterhout, In Search of an Understandable Consensus Algorithm, 2014).

``runs/checkpoint/bucket_lease.py`` is simpler, because a bucket has one clock and creates an object only once. Hosts that share
nothing need votes instead.

The lease is a file on the host's own disk, beside the list of its jobs. A host that was started again knows none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from yolofleet.fleet.hosts import jobs
from yolofleet.storage.atomic import in_turn, write_text
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import StorageError
from yolofleet.support.system.proc import machine_id

STARTING_S = 120.0  # for a new launcher, until it renews its lease for the first time
MARGIN_S = 5.0  # from the end of a lease until a host votes for another one
MOST_LEASE_BYTES = 1 << 20
LEASE_LOST = 86  # exit code of a launcher that must not go on
NOT_BEGUN = 87  # exit code of a launcher that could not take over
KEPT = 20  # leases of runs that have ended


@dataclass(frozen=True)
class Lease:
    """The lease of a run, as one host knows it."""

    # job, title: as in ``jobs.Record``
    job: str
    title: str
    term: int  # number of the lease; each new launcher has a higher one
    holder: str  # name of the host that supervises
    # lists of names of hosts, in the order of their ranks; a majority of each list is needed. Usually one
    voters: tuple[tuple[str, ...], ...]
    version: int  # number of these lists
    lasts_s: float  # how long the lease lasts without renewal
    began_s: float = 0.0  # when the run began, in seconds since 1970
    renewed_s: float = 0.0  # when it was renewed, on this machine's clock (:func:`clock`)
    folder: str = ""  # run folder on this host; "" = not made yet
    code: int | None = None  # exit code of the run; None while it runs
    machine: str = ""  # identifier of the machine since its start

    @property
    def is_over(self) -> bool:
        """Whether the host may vote for another launcher."""
        return clock() > self.renewed_s + self.lasts_s + MARGIN_S


def clock() -> float:
    """Return seconds since the machine was started, including those of sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_majority(voters: Sequence[Sequence[str]], present: Collection[str]) -> bool:
    """Return whether ``present`` has more than half of each list, or half of it with its first host."""

    def enough(names: Sequence[str]) -> bool:
        found = sum(name in present for name in names)
        return 2 * found > len(names) or (2 * found == len(names) and names[0] in present)

    return all(map(enough, voters))


def lease_of(values: Mapping[str, Any]) -> Lease:
    """Parse a lease from JSON values. Raise TypeError or LookupError if they are not a lease."""
    return Lease(**{**values, "voters": tuple(tuple(names) for names in values["voters"])})


def read(job: str) -> Lease | None:
    """Return the lease of a run; None if this host knows none since its start."""
    try:
        lease = lease_of(
            json.loads(read_foreign(jobs.file_of(job, "lease"), limit_bytes=MOST_LEASE_BYTES, follow=False))
        )
    except (OSError, ValueError, TypeError, LookupError, StorageError):
        return None
    return lease if lease.machine == machine_id() else None


def write(lease: Lease, *, is_new: bool = False) -> None:
    """Write a lease, as renewed now; a new one, as renewed at the time by which its launcher must have started."""
    now = replace(lease, machine=machine_id(), renewed_s=clock() + is_new * STARTING_S)
    write_text(jobs.file_of(lease.job, "lease"), json.dumps(asdict(now)))


@contextmanager
def locked(job: str) -> Iterator[Lease | None]:
    """Hold the lock of a run's lease for the block, and yield the lease."""
    with in_turn(jobs.file_of(job, "lock")):
        yield read(job)


def forget_old() -> None:
    """Remove the files of runs that ended long ago."""
    with suppress(OSError, StorageError):
        files = sorted(jobs.folder().glob("*.lease"), key=lambda file: -file.lstat().st_mtime)
        ended = [file for file in files if (found := read(file.stem)) is None or found.code is not None]
        for file in ended[KEPT:]:
            file.unlink()
            for kind in (".console", ".order"):
                file.with_suffix(kind).unlink(missing_ok=True)


# -- requests (fleet/hosts/requests.py) ----------------------------------------------------------------------

Arguments = Mapping[str, Any]


def renew_lease(arguments: Arguments) -> bool:
    """Renew a launcher's lease, the fields of :class:`Lease`; return False if this host knows a newer one."""
    asked = lease_of(arguments)
    with locked(asked.job) as known:
        if known is not None and (known.term > asked.term or known.code is not None):
            return False
        if known is not None and known.term == asked.term and known.version > asked.version:
            asked = replace(asked, voters=known.voters, version=known.version)  # a request that came late
        write(replace(asked, began_s=known.began_s if known is not None else time.time()))
    return True


def vote(arguments: Arguments) -> dict[str, Any] | None:
    """Vote for a host that wants to supervise a run.

    Args:
        arguments: ``job``; ``holder``, the host that wants to; ``term`` of the new lease, 0: only report whether
            a vote would be granted.
    Returns:
        ``granted``, and of the lease that this host knew: ``term``, ``voters``, ``version``, ``code``; None: it knows
        none.
    """
    job, term = str(arguments["job"]), int(arguments["term"])
    with locked(job) as known:
        if known is None:
            return None
        # if the holder itself asks, its launcher ended; the same host may take over
        is_free = known.is_over or known.holder == arguments["holder"]
        granted = known.code is None and is_free and (not term or term > known.term)
        if granted and term:
            write(replace(known, term=term, holder=str(arguments["holder"])), is_new=True)
    return {name: getattr(known, name) for name in ("term", "voters", "version", "code")} | {
        "granted": granted
    }


def end_lease(arguments: Arguments) -> None:
    """Record the exit code of a run that has ended.

    Args:
        arguments: ``job``, ``code``; ``term`` of the launcher that ended, if there is one.
    """
    with locked(str(arguments["job"])) as known:
        if known is not None and known.code is None and known.term <= int(arguments.get("term", known.term)):
            write(replace(known, code=int(arguments["code"])))


def leases() -> list[Lease]:
    """Return the leases of this host."""
    return [found for file in jobs.folder().glob("*.lease") if (found := read(file.stem)) is not None]


def list_leases(_: Arguments) -> list[dict[str, Any]]:
    """Return the leases of this host, with the name of the file with the console of a launcher here."""
    return [
        {**asdict(lease), "console": str(jobs.file_of(lease.job, "console")), "is_over": lease.is_over}
        for lease in leases()
    ]
