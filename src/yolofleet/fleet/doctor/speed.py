"""Plan the measurements between hosts, and judge them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain

from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.host_differences import groups_text
from yolofleet.fleet.doctor.host_facts import Measured, Summed
from yolofleet.fleet.doctor.network import Endpoint

SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s
MOST_PAIRS_MEASURED = 56  # all of 8 hosts
ALL_REDUCE_MIB = 4
Way = tuple[str, str]  # from, to


def rounds(hosts: Sequence[str]) -> list[list[Way]]:
    """Return all ordered pairs, in rounds in which each host takes part at most once.

    For many hosts, return only the pairs of each host with the next.

    >>> rounds(["a", "b", "c"])
    [[('a', 'b')], [('b', 'a')], [('a', 'c')], [('c', 'a')], [('b', 'c')], [('c', 'b')]]
    """
    count = len(hosts)
    pairs = [(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    pairs = [way for a, b in pairs for way in ((a, b), (b, a))]
    if len(pairs) > MOST_PAIRS_MEASURED:
        pairs = [(hosts[i], hosts[(i + 1) % count]) for i in range(count)]
    found: list[list[Way]] = []
    for pair in pairs:
        for one in found:
            if not set(pair) & set(chain.from_iterable(one)):
                one.append(pair)
                break
        else:
            found.append([pair])
    return found


def judge_speeds(measured: Mapping[Way, Measured], endpoints: Mapping[str, Endpoint]) -> list[Finding]:
    """Judge what ``probes.measure`` found on each way."""
    rates = {way: one.bytes_per_s / 1e6 for way, one in measured.items() if one.bytes_per_s}
    trips = {way: 1e3 * (measured[way].round_trip_s or 0.0) for way in rates}
    median = statistics.median(rates.values()) if rates else 0.0
    found = []
    for way, one in measured.items():
        (source, target), where = way, " -> ".join(way)
        names = {"source": source, "target": target, "interface": endpoints[target].interface}
        if one.stalled:
            ends = {"address": endpoints[target].address, "own_interface": endpoints[source].interface}
            found.append(finding("way-stalls", where, **names, **ends))
        elif one.problem:
            found.append(finding("way-breaks", where, problem=one.problem))
        elif rates[way] < max(SLOW_BYTES_PER_S / 1e6, median / 4):
            found.append(finding("way-slow", where, rate=rates[way], trip=trips[way], median=median, **names))
    if rates:
        slowest, farthest = min(rates, key=rates.__getitem__), max(trips, key=trips.__getitem__)
        found.append(
            finding(
                "speed",
                "fleet",
                count=len(rates),
                rate=rates[slowest],
                slowest=" -> ".join(slowest),
                trip=trips[farthest],
                farthest=" -> ".join(farthest),
            )
        )
    return found


def judge_all_reduce(replies: Mapping[str, Summed]) -> list[Finding]:
    """Judge a sum over all hosts by what each host says of it."""
    broken = {name: reply.problem for name, reply in replies.items() if reply.problem}
    if broken:
        return [finding("all-reduce-failed", "fleet", groups=groups_text(broken))]
    large = max(reply.seconds or 0.0 for reply in replies.values())
    small = max(reply.barrier_s or 0.0 for reply in replies.values())
    return [
        finding(
            "all-reduce",
            "fleet",
            mib=ALL_REDUCE_MIB,
            hosts=len(replies),
            large=large * 1e3,
            rate=ALL_REDUCE_MIB / large,
            small=small * 1e3,
        )
    ]
