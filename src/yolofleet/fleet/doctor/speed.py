"""What was measured between hosts, and in which order it is. Touches nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.host_differences import groups_text
from yolofleet.fleet.doctor.network import Meeting

SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s
MOST_PAIRS_MEASURED = 56  # all of 8 hosts
ALL_REDUCE_MIB = 4


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """All ordered pairs, in rounds in which each host takes part once at most; for many hosts, each with the
    next alone.

    >>> rounds(["a", "b", "c"])
    [[('a', 'b')], [('b', 'a')], [('a', 'c')], [('c', 'a')], [('b', 'c')], [('c', 'b')]]
    """
    count = len(hosts)
    pairs = [(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    pairs = [way for a, b in pairs for way in ((a, b), (b, a))]
    if len(pairs) > MOST_PAIRS_MEASURED:
        pairs = [(hosts[i], hosts[(i + 1) % count]) for i in range(count)]
    found: list[list[tuple[str, str]]] = []
    for pair in pairs:
        for one in found:
            if not set(pair) & set(chain.from_iterable(one)):
                one.append(pair)
                break
        else:
            found.append([pair])
    return found


def judge_speeds(
    measured: Mapping[tuple[str, str], Mapping[str, Any]], meetings: Mapping[str, Meeting]
) -> list[Finding]:
    """
    Args:
        measured: (from, to) -> what ``probes.measure`` found.
    """
    findings = []
    good = {way: m for way, m in measured.items() if m["bytes_per_s"]}
    middle = statistics.median([m["bytes_per_s"] for m in good.values()]) if good else 0.0
    for (source, target), one in measured.items():
        where, card = f"{source} -> {target}", meetings[target].card
        if one["stalled"]:
            findings.append(
                Finding(
                    "way-stalls",
                    "fault",
                    where,
                    "short messages pass and long ones do not",
                    "packets are larger than something on the way takes (MTU), and nobody says so",
                    f"on {source}: ping -c 3 -M do -s 1472 {meetings[target].address}\n"
                    f"on both, mtu 1400 if that fails, else 1500: sudo ip link set {card} mtu 1400 (on {source}: "
                    f"{meetings[source].card})",
                )
            )
        elif one["problem"]:
            findings.append(Finding("way-breaks", "fault", where, f"the connection broke: {one['problem']}"))
        elif one["bytes_per_s"] < max(SLOW_BYTES_PER_S, middle / 4):
            findings.append(
                Finding(
                    "way-slow",
                    "warn",
                    where,
                    f"{one['bytes_per_s'] / 1e6:.0f} MB/s, round trip {one['round_trip_s'] * 1e3:.2f} ms; the middle "
                    f"of all ways is {middle / 1e6:.0f} MB/s",
                    "every step waits for the slowest way",
                    f"another card or cable on {source} or {target}: sudo ethtool {card}",
                )
            )
    if good:
        slowest = min(good, key=lambda way: good[way]["bytes_per_s"])
        farthest = max(good, key=lambda way: good[way]["round_trip_s"])
        findings.append(
            Finding(
                "speed",
                "ok",
                "fleet",
                f"{len(good)} ways: slowest {good[slowest]['bytes_per_s'] / 1e6:.0f} MB/s ({' -> '.join(slowest)}), "
                f"longest round trip {good[farthest]['round_trip_s'] * 1e3:.2f} ms ({' -> '.join(farthest)})",
            )
        )
    return findings


def judge_all_reduce(replies: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    broken = {name: reply["problem"] for name, reply in replies.items() if reply["problem"]}
    if broken:
        return [
            Finding(
                "all-reduce-failed",
                "fault",
                "fleet",
                f"a sum over all hosts through gloo failed: {groups_text(broken)}",
                "a run would fail in the same way",
                "faults above come first; else yolofleet doctor --log FILE with what it printed",
            )
        ]
    slowest = max(reply["seconds"] for reply in replies.values())
    small = max(reply["barrier_s"] for reply in replies.values())
    return [
        Finding(
            "all-reduce",
            "ok",
            "fleet",
            f"a sum of {ALL_REDUCE_MIB} MiB over {len(replies)} hosts takes {slowest * 1e3:.1f} ms "
            f"({ALL_REDUCE_MIB / slowest:.0f} MiB/s), the smallest one {small * 1e3:.2f} ms (gloo)",
        )
    ]
