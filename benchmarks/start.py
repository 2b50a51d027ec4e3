"""What the start and the end of a command cost: train with one and two processes, val and predict of one image, --help.

    python benchmarks/start.py --turns 5 [--also PYTHON]

The commands, and `import torch` alone, run in turns. The table has medians: CPU seconds of all processes of a command, their
ratio to those of `import torch` in the same turn, and seconds from the command until torch begins to load, is loaded, the
modules of a rank are loaded, the first step is done, and the command has ended; with several processes, until the
last of them. ``--also`` is the Python of another checkout, which takes its turn with the first. The clocks are a
``sitecustomize.py`` in PYTHONPATH and a callback.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

MARKS = """
import importlib.util, json, os, sys, time

def mark(what):
    with open(os.environ["MARKS"], "a") as file:
        file.write(json.dumps([what, time.time()]) + "\\n")

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "yolofleet.training.rank.worker", "yolofleet.training.rank.train", "yolofleet.training.rank.val", "yolofleet.inference.predict.run"):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        run = spec.loader.exec_module
        def exec_module(module):
            mark(name + " begins")
            run(module)
            mark(name)
        spec.loader.exec_module = exec_module
        return spec

if "MARKS" in os.environ:
    sys.meta_path.insert(0, Watch())
"""
CALLBACK = """
import json, os, time
from yolofleet import Callback

class Mark(Callback):
    def step(self, step):
        with open(os.environ["MARKS"], "a") as file:
            file.write(json.dumps(["first step", time.time()]) + "\\n")
"""
PHASES = {
    "torch begins": ("torch begins",),
    "torch loaded": ("torch",),
    "modules loaded": (
        "yolofleet.training.rank.train",
        "yolofleet.training.rank.val",
        "yolofleet.inference.predict.run",
    ),
    "first step done": ("first step",),
    "end": ("end",),
}
TRAIN = (
    "train --data set/data.yaml --model yolov5n --img 64 --batch 8 --nominal-batch 8 --micro-batch 4 --max-steps 1 "
    "--val-period 0 --no-plots --workers 0 --threads 1 --callbacks mark.py:Mark"
)
DATA = "data make shapes --out set --images 16 --val-images 1 --img 64"
COMMANDS = {
    "train cpu:1": f"{TRAIN} --device cpu:1",
    "train cpu:2": f"{TRAIN} --device cpu:2",
    "val": "val --weights last.safetensors --data set/data.yaml --img 64 --device cpu --threads 1 --workers 0",
    "predict": "predict --weights last.safetensors --source one.png --img 64 --device cpu",
    "help": "--help",
}
Turn = dict[str, float]


def timed(argv: list[str], folder: Path) -> Turn:
    """Run a command; return its CPU seconds, and the seconds until the end of each phase."""
    (marks := folder / "marks").write_text("")
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    ended_s, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    last: dict[str, float] = {"end": ended_s}
    for line in marks.read_text().splitlines():
        what, at_s = json.loads(line)
        last[what] = at_s
    found = {
        phase: max(last[what] for what in names if what in last) - began_s
        for phase, names in PHASES.items()
        if any(what in last for what in names)
    }
    return {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--also", default="", metavar="PYTHON")
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    asked = parser.parse_args()
    pythons = [sys.executable, *filter(None, [asked.also])]
    turns: dict[tuple[str, str], list[Turn]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(MARKS)
        (folder / "mark.py").write_text(CALLBACK)
        os.environ |= {
            "YOLOFLEET_CACHE": f"{folder}/cache",
            "PYTHONPATH": str(folder),
            "MARKS": f"{folder}/marks",
        }
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        verb = [sys.executable, "-m", "yolofleet"]
        timed([*verb, *DATA.split()], folder)
        timed([*verb, *COMMANDS["train cpu:1"].split(), "--name", "first"], folder)
        next(folder.glob("runs/train/first/weights/last.*")).rename(folder / "last.safetensors")
        shutil.copy(next((folder / "set/images/val").iterdir()), folder / "one.png")
        for turn in range(asked.turns + 1):
            for python in pythons:
                torch_s = timed([python, "-c", "import torch"], folder)["cpu"]
                for name in asked.commands:
                    found = timed([python, "-m", "yolofleet", *COMMANDS[name].split()], folder)
                    if turn:  # the first turn writes bytecode and fills the page cache
                        turns.setdefault((python, name), []).append({"torch": torch_s, **found})
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores; seconds, medians of {asked.turns} turns")
    print(
        "| command | python | CPU | CPU / import torch | CPU less import torch | " + " | ".join(PHASES) + " |"
    )
    print("|---" * (5 + len(PHASES)) + "|")
    for (python, name), all_of in turns.items():
        figures = [median(one["cpu"] for one in all_of), median(one["cpu"] / one["torch"] for one in all_of)]
        figures.append(median(one["cpu"] - one["torch"] for one in all_of))
        phases = [
            f"{median(one[phase] for one in all_of):.1f}" if phase in all_of[0] else "" for phase in PHASES
        ]
        print(
            f"| {name} | {'this' if python == sys.executable else 'other'} | "
            + " | ".join([f"{value:.2f}" for value in figures] + phases)
            + " |"
        )


if __name__ == "__main__":
    main()
