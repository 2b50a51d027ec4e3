"""The stages of ``yolofleet selftest --minutes N``, in the order of their importance, and how each one is judged.

A stage runs in a process of its own (``selftest_minutes.py`` starts and ends it). It either runs command lines of yolofleet,
each in a copy of that process, or computes on the device itself. It must not do both, because a process that has used
CUDA cannot be forked. A stage returns a :class:`Found`, and raises any exception if it fails.

Seconds are estimates: nobody has run all stages on a GPU. Goals of speed are estimates too, so a stage that misses one has
not failed.
"""

from __future__ import annotations

import atexit
import csv
import importlib.util
import json
import math
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from yolofleet.config.device import processes_of
from yolofleet.config.schema import SelftestConfig
from yolofleet.datasets.shapes import make_shapes
from yolofleet.extras import install_hint
from yolofleet.files.atomic import write_text
from yolofleet.measure.selftest.checks import Comparison, Leg, judge, lone_devices, plan
from yolofleet.measure.selftest.runs import (
    explained,
    killed_rank_check,
    newest_step,
    run_legs,
    train,
    write_job,
)
from yolofleet.report.folder import RunFolder
from yolofleet.system.children import PACKAGES, die_with_parent
from yolofleet.system.proc import descendants, end_descendants, rank_of
from yolofleet.text import echo

Group = Literal["numbers", "failures", "features", "speed", "tests"]
GROUPS: tuple[Group, ...] = ("numbers", "failures", "features", "speed", "tests")
START_S = 300.0  # until a training has its first checkpoint; the time limit of the stage is shorter as a rule
SAME_UPDATE = 5e-3  # of a first update in float32 with other kernels; measured on CPUs: 2e-4
COCO_IMAGES, COCO_VAL_IMAGES = 118_287, 5_000
LARGE_GIB = 15.0  # of a device that can take micro-batches of 16 images of the largest network
TESTS = Path(PACKAGES).parent / "tests" / "gpu"
NOT_FUSED = ("RMSProp", "Adamax", "NAdam", "RAdam")
FLOORS = {  # ratio -> its goal
    "loader / step": 0.95,
    "loop / bare network": 0.97,
    "whole run / slower part": 0.95,
    "validation / its forward passes": 0.5,
    "checkpoint / one write": 0.1,  # it is also read back and compared
}
EXACT_FLOORS = {**FLOORS, "loop / bare network": 0.85}  # integer sums cost up to 14 % on CPUs
RATES = {  # part of a device's name -> images/s of a step at 640 px in fp16: 60 % of what its bandwidth allows
    "H100": {"yolov5n": 1400, "yolov5s": 740, "yolov5l": 240},
    "H200": {"yolov5n": 1700, "yolov5s": 900, "yolov5l": 290},
}  # fmt: skip


KINDS = ("cuda", "xpu", "mps")  # devices that get images and networks of a real size
TOY_NETWORK = """
nc: 80
depth_multiple: 1.0
width_multiple: 0.125
anchors: [[10,14, 23,27, 37,58], [81,82, 135,169, 344,319]]
backbone:
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, Conv, [512, 3, 2]]
head:
  - [-1, 1, Conv, [512, 3, 2]]
  - [[3, 4], 1, Detect, [nc, anchors]]
"""


class StageFailed(Exception):
    """A stage found a fault; the text says which."""


@dataclass(frozen=True)
class Machine:
    """What stages know about where they run.

    Attributes:
        folder: of the results. work: of the running stage, deleted when it has passed.
        device: as ``--device``; all devices of the check.
        kind: cuda | cpu | ...
        name: of the first device.
        memory_gib: of the first device; 0 if torch does not know it.
        minutes: in total.
        has_processes: several processes can sum gradients of this kind of device.
    """

    folder: Path
    device: str
    kind: str
    name: str
    memory_gib: float = 0.0
    has_tf32: bool = False
    has_bfloat16: bool = True
    has_processes: bool = True
    minutes: float = 10.0
    work: Path = Path()

    @property
    def is_toy(self) -> bool:
        """Whether sizes are as small as possible: on a CPU, and on devices that PyTorch itself does not know."""
        return self.kind not in KINDS

    @property
    def one(self) -> str:
        """The first device, for one process."""
        return lone_devices(self.device)[0]

    @property
    def devices(self) -> int:
        """How many devices are compared in speed: processes on a CPU, else devices."""
        return processes_of(self.device) if self.kind == "cpu" else len(lone_devices(self.device))

    @property
    def pair(self) -> str:
        """Two processes: on two devices, or on one that they share."""
        if self.kind == "cpu":
            return "cpu:2"
        ids = lone_devices(self.device)
        return f"{ids[0]},{ids[1]}" if len(ids) > 1 else f"{ids[0]}:2"

    def first(self, count: int) -> str:
        """The first ``count`` devices."""
        if self.kind == "cpu":
            return f"cpu:{count}" if count > 1 else "cpu"
        return ",".join(lone_devices(self.device)[:count])

    @property
    def precision(self) -> str:
        return "fp32" if self.is_toy else "fp16"

    @property
    def data(self) -> Path:
        return self.folder / "data" / "data.yaml"

    @property
    def network(self) -> str:
        """The network of short trainings."""
        return str(self.folder / "data" / "network.yaml") if self.is_toy else "yolov5n"


@dataclass(frozen=True)
class Found:
    """The result of a stage that passed.

    Attributes:
        text: one line. figures: for JSON. missed: goals that were missed.
    """

    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    missed: Sequence[str] = ()


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        what: it checks, for tables.
        seconds: estimate on a GPU; also its weight. toy_seconds: the same at toy size, on a CPU.
        unfit: returns why the stage cannot run on a machine, or "".
    """

    name: str
    group: Group
    what: str
    seconds: float
    toy_seconds: float
    run: Callable[[Machine], Found]
    unfit: Callable[[Machine], str] = lambda machine: ""

    def estimate_s(self, machine: Machine) -> float:
        return self.toy_seconds if machine.is_toy else self.seconds


# -- command lines in copies of this process -------------------------------------------------------------------


def copy_of_this_process(target: Callable[..., int], *args: Any) -> BaseProcess:
    """Start ``target`` in a copy of this process, which has torch loaded; its result is the exit code.

    Systems other than Linux start a new Python instead, which loads torch again.
    """
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process: BaseProcess = context.Process(target=_exit_with, args=(target, *args))
    process.start()
    return process


def _exit_with(target: Callable[..., int], *args: Any) -> None:
    """End this process with the result of ``target``, and clean up as a process that is not a copy does."""
    atexit._clear()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        sys.exit(target(*args))
    finally:
        atexit._run_exitfuncs()


def start_command(*argv: str | Path) -> BaseProcess:
    """Start a command line of yolofleet, and show it in the log."""
    words = list(map(str, argv))
    echo(f"\n$ yolofleet {shlex.join(words)}")
    return copy_of_this_process(_main, words)


def _main(argv: list[str]) -> int:
    """Do what ``python -m yolofleet ARGV`` does."""
    sys.argv[1:] = argv
    runpy.run_module("yolofleet", run_name="__main__")
    return 0


def command(*argv: str | Path) -> None:
    """Run a command line of yolofleet to its end.

    Raises:
        StageFailed: its exit code is not 0.
    """
    process = start_command(*argv)
    process.join()
    if process.exitcode:
        raise StageFailed(
            f"`yolofleet {' '.join(map(str, argv[:2]))} ...` ended with exit code {process.exitcode}"
        )


def train_argv(machine: Machine, name: str, *more: str | Path) -> list[str | Path]:
    """Return the command line of a short training; a later option wins over an earlier one."""
    img, batch, micro = ("64", "8", "2") if machine.is_toy else ("320", "64", "16")
    size = ["--img", img, "--batch", batch, "--nominal-batch", batch, "--micro-batch", micro, "--epochs", "2"]
    where: list[str | Path] = ["--device", machine.one, "--project", machine.work, "--name", name]
    toy = ["--workers", "0", "--threads", "1"] if machine.is_toy else []
    plain = ["--no-plots", "--no-autoanchor", "--set", "warmup_epochs=0"]
    return ["train", "--data", machine.data, "--model", machine.network, *size, *where, *toy, *plain, *more]


def trained(machine: Machine, name: str, *more: str | Path) -> dict[str, Any]:
    """Train to the end; return the results.

    Raises:
        StageFailed: the command failed, or left a loss or a weight that is not finite.
    """
    command(*train_argv(machine, name, *more))
    return checked_results(RunFolder(machine.work / name))


def checked_results(folder: RunFolder) -> dict[str, Any]:
    """Return the results of a run whose losses and weights are finite.

    Raises:
        StageFailed: one is not.
    """
    from safetensors.torch import load_file

    from yolofleet.checkpoint.format import non_finite

    with folder.results_csv.open(encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    losses = {name: float(value) for name, value in last.items() if name.startswith("train/") and value}
    if bad := [name for name, value in losses.items() if not math.isfinite(value)]:
        raise StageFailed(f"{folder.path.name}: {', '.join(bad)} of the last epoch is not finite")
    weights = load_file(folder.weights / "last.safetensors")
    if bad := non_finite(weights):
        raise StageFailed(
            f"{folder.path.name}: {len(bad)} of {len(weights)} tensors are not finite, first {bad[0]}"
        )
    results: dict[str, Any] = json.loads(folder.results_json.read_text(encoding="utf-8"))
    return results | {"loss": sum(losses.values())}


def feature(*more: str, device: str = "one") -> Callable[[Machine], Found]:
    """Return a stage that trains with some options."""

    def run(machine: Machine) -> Found:
        results = trained(machine, "run", "--device", getattr(machine, device), *more)
        return Found(f"{results['steps']} steps, loss {results['loss']:.4g}", {"loss": results["loss"]})

    return run


# -- numbers -----------------------------------------------------------------------------------------------------


def make_data(machine: Machine) -> Found:
    images, val_images, img = (20, 8, 64) if machine.is_toy else (512 * (1 + (machine.devices > 1)), 64, 320)
    make_shapes(machine.data.parent, images=images, val_images=val_images, img=img)
    if machine.is_toy:
        write_text(Path(machine.network), TOY_NETWORK)
    return Found(f"{images} images to train, {val_images} to validate", {"images": images})


def overflow(machine: Machine) -> Found:
    from yolofleet.devices import device_of, is_host, select
    from yolofleet.measure.selftest.device_checks import forgets_an_overflow_in_a_layer

    device = device_of(machine.one, 0)
    select(device)
    precision = "fp32" if is_host(device) else "fp16"
    texts = [
        forgets_an_overflow_in_a_layer(device, precision, per_pass, machine.network) for per_pass in (1, 2)
    ]
    return Found(f"{precision}: {texts[-1]}")


def device_checks(machine: Machine) -> Found:
    failed = []
    # the second device of the simulated accelerator is its first one for PyTorch's C++ code
    devices = lone_devices(machine.device)[: 1 if machine.is_toy else None]
    for device in devices:
        process = copy_of_this_process(_checks, device, machine.network)
        process.join()
        if process.exitcode:
            failed.append(device)
    if failed:
        raise StageFailed(f"checks of device {', '.join(failed)} failed")
    return Found(f"all checks of device {', '.join(devices)}")


def _checks(device: str, model: str) -> int:
    """Run the checks of one device; return how many failed."""
    from yolofleet.devices import device_of
    from yolofleet.measure.selftest.device_checks import run_checks

    checks = []
    for check in run_checks(device_of(device, 0), model):
        echo(
            f"{device}  {check.name}: {check.detail}"
            if check.passed
            else f"CheckError: {check.name}: {check.detail}"
        )
        checks.append(check)
    return sum(not check.passed for check in checks)


def comparison_of(machine: Machine, legs: Sequence[Leg]) -> Comparison:
    config = SelftestConfig(model=machine.network, img=64 if machine.is_toy else 128, steps=2)
    return Comparison(config, legs, machine.work)


def equal_bits(machine: Machine) -> Found:
    legs = [leg for leg in plan(machine.device) if leg.processes == 1 or machine.has_processes]
    if (machine.is_toy or machine.minutes < 5) and len(legs) > 4:
        exact = [leg for leg in legs if leg.kind == "exact" and (leg.shares or leg.parallel == "dp")]
        legs = [legs[0], *exact, next(leg for leg in legs if leg.kind == "fast" and leg.parallel == "dp")]
    comparison = comparison_of(machine, legs)
    records = []
    for record in run_legs(comparison, legs, machine.work, train=train_here):
        records.append(record)
        echo(f"{record.leg.title}: {record.sha256[:12] or record.problem}")
    verdict = judge(records)
    if verdict.cause is not None:
        raise StageFailed(f"{verdict.text}; {verdict.cause.what}")
    return Found(verdict.text, {record.leg.title: record.sha256 for record in records})


def train_here(
    settings: Mapping[str, Any], processes: int, folder: RunFolder, extra: Mapping[str, str]
) -> tuple[int, str]:
    """As ``selftest_runs.train``: a run of one process in a copy of this one, which has torch loaded."""
    if processes > 1:
        return train(settings, processes, folder, extra)
    argv = write_job(settings, folder)
    process = copy_of_this_process(_worker, argv)
    process.join()
    return explained(folder, process.exitcode or 0)


def _worker(argv: list[str]) -> int:
    from yolofleet.rank import worker

    return worker.main(argv)


def passes(machine: Machine) -> Found:
    legs = [Leg("fast", "one micro-batch a pass", machine.one), Leg("fast", "several", machine.one)]
    comparison = comparison_of(machine, legs)
    for number, (leg, together) in enumerate(zip(legs, (1, 4), strict=True)):
        folder = RunFolder(machine.work / f"passes-{together}")
        settings = comparison.settings_of(leg) | {"precision": "fp32", "micro_batches_per_pass": together}
        code, problem = train_here(settings, 1, folder, {})
        if code:
            raise StageFailed(f"--micro-batches-per-pass {together}: {problem}")
        record = comparison.read(leg, folder)
        if number and not max(record.update_difference, record.loss_difference) <= SAME_UPDATE:
            raise StageFailed(
                f"the first update of {together} micro-batches in a pass is off by {record.update_difference:.1e} and the "
                f"loss by {record.loss_difference:.1e}, expected at most {SAME_UPDATE:.0e}"
            )
    off = max(record.update_difference, record.loss_difference)
    return Found(f"first update off by {off:.1e}", {"update_difference": off})


def suppression(machine: Machine) -> Found:
    import torch

    from yolofleet.devices import device_of
    from yolofleet.geometry.nms import detections

    draws = torch.Generator().manual_seed(0)
    places = torch.rand(4 if machine.is_toy else 32, 400 if machine.is_toy else 2000, 9, generator=draws)
    places[..., :2] *= 600
    places[..., 2:4] = 8 + 100 * places[..., 2:4]
    for multi_label in (True, False):
        here, there = (
            detections(places.to(device), conf=0.3, iou=0.6, max_det=300, multi_label=multi_label)[0]
            for device in (torch.device("cpu"), device_of(machine.one, 0))
        )
        for image, (mine, theirs) in enumerate(zip(here, there, strict=True)):
            if mine.shape != theirs.shape or not torch.allclose(mine, theirs.cpu(), rtol=1e-5, atol=1e-3):
                raise StageFailed(f"image {image}: {len(theirs)} boxes, {len(mine)} on the CPU, or others")
    return Found(f"the boxes of {len(places)} images are those of the CPU")


def optimizers(machine: Machine) -> Found:
    from yolofleet.devices import device_of, select
    from yolofleet.measure.selftest.device_checks import resumes

    device = device_of(machine.one, 0)
    select(device)
    names = NOT_FUSED[:2] if machine.is_toy else NOT_FUSED
    for name in names:
        echo(f"{name}: {resumes(device, name, machine.network)}")
    return Found(f"{', '.join(names)}: two steps, and resumed")


# -- failures ----------------------------------------------------------------------------------------------------


def killed_rank(machine: Machine) -> Found:
    leg = Leg("exact", "2 processes", machine.pair, devices=2)
    settings = comparison_of(machine, [leg]).settings_of(leg)
    check = killed_rank_check(settings, machine.pair, 2, RunFolder(machine.work / "killed"), {})
    if not check["passed"]:
        raise StageFailed(check["detail"])
    return Found(check["detail"])


@contextmanager
def at_step(step: int, run: Path, argv: Sequence[str | Path]) -> Iterator[BaseProcess]:
    """Start a training and wait until the checkpoint of ``step`` exists; end all its processes after the block."""
    process = start_command(*argv)
    try:
        deadline_s = time.monotonic() + START_S
        while newest_step(RunFolder(run)) < step:
            if not process.is_alive():
                raise StageFailed(f"{run.name} ended with exit code {process.exitcode} before step {step}")
            if time.monotonic() > deadline_s:
                raise StageFailed(f"{run.name} has no checkpoint of step {step} after {START_S:.0f} s")
            time.sleep(0.02)
        yield process
    finally:
        if process.is_alive() and process.pid is not None:
            end_descendants(process.pid)
            process.kill()
        process.join()


LENGTH = (
    "--epochs",
    "1000",
    "--val-period",
    "0",
    "--reduce",
    "exact",
    "--save-steps",
    "1",
    "--keep-last",
    "9",
)


def killed_run(machine: Machine) -> Found:
    steps = ("--max-steps", "6", *LENGTH)
    whole = trained(machine, "whole", *steps)
    run = machine.work / "killed"
    with at_step(2, run, train_argv(machine, "killed", *steps)):
        pass
    last = newest_step(RunFolder(run))
    command("train", "--resume", run)
    resumed = checked_results(RunFolder(run))
    if resumed["weights_sha256"] != whole["weights_sha256"]:
        raise StageFailed(f"resumed after step {last}, it ends with other weights than without a break")
    return Found(f"killed after step {last}, resumed, equal bits", {"sha256": whole["weights_sha256"]})


def elastic(machine: Machine) -> Found:
    steps = 12 if machine.is_toy else 60
    more = (
        "--device",
        machine.pair,
        "--max-steps",
        str(steps),
        *LENGTH,
        "--restarts",
        "2",
        "--stall-s",
        "20",
    )
    run = machine.work / "restarted"
    with at_step(2, run, train_argv(machine, "restarted", *more)) as process:
        ranks = [pid for pid in descendants(process.pid or 0) if rank_of(pid) == 1]
        if not ranks:
            raise StageFailed("the run has no process of rank 1")
        at = newest_step(RunFolder(run))
        os.kill(ranks[0], signal.SIGKILL)
        killed_at_s = time.monotonic()
        process.join()
        elapsed_s = time.monotonic() - killed_at_s
    if process.exitcode:
        raise StageFailed(f"it ended with exit code {process.exitcode} after rank 1 was killed")
    results = checked_results(RunFolder(run))
    if results["steps"] != steps or not RunFolder(run).launcher_events.is_file():
        raise StageFailed(f"it ended after {results['steps']} of {steps} steps, or without a restart")
    return Found(f"killed after step {at}, went on by itself, all {steps} steps {elapsed_s:.0f} s later")


# -- features ----------------------------------------------------------------------------------------------------


def tune(machine: Machine) -> Found:
    argv = train_argv(machine, "study", "--trials", "2", "--epochs", "1")
    argv = [word for word in argv if word not in ("--no-plots", "--no-autoanchor")]
    at = argv.index("--set")
    command("tune", *argv[1:at], *argv[at + 2 :], "--device", machine.first(min(machine.devices, 2)))
    done = list((machine.work / "study").glob("trials/*/results.json"))
    if len(done) < 2:
        raise StageFailed(f"{len(done)} of 2 trials have results")
    return Found("2 trials")


# -- speed -------------------------------------------------------------------------------------------------------


def speed(
    model: str, *more: str, batch: int = 64, per_device: bool = False, count: int = 1, img: int = 640
) -> Callable[[Machine], Found]:
    """Return a stage that measures the parts of a training (``yolofleet bench train``).

    Args:
        batch: images of a step; with ``per_device`` for each device.
    """

    def run(machine: Machine) -> Found:
        step_images, pixels, micro, steps = batch * (count if per_device else 1), img, 16, 20
        if machine.memory_gib and machine.memory_gib < LARGE_GIB:
            micro = 4
        if machine.minutes >= 30:
            steps = 60
        network = model
        if machine.is_toy:
            step_images, pixels, micro, steps = 4 * count, 64, 2, 1
            network = machine.network
        size = [
            "--img",
            pixels,
            "--batch",
            step_images,
            "--nominal-batch",
            step_images,
            "--micro-batch",
            micro,
        ]
        toy = ["--workers", "0", "--threads", "1"] if machine.is_toy else []
        target = machine.work / "figures.json"
        where = [
            "--device",
            machine.first(count),
            "--precision",
            machine.precision,
            "--project",
            machine.work,
        ]
        options = [*size, *where, "--cache", "auto", "--steps", steps, "--json", target, *toy, *more]
        command("bench", "train", "--data", machine.data, "--model", network, *map(str, options))
        return speed_found(machine, json.loads(target.read_text(encoding="utf-8")), count)

    return run


def speed_found(machine: Machine, figures: Mapping[str, Any], count: int) -> Found:
    """Return the figures of ``bench train`` as a row of the tables, beside the goals."""
    parts = {part["name"]: part for part in figures["parts"]}
    found = ratios(figures)
    rate, setup, model = parts["whole run"]["rate"], figures["setup"], figures["model"]
    step_rate = parts["step"]["rate"]
    row = {
        "model": model,
        "devices": count,
        "batch": setup["step_images"],
        "precision": setup["precision"],
        "reduce": setup["reduce"],
        "img": figures["img"],
        "step_img_s": step_rate,
        "run_img_s": rate,
        "memory_gib": figures["device_memory_mib"] / 1024,
        "coco_train_s": COCO_IMAGES / rate,
        "coco_val_s": COCO_VAL_IMAGES / parts["validation"]["rate"],
        "ratios": found,
        "binds": figures["binds"],
    }
    missed = []
    if not machine.is_toy:
        missed = below(found, EXACT_FLOORS if setup["reduce"] == "exact" else FLOORS)
        goals = next((goals for name, goals in RATES.items() if name in machine.name), {})
        goal = goals.get(model, 0) * count
        if (
            figures["img"] == 640
            and setup["precision"] == "fp16"
            and setup["reduce"] == "fast"
            and step_rate < goal
        ):
            missed.append(f"step {step_rate:,.0f} img/s < {goal:,}")
    text = f"{step_rate:,.4g} img/s, loop / bare network {found['loop / bare network']:.2f}, {row['memory_gib']:.1f} GiB"
    return Found(text, row, missed)


def ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of ``FLOORS`` from the JSON of ``yolofleet bench train``."""
    parts = {part["name"]: part for part in figures["parts"]}
    return {
        "loader / step": parts["loader"]["rate"] / parts["step"]["rate"],
        "loop / bare network": figures["loop_of_bare_network"],
        "whole run / slower part": parts["whole run"]["share"],
        "validation / its forward passes": parts["validation"]["share"],
        "checkpoint / one write": parts["checkpoint"]["share"],
    }


def below(found: Mapping[str, float], floors: Mapping[str, float]) -> list[str]:
    """Return a text for each ratio under its floor."""
    return [f"{name} {found[name]:.2f} < {floor}" for name, floor in floors.items() if found[name] < floor]


# -- tests of the checkout ---------------------------------------------------------------------------------------


def gpu_tests(*names: str) -> Callable[[Machine], Found]:
    """Return a stage that runs files of ``tests/gpu``."""

    def run(machine: Machine) -> Found:
        from yolofleet.parallel.process import usable_cores

        jobs = min(6, usable_cores()) if importlib.util.find_spec("xdist") else 0
        argv = ["-q", "-m", "gpu", "-p", "no:cacheprovider", *(["-n", str(jobs)] if jobs > 1 else [])]
        argv += [
            "--rootdir",
            str(TESTS.parents[1]),
            "--timeout",
            "1800",
            "--basetemp",
            str(machine.work / "t"),
        ]
        paths = [str(TESTS / name) for name in names] or [str(TESTS)]
        echo(f"\n$ pytest {shlex.join([*argv, *paths])}")
        if machine.kind == "cpu":
            os.environ["YOLOFLEET_TEST_GPUS"] = "cpu"  # runs their bodies on CPUs
        process = copy_of_this_process(_pytest, [*argv, *paths])
        process.join()
        if process.exitcode:
            raise StageFailed(f"pytest ended with exit code {process.exitcode}")
        return Found("all passed, or skipped with a reason")

    return run


def _pytest(argv: list[str]) -> int:
    import pytest

    os.chdir(TESTS.parents[1])
    return int(pytest.main(argv))


# -- why a stage cannot run --------------------------------------------------------------------------------------


def no_processes(machine: Machine) -> str:
    if not machine.has_processes:
        return f"several processes cannot sum gradients of {machine.kind} devices"
    return "" if sys.platform == "linux" else "finds the processes in /proc, so it needs Linux"


def needs_devices(count: int) -> Callable[[Machine], str]:
    def unfit(machine: Machine) -> str:
        if count > 1 and not machine.has_processes:
            return no_processes(machine)
        return (
            ""
            if machine.devices >= count
            else f"needs {count} devices, {machine.device} has {machine.devices}"
        )

    return unfit


def no_tf32(machine: Machine) -> str:
    return "" if machine.has_tf32 else "needs an NVIDIA GPU with TensorFloat-32 (Ampere or newer)"


def no_bfloat16(machine: Machine) -> str:
    return "" if machine.has_bfloat16 else f"{machine.name} has no bfloat16"


def no_second_use(machine: Machine) -> str:
    if machine.kind == "cpu" or machine.devices < 2:
        return "stage fast16 has run two processes on one device"
    return no_processes(machine)


def no_optuna(machine: Machine) -> str:
    if not importlib.util.find_spec("optuna"):
        return f"needs Optuna: {install_hint('tune')}"
    return (
        "" if machine.has_processes else f"its trials are processes, which cannot use {machine.kind} devices"
    )


def not_on_cpus(machine: Machine) -> str:
    return "takes minutes on a CPU, and says nothing about a GPU" if machine.is_toy else ""


def no_tests(machine: Machine) -> str:
    if not TESTS.is_dir():
        return "needs a checkout: an installed package has no tests"
    if not (importlib.util.find_spec("pytest") and importlib.util.find_spec("pytest_timeout")):
        return "needs pytest and pytest-timeout: make env installs them"
    return "" if machine.kind in ("cpu", *KINDS) else f"the tests do not know {machine.kind} devices"


def _speed_on(count: int) -> list[Stage]:
    each = speed("yolov5l", batch=16, per_device=True, count=count)
    large = speed("yolov5s", batch=512, count=count)
    plural = "s" if count > 1 else ""
    return [
        Stage(f"epoch-{count}", "speed", f"yolov5l, 16 images a device, {count} device{plural}", 45, 4 + 6 * (count > 1),
              each, needs_devices(count)),
        Stage(f"batch512-{count}", "speed", f"yolov5s, steps of 512 images, {count} device{plural}", 45, 4 + 6 * (count > 1),
              large, lambda machine: needs_devices(max(count, 2))(machine)),
    ]  # fmt: skip


STAGES: tuple[Stage, ...] = (
    Stage("data", "numbers", "draw the images of all stages", 12, 1, make_data),
    Stage("overflow", "numbers", "an overflow in one layer leaves no trace after the next step", 12, 2, overflow),
    Stage("device-checks", "numbers", "each device against the CPU, resume with SGD, Adam, AdamW", 20, 5, device_checks),
    Stage("equal-bits", "numbers", "one process, several, unequal shares, DataParallel: equal weights", 60, 20, equal_bits),
    Stage("killed-rank", "failures", "one rank killed: the others end, the run resumes", 50, 20, killed_rank, no_processes),
    Stage("killed-run", "failures", "a run killed by SIGKILL ends with equal bits after --resume", 25, 7, killed_run),
    Stage("elastic", "failures", "one rank killed: the run goes on by itself", 60, 18, elastic, no_processes),
    Stage("passes", "features", "4 micro-batches in a pass against 1", 12, 5, passes),
    Stage("suppression", "features", "suppression (NMS) of a whole batch as on the CPU", 5, 1, suppression),
    Stage("optimizers", "features", "optimizers without fused kernels", 12, 2, optimizers),
    Stage("augment", "features", "--augment-on device", 15, 3, feature("--augment-on", "device")),
    Stage("val-overlap", "features", "--val-overlap", 15, 3, feature("--val-overlap")),
    Stage("batch-auto", "features", "--batch auto", 30, 3, feature("--batch", "auto", "--max-steps", "3")),
    Stage("tf32", "features", "--precision tf32", 12, 3, feature("--precision", "tf32"), no_tf32),
    Stage("bf16", "features", "--precision bf16", 12, 3, feature("--precision", "bf16"), no_bfloat16),
    Stage("fast16", "features", "--reduce fast16, two processes", 25, 9, feature("--reduce", "fast16", device="pair"),
          no_processes),
    Stage("shared", "features", "--device 0:2, two processes on one device", 25, 9,
          lambda machine: feature("--device", f"{machine.one}:2")(machine), no_second_use),
    Stage("sync-bn", "features", "--sync-bn, two processes", 25, 9, feature("--sync-bn", device="pair"), no_processes),
    Stage("tune", "features", "tune, two trials", 40, 12, tune, no_optuna),
    Stage("speed-n", "speed", "yolov5n", 35, 4, speed("yolov5n")),
    Stage("speed-s", "speed", "yolov5s", 35, 4, speed("yolov5s")),
    Stage("speed-l", "speed", "yolov5l", 45, 4, speed("yolov5l")),
    *(stage for count in (1, 2, 4, 8) for stage in _speed_on(count)),
    Stage("tests-steps", "tests", "tests/gpu/test_steps_on_gpus.py", 60, 240, gpu_tests("test_steps_on_gpus.py"), no_tests),
    Stage("speed-exact", "speed", "yolov5s with exact sums", 40, 4, speed("yolov5s", "--reduce", "exact")),
    Stage("speed-fp32", "speed", "yolov5s in fp32", 50, 4, speed("yolov5s", "--precision", "fp32")),
    Stage("speed-bf16", "speed", "yolov5s in bf16", 40, 4, speed("yolov5s", "--precision", "bf16"), no_bfloat16),
    Stage("speed-yolov3", "speed", "yolov3", 70, 10, speed("yolov3"), not_on_cpus),
    Stage("speed-ppyoloe", "speed", "ppyoloe-s", 45, 5, speed("ppyoloe-s"), not_on_cpus),
    Stage("compile", "features", "--compile", 240, 240, feature("--compile"), not_on_cpus),
    Stage("tests-runs", "tests", "tests/gpu: whole runs and failures", 400, 1200,
          gpu_tests("test_runs_on_gpus.py", "test_failures_on_gpus.py"), no_tests),
)  # fmt: skip
