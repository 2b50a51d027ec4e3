"""The simulation against the formula, and against cases worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from yolofleet.fleet.plan.formula import predict
from yolofleet.fleet.plan.inputs import NO_LINK, Doubt, Link, Machine, Network, Workload
from yolofleet.fleet.plan.library import Library, network_of
from yolofleet.fleet.plan.simulation import MOST_RANKS, simulate
from yolofleet.support.errors import ConfigError

EVEN = tuple(share / 8 for share in range(1, 9))
TINY = Network("tiny", parameters=1 << 20, gflops=1.0, ready=EVEN)  # 4 MiB of gradients
GPU = Machine(
    name="gpu", devices=1, cores=8, pass_s=0.002, image_s=0.01, update_s=0.005, load_s=0.02, cached_s=0.002,
    read_bytes_s=1e12, inside=NO_LINK, between=Link(2e-5, 1e9, tree=True), val_image_s=0.005, val_end_s=1.0, save_s=0.5,
    start_s=10.0, spread=0.05, memory_bytes=1e12, device_bytes=1e10, on_cpu=False, doubt=Doubt(0.1, 0.1, 0.1),
)  # fmt: skip
HOST = replace(GPU, devices=8, cores=64, inside=Link(5e-6, 1e11, tree=True))
CPU = replace(
    GPU, cores=1, on_cpu=True, image_s=0.05, update_s=0.02, load_s=0.005, inside=Link(1e-4, 6e8), between=Link(2e-4, 1.1e8)
)  # fmt: skip
WORK = Workload(
    network=TINY, img=640, images=6400, val_images=1000, image_bytes=1e5, epochs=10, step_images=64, micro_batch=8, workers=4
)  # fmt: skip
LARGE = Network("large", parameters=40 << 20, gflops=100.0, ready=EVEN)


def of_ranks(ranks: int, **changes: object) -> Workload:
    """Return a workload in which each rank has a micro-batch or more."""
    return replace(WORK, step_images=64 * ranks, images=6400 * ranks, **changes)  # type: ignore[arg-type]


CASES = {
    "one GPU": (WORK, [GPU]),
    "two GPUs": (WORK, [GPU] * 2),
    "eight GPUs of a host": (WORK, [HOST]),
    "64 GPUs": (of_ranks(64), [HOST] * 8),
    "512 GPUs, in passes of all micro-batches": (of_ranks(512, per_pass=8), [HOST] * 64),
    "4,096 GPUs": (of_ranks(4096), [HOST] * 512),
    "a large network and a slow link": (
        of_ranks(16, network=LARGE),
        [replace(HOST, between=Link(2e-5, 1e8, tree=True))] * 2,
    ),
    "bfloat16 sums": (of_ranks(16, network=LARGE, reduce="fast16"), [HOST] * 2),
    "a slow loader": (WORK, [replace(GPU, load_s=0.1, spread=0.0)]),
    "slow loaders on many hosts": (of_ranks(64), [replace(HOST, cores=8, spread=0.0)] * 8),
    "a slow loader until the images are cached": (replace(WORK, cache="ram"), [replace(GPU, load_s=0.1, spread=0.01)]),
    "no loader processes": (replace(WORK, workers=0), [GPU] * 4),
    "a slow disk in the first epoch": (WORK, [replace(HOST, read_bytes_s=5e7, spread=0.01)]),
    "files larger than the memory": (WORK, [replace(HOST, read_bytes_s=5e7, memory_bytes=1e8, spread=0.0)]),
    "one process on a CPU": (replace(WORK, workers=0), [CPU]),
    "two hosts at 1 Gbit/s": (replace(WORK, workers=0, network=LARGE), [CPU] * 2),
    "three hosts at 100 Mbit/s": (replace(WORK, workers=0), [replace(CPU, between=Link(2e-4, 1.1e7))] * 3),
    "two hosts of two processes": (
        replace(WORK, workers=0, network=LARGE),
        [replace(CPU, devices=2, cores=2)] * 2,
    ),
    "loader processes beside a network on a CPU": (replace(WORK, workers=1), [CPU] * 2),
    "unequal GPUs": (WORK, [replace(GPU, image_s=0.02), GPU]),
    "unequal GPUs with shares": (replace(WORK, auto_shares=True, micro_batch=2, workers=8), [replace(GPU, image_s=0.02), GPU]),
    "ranks without work": (replace(WORK, step_images=32), [HOST]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_simulation_is_within_5_percent_of_the_formula(name: str):
    work, fleet = CASES[name]
    found, expected = simulate(work, fleet), predict(work, fleet)
    assert found.step_s == pytest.approx(expected.step.total, rel=0.05)
    assert found.first_step_s == pytest.approx(expected.first.total, rel=0.05)
    assert found.rate_img_s == pytest.approx(expected.rate_img_s, rel=0.05)
    assert found.epoch_s == pytest.approx(expected.epoch, rel=0.05)
    assert found.run_s == pytest.approx(expected.run, rel=0.05)
    assert sum(found.waits.values()) == pytest.approx(found.step_s)


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1, 0.2])
@pytest.mark.parametrize("machines", [1, 4, 32])
def test_published_machines_with_any_spread_are_within_5_percent(machines: int, spread: float):
    network = network_of("yolov5l")
    work = Workload(
        network, 640, 118_287, 5000, 163e3, 300, 128 * machines, 16, precision="fp16", cache="ram", workers=8
    )
    machine = replace(Library.read().machine("8xA100", work), spread=spread)
    found, expected = simulate(work, [machine] * machines), predict(work, [machine] * machines)
    assert found.step_s == pytest.approx(expected.step.total, rel=0.05)


def test_a_run_is_the_same_each_time_and_another_seed_is_another_run():
    work, fleet = CASES["64 GPUs"]
    assert simulate(work, fleet) == simulate(work, fleet)
    assert simulate(work, fleet).step_s != simulate(work, fleet, seed=1).step_s


def test_all_wait_for_the_slow_rank():
    found = simulate(WORK, [replace(GPU, spread=0.0), replace(GPU, spread=0.0, image_s=0.02)])
    # rank 0 waits 32 x 0.01 s for rank 1, which waits for nobody; of two ranks the mean is half
    assert found.waits["slowest"] == pytest.approx(0.16, rel=0.05)


def test_a_queue_hides_stragglers_where_the_loader_binds():
    """The formula does not apply there: it adds the stragglers to the time of the loader."""
    steady, varying = (replace(HOST, load_s=0.2, spread=spread) for spread in (0.0, 0.1))
    first, second = simulate(WORK, [steady]), simulate(WORK, [varying])
    assert second.step_s == pytest.approx(first.step_s, rel=0.01)
    assert predict(WORK, [varying]).step.total > 1.1 * second.step_s


def test_a_step_longer_than_the_queue_waits_for_the_rest_of_its_images():
    """The formula does not apply there: a rank takes all passes of a step at once, and one process loads 4 of 8 ahead."""
    one = replace(GPU, load_s=0.009, spread=0.0)  # 64 x 0.009 = 0.576 s for a step, which computes 0.661 s
    found = simulate(replace(WORK, workers=1), [one])
    # 4 passes of 8 images are loaded after the rank asks, the last of them just before it computes
    assert found.waits["loader"] == pytest.approx(4 * 8 * 0.009, rel=0.01)
    assert predict(replace(WORK, workers=1), [one]).step.loader == 0


@pytest.mark.parametrize("fleet", [[], [HOST] * (MOST_RANKS // 8 + 1)])
def test_a_fleet_that_is_empty_or_too_large_gets_one_message(fleet: list[Machine]):
    with pytest.raises(ConfigError, match="takes 1 to 4096 devices, got"):
        simulate(WORK, fleet)


def test_4096_ranks_with_loaders_and_disks_give_numbers():
    found = simulate(of_ranks(4096, cache="ram"), [replace(HOST, read_bytes_s=1e9)] * 512, steps=3)
    assert math.isfinite(found.run_s) and found.first_step_s >= 0.9 * found.step_s
