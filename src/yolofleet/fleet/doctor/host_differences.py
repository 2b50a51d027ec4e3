"""Judge what hosts show together: differences of software, clocks and data, and the measured speed between them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.host_facts import DataAnswer, HostFacts, Measured, Summed
from yolofleet.fleet.doctor.network import Endpoint
from yolofleet.fleet.strict import HERE

CLOCK_SKEW_S = 2.0


def groups(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return value as a text -> hosts that have it; the most frequent value first."""
    found = defaultdict(list)
    for name, value in values.items():
        found[str(value)].append(name)
    return dict(sorted(found.items(), key=lambda entry: -len(entry[1])))


def groups_text(values: Mapping[str, Any]) -> str:
    """Return ``m1, m2: 2.13.0; m3: 2.6.0``."""
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in groups(values).items())


def same_machines(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """Return a fault for hosts that are one machine under several names."""
    identities = {}
    for name, host in facts.items():
        if host.network_id:  # a copy of a running virtual machine has the same boot, but other addresses
            identities[name] = host.network_id, [one.addresses for one in host.interfaces or ()]
    return [
        finding("same-machine", "fleet", others=", ".join(names[:-1]), last=names[-1], first=names[0])
        for names in groups(identities).values()
        if len(names) > 1
    ]


def differences(facts: Mapping[str, HostFacts], here: Mapping[str, Any]) -> list[Finding]:
    """Judge software that is not the same everywhere.

    Args:
        here: software of this machine, which would start the run.
    """
    if found := list(_differing(facts, here)):
        return found
    software = next(iter(facts.values())).software
    same = {"version": software.yolofleet, "torch": software.torch}
    return [finding("same-software", "fleet", hosts=len(facts), **same)]


def _differing(facts: Mapping[str, HostFacts], here: Mapping[str, Any]) -> Iterator[Finding]:
    def each(read: Callable[[HostFacts], Any]) -> dict[str, Any]:
        return {name: read(host) for name, host in facts.items()}

    package = each(lambda f: f"{f.software.yolofleet} ({f.software.package_sha256[:12]})")
    package[HERE] = f"{here['yolofleet']} ({here['package_sha256'][:12]})"
    if len(groups(package)) > 1:
        yield finding("package-differs", "fleet", groups=groups_text(package), version=here["yolofleet"])
    torch = each(lambda f: f.software.torch)
    if len(groups(torch)) > 1:
        releases = groups({name: str(version).partition("+")[0] for name, version in torch.items()})
        level = "fault" if len(releases) > 1 else "warn"  # 2.13.0+cu126 and 2.13.0+cu128 work together
        release = next((release for release in releases if release != "None"), "")
        yield finding("torch-differs", "fleet", level=level, groups=groups_text(torch), release=release)
    nccl = each(lambda f: f.torch and f.torch.nccl)
    if len(groups(nccl)) > 1 and all(host.torch.devices for host in facts.values() if host.torch):
        yield finding("nccl-differs", "fleet", groups=groups_text(nccl))
    for library, read, why in (
        (
            "python",
            lambda f: ".".join(f.software.python.split(".")[:2]),
            "objects of one may not be readable by the other",
        ),
        ("numpy", lambda f: f.software.numpy, "the last bits of images and labels may differ"),
        ("cv2", lambda f: f.software.cv2, "another decoder of JPEG gives other pixels"),
    ):
        if len(groups(each(read))) > 1:
            yield finding(
                "libraries-differ", "fleet", library=library, groups=groups_text(each(read)), why=why
            )
    driver = each(lambda f: f.gpus and f.gpus.driver)
    if len(groups({name: value for name, value in driver.items() if value})) > 1:
        yield finding("drivers-differ", "fleet", groups=groups_text(driver))


def judge_clocks(offsets_s: Mapping[str, float], trips_s: Mapping[str, float]) -> list[Finding]:
    """Judge the hosts' clocks.

    Args:
        offsets_s: of each host's clock to this machine's.
        trips_s: of question and answer; half of it is uncertain.
    """
    if not offsets_s:
        return []
    every = {**offsets_s, HERE: 0.0}
    middle = statistics.median_low(every.values())
    wrong = {
        name: offset - middle
        for name, offset in every.items()
        if abs(offset - middle) > CLOCK_SKEW_S + trips_s.get(name, 0.0) / 2
    }
    if not wrong:
        largest = max(abs(offset - middle) for offset in every.values())
        return [finding("clocks", "fleet", seconds=largest)]
    return [
        finding("clock-off", name, span=_span(abs(skew)), direction="ahead of" if skew > 0 else "behind")
        for name, skew in wrong.items()
    ]


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def judge_data(seen: Mapping[str, DataAnswer], chosen: Mapping[str, str]) -> list[Finding]:
    """Judge the data sets of the hosts.

    Args:
        seen: host -> digests of its data set.
        chosen: host -> name of its data set.
    """
    found = [
        finding(
            "data-unknown" if answer.late else "data-missing",
            name,
            data=chosen[name],
            problem=answer.problem,
            host=name,
        )
        for name, answer in seen.items()
        if answer.problem
    ]
    known = {name: answer.splits for name, answer in seen.items() if not answer.problem}
    same = True
    for split in sorted({split for splits in known.values() for split in splits}):
        shown = {
            name: f"{splits[split].images} images, {splits[split].labels} labels ({splits[split].digest[:8]})"
            if split in splits
            else "missing"
            for name, splits in known.items()
        }
        if len(groups(shown)) > 1:
            same = False
            found.append(finding("data-differs", "fleet", split=split, groups=groups_text(shown)))
    if same and len(known) > 1:
        found.append(finding("data", "fleet", hosts=len(known)))
    return found


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
        if one.problem:
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
