"""The ways between the hosts of a run: which are broken, and which hosts go on then."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.hosts import broken_ways
from yolofleet.fleet.doctor.network import Endpoint
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.preflight import peer_of

T = TypeVar("T")
WAYS_S = 30.0  # longer than a try of a way that lets nothing pass
MOST_TRIALS = 4096  # of sets of hosts; the first ones are close to the largest


def ways_between(hosts: Mapping[Remote, Endpoint], about: str = "") -> dict[tuple[str, str], Finding]:
    """Return what is wrong with each broken way between hosts that have met before: ``doctor.hosts.broken_ways``."""
    peers = [peer_of(remote, WAYS_S) for remote in hosts]
    endpoints = {remote.name: endpoint for remote, endpoint in hosts.items()}
    return broken_ways(peers, endpoints, about) if len(peers) > 1 else {}


def reaching_each_other(devices: Mapping[T, int], broken: Collection[tuple[T, T]]) -> list[T]:
    """Return the largest set of hosts of which each reaches each; then more devices count, then hosts that come first.

    Args:
        devices: of each host; the hosts with the newest state first.
        broken: ways (from, to) that do not work. A pair of hosts needs both directions.
    """
    hosts = list(devices)
    place = {host: n for n, host in enumerate(hosts)}
    cut = [0] * len(hosts)  # of each host, the bits of those that it does not reach, or that do not reach it
    for one, other in broken:
        if one != other and one in place and other in place:
            cut[place[one]] |= 1 << place[other]
            cut[place[other]] |= 1 << place[one]

    def members(found: int) -> list[int]:
        return [n for n in range(len(hosts)) if found >> n & 1]

    def rank(found: int) -> tuple[int, int, list[int]]:
        return found.bit_count(), sum(devices[hosts[n]] for n in members(found)), [-n for n in members(found)]

    best, to_try = 0, [(1 << len(hosts)) - 1]
    for _ in range(MOST_TRIALS):
        if not to_try:
            break
        found = to_try.pop()
        counts = [((cut[n] & found).bit_count(), -devices[hosts[n]], n) for n in members(found)]
        many, _, worst = max(counts, default=(0, 0, 0))
        if not many:
            best = max(best, found, key=rank)
        elif found.bit_count() > best.bit_count():
            to_try += [found & ~cut[worst], found & ~(1 << worst)]
    return [hosts[n] for n in members(best)]
