"""Check one device against the CPU with short trainings, without a data set or a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from yolofleet.config.schema import Recipe
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.build import build_model, family_loss, family_of
from yolofleet.families.networks.description import describe
from yolofleet.families.weights.format import non_finite
from yolofleet.measure.steps import random_micro_batch
from yolofleet.runs.checkpoint.store import Snapshot
from yolofleet.runs.report.clock import Clock
from yolofleet.support.devices import device_of, float32_products, is_host, select
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState
from yolofleet.training.step import NanRule, train_step

MODEL, CLASSES, IMG, IMAGES = "yolov5n", 4, 64, 4
STEPS = 10
LR = 0.001
SAME_LOSS = 1e-3  # relative; weights that differ by 1e-6 change the loss of ten such steps by at most 7e-6
OPTIMIZERS = ("SGD", "Adam", "AdamW")


class Training:
    """Train a network on random images on ``device``. Every instance has the same initial weights."""

    def __init__(
        self,
        device: torch.device,
        *,
        optimizer: str = "SGD",
        precision: str = "fp32",
    ) -> None:
        self.precision, self.world = precision, World.single(device)
        description = describe(MODEL)
        recipe: Recipe = family_of(description).hyperparameters()
        network = build_model(description, CLASSES).to(device).train()
        self.loss = family_loss(network, recipe, IMG)
        replicas = Replicas.build(network, [device], self.world, synced=False)
        self.state = TrainState.build(
            replicas, recipe, optimizer=optimizer, weight_decay=recipe.weight_decay, precision=precision
        )

    def steps(self, count: int) -> float:
        """Train for some steps. Return the loss of the last one."""
        for _ in range(count):
            plan = StepPlan(self.state.step, self.state.step * IMAGES, IMAGES, LR, LR, 0.9)
            seed, device = self.state.step, self.world.device
            rng = np.random.default_rng(seed)
            parts = [(rng.integers(0, CLASSES, 8), rng.uniform(0.2, 0.6, (8, 4))) for _ in range(IMAGES)]
            labels = Shapes.of_images([Shapes.of_image(*part) for part in parts])
            batch = random_micro_batch(self.loss, device, labels, IMAGES, IMG, seed=seed)
            report = train_step(
                self.state,
                plan,
                [[batch]],
                self.loss,
                self.world,
                Clock(),
                total_micro_batches=1,
                precision=self.precision,
                clip_norm=10.0,
                nan_rule=NanRule(skips=3),
            )
        return float(report.terms.sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the whole state, on the CPU."""
        return dict(self.state.snapshot({}).tensors)


def learns_as_the_cpu(device: torch.device) -> str:
    """Check that ten steps in float32 end at the CPU's loss. Return the difference."""
    with float32_products(device, tf32=False):
        loss, cpu_loss = (Training(where).steps(STEPS) for where in (device, torch.device("cpu")))
    off = abs(loss / cpu_loss - 1)
    assert off <= SAME_LOSS, f"loss {loss:.5g} after {STEPS} steps, {cpu_loss:.5g} on the CPU"
    return f"loss off by {off:.1e} after {STEPS} steps"


def survives_an_overflow(device: torch.device) -> str:
    """Check that an overflow in the first fp16 step changes nothing, and that the next steps are finite."""
    training = Training(device, precision="fp16")
    before = training.tensors()
    training.state.scaler.load_state_dict({"scale": 2.0**126, "_growth_tracker": 0})
    training.steps(1)
    after = training.tensors()
    changed = [name for name, t in before.items() if not torch.equal(t, after[name])]
    assert not changed, f"a step that overflowed changed {len(changed)} tensors, first {changed[0]}"
    training.state.scaler.load_state_dict({"scale": 256.0, "_growth_tracker": 0})
    loss = training.steps(3)
    broken = non_finite(training.tensors())
    assert not broken, f"{len(broken)} tensors are not finite after an overflow, first {broken[0]}"
    return f"loss {loss:.4g} three steps later"


def resumes(device: torch.device, optimizer: str) -> str:
    """Check that a restored state equals the saved one, and that training continues from it."""
    first = Training(device, optimizer=optimizer)
    first.steps(2)
    saved: Snapshot = first.state.snapshot({})
    second = Training(device, optimizer=optimizer)
    second.state.restore(saved)
    restored = second.tensors()
    differ = [name for name, t in saved.tensors.items() if not torch.equal(t, restored[name])]
    assert not differ, f"{len(differ)} restored tensors differ, first {differ[0]}"
    unbroken, resumed = first.steps(1), second.steps(1)
    assert abs(unbroken / resumed - 1) <= SAME_LOSS, (
        f"the next loss is {resumed:.5g}, without a break {unbroken:.5g}"
    )
    return f"{len(restored)} tensors"


def checks_of(device: torch.device) -> dict[str, Callable[[], str]]:
    """Return the checks that apply to ``device``, by name."""
    found: dict[str, Callable[[], str]] = {}
    if not is_host(device):
        found["ten steps as on the CPU"] = lambda: learns_as_the_cpu(device)
        found["fp16 overflow in the first step"] = lambda: survives_an_overflow(device)
    for optimizer in OPTIMIZERS:
        found[f"resume with {optimizer}"] = lambda optimizer=optimizer: resumes(device, optimizer)  # type: ignore[misc]
    return found


def run_checks(device: torch.device) -> Iterator[dict[str, Any]]:
    """Run all checks of a device, one after another. An error is a failed check.

    Yields:
        name, passed, and detail: a measured value, or what failed.
    """
    select(device)
    for name, check in checks_of(device).items():
        try:
            yield {"name": name, "passed": True, "detail": check()}
        except Exception as problem:  # also any error of a driver
            detail = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
            yield {"name": name, "passed": False, "detail": detail}


def send_checks(device: str, sender: Connection) -> int:
    """Run the checks of one device, and send each when it has ended."""
    torch.set_num_threads(1)
    for check in run_checks(device_of(device, 0)):
        sender.send(check)
    return 0
