"""Check the contract "the fleet never changes the result" on a user's own devices.

The self-test trains the same few steps several times ("legs"): in one process, in one process again, in several
processes, in several with uneven shares, and with DataParallel. With exact sums every leg must end with the same bits.
With fast sums, on the same kernels, the first update may differ by the rounding of a float32 sum. A last leg uses the
default kernels of a run, and so shows what exact sums cost.

The legs are real runs, which ``contract.py`` starts. This module plans them, reads their results, and judges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from yolofleet.config.schema.verbs import SelftestConfig
from yolofleet.data.datasets.shapes import NAMES, make_shapes
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot, load_snapshot
from yolofleet.runs.report.clock import TRAINING
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support import devices
from yolofleet.support.device_names import ALL, processes_of
from yolofleet.support.errors import NumericsError

MICRO_BATCH = 2  # images
LEAST_MICRO_BATCHES = 8  # of a step
ROUNDING = 1e-5  # of the first update and losses, with equal kernels; measured: 5e-7 for 8 micro-batches


@dataclass(frozen=True)
class Leg:
    """One run.

    Attributes:
        kind: ``exact``: must give the reference's bits; ``fast``: fast sums on the kernels of exact mode, may
            differ by rounding; ``default``: fast sums on the default kernels, shown but not judged.
    """

    kind: Literal["exact", "fast", "default"]
    name: str
    device: str
    devices: int = 1
    parallel: Literal["ddp", "dp"] = "ddp"
    shares: str = ""

    @property
    def processes(self) -> int:
        return 1 if self.parallel == "dp" else self.devices

    @property
    def title(self) -> str:
        return f"{self.kind}: {self.name}"


def fleet_of(device: str) -> str:
    """Return the devices to check: all CUDA devices for ``auto``; two processes if there is only a CPU.

    Raises:
        ConfigError: this machine does not have a device.
    """
    if device == ALL or (device == "auto" and devices.accelerator() == "cuda"):
        device = devices.all_devices()
    if device in ("auto", "cpu", "cpu:1"):
        device = "cpu:2"
    devices.device_of(device, 0)
    return device


def plan(device: str) -> list[Leg]:
    """Return the legs for the devices of :func:`fleet_of`. The first one is the reference.

    A single device can only be compared with itself.
    """
    alone, devices = lone_devices(device)[0], processes_of(device)
    uneven = ",".join("31"[i % 2] for i in range(devices))
    one, many, dp = "one process", f"{devices} processes", "DataParallel"
    spread = f"{many}, shares {uneven}"
    legs = [
        Leg("exact", one, alone),
        Leg("exact", f"{one} again", alone),
        Leg("exact", many, device, devices),
        Leg("exact", spread, device, devices, shares=uneven),
        Leg("exact", dp, device, devices, parallel="dp"),
        Leg("fast", one, alone),
        Leg("fast", spread, device, devices, shares=uneven),
        Leg("fast", dp, device, devices, parallel="dp"),
        Leg("default", many, device, devices),
    ]
    if devices > 1:
        return legs
    return [*(leg for leg in legs if leg.name.startswith(one)), Leg("default", one, alone)]


def lone_devices(device: str) -> list[str]:
    """Return the devices one by one: ``0,1`` -> 0 and 1. A device may have several processes, as ``cpu:2`` and ``0:2``."""
    return [part.partition(":")[0] for part in device.split(",")]


def further_legs(records: Sequence[Record]) -> list[Leg]:
    """Return legs that help to find a cause if several GPUs together gave other bits: each other GPU alone."""
    reference = records[0].leg
    fleet = max((r.leg for r in records), key=lambda leg: leg.devices)
    if not any(is_broken(r, records[0]) and r.leg.devices > 1 and not r.problem for r in records):
        return []
    others = [d for d in lone_devices(fleet.device) if d != reference.device]
    return [Leg("exact", f"one process on device {d}", d) for d in others]


# -- results of a leg ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A leg's result, compared with the reference.

    Attributes:
        sha256: of the weights at the end.
        update_difference: ||w - w_ref|| / ||w_ref - w_start|| after the first step. Later steps amplify any
            difference 30-fold and more each: a network with fresh weights is chaotic.
        loss_difference: largest relative difference of a loss term of the first step.
        step_s: seconds a step of rank 0, without the first.
        reported: kernels, versions and data that the run reports, by name.
        problem: why the run did not finish; the other attributes are unknown then.
    """

    leg: Leg
    sha256: str = ""
    update_difference: float = math.nan
    loss_difference: float = math.nan
    step_s: float = math.nan
    reported: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


class Comparison:
    """What all legs share (data, settings, initial weights), and the reference.

    Args:
        folder: for the images.
    Raises:
        ConfigError: the model does not exist.
        OSError: the disk refused.
    """

    def __init__(self, config: SelftestConfig, legs: Sequence[Leg], folder: Path) -> None:
        self.config = config
        self.step_images = MICRO_BATCH * max(LEAST_MICRO_BATCHES, 2 * max(leg.devices for leg in legs))
        model = build_model(describe(config.model), len(NAMES))
        self.start = {name: p.detach() for name, p in model.named_parameters()}
        # an epoch has one and a half steps, so that steps cross the border of epochs
        self.data = make_shapes(
            folder / "shapes", images=self.step_images * 3 // 2, val_images=2, img=config.img
        )
        self.reference: tuple[dict[str, Tensor], list[float]] | None = None

    @property
    def text(self) -> str:
        c = self.config
        return f"{c.model}, {c.steps} steps of {self.step_images} images at {c.img} px"

    def settings_of(self, leg: Leg) -> dict[str, Any]:
        """Return the training settings of a leg, by name. They differ only in where it runs and how it sums."""
        equal_kernels = leg.kind != "default"
        return {
            "data": str(self.data),
            "model": self.config.model,
            "img": self.config.img,
            "precision": self.config.precision,
            "max_steps": self.config.steps,
            "epochs": 1000,
            "micro_batch": MICRO_BATCH,
            "batch": self.step_images,
            "nominal_batch": self.step_images,
            "set": ("warmup_epochs=0",),  # warm-up begins at a rate of 0, which would hide all differences
            "device": leg.device,
            "parallel": leg.parallel,
            "shares": leg.shares,
            "reduce": "exact" if leg.kind == "exact" else "fast",
            "threads": 1 if equal_kernels else 0,
            "deterministic": equal_kernels,
            # larger passes would get other kernels on a GPU, where several micro-batches pass together by default
            "micro_batches_per_pass": 1 if equal_kernels else 0,
            "workers": 0,
            "save_every": ("0", "1steps"),
            "keep_last": self.config.steps,
            "val_period": 0,
            "autoanchor": False,
            "plots": False,
        }

    def read(self, leg: Leg, folder: RunFolder, problem: str = "") -> Record:
        """Return the results in a leg's run folder.

        Raises:
            CheckpointError: its checkpoints are damaged.
            NumericsError: the reference's first step changed nothing.
        """
        if problem:
            return Record(leg, problem=problem)
        entries = CheckpointStore(folder.checkpoints).entries()
        first, last = load_snapshot(entries[-1].path), load_snapshot(entries[0].path)
        weights = {name: first.tensors[f"model/{name}"] for name in self.start}
        progress = first.values["progress"]
        losses = [term / progress["epoch_images"] for term in progress["epoch_terms"]]
        if self.reference is None:
            self.reference = weights, losses
        weights_ref, losses_ref = self.reference
        moved = distance(weights_ref, self.start)
        if not moved > 0:
            raise NumericsError(
                "the first step left the weights as they were (fp16 overflow): there is nothing to compare",
                hint="--precision fp32, or bf16",
            )
        results = json.loads(folder.results_json.read_text(encoding="utf-8"))
        fingerprint = last.values["fingerprint"]
        return Record(
            leg,
            sha256=results["weights_sha256"],
            update_difference=distance(weights, weights_ref) / moved,
            loss_difference=max(
                abs(mine - theirs) / max(abs(theirs), 1e-12)
                for mine, theirs in zip(losses, losses_ref, strict=True)
            ),
            step_s=(training_s(last) - training_s(first)) / (last.step - first.step),
            reported={
                **{name: value for name, value in fingerprint["kernels"].items() if name != "reduce"},
                **results["versions"],
                "data": fingerprint["data"],
            },
        )


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the 2-norm of the difference, summed in float64."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def training_s(snapshot: Snapshot) -> float:
    """Return the seconds of data, compute and communication up to a checkpoint."""
    total_s: float = sum(
        part["seconds"][phase] for part in snapshot.values["clock"].values() for phase in TRAINING
    )
    return total_s


# -- the verdict ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    what: str
    hint: str


@dataclass(frozen=True)
class Verdict:
    """The result of all legs; ``cause`` is None if the contract holds."""

    text: str
    cause: Cause | None = None


def is_broken(record: Record, reference: Record) -> bool:
    """Return whether a leg breaks the contract."""
    if record.problem:
        return True
    if record.leg.kind == "exact":
        return record.sha256 != reference.sha256
    if record.leg.kind == "fast":  # NaN breaks it too
        return not (record.update_difference <= ROUNDING and record.loss_difference <= ROUNDING)
    return False


def judge(records: Sequence[Record]) -> Verdict:
    """Return whether the contract holds; if not, the likely cause.

    Args:
        records: of all legs. The first is the reference, and it has no problem.
    """
    exact, fast = ([r for r in records if r.leg.kind == kind] for kind in ("exact", "fast"))
    broken = [r for r in records if is_broken(r, records[0])]
    if not broken:
        largest = max(max(r.update_difference, r.loss_difference) for r in fast)
        return Verdict(
            f"the contract holds here: {len(exact)} exact runs, one SHA-256; fast sums are off by at most "
            f"{largest:.0e}, as rounding is (limit {ROUNDING:.0e})"
        )
    parts = []
    for record in broken:
        if record.problem:
            how = "did not get to its end"
        elif record.leg.kind == "exact":
            how = f"{short(record.sha256)} instead of {short(records[0].sha256)}"
        else:
            off = max(record.update_difference, record.loss_difference)
            how = f"off by {off:.0e}, more than rounding"
        parts.append(f"{record.leg.title} ({how})")
    return Verdict(f"the fleet changed the result: {'; '.join(parts)}", cause_of(records, broken))


def short(sha256: str) -> str:
    return sha256[:12]


def cause_of(records: Sequence[Record], broken: Sequence[Record]) -> Cause:
    """Return the likeliest cause: a value that runs report differently, else the pattern of the broken legs."""
    reference = records[0]
    for record in (r for r in broken if not r.problem):
        unlisted = {*reference.reported, *record.reported} - MEANINGS.keys()
        for name in (*MEANINGS, *sorted(unlisted)):
            then, now = reference.reported.get(name), record.reported.get(name)
            if then != now:
                text, hint = MEANINGS.get(name, ("the runs report different things", REPORT))
                return Cause(f"{text}: {name} is {now} in {record.leg.title}, {then} in the reference", hint)
    legs = [record.leg for record in broken if not record.problem]
    lone = [leg for leg in legs if leg.devices == 1 and leg.kind == "exact"]
    if any(leg.device == reference.leg.device for leg in lone):
        settings = ", ".join(
            f"{name} {reference.reported.get(name)}" for name in ("deterministic", "threads")
        )
        return Cause(
            f"a kernel is not deterministic: one process alone gives other weights when it runs again ({settings})",
            "--precision fp32; another torch build or driver; then test this machine's memory",
        )
    if lone:
        ids = ", ".join(leg.device for leg in lone)
        return Cause(
            f"device {ids} alone gives other weights than device {reference.leg.device}, under the same name",
            f"leave device {ids} out, and test it",
        )
    for record in broken:
        if record.problem:
            return Cause(f"{record.leg.title}: {record.problem.splitlines()[0]}", SEE_JSON)
    if all(leg.parallel == "dp" for leg in legs):
        return Cause(
            "only DataParallel differs: results depend on the thread that computes", "--parallel ddp"
        )
    if all(leg.kind == "fast" for leg in legs):
        return Cause("only fast sums differ: float32 sums are off by more than rounding", "--reduce exact")
    if all(leg.processes > 1 for leg in legs):
        return Cause(
            "only several processes differ, each alone does not: what one sends is not what another receives",
            "check the connection; NCCL_P2P_DISABLE=1 leaves out direct transfers between GPUs",
        )
    return Cause("not known: all runs report the same about themselves", REPORT)


SEE_JSON = "--json FILE has all of its last words"
REPORT = "please report it with what --json FILE writes"
MEANINGS = {  # a value that runs report -> meaning of a difference, and what to do; the likeliest first
    "device": (
        "mixed hardware",
        "equal bits need equal devices (and no ATEN_CPU_CAPABILITY or the like); mixed ones: --reduce fast",
    ),
    "threads": ("different numbers of threads", "--threads 1 everywhere"),
    "torch": ("different builds of torch", "install the same one everywhere"),
    "cuda": ("different versions of CUDA", "install the same build of torch everywhere"),
    "cudnn": ("different versions of cuDNN", "install the same build of torch everywhere"),
    "deterministic": ("not all runs use deterministic kernels", "--deterministic"),
    "tf32": ("TF32 is not the same in all runs", "unset NVIDIA_TF32_OVERRIDE"),
    "data": ("the images are not the same", "install the same numpy and OpenCV everywhere"),
}
