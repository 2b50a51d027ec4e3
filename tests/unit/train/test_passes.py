"""Several micro-batches that pass the network together give the gradient and the statistics of one after the other."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import cast

import pytest
import torch
from commands import small_shapes
from small_files import TINY_YAML
from small_training import SmallRun, small_run
from torch import nn
from walks import sampled

from yolofleet import Model
from yolofleet.families.networks.detector import Detector
from yolofleet.training.network import checkpoint_activations
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.schedule import StepPlan, StepSplitter

MODELS = [("yolov5-narrow", 0.0), ("darknet-narrow", 0.0), ("ppyoloe-narrow", 0.0), ("ppyoloe-narrow", 0.9)]


def gradient(run: SmallRun) -> torch.Tensor:
    return torch.cat([bucket.flat for bucket in run.state.buckets.buckets])


@pytest.mark.parametrize(
    ("model", "devices"),
    sampled(product(["yolov5-narrow", "darknet-narrow", "ppyoloe-narrow"], [["cpu"], ["cpu", "cpu"]]), 3),
)
def test_blocks_that_are_computed_again_give_the_same_bits(model: str, devices: list[str]) -> None:
    found = []
    for checkpoints in (False, True):
        run = small_run(model, devices, images=8, micro_batch=2, per_pass=2)
        if checkpoints:
            for replica in run.state.replicas.all:
                checkpoint_activations(cast(Detector, replica.model))
        kept: dict[
            int, torch.UntypedStorage
        ] = {}  # held, or another one could get the address of one that is gone

        def keep(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            terms = [run.do(1).terms for _ in range(3)][-1]
        weights = torch.cat([parameter.flatten() for parameter in run.state.model.parameters()])
        found.append(
            (
                terms,
                gradient(run),
                run.state.statistics.running.clone(),
                weights,
                sum(storage.nbytes() for storage in kept.values()),
            )
        )
    (*expected, most), (*others, least) = found
    assert all(torch.equal(one, other) for one, other in zip(expected, others, strict=True))
    assert least < 0.6 * most or len(devices) > 1  # the hooks belong to this thread


@pytest.mark.parametrize(("model", "progress"), MODELS)
def test_a_step_in_fewer_passes_has_the_same_gradient_and_statistics(model: str, progress: float) -> None:
    runs = []
    for per_pass in (1, 2, 5):  # 2: the last pass has one micro-batch
        run = small_run(model, images=10, micro_batch=2, per_pass=per_pass)
        run.progress, run.rate = progress, 0.0
        assert len(run.micro_batches(0)[0]) == -(-5 // per_pass)
        terms = run.do(1).terms
        runs.append((gradient(run), run.state.statistics.running.clone(), terms))
    (expected, statistics, terms), *others = runs
    for found, found_statistics, found_terms in others:
        assert (found - expected).norm() < 1e-4 * expected.norm()
        torch.testing.assert_close(found_statistics, statistics, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found_terms, terms, rtol=1e-4, atol=1e-6)


def test_one_pass_over_all_images_without_groups_is_another_step() -> None:
    """So the comparison above would notice statistics of the whole pass."""
    apart = small_run("yolov5-narrow", images=8, micro_batch=2)
    whole = small_run("yolov5-narrow", images=8, micro_batch=8)
    for run in (apart, whole):
        run.rate = 0.0
        run.do(1)
    assert (gradient(whole) - gradient(apart)).norm() > 0.01 * gradient(apart).norm()


@pytest.mark.parametrize(("shares", "per_pass"), [("1", 3), ("3,1", 2), ("1,1", 100)])
def test_passes_hold_the_images_of_their_micro_batches(shares: str, per_pass: int) -> None:
    plan = StepPlan(3, 192, 64, 0.01, 0.01, 0.9)
    for rank in range(shares.count(",") + 1):
        splitters = [
            StepSplitter(
                partition=Partition.parse(shares, shares.count(",") + 1),
                rank=rank,
                replicas=1,
                micro_batch=4,
                batch=16,
                dataset_images=100,
                sync_bn=False,
                sizes=(1, 1),
                img=64,
                stride=32,
                seed=0,
                per_pass=each,
            )
            for each in (1, per_pass)
        ]
        single, several = (splitter.keys(plan) for splitter in splitters)
        assert [k for key in several for k in key.samples] == [k for key in single for k in key.samples]
        assert len(several) == -(-len(single) // per_pass)
        assert [key.ordinal for key in several] == [key.ordinal for key in single[::per_pass]]
        assert splitters[0].largest_share(64) == len(single)


def test_convolutions_are_timed_for_passes_of_the_full_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward and the backward pass; the switch is on again afterwards."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    run = small_run("yolov5-narrow", images=10, micro_batch=2, per_pass=2)  # passes of 4, 4 and 2 images
    conv = next(m for m in run.state.model.modules() if isinstance(m, nn.Conv2d))
    seen: dict[str, list[bool]] = {"forward": [], "backward": []}
    conv.register_forward_hook(lambda *_: seen["forward"].append(torch.backends.cudnn.benchmark))
    conv.register_full_backward_hook(lambda *_: seen["backward"].append(torch.backends.cudnn.benchmark))
    run.do(1)
    run.state.replicas.time_kernels_of(4)
    run.do(1)
    assert seen == {name: [True, True, True, True, True, False] for name in seen}
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "sync_bn", "most"), [(1, 8, False, 32), (3, 8, False, 24), (3, 8, True, 8)]
)
def test_the_largest_pass_of_a_rank(ranks: int, micro_batch: int, sync_bn: bool, most: int) -> None:
    """Of 64 images, in batches of 16 for synchronised batch norm: two micro-batches for three ranks."""
    found = [
        StepSplitter(
            partition=Partition.equal(ranks), rank=rank, replicas=1, micro_batch=micro_batch, batch=16,
            dataset_images=99, sync_bn=sync_bn, sizes=(1, 1), img=64, stride=32, seed=0, per_pass=4,
        ).largest_pass(64)
        for rank in range(ranks)
    ]  # fmt: skip
    assert max(found) == most


@pytest.mark.long
def test_a_run_times_convolutions_for_the_full_pass_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # restores it after the run
    (tmp_path / "tiny.yaml").write_text(TINY_YAML)
    seen: set[tuple[int, bool]] = set()

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        if module.training and isinstance(module, nn.Conv2d):
            seen.add((len(inputs[0]), torch.backends.cudnn.benchmark))

    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        Model("tiny.yaml").train(
            data=str(small_shapes(tmp_path, images=8, val_images=2)), img=64, batch=2,
            nominal_batch=4, micro_batch=2, micro_batches_per_pass=4, epochs=60, device="cpu", plots=False,
            val_period=0, threads=1, set=["size_low=1", "size_high=1", "warmup_epochs=1"],
        )  # fmt: skip
    finally:
        hook.remove()
    assert seen == {(2, False), (4, True)}
