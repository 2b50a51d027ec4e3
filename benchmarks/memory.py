"""Memory of a training: of its processes on the host, and of the tensors of a step with and without checkpointing.

    python benchmarks/memory.py processes --images 118287 --loaders 1 2 8 [--rival PYTHON]
    python benchmarks/memory.py checkpointing [--models yolov5n rtdetrv2-r18]

``processes`` trains yolov5n with 64 px on a generated data set whose images are links to a few small ones, and looks at
the memory of all its processes until it has done --steps steps of 16 images: RSS counts shared pages in each process, PSS
divides them by the number of their users (/proc/PID/smaps_rollup), private pages have one user. The table has the values
at the largest total PSS. ``--rival`` is a Python that has YOLOv5's package: the same data, network and steps there.

``checkpointing`` compares the most bytes that are alive during a step of one micro-batch on the CPU with and without
``--checkpoint-activations``, and the median seconds of three turns.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any, cast

import rival
import torch
from index import make_set
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from small_training import small_run

from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import Detector
from yolofleet.support.system.proc import descendants
from yolofleet.training.network import checkpoint_activations

MIB = 1 << 20
RIVAL = (  # it starts at most as many loader processes as the machine has cores
    "import os, sys, runpy; os.cpu_count = lambda: 64; sys.argv[0] = 'train.py'; "
    "runpy.run_module('yolov5.train', run_name='__main__')"
)


def memory_of(pid: int) -> dict[str, int]:
    """Return the bytes of RSS, PSS and private memory of a process; {} if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    kib = {name: int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    private = kib["Private_Dirty"] + kib["Private_Clean"]
    return {"rss": kib["Rss"] << 10, "pss": kib["Pss"] << 10, "private": private << 10}


def processes(command: list[str], loaders: int, folder: Path, is_done: str) -> str:
    """Run a training until its output matches ``is_done``; return the row of the table."""
    most: list[dict[str, int]] = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as training:
        read = bytearray()

        def collect() -> None:
            assert training.stdout is not None
            while piece := os.read(training.stdout.fileno(), 1 << 16):
                read.extend(piece)

        reader = threading.Thread(target=collect)
        reader.start()
        while training.poll() is None and not re.search(is_done.encode(), bytes(read)):
            now = [memory_of(pid) for pid in (training.pid, *descendants(training.pid))]
            now = [found for found in now if found]
            if sum(one["pss"] for one in now) > sum(one["pss"] for one in most):
                most = now
            time.sleep(0.5)
        done = re.search(is_done.encode(), bytes(read))
        for pid in descendants(training.pid):
            os.kill(pid, 15)
        training.kill()
        reader.join()
    assert done, bytes(read[-3000:]).decode("utf-8", "replace")
    largest = sorted(most, key=lambda one: one["pss"])
    loader = largest[-1 - loaders : -1] or [dict.fromkeys(("rss", "pss", "private"), 0)]
    values = [sum(one[kind] for one in most) / MIB for kind in ("pss", "rss")]
    values += [sum(one[kind] for one in loader) / len(loader) / MIB for kind in ("pss", "private")]
    return " | ".join(f"{value:,.0f}" for value in values) + f" | {len(most)}"


def compare(images: int, loaders: list[int], steps: int, rival_python: str) -> None:
    print("| program | loader processes | PSS, MiB | RSS | a loader: PSS | a loader: private | processes |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        make_set(root / "set", images, val_images=64)
        os.environ |= {"YOLOFLEET_CACHE": f"{root}/cache", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        variables = rival.environment(rival_python, root / "rival") if rival_python else {}
        shared = ["--data", str(root / "set/data.yaml"), "--img", "64", "--device", "cpu"]
        for count in loaders:
            words = f"--model yolov5n --batch 16 --nominal-batch 16 --micro-batch 16 --workers {count} --max-steps {steps}"
            words += " --cache none --val-period 0 --no-plots --no-autoanchor --threads 1"
            ours = [sys.executable, "-m", "yolofleet", "train", *shared, *words.split()]
            print(f"| yolofleet | {count} | {processes(ours, count, root, 'validation: ')} |", flush=True)
            if rival_python:
                words = f"--weights= --cfg yolov5n.yaml --batch 16 --workers {count} --epochs 1 --noplots --nosave --noautoanchor"
                theirs = [
                    "env",
                    *map("=".join, variables.items()),
                    rival_python,
                    "-c",
                    RIVAL,
                    *shared,
                    *words.split(),
                ]
                row = processes(theirs, count, root, rf" {steps}/\d")
                print(f"| YOLOv5 | {count} | {row} |", flush=True)


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operations in the block make, as long as they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._seen = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._keep(tensor.untyped_storage())
        return out

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def checkpointing(name: str, img: int, images: int) -> str:
    """Return the row of a network: MB that are alive, and seconds of a step, without and with checkpointing."""
    runs = [small_run(name, images=images, micro_batch=images, img=img) for _ in range(2)]
    checkpoint_activations(cast(Detector, runs[1].state.replicas.lead.model))
    shares = runs[0].micro_batches(1)
    most, seconds = [0, 0], [[0.0] * 3 for _ in runs]
    for turn in range(4):
        for number, run in enumerate(runs):
            began_s = time.monotonic()
            if turn:
                run.do(1, shares=shares)
                seconds[number][turn - 1] = time.monotonic() - began_s
            else:
                with Alive() as alive:
                    run.do(1, shares=shares)
                most[number] = alive.most
    plain_s, again_s = map(statistics.median, seconds)
    values = f"{most[0] / 1e6:,.0f} | {most[1] / 1e6:,.0f} | {most[1] / most[0]:.2f}"
    return f"| {describe(name).name}, {images} x {img} px | {values} | {again_s / plain_s:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["processes", "checkpointing"])
    parser.add_argument("--images", type=int, default=118_287)
    parser.add_argument("--loaders", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rival", default="", metavar="PYTHON")
    parser.add_argument(
        "--models", nargs="+", default=["yolov5n", "yolov5l", "yolov3", "ppyoloe-s", "dfine-n"]
    )
    asked = parser.parse_args()
    if asked.what == "processes":
        compare(asked.images, asked.loaders, asked.steps, asked.rival)
        return
    print("| network | alive in a step, MB | with checkpointing | ratio | time, ratio |")
    print("|---" * 5 + "|")
    for name in asked.models:
        print(checkpointing(name, 640, 4), flush=True)


if __name__ == "__main__":
    main()
