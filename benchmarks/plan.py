"""Predictions of `yolofleet plan` against runs that they were made before, on one, two and three machines.

The machines are network namespaces on this one, each with its own address and a quota of CPU time (Linux, root, openssh-server).
Probes are measured under the same quotas and links, of one or two machines; three machines are predicted from two. All
predictions are in OUT/predictions.json before the first run starts. Runs of all cases take turns.

    python benchmarks/plan.py --data bccd/data.yaml --out OUT [--repeats 3] [--only NAME ...]

The table has images/s: predicted, the median of the repeats, and their spread (largest - smallest) / median. A prediction holds if it
is within 10 %, or twice the spread. *binds* is right if the prediction names the part that had the largest share of the steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "cluster"), str(TESTS)]

from machines import Lab, Machine, machines, missing  # noqa: E402

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
CORES = 0.6  # of a machine for each of its processes: three machines and the launcher fit on two cores
COMMON = [
    *("--img", "320", "--batch", "24", "--nominal-batch", "24", "--micro-batch", "4"),
    *("--workers", "0"),
]
TRAINING = [
    "--threads",
    "1",
    "--set",
    "warmup_epochs=0",
    "--epochs",
    "3",
    "--no-plots",
    "--save-period",
    "0",
    "--val-period",
    "0",
    "--exist-ok",
]
DEADLINE_S = 3000
LOADER_WAITS = 0.1  # share of a step: if ranks wait less for the loader, it does not bind, as in the formula


@dataclass(frozen=True)
class Case:
    """A run. ``rate``: of each machine's link, as ``tc`` writes it; "" = no limit."""

    name: str
    hosts: int
    processes: int
    rate: str
    cache: str
    model: str

    @property
    def probe(self) -> tuple[str, int, int, str]:
        """What its probe is measured on: model, machines, processes of each, link."""
        return self.model, min(self.hosts, 2), self.processes, self.rate

    def fleet(self, hosts: int) -> str:
        return ",".join(f"m{number + 1}:cpu:{self.processes}" for number in range(hosts))


CASES = [
    Case("one-files", 1, 1, "", "none", "yolov5n"),
    Case("one-large", 1, 1, "", "ram", "yolov5s"),
    Case("two-processes", 1, 2, "", "ram", "yolov5n"),
    Case("two-hosts-1gbit", 2, 1, "1gbit", "ram", "yolov5n"),
    Case("two-hosts-100mbit-large", 2, 1, "100mbit", "ram", "yolov5s"),
    Case("three-hosts-1gbit-files", 3, 1, "1gbit", "none", "yolov5n"),
    Case("three-hosts-100mbit", 3, 1, "100mbit", "ram", "yolov5n"),
    Case("two-hosts-1gbit-large-files", 2, 1, "1gbit", "none", "yolov5s"),
]


@contextmanager
def limited(lab: Lab, cores: float, rate: str) -> Iterator[None]:
    """Give each host a quota of CPU time in a control group of its own, and its link a rate."""
    version_2 = (GROUPS / "cgroup.controllers").is_file()
    folders = [
        (GROUPS if version_2 else GROUPS / "cpu") / f"yolofleet-plan-{host.name}" for host in lab.hosts
    ]
    try:
        for host, folder in zip(lab.hosts, folders, strict=True):
            folder.mkdir(exist_ok=True)
            quota = str(round(cores * PERIOD_US))
            if version_2:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(quota)
            (folder / "cgroup.procs").write_text(str(host.sshd.pid))  # its sessions inherit the group
            # the /sys of a network namespace has no control groups; in a container, programs see them
            kind = (
                ["cgroup2", "none", GROUPS] if version_2 else ["cgroup", "-o", "cpu", "none", GROUPS / "cpu"]
            )
            if not version_2:
                host.run("mount", "-t", "tmpfs", "none", GROUPS)
                host.run("mkdir", GROUPS / "cpu")
            host.run("mount", "-t", *kind)
            host.limit_rate(rate)
        yield
    finally:
        for host, folder in zip(lab.hosts, folders, strict=True):
            with suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(str(host.sshd.pid))
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:  # until the last process of a session has ended
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


def yolofleet(desk: Machine, *words: str, cache: Path) -> str:
    """Run a command at the desk; return what it printed."""
    env = {**os.environ, "YOLOFLEET_CACHE": str(cache)}
    return desk.run(sys.executable, "-m", "yolofleet", *words, timeout_s=DEADLINE_S, env=env).stdout


def measure_probe(case: Case, data: str, out: Path) -> list[Path]:
    """Return the probe of each machine for a case; measured now, unless another case had the same."""
    model, hosts, processes, rate = case.probe
    cache = out / f"probe-{model}-{hosts}x{processes}-{rate or 'local'}"
    found = sorted((cache / "probes").glob("*.json"))
    if not found:
        with machines(hosts) as lab, limited(lab, CORES * processes, rate):
            words = [
                "--data",
                data,
                "--model",
                model,
                *COMMON,
                *("--threads", "1", "--set", "warmup_epochs=0"),
                "--hosts",
                case.fleet(hosts),
                "--project",
                str(out),
            ]
            yolofleet(lab.desk, "plan", "probe", *words, "--cache", "ram", cache=cache)
        found = sorted((cache / "probes").glob("*.json"))
    return found


def mean_probe(case: Case, data: str, out: Path) -> Path:
    """Write a probe with the means of those of equal machines, and return its path."""
    files = measure_probe(case, data, out)
    probes = [json.loads(path.read_text()) for path in files]
    mean = dict(probes[0])
    for name in ("update_s", "spread", "load_s", "cached_s", "val_image_s", "val_end_s", "save_s", "start_s"):
        mean[name] = statistics.mean(probe[name] for probe in probes)
    mean["passes"] = [
        {"images": each[0]["images"], "seconds": statistics.mean(row["seconds"] for row in each)}
        for each in zip(*(probe["passes"] for probe in probes), strict=True)
    ]
    path = files[0].parent.parent / "mean.json"
    path.write_text(json.dumps(mean))
    return path


def predict(case: Case, data: str, out: Path) -> dict[str, object]:
    """Return the prediction for a case, from its probes."""
    file = out / "plan.json"
    with machines(0) as lab:
        words = ["--data", data, "--model", case.model, *COMMON, "--epochs", "3", "--cache", case.cache]
        named = ["--probe", str(mean_probe(case, data, out))]
        yolofleet(
            lab.desk,
            "plan",
            *words,
            "--hosts",
            case.fleet(case.hosts),
            *named,
            "--json",
            str(file),
            cache=out,
        )
    found = json.loads(file.read_text())["fleets"][0]
    return {name: found[name] for name in ("images_per_s", "fast", "slow", "binds", "seconds")}


def train(case: Case, data: str, out: Path, number: int) -> dict[str, float | str]:
    """Run a case once; return images/s and the part with the largest share of its steps."""
    name = f"{case.name}-{number}"
    with machines(case.hosts) as lab, limited(lab, CORES * case.processes, case.rate):
        words = ["--data", data, "--model", case.model, *COMMON, *TRAINING, "--cache", case.cache]
        place = ["--hosts", case.fleet(case.hosts), "--project", str(out), "--name", name]
        yolofleet(lab.desk, "train", *words, *place, cache=out / "cache")
    with (out / name / "results.csv").open(encoding="utf-8") as file:
        epochs = list(csv.DictReader(file))[1:]
    images_s, loader, network, sums = (
        statistics.median(float(epoch[column]) for epoch in epochs)
        for column in ("images_per_s", "data_share", "compute_share", "comm_share")
    )
    others = "network" if network >= sums else "all-reduce"
    return {"images_per_s": images_s, "binds": "loader" if loader >= LOADER_WAITS else others}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cases: Sequence[Case] = [case for case in CASES if not options.only or case.name in options.only]
    predictions = out / "predictions.json"
    if not predictions.is_file():  # made once, before the first run
        made = {case.name: {"case": asdict(case), **predict(case, options.data, out)} for case in cases}
        predictions.write_text(json.dumps(made, indent=1))
    predicted = json.loads(predictions.read_text())
    runs: dict[str, list[dict[str, float | str]]] = {case.name: [] for case in cases}
    for number in range(options.repeats):
        for case in cases:
            runs[case.name].append(train(case, options.data, out, number))
            (out / "runs.json").write_text(json.dumps(runs, indent=1))
    print(
        "| case | predicted | measured | spread | error | binds: predicted, measured |\n|---|---|---|---|---|---|"
    )
    errors = []
    for case in cases:
        rates = [float(run["images_per_s"]) for run in runs[case.name]]
        middle, likely = statistics.median(rates), predicted[case.name]["images_per_s"]
        spread, error = (max(rates) - min(rates)) / middle, likely / middle - 1
        errors.append(abs(error))
        binds = statistics.mode(str(run["binds"]) for run in runs[case.name])
        print(
            f"| {case.name} | {likely:.4g} | {middle:.4g} | {spread:.1%} | {error:+.1%} | "
            f"{predicted[case.name]['binds']}, {binds} |"
        )
    print(f"\nmedian error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
