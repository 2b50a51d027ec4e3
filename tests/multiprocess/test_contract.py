"""The fleet never changes the result: equal bits in exact mode for every partition, DataParallel included."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import events_of, in_ranks, killed_at_step, results, yolofleet
from fleet import on_fleet
from label_rows import shapes_of
from small_files import TINY

from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.input.sample import MicroBatch
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.runs.report.clock import Clock
from yolofleet.support.device_names import processes_of
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState
from yolofleet.training.step import train_step

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")

JOB = [
    "--img", "128", "--micro-batch", "2", "--batch", "16", "--nominal-batch", "16", "--reduce", "exact", "--no-plots",
]  # fmt: skip
YOLOV5 = ["--model", "yolov5n"]
FAMILIES = {
    "yolov5": YOLOV5,
    "yolov3": ["--model", "yolov3-tiny"],
    "darknet": ["--model", "darknet-yolov3-tiny"],
    "ppyoloe": ["--model", "ppyoloe-s", "--set", "assigner_switch=0.05"],  # both assigners within a few steps
}
ALONE: list[str] = ["--device", "cpu"]
FLEETS = {
    "two": ["--device", "cpu:2"],
    "three": ["--device", "cpu:3"],
    "four": ["--device", "cpu:4"],
    "7,1": ["--device", "cpu:2", "--shares", "7,1"],
    "1,5,2": ["--device", "cpu:3", "--shares", "1,5,2"],
    "4,2,2": ["--device", "cpu:3", "--shares", "4,2,2"],
    "dataparallel": ["--device", "cpu:2", "--parallel", "dp"],
    "dataparallel 1,3": ["--device", "cpu:2", "--parallel", "dp", "--shares", "1,3"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    make_shapes(folder / "shapes", images=48, val_images=4, img=128, seed=1)
    return folder


def trained(folder: Path, name: str, steps: int, *more: str) -> str:
    """SHA-256 of the averaged weights and batch-norm statistics after ``steps`` steps."""
    args: list[str | Path] = [
        "train",
        "--data",
        folder / "shapes" / "data.yaml",
        *JOB,
        "--epochs",
        "9",
        "--max-steps",
        str(steps),
    ]
    device = more[more.index("--device") + 1]
    if "--parallel" in more:  # all devices in one process
        in_ranks(folder, 1, *args, "--name", name, *more, device=device)
    else:
        in_ranks(folder, processes_of(device), *args, "--name", name, *more)
    return results(folder / "runs" / "train" / name)["weights_sha256"]


@pytest.mark.parametrize(
    ("family", "fleets"),
    [
        ("yolov5", ["1,5,2", "dataparallel"]),
        pytest.param("yolov3", ["7,1"], marks=pytest.mark.slow),  # blocks of yolov5, the loss of yolov5
        *(pytest.param(family, ["7,1"], marks=pytest.mark.slow) for family in ("darknet", "ppyoloe")),
        pytest.param("ppyoloe", ["1,5,2", "dataparallel"], marks=pytest.mark.slow),
    ],
)
def test_one_hash_for_one_unequal_and_dataparallel(folder: Path, family: str, fleets: list[str]) -> None:
    model = [*FAMILIES[family], "--img", "64", "--val-period", "0"]
    steps = 3 if family == "ppyoloe" else 2  # the third has the other assigner
    alone = trained(folder, f"{family} alone {fleets}", steps, *model, *ALONE)
    for name in fleets:
        assert trained(folder, f"{family} {name}", steps, *model, *FLEETS[name]) == alone, name


def test_shares_measure_each_rank_although_first_steps_have_one_micro_batch(folder: Path) -> None:
    job = ["--model", str(TINY), "--img", "64", "--val-period", "0"]
    job += ["--batch", "4", "--micro-batch", "4", "--nominal-batch", "16"]
    alone = trained(folder, "measured alone", 24, *job, *ALONE)
    assert trained(folder, "measured", 24, *job, *FLEETS["two"], "--shares", "auto") == alone
    measured = events_of(folder / "runs" / "train" / "measured", "shares")[0]
    assert sum(measured["micro_batches"]) == 4 and all(measured["seconds"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        *(("yolov5", name) for name in ("AdamW", "pytorch_optimizer:Lamb")),
        *((family, "SGD") for family in FAMILIES),
    ],
)
def test_one_hash_for_the_whole_matrix(folder: Path, family: str, optimizer: str) -> None:
    more = ["--optimizer", optimizer, *(["--set", "lr0=0.001"] if optimizer != "SGD" else [])]
    more += FAMILIES[family]
    case = f"{family} {optimizer}"
    alone = trained(folder, f"{case} alone", 20, *ALONE, *more)
    hashes = {name: trained(folder, f"{case} {name}", 20, *args, *more) for name, args in FLEETS.items()}
    print(f"\n{case}: {alone}")
    assert hashes == dict.fromkeys(FLEETS, alone)


@pytest.mark.slow
@needs_proc
def test_killed_three_times_and_resumed_on_fewer_processes_gives_the_hash_of_one(folder: Path) -> None:
    """4 -> 3 -> 2 -> 1 processes, killed in mid-epoch at random steps (an epoch is 3 steps of 16 images)."""
    args = [
        "--data",
        folder / "shapes" / "data.yaml",
        *YOLOV5,
        *JOB,
        *("--epochs", "4", "--save-every", "1steps"),
    ]
    kill_chain(folder, args, random.Random(11), steps=range(1, 4))


@pytest.mark.slow
def test_killed_three_times_at_the_size_of_the_demo(folder: Path) -> None:
    make_shapes(folder / "demo", seed=0)
    args = [
        "--data",
        folder / "demo" / "data.yaml",
        *DEMO_JOB,
        *("--reduce", "exact", "--save-every", "37steps"),
    ]
    kill_chain(folder, args, random.Random(5), steps=range(80, 300), name="demo")


DEMO_JOB = [
    "--model", "yolov5n", "--recipe", "demo", "--img", "160", "--batch", "16", "--nominal-batch", "16",
    "--micro-batch", "4", "--epochs", "24", "--no-plots",  # so that each of four processes has work
]  # fmt: skip


def kill_chain(folder: Path, args: list, chance: random.Random, *, steps: range, name: str = "small") -> None:
    """A run that is never killed; another that is, each time ``steps`` later; equal hashes."""
    yolofleet(folder, "train", *args, "--name", f"{name} whole", "--device", "cpu", deadline_s=3000)
    run, step = folder / "runs" / "train" / f"{name} chain", 0
    args = ["train", *args, "--name", run.name, "--resume", "auto"]
    for processes in (4, 3, 2):
        step += chance.choice(steps)
        killed_at_step(folder, step, run, *args, "--device", f"cpu:{processes}", then_s=chance.random())
        assert not (run / "results.json").exists(), "it was to die before the end"
    said = yolofleet(folder, *args, "--device", "cpu", deadline_s=3000).out
    assert "the fleet changed: processes was 2, is 1" in said
    whole = results(run.with_name(f"{name} whole"))
    print(f"\n{name}: {whole['weights_sha256']} mAP50 {whole['metrics']['mAP50']:.3f}")
    assert results(run)["weights_sha256"] == whole["weights_sha256"]
    assert results(run)["metrics"] == whole["metrics"]


SHARES = [(3.0, 1.0), (4.0, 0.0, 2.0)]
STEP_MICRO_BATCHES, IMAGES, IMG = 6, 2, 64


class CountedElsewhere(World):
    """One process that is told what the other micro-batches' counts are."""

    others: torch.Tensor

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor[: len(self.others)] += self.others  # the rest are requests
        return tensor


def gradient_of_a_step(
    world: World, shares: tuple[float, ...], only: int | None = None
) -> list[torch.Tensor]:
    """Of yolov5n over six micro-batches, in float32; with ``only``, that micro-batch's part.

    On one thread: with several, kernels may round differently from call to call, and a tie in max-pooling that turns moves
    the gradient by 1e-4, whatever the fleet.
    """
    torch.set_num_threads(1)
    recipe = Yolov5Hyperparameters()
    model = build_model(describe("yolov5n"), 3).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]  # torch's stub lacks memory_format
    replicas = Replicas.build(model, [world.device], world, synced=False)
    state = TrainState.build(replicas, recipe, optimizer="SGD", weight_decay=0.0, precision="fp32")
    loss = Yolov5Loss(anchors_px=model.anchors_px, strides=model.strides, nc=3, recipe=recipe, img=IMG)
    rng = np.random.default_rng(5)
    made = []
    for v in range(STEP_MICRO_BATCHES):
        image, classes = np.sort(rng.integers(0, IMAGES, 5)), rng.integers(0, 3, 5)
        labels = shapes_of(np.column_stack([image, classes, rng.uniform(0.2, 0.8, (5, 4))]))
        images = torch.from_numpy(rng.integers(0, 256, (IMAGES, IMG, IMG, 3), dtype=np.uint8)).permute(
            0, 3, 1, 2
        )
        made.append(MicroBatch(0, v, images, labels, loss.match(labels, IMAGES, (IMG, IMG))))
    mine = [made[v] for v in Partition(shares).ranges(STEP_MICRO_BATCHES)[world.rank]]
    if only is not None:
        mine = [made[only]]
        world = CountedElsewhere(0, 1, 0, 1, world.device)
        world.others = sum(
            (torch.from_numpy(mb.targets.counts) for mb in made if mb is not made[only]), torch.tensor(0)
        )
    plan = StepPlan(0, 0, STEP_MICRO_BATCHES * IMAGES, 0.0, 0.0, 0.9)
    train_step(
        state, plan, [mine], loss, world, Clock(),
        total_micro_batches=STEP_MICRO_BATCHES, precision="fp32", clip_norm=0.0,
    )  # fmt: skip
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def same_threads() -> Iterator[None]:
    """Give the process its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
def test_fast_gradients_equal_one_process_to_rounding(tmp_path: Path) -> None:
    one = gradient_of_a_step(World.single(), (1.0,))
    parts = [gradient_of_a_step(World.single(), (1.0,), only=v) for v in range(STEP_MICRO_BATCHES)]
    whole = torch.cat([g.flatten() for g in one])
    worst = worst_tensor = 0.0
    for shares in SHARES:
        for grads in on_fleet(len(shares), tmp_path, gradient_of_a_step, shares):
            off = torch.cat([g.flatten() for g in grads]) - whole
            worst = max(worst, float(off.norm() / whole.norm()))
            for i, (g, expected) in enumerate(zip(grads, one, strict=True)):
                size = sum(float(part[i].norm()) for part in parts)
                worst_tensor = max(worst_tensor, float((g - expected).norm()) / max(size, 1e-12))
    print(f"\ngradient: {worst:.2e}, worst tensor: {worst_tensor:.2e}")
    assert worst <= 1e-6
    assert worst_tensor <= 1e-6
