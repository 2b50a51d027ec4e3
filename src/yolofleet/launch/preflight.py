"""Preflight checks of hosts: the doctor's quick examination, the files that every rank reads, and the rendezvous."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.config.resources import RunResources
from yolofleet.doctor.examination import Peer
from yolofleet.doctor.findings import Finding, finding
from yolofleet.doctor.hosts import examine
from yolofleet.doctor.network import Endpoint
from yolofleet.errors import ClusterError, ConfigError
from yolofleet.hosts.fleet import HERE, Fleet
from yolofleet.hosts.remote import Refused, Remote
from yolofleet.hosts.requests import hash_files

T = TypeVar("T")

PORTS_TRIED = 100
PROBE_S = 60.0  # longer than any probe
HASH_S = 120.0


ALONE = Endpoint("127.0.0.1", "lo")


@dataclass(frozen=True)
class Plan:
    """Where the hosts meet: an endpoint of each, and the port on the first."""

    endpoints: tuple[Endpoint, ...]
    port: int


def on_each(remotes: Sequence[Remote], work: Callable[[Remote], T]) -> list[T]:
    """Call ``work`` for all hosts at the same time. Raise the first exception, in their order."""
    pool = ThreadPoolExecutor(max(1, len(remotes)))
    try:
        return list(pool.map(work, remotes))
    finally:  # after Ctrl-C, do not wait for answers
        pool.shutdown(wait=False, cancel_futures=True)


def enter_folders(remotes: Sequence[Remote]) -> None:
    """Let each host work in its own folder, or in the folder of the same path as this one.

    Raises:
        ConfigError: the folder does not exist, or cannot be entered.
        ClusterError: a host is lost.
    """

    def enter(remote: Remote) -> None:
        folder = remote.host.folder or str(Path.cwd())
        try:
            remote.ask("enter", folder=folder)
        except Refused as problem:
            raise ConfigError(
                f"{remote.name} has no folder {folder}",
                source=problem.what,
                hint="make it there, or set folder: for this host (fleet.yaml)",
            ) from None

    on_each(remotes, enter)


def inspect(
    fleet: Fleet, remotes: Sequence[Remote], wanted: RunResources, names: Sequence[str] = ()
) -> tuple[list[Finding], Plan]:
    """Return what the doctor finds within a second or two, and where the hosts meet, which is valid without faults.

    Args:
        wanted: what the run asks of each host.
        names: files that every rank reads.
    """
    port = free_port(fleet, remotes)
    pool = ThreadPoolExecutor(1)
    try:
        hashing = pool.submit(files, remotes, names)
        peers = [peer_of(remote) for remote in remotes]
        seen = examine(peers, wanted, port=port, folders=[str(wanted.results)], quick=True)
        findings = [*seen.findings, *hashing.result()]
    finally:  # after Ctrl-C, do not wait for answers
        pool.shutdown(wait=False, cancel_futures=True)
    return findings, Plan(tuple(seen.endpoints.get(remote.name, ALONE) for remote in remotes), port)


def peer_of(remote: Remote) -> Peer:
    """Return a host as the doctor asks it."""

    def ask(probe: str, arguments: Mapping[str, Any]) -> Any:
        return remote.ask(probe, timeout_s=PROBE_S, **arguments)

    host = remote.host
    return Peer(remote.name, ask, host.device, host.address, host.interface, host.data)


def free_port(fleet: Fleet, remotes: Sequence[Remote], passed_over: Sequence[int] = ()) -> int:
    """Reserve a port on the first host, after those of ``passed_over``, which turned out to be busy.

    Raises:
        ClusterError: no port is free.
    """
    ports = ports_of(fleet)
    first = max([ports.start, *(port + 1 for port in passed_over)])
    return int(remotes[0].ask("reserve_port", first=first, count=ports.stop - first))


def ports_of(fleet: Fleet) -> range:
    """Return the ports of the first host that a run may use for its rendezvous, for the rules of a firewall."""
    return range(fleet.port, fleet.port + PORTS_TRIED)


def files(remotes: Sequence[Remote], names: Sequence[str]) -> list[Finding]:
    """Compare files that every rank reads. Names that are no file on any host are ignored."""
    if not names:
        return []
    try:
        here = hash_files({"names": names})
    except OSError:  # this machine runs no rank
        here = {}
    every = on_each(remotes, lambda remote: dict(remote.ask("hash_files", HASH_S, names=list(names))))
    found = []
    for name in names:
        known = [place[name] for place in (*every, here) if name in place]
        usual = Counter(known).most_common(1)[0][0] if known else None
        for remote, there in zip(remotes, every, strict=True):
            if there.get(name) != usual:
                code = "file-differs" if name in there else "file-missing"
                right = (
                    None if here.get(name) == usual else remotes[[p.get(name) for p in every].index(usual)]
                )
                fix = copy_command(name, right, remote)
                found.append(finding(code, remote.name, name=name, fix=fix))
    return found


def copy_command(name: str, source: Remote | None, target: Remote) -> str:
    """Return the command, typed here, that copies a file from ``source``, or this machine, to ``target``.

    It does not use scp, whose versions differ in how the remote side treats quotes.
    """
    path = _full_path(target, name)
    take = f"mkdir -p {shlex.quote(str(path.parent))} && cat > {shlex.quote(str(path))}"
    put = f"{_shell_of(target)} {shlex.quote(take)}"
    if source is None:
        return f"{put} < {shlex.quote(str(Path(name).absolute()))}"
    give = f"cat {shlex.quote(str(_full_path(source, name)))}"
    return f"{_shell_of(source)} {shlex.quote(give)} | {put}"


def _full_path(remote: Remote, name: str) -> Path:
    return Path(str(remote.ask("enter", folder=".")), name)


def _shell_of(remote: Remote) -> str:
    return "sh -c" if remote.name == HERE else f"ssh {remote.name}"


def faults_of(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings because of which a run cannot start."""
    return [finding for finding in findings if finding.level == "fault"]


def raise_faults(findings: Sequence[Finding]) -> None:
    """Raise ClusterError if there are faults."""
    if faults := faults_of(findings):
        first, others = faults[0], faults[1:]
        source = first.why
        if others:
            source += "\n" + "\n".join(f"also: {other.where}: {other.seen}" for other in others)
        raise ClusterError(f"{first.where}: {first.seen}", source=source.strip() or None, hint=first.fix)
