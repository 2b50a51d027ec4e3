"""Several hosts as one: what differs between them, and whether each reaches each.

The hosts are asked by name for what ``probes.py`` does; how the question gets there is the caller's business.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from yolofleet.config.resource_estimate import by_number, estimate_here
from yolofleet.config.resources import RunResources
from yolofleet.errors import YolofleetError
from yolofleet.fleet.doctor.answers import check_answer
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.host_differences import (
    differences,
    groups,
    groups_text,
    judge_clocks,
    judge_data,
    same_machines,
)
from yolofleet.fleet.doctor.local import judge_host
from yolofleet.fleet.doctor.machine_facts import software
from yolofleet.fleet.doctor.network import Meeting, candidates, judge_network, judge_way, meeting_of
from yolofleet.fleet.doctor.network_interfaces import card_with, network_of
from yolofleet.fleet.doctor.speed import judge_all_reduce, judge_speeds, rounds

Reply = Any  # what JSON can say

LISTEN_S = 60.0


@dataclass(frozen=True)
class Peer:
    """A host that answers.

    Attributes:
        name: as the user calls it.
        ask: name of a probe and its arguments -> its answer; raises YolofleetError when the host is lost.
        device: as ``--device`` there.
        address, interface: where others shall meet it; "" = to be found.
        data: data set there.
    """

    name: str
    ask: Callable[[str, Mapping[str, Any]], Reply]
    device: str = "auto"
    address: str = ""
    interface: str = ""
    data: str = ""


@dataclass
class Examination:
    """What was found, and what is known for the next question.

    Attributes:
        peers: that still answer.
        facts: of each host that answered.
        meetings: where each host can be reached by the others.
    """

    peers: list[Peer]
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    meetings: dict[str, Meeting] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def ask(
        self,
        probe: str,
        arguments: Mapping[str, Any] | Callable[[Peer], Mapping[str, Any]],
        peers: Sequence[Peer] | None = None,
        *,
        trips_s: dict[str, tuple[float, float]] | None = None,
    ) -> dict[str, Reply]:
        """All hosts at the same time; one that is lost, or answers something else, is a finding, and is not asked again.

        Args:
            peers: only these.
            trips_s: filled with when each was asked and when it had answered, by this machine's clock.
        """
        asked = [peer for peer in self.peers if peers is None or peer in peers]
        if not asked:
            return {}

        def one(peer: Peer) -> Reply | YolofleetError:
            began_s = time.time()
            wish = arguments(peer) if callable(arguments) else arguments
            try:
                answer = peer.ask(probe, wish)
                check_answer(peer.name, probe, wish, answer)
                return answer
            except YolofleetError as problem:
                return problem
            finally:
                if trips_s is not None:
                    trips_s[peer.name] = (began_s, time.time())

        pool = ThreadPoolExecutor(len(asked))
        try:
            replies = dict(zip([peer.name for peer in asked], pool.map(one, asked), strict=True))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nobody waits for a host that hangs
        lost = {name: reply for name, reply in replies.items() if isinstance(reply, YolofleetError)}
        with self._lock:
            self.peers = [peer for peer in self.peers if peer.name not in lost]
            self.findings += [
                Finding("host-lost", "fault", name, problem.what, f"asked for {probe!r}", problem.hint)
                for name, problem in lost.items()
            ]
        return {name: reply for name, reply in replies.items() if name not in lost}

    @property
    def names(self) -> list[str]:
        return [peer.name for peer in self.peers]


def examine(
    peers: Iterable[Peer],
    wanted: RunResources,
    *,
    port: int,
    folders: Sequence[str] = (),
    quick: bool = False,
) -> Examination:
    """Everything that can be said about these hosts together.

    Args:
        wanted: by the run that is planned.
        port: of the rendezvous, on the first host.
        folders: whose disks to look at, on every host.
        quick: no torch, no measuring: what a run wants to know before it starts.
    """
    found = Examination(list(peers))
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(data_sets, found, wanted)
        wishes = {"folders": list(folders), "port": port, "quick": quick}
        found.facts = found.ask("facts", lambda peer: {**wishes, "count_gpus": by_number(peer.device)})
        found.findings += alone(found, wanted)
        if len(found.facts) > 1:
            found.findings += differences(found.facts, software())
            found.findings += clocks(found)
            if not quick:
                found.findings += names(found)
            # a machine does not reach itself as others do: what its ways show would mislead
            found.findings += same_machines(found.facts) or together(found, port, quick=quick)
        found.findings += waiting.result()
    return found


def alone(found: Examination, wanted: RunResources) -> list[Finding]:
    """What there is to say about each host by itself."""
    findings = []
    for number, peer in enumerate(found.peers):
        facts = found.facts[peer.name]
        need = estimate_here(replace(wanted, device=peer.device), facts)
        findings += judge_host(facts, need, peer.name)
        network = judge_network(facts, peer.name)
        # the rendezvous is on the first host alone
        findings += [f for f in network if number == 0 or f.code not in ("port", "port-busy")]
    return findings


def together(found: Examination, port: int, *, quick: bool) -> list[Finding]:
    """Whether each host reaches each, and unless ``quick`` how fast."""
    token = secrets.token_hex(16)
    if len(found.peers) < 2:  # the others were lost meanwhile
        return []
    try:
        open_ports = listen(found, token, port)
        findings = judge_ways(found, token, open_ports, port)
        met = not any(finding.level == "fault" for finding in findings)
        if met and not quick:
            findings += speeds(found, token, open_ports)
    finally:
        found.ask("unlisten", {"token": token})
    if met and not quick:
        findings += measured_all_reduce(found)
    return findings


# -- what differs --------------------------------------------------------------------------------------------


def clocks(found: Examination) -> list[Finding]:
    """Clocks of all hosts and of this machine, read three times; the shortest trip counts."""
    offsets_s: dict[str, float] = {}
    shortest_s: dict[str, float] = {}
    for _ in range(3):
        trips_s: dict[str, tuple[float, float]] = {}
        for name, reply in found.ask("time", {}, trips_s=trips_s).items():
            asked_s, answered_s = trips_s[name]
            if answered_s - asked_s < shortest_s.get(name, float("inf")):
                shortest_s[name] = answered_s - asked_s
                offsets_s[name] = reply["time_s"] - (asked_s + answered_s) / 2
    return judge_clocks(offsets_s, shortest_s)


def names(found: Examination) -> list[Finding]:
    """Do the hosts know each other by name, and correctly?"""
    own = {peer.name: str(found.facts[peer.name]["host"]) for peer in found.peers}
    seen = found.ask("look_up", {"names": sorted(set(own.values()))})
    findings = []
    unknown: dict[str, list[str]] = defaultdict(list)
    for asker, answers in seen.items():
        for target, machine in own.items():
            if own[asker] == machine:  # "localhost", say: what it has to say of that is said for itself
                continue
            addresses = answers[machine]["addresses"]
            cards = found.facts[target]["cards"] or []
            if not addresses:
                unknown[target].append(asker)
            elif cards and not any(card_with(cards, a) and not a.startswith("127.") for a in addresses):
                findings.append(
                    Finding(
                        "name-wrong",
                        "warn",
                        f"{asker} -> {target}",
                        f"{asker} takes {machine} for {', '.join(addresses)}, which is no address of {target}",
                        "programs that meet by host name meet nobody, or somebody else",
                        f"on {asker}, in /etc/hosts: {_first_address(cards)} {machine}",
                    )
                )
    for target, askers in unknown.items():
        findings.append(
            Finding(
                "name-unknown",
                "note",
                target,
                f"its name {own[target]} is unknown on {', '.join(askers)}",
                "yolofleet does not need it; torchrun by hand needs an address as --master_addr",
            )
        )
    return findings


def _first_address(cards: Sequence[Mapping[str, Any]]) -> str:
    meetings = candidates({"cards": cards})
    return meetings[0].address if meetings else "ADDRESS"


def data_sets(found: Examination, wanted: RunResources) -> list[Finding]:
    """The same images and labels everywhere? Nothing when no data set was named."""
    chosen = {peer.name: peer.data or wanted.data for peer in found.peers}
    if not any(chosen.values()):
        return []
    shared = {"module": wanted.data_digest, "single_cls": wanted.single_cls}
    seen = found.ask("data", lambda peer: {**shared, "data": chosen[peer.name]})
    return judge_data(seen, chosen)


# -- from each to each ---------------------------------------------------------------------------------------


def addresses(found: Examination, peer: Peer) -> list[Meeting]:
    """Where others try to reach a host: as the fleet's description says, then at its usable network interfaces.

    An address that was named may be wrong, and the finding then names one that works.
    """
    facts = found.facts[peer.name]
    return list(dict.fromkeys([*candidates(facts, peer.address, peer.interface), *candidates(facts)]))


def listen(found: Examination, token: str, port: int) -> dict[str, list[int]]:
    """Every host listens on a port that its kernel chooses, the first one on that of the rendezvous as well.

    It listens only on the addresses that the others try. A host without one is left to :func:`judge_ways`.
    """
    first = found.peers[0].name
    seen = found.facts[first]["port"]
    tried = {peer.name: [meeting.address for meeting in addresses(found, peer)] for peer in found.peers}

    def ports(peer: Peer) -> Mapping[str, Any]:
        wanted = [0, port] if peer.name == first and not (seen and seen["busy"]) else [0]
        return {"addresses": tried[peer.name], "ports": wanted, "token": token, "seconds": LISTEN_S}

    able = [peer for peer in found.peers if tried[peer.name]]
    return {name: reply["ports"] for name, reply in found.ask("listen", ports, able).items()}


def judge_ways(
    found: Examination, token: str, open_ports: Mapping[str, Sequence[int]], port: int
) -> list[Finding]:
    """Try every way, in both directions, at every address of every host; choose where each is met.

    Sets ``found.meetings``.
    """
    wanted = {
        peer.name: candidates(found.facts[peer.name], peer.address, peer.interface) for peer in found.peers
    }
    every = {peer.name: addresses(found, peer) for peer in found.peers}

    def targets(source: str) -> list[dict[str, Any]]:
        return [
            {"address": meeting.address, "port": number, "token": token, "host": name}
            for name, numbers in open_ports.items()
            if name != source
            for meeting in every.get(name, ())  # nothing of a host that was lost meanwhile
            for number in numbers
        ]

    attempts: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for source, results in found.ask("reach", lambda peer: {"targets": targets(peer.name)}).items():
        for target, result in zip(targets(source), results, strict=True):
            at = {"address": target["address"], "port": target["port"]}
            attempts[source, target["host"]].append({**result, **at})
    findings: list[Finding] = []
    for name in found.names:
        findings += _judge_target(found, name, wanted[name], every[name], attempts, port)
    ok = [finding for finding in findings if finding.level == "ok"]
    findings = [finding for finding in findings if finding.level != "ok"]
    if ok:
        shown = ", ".join(f"{name} {m.address} ({m.card})" for name, m in found.meetings.items())
        findings.append(
            Finding(
                "ways",
                "ok",
                "fleet",
                f"{len(ok)} of {len(ok) + _faults(findings)} ways are open; met at {shown}",
            )
        )
    known = {name: _mtu(found.facts[name], meeting) for name, meeting in found.meetings.items()}
    mtus = {name: mtu for name, mtu in known.items() if mtu}
    if len(groups(mtus)) > 1:
        least = min(mtus.values())
        lines = [
            f"on {name}: sudo ip link set {found.meetings[name].card} mtu {least}"
            for name, mtu in mtus.items()
            if mtu > least
        ]
        findings.append(
            Finding(
                "mtu-differs",
                "warn",
                "fleet",
                f"largest packets of the cards (MTU): {groups_text(mtus)}",
                "long messages may vanish where short ones pass",
                "the same everywhere:\n" + "\n".join(lines),
            )
        )
    return findings


def _faults(findings: Iterable[Finding]) -> int:
    return sum(finding.level == "fault" for finding in findings)


def _mtu(facts: Mapping[str, Any], meeting: Meeting) -> int | None:
    return next((card["mtu"] for card in facts["cards"] or () if card["name"] == meeting.card), None)


def _judge_target(
    found: Examination,
    target: str,
    wanted: Sequence[Meeting],
    every: Sequence[Meeting],
    attempts: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    port: int,
) -> list[Finding]:
    """How one host is met by the others."""
    reached: dict[str, dict[str, str]] = defaultdict(dict)
    for (source, to), results in attempts.items():
        for result in results:
            if to == target and result["port"] != port:
                reached[result["address"]][source] = result["outcome"]
    meeting = meeting_of(target, wanted, reached)
    if meeting is None:
        return [
            Finding(
                "way-no-card",
                "fault",
                target,
                "it has no card and address that others could reach",
                "it cannot take part",
                "name one in fleet.yaml: interface: CARD or address: ADDRESS",
            )
        ]
    found.meetings[target] = meeting
    findings = []
    for (source, to), results in attempts.items():
        for result in results:
            if to == target and result["address"] == meeting.address:
                if result["outcome"] != "connected" and "firewall" not in found.facts[target]:
                    asked = [peer for peer in found.peers if peer.name == target]
                    found.facts[target]["firewall"] = found.ask("firewall", {}, asked).get(
                        target, {"kind": "", "rules": [], "chains": [], "readable": False}
                    )
                what = "rendezvous" if result["port"] == port else "as gloo and NCCL choose"
                findings.append(judge_way(source, target, result, found.facts[target], what))
    if _faults(findings):
        better = meeting_of(target, every, reached)
        if better is not None and better != meeting and "connected" in reached[better.address].values():
            findings.append(_wrong_card(target, meeting, better, found, "fault"))
    elif every and every[0] != meeting and every[0].card != meeting.card and not _stated(found, target):
        findings.append(_wrong_card(target, every[0], meeting, found, "warn"))
    return findings


def _stated(found: Examination, name: str) -> bool:
    return any(peer.name == name and (peer.address or peer.interface) for peer in found.peers)


def _wrong_card(target: str, wrong: Meeting, right: Meeting, found: Examination, level: Any) -> Finding:
    card = card_with(found.facts[target]["cards"] or [], right.address)
    network = f", network {network_of(card, right.address)}" if card else ""
    return Finding(
        "card-unshared",
        level,
        target,
        f"not all others reach it at {wrong.address} ({wrong.card}); they do at {right.address} "
        f"({right.card}{network})",
        "NCCL and gloo, left to themselves, take the first card"
        if level == "warn"
        else "the fleet's description names the wrong card or address",
        f"yolofleet chooses {right.card} by itself; by hand: export NCCL_SOCKET_IFNAME={right.card} "
        f"GLOO_SOCKET_IFNAME={right.card}"
        if level == "warn"
        else f"in fleet.yaml: interface: {right.card}",
    )


# -- how fast ------------------------------------------------------------------------------------------------


def speeds(found: Examination, token: str, open_ports: Mapping[str, Sequence[int]]) -> list[Finding]:
    """Latency and bandwidth of every way, measured while the hosts do nothing else."""
    measured: dict[tuple[str, str], Mapping[str, Any]] = {}
    for one in rounds(found.names):
        targets = dict(one)
        asked = [peer for peer in found.peers if peer.name in targets]

        def target(peer: Peer, targets: Mapping[str, str] = targets) -> Mapping[str, Any]:
            name = targets[peer.name]
            return {"address": found.meetings[name].address, "port": open_ports[name][0], "token": token}

        for source, reply in found.ask("measure", target, asked).items():
            measured[source, targets[source]] = reply
    left = {way: reply for way, reply in measured.items() if way[1] in found.names}
    return judge_speeds(left, found.meetings)  # why the way to a host that was lost broke is said


def measured_all_reduce(found: Examination) -> list[Finding]:
    """A sum over all hosts through torch, one process each: what a step will wait for."""
    if len(found.peers) < 2:
        return []
    first = found.peers[0]
    order = {name: rank for rank, name in enumerate(found.names)}
    address = found.meetings[first.name].address
    port = found.ask("free_port", {"address": address}, [first]).get(first.name, {}).get("port")
    if port is None:
        return []

    def place(peer: Peer) -> Mapping[str, Any]:
        card = found.meetings[peer.name].card
        shared = {"address": address, "port": port, "size": len(order), "deadline_s": 30}
        return {**shared, "rank": order[peer.name], "card": card}

    replies = found.ask("all_reduce", place)
    return judge_all_reduce(replies)
