"""What exact sums cost, and what our path of gradients costs against PyTorch's DistributedDataParallel.

    python benchmarks/reduction.py step --sizes 1,2,4 --links local,1gbit,100mbit     # needs root for links
    python benchmarks/reduction.py speedup --links 1gbit,100mbit

*step* takes whole training steps of a model (loss, clipping, SGD, moving average) on fixed random images in
three ways, turn by turn in the same processes: ``fast`` and ``exact`` are ``train_step`` with either wire;
``ddp`` is a plain loop around DistributedDataParallel (gradients as views of its buckets, no broadcast of
buffers, ``no_sync`` for all but the last micro-batch) with the same network, loss, clipping, optimizer and
average. Every rank has one thread. A step's time is that of its slowest rank, from a barrier on.

*speedup* compares steps of two ranks, over a link, with the same steps on one rank.

Links are those of ``links.py``; ``local`` is the loopback interface, whose bytes are not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from links import INTERFACE, address_of, machines, sent_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.sample import MicroBatch
from yolofleet.families.build import build_model, family_loss, family_of
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import Detector
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.runs.report.clock import Clock
from yolofleet.support.place import place_from_environment
from yolofleet.training.ema import MovingAverage
from yolofleet.training.optimiser import build_optimizer
from yolofleet.training.parallel.process import set_kernels
from yolofleet.training.parallel.replicas import Reduce, Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState
from yolofleet.training.step import train_step

EXACT = TrainConfig(data="shapes", reduce="exact")  # what the trainer sets for exact sums
WARM_UP = 3  # rounds that are left out
UNEVEN = {1: (2,), 2: (5, 3), 3: (3, 3, 2), 4: (3, 2, 2, 1)}  # micro-batches of each rank, by ranks
DEADLINE_S = 1800
# torch renames a setting of DDP, and a namespace has no names for its addresses
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning", "TORCH_CPP_LOG_LEVEL": "ERROR"}


# -- one rank ------------------------------------------------------------------------------------------------


class OursStep:
    """``train_step`` as the trainer calls it."""

    def __init__(self, model: Detector, world: World, recipe: Recipe, reduce: Reduce) -> None:
        self.world, self.recipe, self.clock, self.exact = world, recipe, Clock(), reduce == "exact"
        replicas = Replicas.build(model, [world.device], world, reduce=reduce, synced=False)
        self.state = TrainState.build(
            replicas, recipe, optimizer="SGD", weight_decay=recipe.weight_decay, precision="fp32"
        )

    def __call__(self, batches: Sequence[MicroBatch], loss: Yolov5Loss, total: int, images: int) -> None:
        if self.exact:
            set_kernels(EXACT)
        plan = StepPlan(self.state.step, self.state.images_seen, images, 1e-4, 1e-4, 0.9)
        train_step(
            self.state,
            plan,
            [batches],
            loss,
            self.world,
            self.clock,
            total_micro_batches=total,
            precision="fp32",
            clip_norm=self.recipe.clip_norm,
        )
        torch.use_deterministic_algorithms(False)

    def digest(self) -> str:
        """Of the trained weights."""
        weights = hashlib.sha256()
        for tensor in self.state.all_tensors():
            weights.update(tensor.detach().contiguous().numpy().tobytes())
        return weights.hexdigest()[:12]


class DdpStep:
    """The usual loop around DistributedDataParallel; losses are normalised by each micro-batch's counts."""

    def __init__(self, model: Detector, world: World, recipe: Recipe) -> None:
        self.world, self.recipe = world, recipe
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.optimizer = build_optimizer(model, "SGD", recipe, recipe.weight_decay)
        live = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
        self.average = MovingAverage(live, decay=recipe.ema_decay, tau=recipe.ema_tau)

    def __call__(self, batches: Sequence[MicroBatch], loss: Yolov5Loss, total: int, images: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"], group["momentum"] = 1e-4, 0.9
        for mb in batches:
            with nullcontext() if mb is batches[-1] else self.ddp.no_sync():
                pixels = mb.images_on(torch.device("cpu")).float().div_(255)
                sums = loss.sums(self.ddp(pixels), mb.targets)
                weights = loss.gains / torch.from_numpy(mb.targets.counts).clamp(min=1)
                ((sums * weights).sum() * (images / total * self.world.size)).backward()
        nn.utils.clip_grad_norm_(self.ddp.parameters(), self.recipe.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # the gradients are views of the buckets
        self.average.update(torch.tensor(True))


def random_micro_batch(loss: DetectionLoss, ordinal: int, images: int, img: int) -> MicroBatch:
    """10 labels an image, three classes; of ``ordinal`` alone."""
    rng = np.random.default_rng(ordinal)
    parts = [Shapes.of_image(rng.integers(0, 3, 10), rng.uniform(0.2, 0.5, (10, 4))) for _ in range(images)]
    labels = Shapes.of_images(parts)
    pixels = torch.from_numpy(rng.integers(0, 256, (images, img, img, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
    return MicroBatch(0, ordinal, pixels, labels, loss.match(labels, images, (img, img)))


def step_case(world: World, job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Medians of the modes of ``job`` for one image size and one partition. Collective: every rank."""
    shares, img, images = case["shares"], case["img"], case["micro_batch"]
    total, first = sum(shares), sum(shares[: world.rank])

    def network() -> Detector:
        model = build_model(describe(job["model"]), 3, seed=0).train()
        return cast(Detector, cast(Any, model).to(memory_format=torch.channels_last))

    model = network()
    recipe: Recipe = family_of(model.description).hyperparameters()
    loss = family_loss(model, recipe, img)
    per_pass = case.get("per_pass", 1)
    mine = [
        random_micro_batch(loss, first + v, images * per_pass, img)
        for v in range(0, shares[world.rank], per_pass)
    ]
    modes: dict[str, Any] = {
        mode: DdpStep(network(), world, recipe) if mode == "ddp" else OursStep(network(), world, recipe, mode)
        for mode in job["modes"]
    }
    for mode in modes.values():
        if per_pass > 1 and isinstance(mode, OursStep):
            mode.state.replicas.pass_together(per_pass, images)
    works = {name: partial(step, mine, loss, total, total * images) for name, step in modes.items()}
    found = in_turns(world, works, job["rounds"])
    return {**case, "modes": found, "digest": modes["exact"].digest() if "exact" in modes else ""}


def in_turns(
    world: World, works: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Medians over rounds of each work, taken by turns. Collective: every rank.

    Returns:
        By name: ``wall_s`` of the slowest rank, ``cpu_s`` of all ranks together, ``sent_mb`` of the rank that
        sent most (None on loopback).
    """
    rows: dict[str, list[list[float]]] = {name: [] for name in works}
    names = list(works)
    counted = os.environ.get("GLOO_SOCKET_IFNAME") == INTERFACE
    for turn in range(rounds + WARM_UP):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            world.barrier()
            sent, cpu_s, wall_s = sent_bytes() if counted else 0, time.process_time(), time.perf_counter()
            works[name]()
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            world.barrier()  # all that was sent has left
            rows[name].append([wall_s, cpu_s, float(sent_bytes() - sent) if counted else 0.0])
    found = {}
    for name, mine in rows.items():
        texts = world.all_gather_bytes(json.dumps(mine[WARM_UP:]).encode())
        every = np.array([json.loads(text) for text in texts])  # [rank, round, 3]
        found[name] = {
            "wall_s": median(every[:, :, 0].max(0).tolist()),
            "cpu_s": median(every[:, :, 1].sum(0).tolist()),
            "sent_mb": median(every[:, :, 2].max(0).tolist()) / 1e6 if counted else None,
        }
    return found


def be_worker(job: dict[str, Any]) -> None:
    """One rank; rank 0 prints what was found as its last line."""
    torch.set_num_threads(1)
    place = place_from_environment(os.environ)
    if place.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World.join(place, torch.device("cpu"), 300)
    found = [step_case(world, job, case) for case in job["cases"]]
    if world.is_main:
        print(json.dumps(found), flush=True)
    world.barrier()
    dist.destroy_process_group()


# -- the parent ----------------------------------------------------------------------------------------------


def on_ranks(size: int, link: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run ``job`` in ``size`` processes, each on a machine of ``link`` ("local": all on loopback)."""
    with ExitStack() as stack:
        names: list[str] = []
        master, interface = "127.0.0.1", "lo"
        if link != "local":
            names = stack.enter_context(machines(size, "" if link == "unlimited" else link))
            master, interface = address_of(0), INTERFACE
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(end, ranks)
        for rank in range(size):
            command = [sys.executable, __file__, "worker", json.dumps(job)]
            if names:
                command = ["ip", "netns", "exec", names[rank], *command]
            where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            meet = {"MASTER_ADDR": master, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface}
            environment = {name: str(value) for name, value in (where | meet).items()}
            env = os.environ | environment | QUIET | {"OMP_NUM_THREADS": "1"}
            out = None if rank else subprocess.PIPE
            ranks.append(subprocess.Popen(command, env=env, stdout=out, text=True))
        told, _ = ranks[0].communicate(timeout=DEADLINE_S)
        for rank, process in enumerate(ranks):
            if process.wait(timeout=60):
                raise SystemExit(f"rank {rank} of {size} failed")
    return cast(list[dict[str, Any]], json.loads(told.splitlines()[-1]))


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def step_table(asked: argparse.Namespace) -> None:
    print(f"{asked.model}, whole steps, medians of {asked.rounds}; load {os.getloadavg()[0]:.1f}")
    print(
        "link      ranks  px  m  shares    fast/s exact/s  ddp/s  exact/fast fast/ddp "
        "| CPU s, all ranks: fast exact ddp  exact/fast fast/ddp | MB sent: fast exact ddp  digest of exact"
    )
    for link in asked.links.split(","):
        for size in numbers(asked.sizes):
            if size == 1 and link != "local":
                continue
            plans = [UNEVEN[size] if plan == "uneven" else (1,) * size for plan in asked.plans.split(",")]
            places = [(img, plan) for img in numbers(asked.img) for plan in plans]
            cases = [{"img": img, "micro_batch": asked.micro_batch, "shares": plan} for img, plan in places]
            modes = ["fast", "exact", "ddp"]
            job = {"model": asked.model, "rounds": asked.rounds, "modes": modes, "cases": cases}
            for row in on_ranks(size, link, job):
                start = f"{link:10}{size:3} {row['img']:5} {row['micro_batch']:2}"
                print(f"{start}  {step_line(row)}", flush=True)


def step_line(row: dict[str, Any]) -> str:
    fast, exact, ddp = (row["modes"][name] for name in ("fast", "exact", "ddp"))
    parts = []
    for key in ("wall_s", "cpu_s"):
        figures = " ".join(f"{mode[key]:7.3f}" for mode in (fast, exact, ddp))
        parts.append(f"{figures}  {exact[key] / fast[key]:9.3f} {fast[key] / ddp[key]:8.3f}")
    megabytes = [mode["sent_mb"] for mode in (fast, exact, ddp)]
    sent = " ".join("-" if each is None else f"{each:6.2f}" for each in megabytes)
    shares = "/".join(map(str, row["shares"]))
    return f"{shares:8} {parts[0]} | {parts[1]} | {sent}  {row['digest']}"


def speedup_table(asked: argparse.Namespace) -> None:
    """Steps of ``--images``, on one rank and on two over a link."""

    def medians(size: int, link: str) -> dict[str, Any]:
        shares = [asked.images // asked.micro_batch // size] * size
        sizes = {"img": asked.img, "micro_batch": asked.micro_batch, "per_pass": asked.per_pass}
        modes = ["fast", "fast16", "ddp"]
        job = {
            "model": asked.model,
            "rounds": asked.rounds,
            "modes": modes,
            "cases": [sizes | {"shares": shares}],
        }
        return cast(dict[str, Any], on_ranks(size, link, job)[0]["modes"])

    print(f"{asked.model}, {asked.images} images of {asked.img} px a step; load {os.getloadavg()[0]:.1f}")
    print("link        mode     one rank, s/step  two ranks, s/step  speed-up  MB sent")
    for link in asked.links.split(","):
        alone, both = medians(1, "local"), medians(2, link)
        for mode, found in both.items():
            before, now = alone[mode]["wall_s"], found["wall_s"]
            sent = "-" if found["sent_mb"] is None else f"{found['sent_mb']:.2f}"
            print(f"{link:<12}{mode:<8}{before:13.3f}{now:18.3f}{before / now:14.2f}{sent:>10}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(required=True)

    step = verbs.add_parser("step", help="whole steps: fast, exact, ddp")
    step.add_argument("--sizes", default="1,2,4", help="numbers of ranks")
    step.add_argument("--links", default="local,1gbit,100mbit", help="local, unlimited, or a rate of tc")
    step.add_argument("--plans", default="even,uneven", help="even: one micro-batch per rank")
    step.add_argument("--img", default="64,320", help="pixels")
    step.add_argument("--micro-batch", type=int, default=1, help="images")
    step.set_defaults(work=step_table)

    speedup = verbs.add_parser("speedup", help="two ranks against one: fast, fast16, ddp")
    speedup.add_argument("--links", default="1gbit,100mbit")
    speedup.add_argument("--img", type=int, default=320, help="pixels")
    speedup.add_argument("--images", type=int, default=64, help="of a step")
    speedup.add_argument("--micro-batch", type=int, default=8, help="images")
    speedup.add_argument("--per-pass", type=int, default=1, help="micro-batches")
    speedup.set_defaults(work=speedup_table)

    for verb in (step, speedup):
        verb.add_argument("--model", default="yolov5n")
        verb.add_argument("--rounds", type=int, default=12, help="that are measured")

    worker = verbs.add_parser("worker", help="one rank (started by the others)")
    worker.add_argument("job", type=json.loads)
    worker.set_defaults(work=lambda asked: be_worker(asked.job))

    asked = parser.parse_args()
    asked.work(asked)


if __name__ == "__main__":
    main()
