"""The stages of ``make test-gpu STAGES=all N``, in the order of their importance, and how each one is judged.

A stage runs in a process of its own (``minutes.py`` starts and ends it). It either runs command lines of yolofleet,
each in a copy of that process, or computes on the device itself. It must not do both, because a process that has used
CUDA cannot be forked. A stage returns a :class:`Found`, and raises any exception if it fails.

Seconds are estimates, some of them from one H200: nobody has run all stages on a GPU. Goals of speed are estimates too, so a stage that misses one has
not failed.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_check import failures, numbers
from gpu_check.machine import KINDS, Found, Machine, StageFailed
from gpu_check.processes import command
from gpu_check.runs import train_argv, trained
from gpu_check.speed import speed
from yolofleet.measure.selftest.contract import copy_of_this_process
from yolofleet.support.errors import ConfigError, install_hint
from yolofleet.support.text import did_you_mean, echo, shown

Group = Literal["numbers", "failures", "features", "speed", "tests"]
GROUPS: tuple[Group, ...] = ("numbers", "failures", "features", "speed", "tests")
TESTS = Path(__file__).parents[1] / "gpu"


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


def feature(*more: str, device: str = "one") -> Callable[[Machine], Found]:
    """Return a stage that trains with some options."""

    def run(machine: Machine) -> Found:
        results = trained(machine, "run", "--device", getattr(machine, device), *more)
        return Found(f"{results['steps']} steps, loss {results['loss']:.4g}", {"loss": results["loss"]})

    return run


def shared(machine: Machine) -> Found:
    """Train each family in processes that share a device, with unequal shares; all must end with the bits of one process."""
    networks = (machine.network,) if machine.is_toy else ("yolov5n", "yolov3-tiny", "ppyoloe-s")
    for network in networks:
        name, common = Path(network).stem, ("--model", network, "--reduce", "exact", "--max-steps", "4")
        one = trained(machine, f"{name}-1", *common)["weights_sha256"]
        for processes, shares in ((2, "3,1"), (3, "4,2,1")):
            more = ("--device", machine.shared_by(processes), "--shares", shares)
            if trained(machine, f"{name}-{processes}", *common, *more)["weights_sha256"] != one:
                raise StageFailed(f"{name}: {processes} processes on one device have other weights than one")
    return Found(f"1, 2 and 3 processes have equal weights, {len(networks)} networks")


def tune(machine: Machine) -> Found:
    argv = train_argv(machine, "study", "--trials", "2", "--epochs", "1")
    argv = [arg for arg in argv if arg not in ("--no-plots", "--no-autoanchor")]
    at = argv.index("--set")
    command("tune", *argv[1:at], *argv[at + 2 :], "--device", machine.first(min(machine.devices, 2)))
    results = list((machine.work / "study").glob("trials/*/results.json"))
    if len(results) < 2:
        raise StageFailed(f"{len(results)} of 2 trials have results")
    return Found("2 trials")


def gpu_tests(*names: str) -> Callable[[Machine], Found]:
    """Return a stage that runs files of ``tests/gpu``."""

    def run(machine: Machine) -> Found:
        from yolofleet.training.parallel.process import usable_cores

        jobs = min(6, usable_cores()) if importlib.util.find_spec("xdist") else 0
        # -vv against the -q of pyproject.toml: the log names each test as it ends, also if the stage is cut
        argv = ["-vv", "-m", "gpu", "-p", "no:cacheprovider", *(["-n", str(jobs)] if jobs > 1 else [])]
        argv += [
            "--rootdir",
            str(TESTS.parents[1]),
            "--timeout",
            "1800",
            "--basetemp",
            str(machine.work / "t"),
        ]
        argv += [str(TESTS / name) for name in names]
        echo(f"\n$ pytest {shlex.join(argv)}")
        if machine.kind == "cpu":
            os.environ["YOLOFLEET_TEST_GPUS"] = "cpu"  # runs their bodies on CPUs
        process = copy_of_this_process(_pytest, argv)
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
        has = f"{machine.device} has {machine.devices}"
        return "" if machine.devices >= count else f"needs {count} devices, {has}"

    return unfit


def no_tf32(machine: Machine) -> str:
    return "" if machine.has_tf32 else "needs an NVIDIA GPU with TensorFloat-32 (Ampere or newer)"


def no_bfloat16(machine: Machine) -> str:
    return "" if machine.has_bfloat16 else f"{machine.name} has no bfloat16"


def no_optuna(machine: Machine) -> str:
    if not importlib.util.find_spec("optuna"):
        return f"needs Optuna: {install_hint('tune')}"
    return (
        "" if machine.has_processes else f"its trials are processes, which cannot use {machine.kind} devices"
    )


def not_on_cpus(machine: Machine) -> str:
    return "takes minutes on a CPU, and says nothing about a GPU" if machine.is_toy else ""


def no_tests(machine: Machine) -> str:
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
    Stage("data", "numbers", "draw the images of all stages", 10, 1, numbers.make_data),
    Stage("overflow", "numbers", "an overflow in one layer leaves no trace after the next step", 6, 2, numbers.overflow),
    Stage("device-checks", "numbers", "each device against the CPU, resume with SGD, Adam, AdamW", 8, 5, numbers.device_checks),
    Stage("equal-bits", "numbers", "one process, several, unequal shares, DataParallel: equal weights", 30, 20, numbers.equal_bits),
    Stage("killed-rank", "failures", "one rank killed: the others end, the run resumes", 20, 20, failures.killed_rank, no_processes),
    Stage("killed-run", "failures", "a run killed by SIGKILL ends with equal bits after --resume", 25, 7, failures.killed_run),
    Stage("elastic", "failures", "one rank killed: the run goes on by itself", 60, 18, failures.elastic, no_processes),
    Stage("passes", "features", "4 micro-batches in a pass against 1", 15, 5, numbers.passes),
    Stage("suppression", "features", "suppression (NMS) of a whole batch as on the CPU", 3, 1, numbers.suppression),
    Stage("optimizers", "features", "optimizers without fused kernels", 6, 2, numbers.optimizers),
    Stage("val-overlap", "features", "--val-overlap", 15, 3, feature("--val-overlap")),
    Stage("batch-auto", "features", "--batch auto", 15, 3, feature("--batch", "auto", "--max-steps", "3")),
    Stage("tf32", "features", "--precision tf32", 20, 3, feature("--precision", "tf32"), no_tf32),
    Stage("bf16", "features", "--precision bf16", 20, 3, feature("--precision", "bf16"), no_bfloat16),
    Stage("fast16", "features", "--reduce fast16, two processes", 25, 9, feature("--reduce", "fast16", device="pair"),
          no_processes),
    Stage("shared", "features", "two and three processes on one device: the weights of one", 100, 25, shared, no_processes),
    Stage("sync-bn", "features", "--sync-bn, two processes", 25, 9, feature("--sync-bn", device="pair"), no_processes),
    Stage("tune", "features", "tune, two trials", 25, 12, tune, no_optuna),
    Stage("speed-n", "speed", "yolov5n", 20, 4, speed("yolov5n")),
    Stage("speed-s", "speed", "yolov5s", 22, 4, speed("yolov5s")),
    Stage("speed-l", "speed", "yolov5l", 40, 4, speed("yolov5l")),
    *(stage for count in (1, 2, 4, 8) for stage in _speed_on(count)),
    Stage("tests-steps", "tests", "tests/gpu/test_steps_on_gpus.py", 60, 240, gpu_tests("test_steps_on_gpus.py"), no_tests),
    Stage("speed-exact", "speed", "yolov5s with exact sums", 40, 4, speed("yolov5s", "--reduce", "exact")),
    Stage("speed-fp32", "speed", "yolov5s in fp32", 50, 4, speed("yolov5s", "--precision", "fp32")),
    Stage("speed-bf16", "speed", "yolov5s in bf16", 40, 4, speed("yolov5s", "--precision", "bf16"), no_bfloat16),
    Stage("speed-yolov3", "speed", "yolov3", 70, 10, speed("yolov3"), not_on_cpus),
    Stage("speed-ppyoloe", "speed", "ppyoloe-s", 45, 5, speed("ppyoloe-s"), not_on_cpus),
    Stage("compile", "features", "--passes compiled", 240, 240, feature("--passes", "compiled"), not_on_cpus),
    Stage("tests-runs", "tests", "tests/gpu: whole runs and failures", 400, 1200,
          gpu_tests("test_runs_on_gpus.py", "test_failures_on_gpus.py"), no_tests),
)  # fmt: skip


def chosen(names: str) -> list[Stage]:
    """Return the stages of ``--stages``: names of stages and of groups, separated by commas; "" = all.

    Raises:
        ConfigError: there is no such stage.
    """
    wanted = [name for name in names.split(",") if name]
    known = [*GROUPS, *(stage.name for stage in STAGES)]
    for name in wanted:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(
                f"--stages {shown(name)}: there is no such stage or group",
                hint=near or f"groups: {', '.join(GROUPS)}; docs/doctor.md lists the stages",
            )
    return [stage for stage in STAGES if not wanted or stage.name in wanted or stage.group in wanted]
