"""Steps a second of ``--shares auto`` before, while and after the second of two ranks may use a small part of a core only.

    python benchmarks/shares.py --quota 0.05

Then, for the same quota, the rates of fixed shares. The quota is that of a control group (Linux, root). Rates are medians of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.support.system.proc import descendants, rank_of

PERIOD_US = 100_000
JOURNAL = """
import time
from yolofleet import Callback

class Journal(Callback):
    def start(self, run):
        self.file = (run.folder / "steps.txt").open("a", buffering=1)

    def step(self, step):
        self.file.write(f"{time.time()}\\n")
"""


@contextmanager
def control_group() -> Iterator[Path]:
    """Make a control group for CPU time inside the block."""
    root = Path("/sys/fs/cgroup")
    group = (root / "cpu" if (root / "cpu").is_dir() else root) / f"yolofleet-shares-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def limit(group: Path, cores: float) -> None:
    """Let the processes of ``group`` use so many cores; 0: all."""
    quota = str(round(cores * PERIOD_US)) if cores else ""
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")
    else:
        (group / "cpu.cfs_quota_us").write_text(quota or "-1")


class Run:
    """A training of two ranks, whose second one belongs to ``group``."""

    def __init__(self, folder: Path, name: str, shares: str, group: Path) -> None:
        self.path = folder / "runs" / "train" / name
        command = [
            *(sys.executable, "-m", "yolofleet", "train", "--data", "shapes/data.yaml", "--model", "yolov5n"),
            *("--img", "64", "--batch", "64", "--nominal-batch", "64", "--micro-batch", "8", "--epochs", "100000"),
            *("--device", "cpu:2", "--threads", "1", "--workers", "0", "--val-period", "0", "--no-plots"),
            *("--callbacks", "journal.py:Journal", "--name", name, "--shares", shares),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self.wait(lambda: len(self.times()) > 12)
        second = next(pid for pid in descendants(self.process.pid) if rank_of(pid) == 1)
        (group / "cgroup.procs").write_text(str(second))

    def times(self) -> list[float]:
        """Return when each step has ended."""
        with suppress(FileNotFoundError):
            return [*map(float, (self.path / "steps.txt").read_text().split("\n")[:-1])]
        return []

    def shares(self) -> list[dict[str, object]]:
        lines = map(json.loads, (self.path / "events.jsonl").read_text().splitlines())
        return [event for event in lines if event["kind"] == "shares"]

    def wait(self, ready: Callable[[], object]) -> None:
        while not ready():
            assert self.process.poll() is None, "the training has ended"
            time.sleep(0.1)

    def rate(self, steps: int, *, until: Callable[[], object] = lambda: False) -> float:
        """Return the steps a second of the next steps, or of those before ``until()``."""
        began = len(self.times())
        self.wait(lambda: len(self.times()) > began + steps or (len(self.times()) > began + 2 and until()))
        times = self.times()[began:]
        return 1 / statistics.median(b - a for a, b in pairwise(times))

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quota", type=float, default=0.05, help="cores of the second rank")
    parser.add_argument("--steps", type=int, default=60, help="to measure")
    parser.add_argument("--fixed", nargs="*", default=["1,0", "7,1"], help="shares to compare with")
    options = parser.parse_args()
    with TemporaryDirectory() as place, control_group() as group:
        folder = Path(place)
        make_shapes(folder / "shapes", images=640, val_images=4, img=64, seed=1)
        (folder / "journal.py").write_text(JOURNAL)
        run = Run(folder, "auto", "auto", group)
        run.wait(run.shares)
        print(f"auto, before: {run.rate(options.steps):.2f} steps/s", flush=True)
        limit(group, options.quota)
        began_s, known = time.time(), len(run.shares())
        slow = run.rate(options.steps, until=lambda: len(run.shares()) > known)
        print(f"auto, {options.quota:g} cores, old shares: {slow:.2f} steps/s", flush=True)
        run.wait(lambda: len(run.shares()) > known)
        print(f"  {time.time() - began_s:.0f} s later: {run.shares()[-1]['why']}", flush=True)
        run.rate(20)
        print(f"auto, {options.quota:g} cores: {run.rate(options.steps):.2f} steps/s", flush=True)
        limit(group, 0)
        began_s, known = time.time(), len(run.shares())
        run.wait(lambda: len(run.shares()) > known)
        print(
            f"  {time.time() - began_s:.0f} s after the end of the quota: {run.shares()[-1]['why']}",
            flush=True,
        )
        run.rate(20)
        print(f"auto, after: {run.rate(options.steps):.2f} steps/s", flush=True)
        run.end()
        for shares in options.fixed:
            limit(group, 0)
            run = Run(folder, f"fixed {shares}", shares, group)
            limit(group, options.quota)
            run.rate(10)
            print(
                f"--shares {shares}, {options.quota:g} cores: {run.rate(options.steps):.2f} steps/s",
                flush=True,
            )
            run.end()


if __name__ == "__main__":
    main()
