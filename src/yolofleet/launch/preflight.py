"""A job of hosts as a value, and the checks of its hosts before it starts.

The checks are the doctor's quick examination, the files that every rank reads, and the rendezvous.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from yolofleet.hosts.package_sync import packed
from yolofleet.hosts.remote import Refused, Remote
from yolofleet.hosts.requests import hash_files
from yolofleet.hosts.ssh import Unreachable
from yolofleet.launch.lease_renewal import Supervision
from yolofleet.launch.next_action import RestartRules
from yolofleet.report.folder import RunFolder
from yolofleet.text import inform

T = TypeVar("T")

PORTS_TRIED = 100
PROBE_S = 60.0  # longer than any probe
HASH_S = 120.0
SEND_S = 120.0  # timeout for the copy of the package


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


# -- the job -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetJob:
    """A run on hosts. The launcher ships the texts, and knows nothing else of what the run computes.

    Attributes:
        verb: for the job's title.
        text: returns the configuration that a host gets, from all hosts, its number, and the numbers of those that take
            part.
        resources: what the run asks of each host.
        files: names of files that every rank reads; the launcher compares them between hosts.
        make_folder: makes the run's folder on this machine, with the next free name at each call.
        is_resumed: the run continues one that exists.
        may_exist: the run's folder may exist on a host.
        may_link: symbolic links in the run's folder may lead out of it.
        syncs_package: the hosts run this machine's package.
        rules: when the run goes on after a failure.
        resume_options: options of ``yolofleet train --resume FOLDER`` that name the hosts; None if the run writes no
            states that it could resume from.
        supervision: this process supervises a detached run; None: it is the launcher that a person started.
    """

    verb: str
    text: Callable[[Fleet, int, Sequence[int]], str]
    resources: RunResources
    make_folder: Callable[[], RunFolder]
    files: Sequence[str] = ()
    is_resumed: bool = False
    may_exist: bool = False
    may_link: bool = False
    syncs_package: bool = False
    rules: RestartRules = field(default_factory=RestartRules)
    resume_options: Sequence[str] | None = None
    supervision: Supervision | None = None

    def inspect(self, fleet: Fleet, remotes: Sequence[Remote]) -> tuple[list[Finding], Plan]:
        """Return the findings about hosts that concern the job, and where they meet."""
        findings, plan = inspect(fleet, remotes, self.resources, self.files)
        if self.syncs_package:  # the finding compares the installed packages, which the job does not use
            findings = [finding for finding in findings if finding.code != "package-differs"]
        return findings, plan


@contextmanager
def checked(job: FleetJob, fleet: Fleet) -> Iterator[tuple[Plan, Fleet, list[Remote], str]]:
    """Log in to the hosts, and check them. Yield where they meet, the hosts without unfit spares, and the configuration.

    Raises:
        YolofleetError: the job cannot be started.
    """
    left_out: list[Unreachable] = []
    active = range(len(fleet.active))
    config, *_ = [job.text(fleet, number, active) for number in active]  # raises before anything is made
    with logged_in(fleet, lost=left_out if fleet.spare else None) as remotes:
        plan, fleet, remotes = check(job, without_spares(fleet, left_out), remotes)
        inform(describe(fleet, plan))
        yield plan, fleet, remotes, config


def without_spares(fleet: Fleet, left_out: Sequence[Unreachable]) -> Fleet:
    """Return the fleet without the spares that cannot be reached, and say so.

    Raises:
        Unreachable: a host that is not a spare cannot be reached.
    """
    active = {host.name for host in fleet.active}
    for problem in left_out:
        if problem.host in active:
            raise problem
        inform(f"warning: the spare host {problem.host} is left out: {problem.what}")
    return fleet.without({problem.host for problem in left_out})


def make_ready(job: FleetJob, remotes: Sequence[Remote]) -> None:
    """Let hosts work in their folders, with this machine's package if the job asks for it.

    Raises:
        ConfigError: a folder does not exist. ClusterError: a host is lost.
    """
    enter_folders(remotes)
    if job.syncs_package:
        package = packed()
        on_each(remotes, lambda remote: remote.ask("take_code", SEND_S, **package))


def check(job: FleetJob, fleet: Fleet, remotes: Sequence[Remote]) -> tuple[Plan, Fleet, list[Remote]]:
    """Check the hosts, print warnings, and return where the hosts meet, and the hosts without unfit spares.

    Raises:
        ClusterError, ConfigError: the job would fail later.
    """
    make_ready(job, remotes)
    findings, plan = job.inspect(fleet, remotes)
    if fleet.spare and faults_of(findings):
        remotes = without_unfit_spares(job, fleet, remotes)
        fleet = fleet.without({host.name for host in fleet.spare} - {remote.name for remote in remotes})
        findings, plan = job.inspect(fleet, remotes)
    for found in findings:
        if found.level == "warn":
            inform(f"warning: {found.where}: {found.seen}")
    raise_faults(findings)
    return plan, fleet, list(remotes)


def without_unfit_spares(job: FleetJob, fleet: Fleet, remotes: Sequence[Remote]) -> list[Remote]:
    """Return the hosts that start, and each spare that brings no fault with it; name the others.

    Raises:
        ClusterError, ConfigError: a host that starts has a fault.
    """
    starting = remotes[: len(fleet.active)]
    raise_faults(job.inspect(fleet, starting)[0])
    kept = list(starting)
    for spare in remotes[len(starting) :]:
        if faults := faults_of(job.inspect(fleet, [*starting, spare])[0]):
            inform(f"warning: the spare host {spare.name} is left out: {faults[0].seen}")
        else:
            kept.append(spare)
    return kept


def describe(fleet: Fleet, plan: Plan) -> str:
    """Return lines that name each host's processes and the address where the hosts meet."""
    rows = [
        f"  {host.name}: {host.processes} process{'es' if host.processes > 1 else ''} on {host.device}, "
        f"{endpoint}"
        for host, endpoint in zip(fleet.active, plan.endpoints, strict=False)
    ]
    rows += [f"  {host.name}: a spare" for host in fleet.spare]
    many = f"{len(fleet.active)} host{'s' if len(fleet.active) > 1 else ''}"
    ranks = f"{fleet.processes} process{'es' if fleet.processes > 1 else ''}"
    return "\n".join([f"fleet: {many}, {ranks}, meeting at {plan.endpoints[0].address}:{plan.port}", *rows])
