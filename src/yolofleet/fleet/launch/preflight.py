"""The checks of the hosts of a run before it starts.

The checks are the doctor's quick examination, the files that every rank reads, and the rendezvous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yolofleet.fleet.doctor.examination import Peer, on_each
from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.gpus import visible_gpus
from yolofleet.fleet.doctor.host_facts import read_answer
from yolofleet.fleet.doctor.hosts import examine
from yolofleet.fleet.doctor.network import Endpoint
from yolofleet.fleet.hosts.fleet import HERE, Fleet, Host
from yolofleet.fleet.hosts.remote import Refused, Remote, logged_in
from yolofleet.fleet.hosts.requests import hash_files, packed
from yolofleet.fleet.hosts.ssh import Unreachable
from yolofleet.fleet.launch.machines import RunPlan, files_read, shares_of
from yolofleet.fleet.resources import RunResources, resources_of
from yolofleet.support.device_names import ALL, numbered
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.text import inform, quoted

PORTS_TRIED = 100
PROBE_S = 60.0  # longer than any probe
HASH_S = 120.0
SEND_S = 120.0  # timeout for the copy of the package


ALONE = Endpoint("127.0.0.1", "lo")


@dataclass(frozen=True)
class Meeting:
    """Where the hosts meet: an endpoint of each, and the port on the first."""

    endpoints: tuple[Endpoint, ...]
    port: int


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
) -> tuple[list[Finding], Meeting]:
    """Log in to every host and return what the doctor finds, also about unreachable hosts, and where the hosts meet.

    Args:
        port: as :func:`inspect`, which has the others as well.
    """
    lost: list[Unreachable] = []
    with logged_in(fleet, lost=lost) as remotes:
        strays = {remote: problem for remote in remotes if (problem := folder_problem(remote))}
        entered = [remote for remote in remotes if remote not in strays]
        findings, meeting = inspect(fleet, entered, wanted, port=port, quick=quick)
    return [*map(unreached, lost), *strays.values(), *findings], meeting


def with_gpus_counted(fleet: Fleet) -> Fleet:
    """Log in to every host, and return the fleet with the numbers of its GPUs instead of ``all``.

    Raises:
        ClusterError: a host is unreachable or lost.
        ConfigError: a host has no GPU, or only torch could count its GPUs.
    """
    question = {"folders": [], "port": 0, "quick": True, "count_gpus": True}

    def counted(remote: Remote) -> Host:
        host = remote.host
        if host.device != ALL:
            return host
        facts = read_answer(host.name, "facts", question, peer_of(remote).ask("facts", question))
        setting = host.env.get("CUDA_VISIBLE_DEVICES", facts.variables.get("CUDA_VISIBLE_DEVICES"))
        count = visible_gpus(facts.gpu_count, setting)
        if not count:
            problem = "only torch could count its GPUs" if count is None else "it has no GPU"
            hidden = f" (CUDA_VISIBLE_DEVICES={setting})" if setting is not None else ""
            raise ConfigError(
                f"{host.name}:{ALL}: {problem}{hidden}",
                source=fleet.source,
                hint=f"name the devices: {host.name}:8, {host.name}:0+2 or {host.name}:cpu:4",
            )
        inform(f"note: {host.name}:{ALL} is {host.name}:{count}")
        return replace(host, device=numbered(range(count)))

    with logged_in(fleet) as remotes:
        return replace(fleet, hosts=tuple(on_each(remotes, counted)))


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
) -> tuple[list[Finding], Meeting]:
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
    return findings, Meeting(tuple(seen.endpoints.get(remote.name, ALONE) for remote in remotes), port)


def peer_of(remote: Remote, timeout_s: float = PROBE_S) -> Peer:
    """Return a host as the doctor asks it."""

    def ask(probe: str, arguments: Mapping[str, Any]) -> Any:
        return remote.ask(probe, timeout_s=timeout_s, **arguments)

    host = remote.host
    return Peer(remote.name, ask, host.device, host.address, host.interface, host.data)


def free_port(fleet: Fleet, remotes: Sequence[Remote], passed_over: Sequence[int] = ()) -> int:
    """Reserve a port on the first host, after the busy ones ``passed_over``. Raise ClusterError if none is free."""
    ports = ports_of(fleet)
    first = max([ports.start, *(port + 1 for port in passed_over)])
    return int(remotes[0].ask("reserve_port", first=first, count=ports.stop - first))


def ports_of(fleet: Fleet) -> range:
    """Return the ports of the first host that a run may use for its rendezvous, for the rules of a firewall."""
    return range(fleet.port, fleet.port + PORTS_TRIED)


def firewall_line(fleet: Fleet, meeting: Meeting) -> str:
    """Return a firewall rule for the port where other hosts reach the run's store."""
    members = ", ".join(endpoint.address for endpoint in meeting.endpoints)
    ports = ports_of(fleet)
    return (
        f"while a run lasts, {fleet.hosts[0].name} listens at {meeting.endpoints[0].address}, on the first free port of {ports[0]} to "
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
    take = f"mkdir -p {quoted(path.parent)} && cat > {quoted(path)}"
    put = f"{_shell_of(target)} {quoted(take)}"
    if source is None:
        return f"{put} < {quoted(Path(name).absolute())}"
    give = f"cat {quoted(_full_path(source, name))}"
    return f"{_shell_of(source)} {quoted(give)} | {put}"


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


# -- of a run ------------------------------------------------------------------------------------------------


def inspect_for(plan: RunPlan, fleet: Fleet, remotes: Sequence[Remote]) -> tuple[list[Finding], Meeting]:
    """Return the findings about hosts that concern a run, and where they meet."""
    settings = plan.config.value
    findings, meeting = inspect(fleet, remotes, resources_of(settings), files_read(settings))
    if settings.sync_code:  # the finding compares the installed packages, which the run does not use
        findings = [finding for finding in findings if finding.code != "package-differs"]
    return findings, meeting


@contextmanager
def checked(plan: RunPlan) -> Iterator[tuple[Meeting, Fleet, list[Remote], str]]:
    """Log in to the hosts, and check them. Yield where they meet, the hosts without unfit spares, and the configuration.

    Raises:
        YolofleetError: the job cannot be started.
    """
    assert plan.fleet is not None
    left_out: list[Unreachable] = []
    fleet, active = plan.fleet, range(len(plan.fleet.active))
    shares = shares_of(plan.config.value.shares, fleet, active)
    texts = [plan.text_for_host(fleet, number, shares) for number in active]  # raises if one is not valid
    with logged_in(fleet, lost=left_out if fleet.spare else None) as remotes:
        meeting, fleet, remotes = check(plan, without_spares(fleet, left_out), remotes)
        inform(describe(fleet, meeting))
        yield meeting, fleet, remotes, texts[0]


def without_spares(fleet: Fleet, left_out: Sequence[Unreachable]) -> Fleet:
    """Return the fleet without the spares that cannot be reached, and say so. Raise Unreachable for another host."""
    active = {host.name for host in fleet.active}
    for problem in left_out:
        if problem.host in active:
            raise problem
        inform(f"warning: the spare host {problem.host} is left out: {problem.what}")
    return fleet.without({problem.host for problem in left_out})


def make_ready(plan: RunPlan, remotes: Sequence[Remote]) -> None:
    """Let hosts work in their folders, with this machine's package if the run asks for it.

    Raises:
        ConfigError: a folder does not exist. ClusterError: a host is lost.
    """
    enter_folders(remotes)
    if plan.config.value.sync_code:
        package = packed()
        on_each(remotes, lambda remote: remote.ask("take_code", SEND_S, **package))


def check(plan: RunPlan, fleet: Fleet, remotes: Sequence[Remote]) -> tuple[Meeting, Fleet, list[Remote]]:
    """Check the hosts, print warnings, and return where the hosts meet, and the hosts without unfit spares.

    Raises:
        ClusterError, ConfigError: the job would fail later.
    """
    make_ready(plan, remotes)
    findings, meeting = inspect_for(plan, fleet, remotes)
    if fleet.spare and faults_of(findings):
        remotes = without_unfit_spares(plan, fleet, remotes)
        fleet = fleet.without({host.name for host in fleet.spare} - {remote.name for remote in remotes})
        findings, meeting = inspect_for(plan, fleet, remotes)
    for found in findings:
        if found.level == "warn":
            inform(f"warning: {found.where}: {found.seen}")
    raise_faults(findings)
    return meeting, fleet, list(remotes)


def without_unfit_spares(plan: RunPlan, fleet: Fleet, remotes: Sequence[Remote]) -> list[Remote]:
    """Return the hosts that start, and each spare that brings no fault with it; name the others.

    Raises:
        ClusterError, ConfigError: a host that starts has a fault.
    """
    starting = remotes[: len(fleet.active)]
    raise_faults(inspect_for(plan, fleet, starting)[0])
    kept = list(starting)
    for spare in remotes[len(starting) :]:
        if faults := faults_of(inspect_for(plan, fleet, [*starting, spare])[0]):
            inform(f"warning: the spare host {spare.name} is left out: {faults[0].seen}")
        else:
            kept.append(spare)
    return kept


def describe(fleet: Fleet, meeting: Meeting) -> str:
    """Return lines that name each host's processes and the address where the hosts meet."""
    rows = [
        f"  {host.name}: {host.processes} process{'es' if host.processes > 1 else ''} on {host.device}, "
        f"{endpoint}"
        for host, endpoint in zip(fleet.active, meeting.endpoints, strict=False)
    ]
    rows += [f"  {host.name}: a spare" for host in fleet.spare]
    many = f"{len(fleet.active)} host{'s' if len(fleet.active) > 1 else ''}"
    ranks = f"{fleet.processes} process{'es' if fleet.processes > 1 else ''}"
    return "\n".join(
        [f"fleet: {many}, {ranks}, meeting at {meeting.endpoints[0].address}:{meeting.port}", *rows]
    )
