"""What differs between hosts that should be alike: software, clocks, data. Touches nothing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from yolofleet.fleet.doctor.findings import Finding

CLOCK_SKEW_S = 2.0


def groups(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Value as a text -> hosts that have it; the commonest first."""
    found = defaultdict(list)
    for name, value in values.items():
        found[str(value)].append(name)
    return dict(sorted(found.items(), key=lambda entry: -len(entry[1])))


def groups_text(values: Mapping[str, Any]) -> str:
    """``m1, m2: 2.13.0; m3: 2.6.0``."""
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in groups(values).items())


def same_machines(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Hosts that are one machine under several names."""
    identities = {}
    for name, value in facts.items():
        if value.get("network_id"):  # a virtual machine that was copied while it ran has the boot, too
            addresses = [card["addresses"] for card in value["cards"] or ()]
            identities[name] = value["network_id"], addresses
    return [
        Finding(
            "same-machine",
            "fault",
            "fleet",
            f"{', '.join(names[:-1])} and {names[-1]} are the same machine",
            "a GPU would be used twice, and a machine does not reach itself as others do",
            f"name it once, with all its devices: {names[0]}:8, {names[0]}:0+2 or {names[0]}:cpu:4",
        )
        for names in groups(identities).values()
        if len(names) > 1
    ]


def differences(
    facts: Mapping[str, Mapping[str, Any]], here: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Software that is not the same everywhere.

    Args:
        here: software of this machine, from which a run would be started.
    """

    def each(*keys: str) -> dict[str, Any]:
        found = {}
        for name, value in facts.items():
            inner: Any = value
            for key in keys:
                inner = (inner or {}).get(key)
            found[name] = inner
        return found

    found = []
    version, digest = each("software", "yolofleet"), each("software", "package_sha256")
    wanted = next(iter(version.values()))
    if here:
        wanted = here["yolofleet"]
        version["this machine"], digest["this machine"] = here["yolofleet"], here["package_sha256"]
    if len(groups(digest)) > 1:
        both = {name: f"{version[name]} ({str(digest[name])[:12]})" for name in version}
        found.append(
            Finding(
                "package-differs",
                "fault",
                "fleet",
                f"yolofleet is not the same: {groups_text(both)}",
                "the processes would do different things, and wait for each other",
                "train with --sync-code, or install the same version everywhere: pip install yolofleet=="
                f"{wanted}",
            )
        )
    torch = each("software", "torch")
    releases = groups({name: str(version).partition("+")[0] for name, version in torch.items()})
    if len(groups(torch)) > 1:
        found.append(
            Finding(
                "torch-differs",
                "fault" if len(releases) > 1 else "warn",  # 2.13.0+cu126 and 2.13.0+cu128 meet
                "fleet",
                f"torch is not the same: {groups_text(torch)}",
                "they may not understand each other, and results are not those of one machine"
                if len(releases) > 1
                else "another build of it: the last bits may differ, results are not those of one machine",
                f"pip install torch=={next(release for release in releases if release != 'None')} on every host"
                if len(releases) > 1
                else "the same build on every host: pip install with the same --index-url",
            )
        )
    nccl = each("libraries", "torch", "nccl")
    if len(groups(nccl)) > 1 and all(
        value["libraries"]["torch"]["devices"]
        for value in facts.values()
        if value.get("libraries", {}).get("torch")
    ):
        found.append(
            Finding(
                "nccl-differs",
                "fault",
                "fleet",
                f"NCCL is not the same: {groups_text(nccl)}",
                "'NCCL version mismatch', or a hang",
                "install the same build of torch on every host",
            )
        )
    for key, why in (
        ("python", "objects of one may not be read by the other"),
        ("numpy", "the last bits of images and labels may differ"),
        ("cv2", "another decoder of JPEG gives other pixels"),
    ):
        values = each("software", key)
        if key == "python":
            values = {name: ".".join(str(value).split(".")[:2]) for name, value in values.items()}
        if len(groups(values)) > 1:
            found.append(
                Finding(
                    "libraries-differ",
                    "warn",
                    "fleet",
                    f"{key} is not the same: {groups_text(values)}",
                    f"{why}: the result is not that of one machine",
                    "install the same version on every host",
                )
            )
    driver = each("gpus", "driver")
    if len(groups({name: value for name, value in driver.items() if value})) > 1:
        found.append(Finding("drivers-differ", "note", "fleet", f"drivers: {groups_text(driver)}"))
    if not found:
        same = f"yolofleet {next(iter(version.values()))}, torch {next(iter(torch.values()))}"
        found.append(Finding("same-software", "ok", "fleet", f"{same} on all {len(facts)} hosts"))
    return found


def judge_clocks(offsets_s: Mapping[str, float], trips_s: Mapping[str, float]) -> list[Finding]:
    """
    Args:
        offsets_s: of each host's clock to this machine's.
        trips_s: of question and answer: half of it is uncertain.
    """
    if not offsets_s:
        return []
    middle = statistics.median_low([*offsets_s.values(), 0.0])  # this machine's clock is one of them
    wrong = {
        name: offset - middle
        for name, offset in [*offsets_s.items(), ("this machine", 0.0)]
        if abs(offset - middle) > CLOCK_SKEW_S + trips_s.get(name, 0.0) / 2
    }
    if not wrong:
        largest = max(abs(offset - middle) for offset in [*offsets_s.values(), 0.0])
        return [Finding("clocks", "ok", "fleet", f"clocks agree within {largest:.1f} s")]
    return [
        Finding(
            "clock-off",
            "warn",
            name,
            f"its clock is {_span(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the others'",
            "changed files look old or new: indexes and caches go wrong; logs do not fit together",
            "sudo timedatectl set-ntp true; at once: sudo date -s @$(ssh OTHER date +%s)",
        )
        for name, skew in wrong.items()
    ]


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def judge_data(seen: Mapping[str, Mapping[str, Any]], chosen: Mapping[str, str]) -> list[Finding]:
    """
    Args:
        seen: host -> what ``apart.data`` found.
        chosen: host -> data set.
    """
    findings = []
    for name, answer in seen.items():
        if answer["problem"]:
            late = bool(answer.get("late"))
            findings.append(
                Finding(
                    "data-unknown" if late else "data-missing",
                    "note" if late else "fault",
                    name,
                    f"data set {chosen[name]}: {answer['problem']}",
                    "its index is not made yet"
                    if late
                    else "every host reads the data set from its own disk",
                    f"on {name}: yolofleet data check {chosen[name]}"
                    + ("" if late else "; another place there: data: PATH in fleet.yaml"),
                )
            )
    known = {name: answer["splits"] for name, answer in seen.items() if not answer["problem"]}
    same = True
    for split in sorted({split for splits in known.values() for split in splits}):
        shown = {
            name: "missing"
            if split not in splits
            else f"{splits[split]['images']} images, {splits[split]['labels']} labels ({splits[split]['digest'][:8]})"
            for name, splits in known.items()
        }
        if len(groups(shown)) > 1:
            same = False
            findings.append(
                Finding(
                    "data-differs",
                    "fault",
                    "fleet",
                    f"the {split} images or labels are not the same: {groups_text(shown)}",
                    "ranks would train on different data, and count it differently",
                    "copy the data set again: rsync -a --delete --checksum DATA/ HOST:DATA/",
                )
            )
    if same and len(known) > 1:
        findings.append(Finding("data", "ok", "fleet", f"the same data set on {len(known)} hosts"))
    return findings
