"""What exact sums cost, and what our path of gradients costs against PyTorch's DistributedDataParallel.

    python benchmarks/reduction.py step --sizes 1,2,4 --links local,1gbit,100mbit     # needs root for links
    python benchmarks/reduction.py speedup --links 1gbit,100mbit
    python benchmarks/reduction.py exchange --sizes 2,3,4 --links 1gbit,100mbit
    python benchmarks/reduction.py wires

*step* takes whole training steps of a model (loss, clipping, SGD, moving average) on fixed random images in
three ways, turn by turn in the same processes: ``fast`` and ``exact`` are ``train_step`` with either wire;
``ddp`` is a plain loop around DistributedDataParallel (gradients as views of its buckets, no broadcast of
buffers, ``no_sync`` for all but the last micro-batch) with the same network, loss, clipping, optimizer and
average. Every rank has one thread. A step's time is that of its slowest rank, from a barrier on.

*speedup* compares steps of two ranks, over a link, with the same steps on one rank.

*exchange* is the reduction of one step's gradients alone: the sum of float32, of int32, and the canonical tree
that was not kept. *wires* is the computing of exact sums alone, on one core.

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
from itertools import pairwise
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from links import INTERFACE, address_of, machines, sent_bytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.families import build_model, family_of
from yolofleet.input.sample import MicroBatch
from yolofleet.losses.loss import DetectionLoss
from yolofleet.losses.yolov5 import Yolov5Loss
from yolofleet.models.description import describe
from yolofleet.models.detector import Detector
from yolofleet.parallel.buckets import BUCKET_BYTES, GradientBuckets, grouped
from yolofleet.parallel.exact import make_exact
from yolofleet.parallel.place import place_from_environment
from yolofleet.parallel.process import set_kernels
from yolofleet.parallel.replicas import Reduce, Replicas
from yolofleet.parallel.world import World
from yolofleet.report.clock import Clock
from yolofleet.train.ema import MovingAverage
from yolofleet.train.optimiser import build_optimizer
from yolofleet.train.schedule import StepPlan
from yolofleet.train.state import TrainState
from yolofleet.train.step import train_step

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
            requests=(0,),
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
    rows = 10 * images
    labels = np.column_stack(
        [np.arange(rows) % images, rng.integers(0, 3, rows), rng.uniform(0.2, 0.5, (rows, 4))]
    ).astype(np.float32)
    pixels = torch.from_numpy(rng.integers(0, 256, (images, img, img, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
    return MicroBatch(0, ordinal, pixels, labels, loss.match(labels, images, (img, img)))


def step_case(world: World, job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Medians of the modes of ``job`` for one image size and one partition. Collective: every rank."""
    shares, img, images = case["shares"], case["img"], case["micro_batch"]
    total, first = sum(shares), sum(shares[: world.rank])
    recipe = Recipe()

    def network() -> Detector:
        model = build_model(describe(job["model"]), 3, seed=0).train()
        return cast(Detector, cast(Any, model).to(memory_format=torch.channels_last))

    model = network()
    loss = family_of(model.description).loss(model, recipe, img)
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


# -- the exchange alone --------------------------------------------------------------------------------------


def subtrees(leaves: range) -> list[tuple[int, int]]:
    """(first leaf, leaves) of the largest nodes of the binary tree over leaf numbers that fill a range."""
    found, first = [], leaves.start
    while first < leaves.stop:
        size = 1
        while first % (2 * size) == 0 and first + 2 * size <= leaves.stop:
            size *= 2
        found.append((first, size))
        first += size
    return found


def fold(nodes: dict[tuple[int, int], Tensor], first: int, size: int, total: int) -> Tensor:
    """The sum of leaves first .. first + size - 1 in the tree's own order, whatever nodes it comes in."""
    if (first, size) in nodes:
        return nodes[first, size]
    left = fold(nodes, first, size // 2, total)
    middle = first + size // 2
    return left if middle >= total else left + fold(nodes, middle, size // 2, total)


class Tree:
    """Float32 sums in leaf order for any partition: each rank folds one part of the buffer and shares it.

    Two exchanges per bucket: every rank sends each other rank that rank's part of all its nodes (one node if
    its leaves are a subtree, more if not), then its own folded part. 4 bytes x elements x (nodes + 1) x
    (ranks - 1) / ranks leave a rank; an all-reduce sends 2 x that with ``nodes`` = 1.
    """

    def __init__(self, world: World, shares: Sequence[int], sizes: Sequence[int]) -> None:
        self.world, self.total = world, sum(shares)
        self.span = 1 << (self.total - 1).bit_length()
        borders = [sum(shares[:rank]) for rank in range(len(shares) + 1)]
        self.nodes = [subtrees(range(a, b)) for a, b in pairwise(borders)]  # by rank
        self.buckets = []
        for size in sizes:
            padded = -(-size // world.size) * world.size
            self.buckets.append(self._mine(padded))

    def _mine(self, size: int) -> Tensor:
        """[nodes, size]: this rank's nodes, each the fold of its leaves."""
        rows = []
        for first, count in self.nodes[self.world.rank]:
            leaves = {(v, 1): leaf(v, size) for v in range(first, first + count)}
            rows.append(fold(leaves, first, count, self.total))
        return torch.stack(rows)

    def __call__(self) -> list[Tensor]:
        world, counts = self.world, [len(nodes) for nodes in self.nodes]
        parts = []
        for bucket in self.buckets:
            mine = counts[world.rank]
            width = bucket.shape[1] // world.size
            send = bucket.view(mine, world.size, width).transpose(0, 1).reshape(-1)  # [rank, node, width]
            got = torch.empty(sum(counts) * width)
            work = dist.all_to_all_single(
                got, send, [n * width for n in counts], [mine * width] * world.size, async_op=True
            )
            parts.append((work, got.view(-1, width), send))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13's new name
        order = [node for nodes in self.nodes for node in nodes]
        wholes = []
        for work, got, _ in parts:
            work.wait()
            part = fold(dict(zip(order, got, strict=True)), 0, self.span, self.total).contiguous()
            whole = torch.empty(got.shape[1] * world.size)
            wholes.append((gather(whole, part, async_op=True), whole, part))
        for work, _, _ in wholes:
            work.wait()
        return [whole for _, whole, _ in wholes]


def leaf(number: int, size: int) -> Tensor:
    """A made-up gradient of one micro-batch."""
    return torch.randn(size, generator=torch.Generator().manual_seed(number))


def exchange_case(world: World, job: dict[str, Any]) -> dict[str, Any]:
    """All ways to sum the gradients of ``model`` over ranks. Collective: every rank."""
    model = build_model(describe(job["model"]), 80, seed=0)
    sizes = [sum(p.numel() for p in group) for group in grouped(model.parameters(), BUCKET_BYTES)]

    def all_reduce(buckets: Sequence[Tensor]) -> None:
        for work in [world.all_reduce_async(bucket) for bucket in buckets]:
            world.wait(work)

    floats = [torch.zeros(size) for size in sizes]
    integers = [torch.zeros(size, dtype=torch.int32) for size in sizes]
    even = Tree(world, (1,) * world.size, sizes)
    aligned = Tree(world, {2: (4, 4), 3: (4, 2, 2), 4: (2, 2, 2, 2)}[world.size], sizes)
    uneven = Tree(world, UNEVEN[world.size], sizes)
    for one, other in zip(aligned(), uneven(), strict=True):
        assert torch.equal(one, other), "the tree's sum depends on the partition"
    works: dict[str, Callable[[], object]] = {
        "float32": lambda: all_reduce(floats),
        "int32": lambda: all_reduce(integers),
        "tree, even": even,
        "tree, uneven": uneven,
    }
    return {"elements": sum(sizes), "modes": in_turns(world, works, job["rounds"])}


def be_worker(job: dict[str, Any]) -> None:
    """One rank; rank 0 prints what was found as its last line."""
    torch.set_num_threads(1)
    place = place_from_environment(os.environ)
    if place.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World.join(place, torch.device("cpu"), 300)
    if job["what"] == "step":
        found = [step_case(world, job, case) for case in job["cases"]]
    else:
        found = [exchange_case(world, job)]
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
            where = {
                **{"RANK": rank, "WORLD_SIZE": size},
                **{"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1},
            }
            meet = {"MASTER_ADDR": master, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface}
            environment = {name: str(value) for name, value in (where | meet).items()}
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | environment | QUIET | {"OMP_NUM_THREADS": "1"},
                    stdout=None if rank else subprocess.PIPE,
                    text=True,
                )
            )
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
            plans = [
                list(UNEVEN[size]) if plan == "uneven" else [1] * size for plan in asked.plans.split(",")
            ]
            cases = [
                {"img": img, "micro_batch": asked.micro_batch, "shares": shares}
                for img in numbers(asked.img)
                for shares in plans
            ]
            modes = ["fast", "exact", "ddp"]
            job = {
                **{"what": "step", "model": asked.model, "rounds": asked.rounds},
                **{"modes": modes, "cases": cases},
            }
            for row in on_ranks(size, link, job):
                print(
                    f"{link:10}{size:3} {row['img']:5} {row['micro_batch']:2}  {step_line(row)}", flush=True
                )


def step_line(row: dict[str, Any]) -> str:
    fast, exact, ddp = (row["modes"][name] for name in ("fast", "exact", "ddp"))
    parts = []
    for key in ("wall_s", "cpu_s"):
        figures = " ".join(f"{mode[key]:7.3f}" for mode in (fast, exact, ddp))
        parts.append(f"{figures}  {exact[key] / fast[key]:9.3f} {fast[key] / ddp[key]:8.3f}")
    sent = " ".join(
        "-" if mode["sent_mb"] is None else f"{mode['sent_mb']:6.2f}" for mode in (fast, exact, ddp)
    )
    shares = "/".join(map(str, row["shares"]))
    return f"{shares:8} {parts[0]} | {parts[1]} | {sent}  {row['digest']}"


def speedup_table(asked: argparse.Namespace) -> None:
    """Steps of ``--images``, on one rank and on two over a link."""

    def medians(size: int, link: str) -> dict[str, Any]:
        shares = [asked.images // asked.micro_batch // size] * size
        case = {"img": asked.img, "micro_batch": asked.micro_batch, "shares": shares}
        case["per_pass"] = asked.per_pass
        job = {
            **{"what": "step", "model": asked.model, "rounds": asked.rounds},
            **{"modes": ["fast", "fast16", "ddp"], "cases": [case]},
        }
        return cast(dict[str, Any], on_ranks(size, link, job)[0]["modes"])

    print(
        f"{asked.model}, {asked.images} images of {asked.img} px a step, medians of {asked.rounds}; load {os.getloadavg()[0]:.1f}"
    )
    print("link        mode     one rank, s/step  two ranks, s/step  speed-up  MB sent")
    for link in asked.links.split(","):
        alone, both = medians(1, "local"), medians(2, link)
        for mode, found in both.items():
            before, now = alone[mode]["wall_s"], found["wall_s"]
            sent = "-" if found["sent_mb"] is None else f"{found['sent_mb']:.2f}"
            print(f"{link:<12}{mode:<8}{before:13.3f}{now:18.3f}{before / now:14.2f}{sent:>10}", flush=True)


def exchange_table(asked: argparse.Namespace) -> None:
    print(f"{asked.model}, the exchange alone, medians of {asked.rounds}; load {os.getloadavg()[0]:.1f}")
    print("link      ranks  method         seconds  to float32  MB sent  CPU s, all ranks")
    for link in asked.links.split(","):
        for size in numbers(asked.sizes):
            job = {"what": "exchange", "model": asked.model, "rounds": asked.rounds}
            modes = on_ranks(size, link, job)[0]["modes"]
            for name, mode in modes.items():
                sent = "-" if mode["sent_mb"] is None else f"{mode['sent_mb']:.2f}"
                ratio = mode["wall_s"] / modes["float32"]["wall_s"]
                print(
                    f"{link:10}{size:3}    {name:14} {mode['wall_s']:7.3f} {ratio:10.2f} {sent:>9} "
                    f"{mode['cpu_s']:10.3f}",
                    flush=True,
                )


def wires_table(asked: argparse.Namespace) -> None:
    """Computing of exact sums: per step ``begin`` and ``write_back``, per micro-batch ``accumulate``."""
    torch.set_num_threads(1)
    print(f"exact sums, one core, CPU milliseconds, medians of {asked.rounds}; load {os.getloadavg()[0]:.1f}")
    for name in asked.models.split(","):
        model = build_model(describe(name), 80, seed=0)
        buckets = GradientBuckets(model.parameters(), World.single())
        make_exact(buckets)
        values = [torch.randn(len(b.flat)) * 1e-3 for b in buckets.buckets]
        spent: dict[str, list[float]] = {"begin": [], "accumulate": [], "write_back": []}
        for _ in range(asked.rounds + WARM_UP):
            for part, works in (
                ("begin", "begin"),
                ("accumulate", "accumulate"),
                ("write_back", "write_back"),
            ):
                if part == "accumulate":
                    for bucket, value in zip(buckets.buckets, values, strict=True):
                        bucket.flat.copy_(value)
                began_s = time.process_time()
                for bucket in buckets.buckets:
                    getattr(bucket.format, works)(*((8,) if part == "begin" else ()))
                spent[part].append(time.process_time() - began_s)
        ms = {part: 1e3 * median(seconds[WARM_UP:]) for part, seconds in spent.items()}
        millions = sum(len(b.flat) for b in buckets.buckets) / 1e6
        print(
            f"  {name}, {millions:.2f} M: micro-batch {ms['accumulate']:.2f}, "
            f"step {ms['begin'] + ms['write_back']:.2f} (begin {ms['begin']:.2f}, write_back {ms['write_back']:.2f})"
        )


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

    exchange = verbs.add_parser("exchange", help="the reduction alone")
    exchange.add_argument("--sizes", default="2,3,4", help="numbers of ranks")
    exchange.add_argument("--links", default="1gbit,100mbit")
    exchange.set_defaults(work=exchange_table)

    wires = verbs.add_parser("wires", help="the computing of exact sums, one core")
    wires.add_argument("--models", default="yolov5n,yolov5l")
    wires.set_defaults(work=wires_table)
    for verb in (step, speedup, exchange, wires):
        verb.add_argument("--model", default="yolov5n")
        verb.add_argument("--rounds", type=int, default=12, help="that are measured")

    worker = verbs.add_parser("worker", help="one rank (started by the others)")
    worker.add_argument("job", type=json.loads)
    worker.set_defaults(work=lambda asked: be_worker(asked.job))

    asked = parser.parse_args()
    asked.work(asked)


if __name__ == "__main__":
    main()
