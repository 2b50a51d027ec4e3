"""Steps a second of ``--shares auto`` before, while and after the second of two ranks may use a small part of a core only.

    python benchmarks/shares.py --quota 0.05
    python benchmarks/shares.py --quota 0.05 --waits    # devices that are waited for, which other jobs of the machine hardly change

In between, runs with fixed shares and the same quota train at the same time, one after the other, so that both share the load of the
machine. The quota is that of a control group (Linux, root). Rates are medians of steps, those of two runs at once are means.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.storage.atomic import write_text
from yolofleet.support.system.proc import descendants, rank_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
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
WAITING = """
import os
import time
from pathlib import Path
from my_model import TinyNetwork
from yolofleet import TrainingRecipe

class WaitingNetwork(TinyNetwork):
    def forward(self, images):
        slow = Path("slow")
        time.sleep(0.1 / (float(slow.read_text()) if os.environ.get("RANK") == "1" and slow.exists() else 1.0))
        return super().forward(images)

class Waiting(TrainingRecipe):
    def network(self, nc):
        return WaitingNetwork(nc)
"""


@contextmanager
def control_group(name: str) -> Iterator[Path]:
    """Make a control group for CPU time inside the block."""
    root = Path("/sys/fs/cgroup")
    group = (root / "cpu" if (root / "cpu").is_dir() else root) / f"yolofleet-shares-{os.getpid()}-{name}"
    group.mkdir()
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def limit(group: Path, cores: float) -> None:
    """Let the processes of ``group`` use so many cores; 0: all. Without a control group, for devices that wait."""
    if not (group / "cgroup.procs").exists():
        (group / "slow").unlink(missing_ok=True)
        if cores:
            write_text(group / "slow", str(cores))
        return
    quota = str(round(cores * PERIOD_US)) if cores else ""
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")
    else:
        (group / "cpu.cfs_quota_us").write_text(quota or "-1")


class Run:
    """A training of two ranks, whose second one belongs to ``group``."""

    def __init__(self, folder: Path, name: str, shares: str, group: Path) -> None:
        waits = group == folder
        network = ("--recipe-class", "waiting.py:Waiting") if waits else ("--model", "yolov5n")
        self.path = folder / "runs" / "train" / name
        command = [
            *(sys.executable, "-m", "yolofleet", "train", "--data", "shapes/data.yaml", *network),
            *("--img", "64", "--batch", "64", "--nominal-batch", "64", "--micro-batch", "8", "--epochs", "100000"),
            *("--device", "cpu:2", "--threads", "1", "--workers", "0", "--val-period", "0", "--no-plots"),
            *("--callbacks", "journal.py:Journal", "--name", name, "--shares", shares),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.wait(lambda: len(self.times()) > 12)
        if not waits:
            second = next(pid for pid in descendants(self.process.pid) if rank_of(pid) == 1)
            (group / "cgroup.procs").write_text(str(second))

    def times(self) -> list[float]:
        """Return when each step has ended."""
        with suppress(FileNotFoundError):
            return [*map(float, (self.path / "steps.txt").read_text().split("\n")[:-1])]
        return []

    def shares(self) -> list[dict[str, Any]]:
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

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def measure(run: Run, group: Path, folder: Path, other: Path, options: argparse.Namespace) -> None:
    quota = f"{options.quota:g} cores"
    run.wait(run.shares)
    print(f"auto, before: {run.rate(options.steps):.2f} steps/s", flush=True)
    known = len(run.shares())
    limit(group, options.quota)
    slow = run.rate(options.steps, until=lambda: len(run.shares()) > known)
    print(f"auto, {quota}, old shares: {slow:.2f} steps/s", flush=True)
    run.wait(lambda: len(run.shares()) > known)
    run.rate(options.steps)  # the first change may follow times of before
    print(f"auto, {quota}: {run.rate(options.steps):.2f} steps/s", flush=True)
    for shares in options.fixed:
        if other != group:
            limit(other, 0)
        with Run(folder, f"fixed {shares}", shares, other) as fixed:
            limit(other, options.quota)
            fixed.rate(10)
            began = [len(one.times()) for one in (run, fixed)]
            time.sleep(options.seconds)
            steps = [len(one.times()) - before for one, before in zip((run, fixed), began, strict=True)]
        rates = [f"{count / options.seconds:.2f}" for count in steps]
        print(f"at once, {quota}: auto {rates[0]}, --shares {shares} {rates[1]} steps/s", flush=True)
    known = len(run.shares())
    limit(group, 0)
    run.wait(lambda: len(run.shares()) > known)
    run.rate(options.steps)
    print(f"auto, after: {run.rate(options.steps):.2f} steps/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quota", type=float, default=0.05, help="cores of the second rank")
    parser.add_argument("--steps", type=int, default=60, help="to measure")
    parser.add_argument("--seconds", type=float, default=90.0, help="to measure two runs at once")
    parser.add_argument("--fixed", nargs="*", default=["1,0", "7,1"], help="shares to compare with")
    parser.add_argument("--waits", action="store_true", help="0.1 s for each micro-batch, instead of yolov5n")
    options = parser.parse_args()
    with TemporaryDirectory() as place, ExitStack() as groups:
        folder = Path(place)
        names = () if options.waits else ("auto", "fixed")
        group, other = [groups.enter_context(control_group(name)) for name in names] or [folder] * 2
        shutil.copy(EXAMPLES / "my_model.py", folder)
        (folder / "waiting.py").write_text(WAITING)
        make_shapes(folder / "shapes", images=640, val_images=4, img=64, seed=1)
        (folder / "journal.py").write_text(JOURNAL)
        with Run(folder, "auto", "auto", group) as run:
            measure(run, group, folder, other, options)
            for event in run.shares():
                print(f"{event['time']:.0f} step {event['step']}: {event['why']}")


if __name__ == "__main__":
    main()
