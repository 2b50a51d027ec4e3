"""Examine several hosts: what differs between them, and whether each reaches each.

Hosts answer the probes of ``probes.py``. The caller says how a question gets to a host.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from yolofleet.fleet.doctor.examination import Examination, Peer
from yolofleet.fleet.doctor.findings import Finding, Level, finding
from yolofleet.fleet.doctor.host_differences import (
    Way,
    differences,
    groups,
    groups_text,
    judge_all_reduce,
    judge_clocks,
    judge_data,
    judge_speeds,
    rounds,
    same_machines,
)
from yolofleet.fleet.doctor.host_facts import UNSEEN, ConnectionTest, HostFacts
from yolofleet.fleet.doctor.local import estimate_for, judge_host
from yolofleet.fleet.doctor.machine_facts import software
from yolofleet.fleet.doctor.network import (
    Endpoint,
    Target,
    best_endpoint,
    candidates,
    interface_with,
    judge_way,
    network_of,
)
from yolofleet.fleet.resources import RunResources, by_number

LISTEN_S = 60.0
CLOCK_READINGS = 3
Endpoints = Mapping[str, Sequence[Endpoint]]  # of each host, those that others try
ConnectionTests = dict[tuple[str, str], list[tuple[Target, ConnectionTest]]]  # (from, to) ->


def examine(
    peers: Iterable[Peer],
    wanted: RunResources,
    *,
    port: int,
    folders: Sequence[str] = (),
    quick: bool = False,
) -> Examination:
    """Examine hosts, alone and together.

    Args:
        wanted: what the planned run asks of each host.
        port: of the rendezvous, on the first host.
        folders: the doctor examines their disks on every host.
        quick: load no torch and measure nothing, as before a run.
    """
    found = Examination(list(peers))
    with ThreadPoolExecutor(1) as pool:
        data = pool.submit(data_sets, found, wanted)
        question = {"folders": list(folders), "port": port, "quick": quick}
        found.facts = found.ask("facts", lambda peer: {**question, "count_gpus": by_number(peer.device)})
        found.findings += alone(found, wanted)
        if len(found.facts) > 1:
            found.findings += differences(found.facts, software())
            found.findings += clocks(found)
            if not quick:
                found.findings += names(found)
            # a machine does not reach itself as others do, so its ways would mislead
            found.findings += same_machines(found.facts) or together(found, port, quick=quick)
        found.findings += data.result()
    return found


def alone(found: Examination, wanted: RunResources) -> list[Finding]:
    """Judge each host by itself."""
    findings = []
    for number, peer in enumerate(found.peers):
        facts = found.facts[peer.name]
        estimate = estimate_for(replace(wanted, device=peer.device), facts)
        judged = judge_host(facts, estimate, peer.name)
        # the rendezvous is on the first host alone
        findings += [one for one in judged if number == 0 or one.code not in ("port", "port-busy")]
    return findings


def together(found: Examination, port: int, *, quick: bool) -> list[Finding]:
    """Judge whether each host reaches each, and unless ``quick`` how fast."""
    token = secrets.token_hex(16)
    if len(found.peers) < 2:  # the others were lost meanwhile
        return []
    try:
        seen = found.facts[found.peers[0].name].port
        every = {peer.name: endpoints_to_try(found, peer) for peer in found.peers}
        open_ports = listen(found, token, every, 0 if seen and seen.busy else port)
        findings = judge_ways(found, token, open_ports, port)
        is_connected = not any(one.level == "fault" for one in findings)
        if is_connected and not quick:
            findings += speeds(found, token, open_ports)
    finally:
        found.ask("unlisten", {"token": token})
    if is_connected and not quick:
        findings += measured_all_reduce(found)
    return findings


# -- what differs --------------------------------------------------------------------------------------------


def clocks(found: Examination) -> list[Finding]:
    """Compare the clocks of all hosts with this machine's. Of several readings, the shortest trip counts."""
    offsets_s: dict[str, float] = {}
    shortest_s: dict[str, float] = {}
    for _ in range(CLOCK_READINGS):
        trips_s: dict[str, tuple[float, float]] = {}
        for name, reply in found.ask("time", {}, trips_s=trips_s).items():
            asked_s, answered_s = trips_s[name]
            if answered_s - asked_s < shortest_s.get(name, float("inf")):
                shortest_s[name] = answered_s - asked_s
                offsets_s[name] = reply.time_s - (asked_s + answered_s) / 2
    return judge_clocks(offsets_s, shortest_s)


def names(found: Examination) -> list[Finding]:
    """Judge whether the hosts resolve each other's names correctly."""
    own = {peer.name: found.facts[peer.name].host for peer in found.peers}
    seen = found.ask("look_up", {"names": sorted(set(own.values()))})
    findings = []
    unknown: dict[str, list[str]] = defaultdict(list)
    for asker, answers in seen.items():
        for target, machine in own.items():
            if own[asker] == machine:  # both call themselves "localhost", which another finding reports
                continue
            known, interfaces = answers[machine].addresses, found.facts[target].interfaces
            if not known:
                unknown[target].append(asker)
            elif interfaces and not any(
                interface_with(interfaces, one) and not one.startswith("127.") for one in known
            ):
                reachable = candidates(found.facts[target])
                values = {
                    "asker": asker,
                    "target": target,
                    "machine": machine,
                    "addresses": ", ".join(known),
                    "address": reachable[0].address if reachable else "ADDRESS",
                }
                findings.append(finding("name-wrong", f"{asker} -> {target}", **values))
    return findings + [
        finding("name-unknown", target, machine=own[target], askers=", ".join(askers))
        for target, askers in unknown.items()
    ]


def data_sets(found: Examination, wanted: RunResources) -> list[Finding]:
    """Compare the data sets of the hosts. Do nothing if the run names none."""
    chosen = {peer.name: peer.data or wanted.data for peer in found.peers}
    if not any(chosen.values()):
        return []
    shared = {"module": wanted.data_digest, "single_cls": wanted.single_cls}
    return judge_data(found.ask("data", lambda peer: {**shared, "data": chosen[peer.name]}), chosen)


# -- from each to each ---------------------------------------------------------------------------------------


def endpoints_to_try(found: Examination, peer: Peer) -> list[Endpoint]:
    """Return where others try to reach a host: as the fleet's description says, then at its usable interfaces.

    An address in the description may be wrong; the finding then names one that works.
    """
    facts = found.facts[peer.name]
    return list(dict.fromkeys([*candidates(facts, peer.address, peer.interface), *candidates(facts)]))


def listen(found: Examination, token: str, every: Endpoints, port: int = 0) -> dict[str, list[int]]:
    """Let every host listen on a port that its kernel chooses, and the first one on that of the rendezvous as well.

    A host listens only on the addresses that the others try. :func:`judge_ways` reports a host without one.
    """
    first = found.peers[0]

    def question(peer: Peer) -> Mapping[str, Any]:
        addresses = [one.address for one in every[peer.name]]
        ports = [0, port] if port and peer is first else [0]
        return {"addresses": addresses, "ports": ports, "token": token, "seconds": LISTEN_S}

    able = [peer for peer in found.peers if every[peer.name]]
    return {name: reply.ports for name, reply in found.ask("listen", question, able).items()}


def judge_ways(
    found: Examination, token: str, open_ports: Mapping[str, Sequence[int]], port: int
) -> list[Finding]:
    """Try every way, in both directions, at every address of every host, and choose ``found.endpoints``."""
    every = {peer.name: endpoints_to_try(found, peer) for peer in found.peers}
    tests = connection_tests(found, token, open_ports, every, port)
    findings = [
        one for peer in found.peers for one in _judge_target(found, peer, every[peer.name], tests, port)
    ]
    ok = [one for one in findings if one.level == "ok"]
    findings = [one for one in findings if one.level != "ok"]
    if ok:
        shown = ", ".join(f"{name} {endpoint}" for name, endpoint in found.endpoints.items())
        total = len(ok) + sum(one.level == "fault" for one in findings)
        findings.append(finding("ways", "fleet", seen=f"{len(ok)} of {total} ways are open; met at {shown}"))
    return findings + _mtu_differences(found)


def connection_tests(
    found: Examination,
    token: str,
    open_ports: Mapping[str, Sequence[int]],
    every: Endpoints,
    port: int = 0,
    about: str = "",
) -> ConnectionTests:
    """Let every host try to connect to all others, and send a long message; return what each test found.

    Args:
        port: of the rendezvous, which needs no long message; 0: it is not tried.
        about: try only the ways from and to this host; "" = all.
    """

    def targets(source: str) -> list[Target]:
        return [
            Target(
                name, endpoint.address, number, "rendezvous" if number == port else "as gloo and NCCL choose"
            )
            for name, numbers in open_ports.items()
            if name != source and about in ("", name, source)
            for endpoint in every.get(name, ())  # none of a host that was lost meanwhile
            for number in numbers
        ]

    def question(peer: Peer) -> Mapping[str, Any]:
        return {
            "targets": [{**vars(one), "token": token, "long": one.port != port} for one in targets(peer.name)]
        }

    tests: ConnectionTests = defaultdict(list)
    for source, results in found.ask("reach", question).items():
        for target, result in zip(targets(source), results, strict=True):
            tests[source, target.host].append((target, result))
    return tests


def broken_ways(
    peers: Iterable[Peer], endpoints: Mapping[str, Endpoint], about: str = ""
) -> dict[Way, Finding]:
    """Try every way between hosts, or those from and to ``about``; return a finding for each broken one.

    A host that does not answer has a finding at the way to itself.
    """
    found, token = Examination(list(peers)), secrets.token_hex(16)
    every = {name: [endpoint] for name, endpoint in endpoints.items()}
    try:
        tests = connection_tests(found, token, listen(found, token, every), every, about=about)
    finally:
        found.ask("unlisten", {"token": token})
    broken = {
        (source, target.host): judge_way(source, target, test, None, UNSEEN)
        for (source, _), tried in tests.items()
        for target, test in tried
        if test.outcome != "connected"
    }
    return broken | {(one.where, one.where): one for one in found.findings}


def _mtu_differences(found: Examination) -> list[Finding]:
    interfaces = {
        name: interface_with(found.facts[name].interfaces, endpoint.address)
        for name, endpoint in found.endpoints.items()
    }
    mtus = {name: one.mtu for name, one in interfaces.items() if one and one.mtu}
    if len(groups(mtus)) < 2:
        return []
    least = min(mtus.values())
    lines = [
        f"on {name}: sudo ip link set {found.endpoints[name].interface} mtu {least}"
        for name, mtu in mtus.items()
        if mtu > least
    ]
    return [finding("mtu-differs", "fleet", groups=groups_text(mtus), lines="\n".join(lines))]


def _judge_target(
    found: Examination, peer: Peer, every: Sequence[Endpoint], tests: ConnectionTests, port: int
) -> list[Finding]:
    """Choose how the others reach one host, and judge it."""
    facts = found.facts[peer.name]
    mine = [(source, *one) for (source, to), tried in tests.items() if to == peer.name for one in tried]
    reached: dict[str, dict[str, str]] = defaultdict(dict)
    for source, target, test in mine:
        if target.port != port:
            reached[target.address][source] = test.outcome
    chosen = best_endpoint(peer.name, candidates(facts, peer.address, peer.interface), reached)
    if chosen is None:
        there = [text for one in facts.interfaces or () if one.up for text in one.addresses]
        return [finding("way-no-card", peer.name, addresses=", ".join(there) or "none")]
    found.endpoints[peer.name] = chosen
    mine = [one for one in mine if one[1].address == chosen.address]
    firewall = facts.firewall or UNSEEN
    if facts.firewall is None and any(test.outcome != "connected" for _, _, test in mine):
        firewall = found.ask("firewall", {}, [peer]).get(peer.name, firewall)
    findings = [judge_way(source, target, test, facts, firewall) for source, target, test in mine]
    if any(one.level == "fault" for one in findings):
        better = best_endpoint(peer.name, every, reached)
        if better is not None and better != chosen and "connected" in reached[better.address].values():
            findings.append(_unshared(peer.name, chosen, better, facts, "fault"))
    elif every and every[0].interface != chosen.interface and not (peer.address or peer.interface):
        findings.append(_unshared(peer.name, every[0], chosen, facts, "warn"))
    return findings


def _unshared(host: str, wrong: Endpoint, right: Endpoint, facts: HostFacts, level: Level) -> Finding:
    one = interface_with(facts.interfaces, right.address)
    network = f", network {network_of(one, right.address)}" if one else ""
    shown = f"{right.address} ({right.interface}{network})"
    return finding("card-unshared", host, level=level, wrong=wrong, right=shown, name=right.interface)


# -- how fast ------------------------------------------------------------------------------------------------


def speeds(found: Examination, token: str, open_ports: Mapping[str, Sequence[int]]) -> list[Finding]:
    """Measure latency and bandwidth of every way, while the hosts do nothing else."""
    measured = {}
    for one in rounds(found.names):
        targets = dict(one)
        asked = [peer for peer in found.peers if peer.name in targets]

        def target(peer: Peer, targets: Mapping[str, str] = targets) -> Mapping[str, Any]:
            name = targets[peer.name]
            return {"address": found.endpoints[name].address, "port": open_ports[name][0], "token": token}

        for source, reply in found.ask("measure", target, asked).items():
            measured[source, targets[source]] = reply
    # another finding reports a host that was lost
    return judge_speeds(
        {way: reply for way, reply in measured.items() if way[1] in found.names}, found.endpoints
    )


def measured_all_reduce(found: Examination) -> list[Finding]:
    """Measure a sum over all hosts through torch, with one process on each: a step waits for such a sum."""
    if len(found.peers) < 2:
        return []
    first = found.peers[0]
    order = {name: rank for rank, name in enumerate(found.names)}
    address = found.endpoints[first.name].address
    answer = found.ask("free_port", {"address": address}, [first]).get(first.name)
    if answer is None:
        return []
    shared = {"address": address, "port": answer.port, "size": len(order), "deadline_s": 30}

    def question(peer: Peer) -> Mapping[str, Any]:
        return {**shared, "rank": order[peer.name], "card": found.endpoints[peer.name].interface}

    return judge_all_reduce(found.ask("all_reduce", question))
