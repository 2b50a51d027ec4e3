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
from yolofleet.hosts.login import logged_in
from yolofleet.hosts.remote import Refused, Remote
from yolofleet.hosts.requests import hash_files
from yolofleet.hosts.unreachable import Unreachable

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
        folder = _folder_of(remote)
        try:
            remote.ask("enter", folder=folder)
        except Refused as problem:
            raise ConfigError(
                f"{remote.name} has no folder {folder}",
                source=problem.what,
                hint="make it there, or set folder: for this host (fleet.yaml)",
            ) from None

    on_each(remotes, enter)


def _folder_of(remote: Remote) -> str:
    return remote.host.folder or str(Path.cwd())


def examine_fleet(
    fleet: Fleet, wanted: RunResources, *, port: int = 0, quick: bool = False
) -> tuple[list[Finding], Plan]:
    """Log in to every host and return what the doctor finds, also about unreachable hosts, and where the hosts meet.

    Args:
        port: as :func:`inspect`, which has the others as well.
    """
    lost: list[Unreachable] = []
    with logged_in(fleet, lost=lost) as remotes:
        strays = {remote: problem for remote in remotes if (problem := folder_problem(remote))}
        entered = [remote for remote in remotes if remote not in strays]
        findings, plan = inspect(fleet, entered, wanted, port=port, quick=quick)
    return [*map(unreached, lost), *strays.values(), *findings], plan


def unreached(problem: Unreachable) -> Finding:
    what = problem.what.removeprefix(f"{problem.host}: ")
    return finding(
        f"ssh-{problem.kind}", problem.host, seen=what, why=problem.source or "", fix=problem.hint or ""
    )


def folder_problem(remote: Remote) -> Finding | None:
    """Change to the host's folder. Return a finding if that fails."""
    name = remote.name
    try:
        enter_folders([remote])
    except ConfigError as problem:
        refusal = (problem.source or "").removeprefix(f"{name}: ")
        return finding("folder-missing", name, folder=_folder_of(remote), problem=refusal)
    except ClusterError as problem:
        return finding(
            "host-lost", name, seen=problem.what, why="asked for its folder", fix=problem.hint or ""
        )
    return None


def inspect(
    fleet: Fleet,
    remotes: Sequence[Remote],
    wanted: RunResources,
    names: Sequence[str] = (),
    *,
    port: int = 0,
    quick: bool = True,
) -> tuple[list[Finding], Plan]:
    """Return what the doctor finds, and where the hosts meet, which is valid without faults.

    Args:
        wanted: what the run asks of each host.
        names: files that every rank reads.
        port: of the rendezvous on the first host; 0: reserve a free one.
        quick: only what takes a second or two.
    """
    port = port or (free_port(fleet, remotes) if remotes else fleet.port)
    pool = ThreadPoolExecutor(1)
    try:
        hashing = pool.submit(files, remotes, names)
        peers = [peer_of(remote) for remote in remotes]
        seen = examine(peers, wanted, port=port, folders=[str(wanted.results)], quick=quick)
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


def firewall_line(fleet: Fleet, plan: Plan) -> str:
    """Return a firewall rule for the port where other hosts reach the run's store."""
    members = ", ".join(endpoint.address for endpoint in plan.endpoints)
    ports = ports_of(fleet)
    return (
        f"while a run lasts, {fleet.hosts[0].name} listens at {plan.endpoints[0].address}, on the first free port of {ports[0]} to "
        f"{ports[-1]}, for hosts that know the run's secret; to keep others away from it, there:\n"
        f"  sudo nft add rule inet filter input tcp dport {ports[0]}-{ports[-1]} ip saddr != {{ {members} }} drop"
    )


def files(remotes: Sequence[Remote], names: Sequence[str]) -> list[Finding]:
    """Compare files that every rank reads. Names that are no file on any host are ignored."""
    if not names:
        return []
    try:
        local_digests = hash_files({"names": names})
    except OSError:  # this machine runs no rank
        local_digests = {}
    every = on_each(remotes, lambda remote: dict(remote.ask("hash_files", HASH_S, names=list(names))))
    found = []
    for name in names:
        known = [place[name] for place in (*every, local_digests) if name in place]
        usual = Counter(known).most_common(1)[0][0] if known else None
        for remote, digests in zip(remotes, every, strict=True):
            if digests.get(name) != usual:
                code = "file-differs" if name in digests else "file-missing"
                right = (
                    None
                    if local_digests.get(name) == usual
                    else remotes[[p.get(name) for p in every].index(usual)]
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
