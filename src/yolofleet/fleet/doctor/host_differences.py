"""Judge differences between hosts that should be equal: software, clocks, data."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from yolofleet.config.strict import HERE
from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.host_facts import DataAnswer, HostFacts

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
