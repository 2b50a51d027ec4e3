"""One plan of everything that tests a GPU, in stages; ``make test-gpu`` runs those that this machine can run.

    python tests/gpu/plan.py --minutes 10
    python tests/gpu/plan.py --stages steps,speed

Each stage is one command with a log of its own, and all its processes end before the next stage begins. A stage that
fails, crashes or takes too long stops no other one. docs/doctor.md has the same list.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from yolofleet.support.system.proc import end_descendants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOST_ESTIMATES = 4.0  # a stage may take so many times as long as estimated
MOST_TEXT = 240  # characters of what a stage said last; its log has all of it
Needs = Literal["no GPU", "one GPU", "two GPUs", "two hosts"]


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        needs: without a GPU, or with YOLOFLEET_TEST_GPUS=cpu, a stage that needs one GPU runs the same bodies on CPUs.
        seconds: estimate on a GPU, some of them from one H200; the rest has never run on a GPU.
        command: after the path of Python. ``ALL`` stands for all devices, as for ``--device``.
        on: the devices of its tests (``gpu_devices.py``), if not those of the other stages.
    """

    name: str
    needs: Needs
    what: str
    seconds: float
    command: Sequence[str]
    on: str = ""


def tests(*files: str, marks: str = "gpu") -> list[str]:
    """Return the command of a stage of tests: pytest without Python."""
    # -vv against the -q of pyproject.toml: the log names each test as it ends, also if the stage is cut
    words = ["-m", "pytest", "-vv", "-m", marks, "-p", "no:cacheprovider", "--timeout", "1800"]
    jobs = min(6, os.cpu_count() or 1) if find_spec("xdist") else 0
    return [*words, *(["-n", str(jobs)] if jobs > 1 else []), *(str(HERE.parent / file) for file in files)]


# the most important ones first
STAGES = (
    Stage("selftest", "no GPU", "`yolofleet selftest`: equal weights on any fleet, each device against the CPU, a killed rank",
          90, ["-m", "yolofleet", "selftest", "--device", "ALL"]),
    Stage("steps", "one GPU", "steps as on the CPU, overflows, resuming with each optimizer, waits of the host, suppression",
          90, tests("gpu/test_steps_on_gpus.py", "gpu/test_detr_on_gpus.py")),
    Stage("failures", "one GPU", "a rank that is killed, asked to end, or out of memory",
          200, tests("gpu/test_failures_on_gpus.py")),
    Stage("runs", "one GPU", "whole runs: options, equal bits with several processes, kill and resume, validation, prediction",
          400, tests("gpu/test_runs_on_gpus.py")),
    Stage("speed", "one GPU", "`bench train` of several networks and formats, on 1, 2, 4 and 8 GPUs, beside goals",
          400, [str(HERE / "speed.py")]),
    Stage("two-gpus", "two GPUs", "the order of GPUs, a GPU that is left alone, memory that runs out on one",
          60, tests("gpu/test_two_gpus.py")),
    Stage("two-hosts", "two hosts", "two machines train the weights of one GPU; YOLOFLEET_TEST_HOSTS=a:1,b:1 names them",
          60, tests("gpu/test_two_hosts.py")),
    Stage("miniature", "no GPU", "a simulated accelerator runs the bodies of `steps`, and shows faults that are put back",
          240, tests("accelerator", "gpu/test_steps_on_gpus.py", marks="not slow"), on="mini"),
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """The result of a stage: passed, FAILED, CUT or left out; and what it said last, or why it was left out."""

    stage: Stage
    result: str
    seconds: float = 0.0
    said: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return self.stage.name, self.stage.needs, self.result, f"{self.seconds:.0f} s", self.said


def lacking(stage: Stage, gpus: int, on: str, left_s: float) -> str:
    """Return why a stage cannot run here; "" if it can.

    Args:
        gpus: of this machine. on: the devices of its tests, as ``YOLOFLEET_TEST_GPUS``; "" are the GPUs.
        left_s: time that is left.
    """
    if stage.needs == "two hosts":
        if not os.environ.get("YOLOFLEET_TEST_HOSTS"):
            return "YOLOFLEET_TEST_HOSTS=a:1,b:1 names no two machines with a GPU each"
    elif stage.needs != "no GPU" and not on and gpus < (needed := 2 if stage.needs == "two GPUs" else 1):
        return f"needs {needed} GPUs, and torch finds {gpus}"
    return "" if left_s >= stage.seconds or on else f"no time: it needs about {stage.seconds:.0f} s"


def run(stage: Stage, folder: Path, on: str, devices: str, left_s: float) -> Record:
    """Run a stage, and end all its processes."""
    limit_s = left_s if on else min(left_s, MOST_ESTIMATES * stage.seconds)
    began_at_s = time.monotonic()
    log = folder / f"{stage.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *(devices if word == "ALL" else word for word in stage.command)],
            cwd=ROOT,
            env={**os.environ, "YOLOFLEET_TEST_GPUS": stage.on or on, "PYTHONPATH": str(HERE.parent)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_descendants(process.pid)  # they may have sessions of their own
            with suppress(OSError):  # the group may be empty
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text("utf-8", "replace").split("\n")
    said = next((line.strip("= ") for line in reversed(lines) if line.strip()), "")[:MOST_TEXT]
    result = {None: "CUT", 0: "passed"}.get(code, "FAILED")
    return Record(stage, result, time.monotonic() - began_at_s, said)


def write_page(records: Sequence[Record], page: Path) -> None:
    """Write the results as a table of Markdown."""
    head = ("stage", "needs", "result", "time", "what it said last")
    cells = (tuple(cell.replace("|", "\\|") for cell in record.cells) for record in records)
    rows = [head, ("---",) * len(head), *cells]
    page.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows), encoding="utf-8")


def main(argv: Sequence[str], stages: Sequence[Stage] = STAGES) -> int:
    """Run the stages one after another. Return 1 if one failed or was cut, 2 if there is no such stage, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit (default: %(default)g)")
    parser.add_argument("--stages", default="", help="only these, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    chosen = args.stages.split(",") if args.stages else [stage.name for stage in stages]
    if unknown := {*chosen} - {stage.name for stage in stages}:
        parser.error(f"no stages {', '.join(unknown)}; there are {', '.join(stage.name for stage in stages)}")
    sys.path.append(str(HERE))
    import gpu_devices

    on = "cpu" if gpu_devices.ON_CPUS or not gpu_devices.COUNT else ""
    devices = "cpu:2" if on else gpu_devices.ALL
    args.out.mkdir(parents=True, exist_ok=True)
    ends_at_s, records = time.monotonic() + 60 * args.minutes, list[Record]()
    for stage in stages:
        if stage.name not in chosen:
            continue
        left_s = ends_at_s - time.monotonic()
        reason = lacking(stage, gpu_devices.COUNT, on, left_s)
        records.append(
            Record(stage, "left out", said=reason) if reason else run(stage, args.out, on, devices, left_s)
        )
        print("  ".join(records[-1].cells), flush=True)
        write_page(records, args.out / "results.md")
    failed = [record.stage.name for record in records if record.result in ("FAILED", "CUT")]
    print(
        f"{len(failed)} stages failed: {', '.join(failed)}" if failed else "no stage failed", f"({args.out})"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stage that runs ends, too
    sys.exit(main(sys.argv[1:]))
