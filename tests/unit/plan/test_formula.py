"""The formula against figures worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_training import small_run

from yolofleet.fleet.plan import inputs
from yolofleet.fleet.plan.forecast import LATENCY_S, TCP_SHARE
from yolofleet.fleet.plan.formula import (
    exposed_sum_s,
    largest_of,
    predict,
    rank_shares,
    step_time,
    store_limit,
    validation_s,
)
from yolofleet.fleet.plan.inputs import NO_LINK, Doubt, Link, Machine, Network, Store, Workload, bytes_s_of
from yolofleet.fleet.plan.library import network_of, networks
from yolofleet.fleet.plan.probe import LOOPBACK
from yolofleet.training.parallel import buckets

EVEN = tuple(share / 8 for share in range(1, 9))  # gradients become final evenly
TINY = Network("tiny", parameters=1 << 20, gflops=1.0, ready=EVEN)  # 4 MiB of gradients
GPU = Machine(
    name="gpu", devices=1, cores=8, pass_s=0.0, image_s=0.01, update_s=0.0, load_s=0.02, cached_s=0.002,
    read_bytes_s=1e12, inside=NO_LINK, between=Link(0.0, 1e8), val_image_s=0.005, val_end_s=1.0, save_s=0.5, start_s=10.0,
    spread=0.0, memory_bytes=1e12, device_bytes=1e10, on_cpu=False, doubt=Doubt(0.1, 0.1, 0.1), price_hour=3.0,
)  # fmt: skip
WORK = Workload(
    network=TINY,
    img=640,
    images=6400,
    val_images=1000,
    image_bytes=1e5,
    epochs=10,
    step_images=64,
    micro_batch=8,
    workers=4,
)


def test_a_run_of_one_device_is_its_steps_validations_checkpoints_and_start():
    found = predict(WORK, [GPU])
    # a step: 64 x 0.01 = 0.64 s; 4 loader processes need 64 x 0.02 / 4 = 0.32 s, less
    assert found.step.total == pytest.approx(0.64)
    # an epoch: 100 steps, 1000 x 0.005 + 1 s of validation, 0.5 s of checkpoint
    assert found.epoch == pytest.approx(64 + 6 + 0.5)
    assert found.run == pytest.approx(10 * 70.5 + 10)
    assert found.cost == pytest.approx(3.0 * 715 / 3600)
    assert found.rate_img_s == pytest.approx(100)
    assert found.binds == "network"


def test_a_store_limits_the_first_epoch_only():
    far = replace(GPU, store=Store(bytes_s=5e6, latency_s=0.02), store_reads=1.0)
    found = predict(WORK, [far])
    # a step: 64 x 100 kB / 5 MB/s = 1.28 s, of which the network hides 0.64 s
    assert found.first.storage == pytest.approx(0.64)
    assert found.step == predict(WORK, [GPU]).step
    assert found.run - predict(WORK, [GPU]).run == pytest.approx(100 * 0.64)
    assert store_limit(WORK, far) == (pytest.approx(0.02), "bandwidth")


def test_many_small_requests_wait_for_the_latency():
    far = replace(GPU, store=Store(bytes_s=1e9, latency_s=2.56), store_reads=1.0)
    # 4 loader processes with 32 requests at a time: 64 x 2.56 / 128 = 1.28 s
    assert predict(WORK, [far]).first.storage == pytest.approx(0.64)
    assert store_limit(WORK, far) == (pytest.approx(0.02), "latency")


def test_each_machine_reads_more_than_its_part_because_of_mosaics():
    rng, images = np.random.default_rng(0), 40_000
    for hosts in (1, 2, 4, 16):
        own = images // hosts
        shown = np.concatenate([np.arange(own), rng.integers(0, images, 3 * own)])
        assert inputs.reads(hosts) == pytest.approx(len(np.unique(shown)) / own, rel=0.01)
    fleet = [replace(GPU, store=Store(1e9, 0.02, price=0.5), store_reads=inputs.reads(2))] * 2
    found = predict(WORK, fleet)
    assert found.store_price == pytest.approx(6400 * inputs.reads(2) * 0.5 / 1000)
    assert found.cost == pytest.approx(6.0 * found.run / 3600 + found.store_price)
    assert predict(WORK, [GPU] * 2).store_price == 0


def test_the_words_of_a_store_are_its_limits():
    assert Store.parse("1gbit,20ms") == Store(1.25e8, 0.02)
    assert Store.parse("100mbit,2.5ms,0.0004") == Store(1.25e7, 0.0025, 0.0004)
    slow = replace(GPU, store=Store(1e6, 0.01)).changed(1).store
    assert slow is not None and slow.bytes_s < 1e6 and slow.latency_s > 0.01


def test_a_slow_loader_adds_what_the_network_does_not_hide():
    slow = replace(GPU, load_s=0.1)  # 64 x 0.1 / 4 = 1.6 s
    found = predict(WORK, [slow])
    assert found.step.loader == pytest.approx(1.6 - 0.64)
    assert found.binds == "loader"
    # from the cache: 64 x 0.002 / 4 = 0.032 s from the second epoch on
    cached = predict(replace(WORK, cache="ram"), [slow])
    assert cached.first.loader == pytest.approx(0.96) and cached.step.loader == 0
    assert cached.run == pytest.approx(100 * 1.6 + 900 * 0.64 + 10 * 6.5 + 10)


def test_without_loader_processes_loading_and_computing_take_turns():
    found = step_time(replace(WORK, workers=0), [GPU])
    assert found.total == pytest.approx(0.64 + 64 * 0.02)


def test_more_loader_processes_than_cores_are_no_faster():
    found = step_time(replace(WORK, workers=64), [replace(GPU, load_s=0.2)])
    assert found.loader == pytest.approx(64 * 0.2 / 8 - 0.64)


def test_storage_binds_only_while_the_files_are_not_in_memory():
    disk = replace(GPU, read_bytes_s=5e6)  # 64 x 1e5 / 5e6 = 1.28 s
    assert step_time(WORK, [disk], first_epoch=True).storage == pytest.approx(1.28 - 0.64)
    assert step_time(WORK, [disk]).storage == 0
    small = replace(disk, memory_bytes=1e8)  # less than the 6.4e8 bytes of the files
    assert step_time(WORK, [small]).storage == pytest.approx(1.28 - 0.64)


def test_a_part_of_the_images_is_cached_where_memory_is_short():
    half = replace(GPU, memory_bytes=WORK.cached_bytes / 0.8 / 2, load_s=0.1)
    found = step_time(replace(WORK, cache="ram"), [half])
    assert found.loader == pytest.approx(64 * (0.5 * 0.1 + 0.5 * 0.002) / 4 - 0.64)


def test_the_largest_rank_waits_for_nobody_and_unequal_machines_wait_for_the_slowest():
    slow = replace(GPU, image_s=0.03)
    equal = step_time(WORK, [GPU, slow])
    assert equal.network == pytest.approx(32 * 0.03)
    # shares of 3 and 1 of 8 micro-batches: 48 x 0.01 and 16 x 0.03 s
    shared = step_time(replace(WORK, auto_shares=True), [GPU, slow])
    assert shared.network == pytest.approx(0.48)


def test_idle_ranks_have_no_passes_and_are_wasted():
    fleet = [replace(GPU, devices=16)]
    assert [part.passes for part in rank_shares(WORK, fleet)].count(0) == 8
    found = predict(replace(WORK, epochs=1000), fleet)
    assert found.wasted_share > 0.5


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, 0.564), (4, 1.029), (8, 1.424), (16, 1.766), (1000, 3.241)]
)
def test_expected_maximum_of_normal_numbers(ranks, expected):
    """Harter (1961), table of expected values of normal order statistics."""
    assert largest_of(ranks) == pytest.approx(expected, rel=0.05)


def test_stragglers_are_the_expected_maximum_of_all_ranks():
    found = step_time(WORK, [replace(GPU, devices=2, spread=0.1)])
    assert found.stragglers == pytest.approx(0.1 * largest_of(2) * 32 * 0.01)


def test_buckets_have_the_sizes_of_the_training():
    layers = [torch.nn.Parameter(torch.zeros(1 << 14)) for _ in range(640)]  # 64 KiB each, 40 MiB
    sizes = [4 * sum(p.numel() for p in group) for group in buckets.grouped(layers, buckets.BUCKET_BYTES)]
    work = replace(WORK, network=replace(TINY, parameters=640 << 14))
    assert inputs.BUCKET_BYTES == buckets.BUCKET_BYTES
    assert [size for size, _ in work.buckets] == sizes
    assert sum(size for size, _ in replace(work, reduce="fast16").buckets) == 20 << 20
    assert work.buckets[-1][1] == 1.0  # the last gradients are final when the pass ends


def test_the_backward_pass_hides_all_but_the_last_bucket_on_a_fast_link():
    fleet = [replace(GPU, between=Link(0.0, 1e9))] * 2
    work = replace(WORK, micro_batch=32)  # one pass of 0.32 s on each, two thirds of it backward
    exposed = exposed_sum_s(work, fleet, 2 / 3 * 0.32)
    last = work.buckets[-1][0] / 1e9  # two ranks send a bucket once
    assert exposed == pytest.approx(last + 64 / 1e9)


def test_a_slow_link_is_exposed_less_the_backward_pass():
    fleet = [replace(GPU, between=Link(0.0, 1e6))] * 2
    exposed = exposed_sum_s(WORK, fleet, 0.1)
    first = 0.1 * WORK.buckets[0][1]
    assert exposed == pytest.approx((4 << 20) / 1e6 - (0.1 - first) + 64 / 1e6, rel=1e-3)


def test_a_quota_of_less_than_a_core_stops_the_sums_too():
    cpu = replace(GPU, on_cpu=True, cores=0.5)
    (part,) = rank_shares(WORK, [cpu])
    assert part.backward_s == pytest.approx(0.5 * 2 / 3 * 8 * 0.01)
    assert rank_shares(WORK, [replace(cpu, cores=2.0)])[0].backward_s == pytest.approx(2 / 3 * 8 * 0.01)


def test_nccl_sums_inside_each_host_first():
    host = replace(GPU, devices=4, inside=Link(0.0, 1e9), between=Link(0.0, 1e7))
    in_stages = exposed_sum_s(WORK, [replace(host, between=replace(host.between, tree=True))] * 2, 0.0)
    ring = exposed_sum_s(WORK, [host] * 2, 0.0)
    # over the link between: 2 (H - 1) / H = 1.0 instead of 2 (8 - 1) / 8 = 1.75 times the bytes
    assert ring / in_stages == pytest.approx(1.75, rel=0.05)


def test_a_tree_has_less_latency_than_a_ring():
    assert Link(1e-3, math.inf).all_reduce_s(0, 512) == pytest.approx(1.022)
    assert Link(1e-3, math.inf, tree=True).all_reduce_s(0, 512) == pytest.approx(0.018)


def test_all_ranks_share_a_validation():
    assert [validation_s(WORK, [GPU] * n) for n in (1, 2, 4)] == pytest.approx([6, 3.5, 2.25])


def test_doubts_widen_the_prediction_in_both_directions():
    runs = [predict(WORK, [machine]).run for machine in (GPU.changed(-1), GPU, GPU.changed(1))]
    assert runs == sorted(runs) and runs[0] < runs[2]


def test_every_built_in_network_has_figures():
    from yolofleet.families.networks.description import preset_names

    assert list(networks()) == preset_names()


@pytest.mark.parametrize(
    "name",
    [
        *("yolov5n", "ppyoloe-s", "dfine-n"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rtdetrv2-r50m", "rfdetr-n", "rfdetr-s-seg")
        ),
    ],
)
def test_figures_of_networks_are_those_of_the_code(name):
    from yolofleet.families.build import build_model
    from yolofleet.families.networks.cost import gflops, ready_shares, saved_bytes
    from yolofleet.families.networks.description import preset

    model, stored = build_model(preset(name), 80), network_of(name)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == stored.parameters
    assert gflops(model) == pytest.approx(stored.gflops, rel=1e-3)
    assert ready_shares(model) == pytest.approx(stored.ready, abs=0.006)
    assert saved_bytes(model) == pytest.approx(stored.saved_bytes, rel=1e-3)


def test_saved_bytes_are_those_of_a_forward_pass_by_hand():
    from yolofleet.families.networks.cost import saved_bytes

    class Two(torch.nn.Sequential):
        """A convolution from 3 to 4 channels and a SiLU, on 8 x 8 pixels."""

        strides = (8,)

    model = Two(torch.nn.Conv2d(3, 4, 1), torch.nn.SiLU(), torch.nn.SiLU())
    # the inputs of three layers: 3, 4 and 4 channels of 8 x 8 float32; the last output is nobody's input
    assert saved_bytes(model, 8) == (3 + 4 + 4) * 64 * 4  # type: ignore[arg-type]


def test_the_memory_of_a_micro_batch_is_state_and_saved_activations():
    work = replace(WORK, network=replace(TINY, saved_bytes=1e9), img=320)
    # 8 images with a quarter of the pixels, and 20 bytes for each of 2^20 parameters
    assert work.device_bytes == pytest.approx(8 * 0.25e9 + (20 << 20))
    assert replace(work, precision="fp16").device_bytes == pytest.approx(8 * 0.125e9 + (20 << 20))
    gpu = replace(GPU, needed_bytes=work.device_bytes)
    assert replace(gpu, device_bytes=2.1e9).fits and not replace(gpu, device_bytes=2.0e9).fits
    assert replace(gpu, device_bytes=0.0, on_cpu=True).fits


def test_the_state_of_a_device_has_the_bytes_of_the_estimate():
    state = small_run("yolov3-narrow", ["meta"]).state
    state.optimizer.step()  # it makes the momentum
    tensors = [*state.model.parameters(), *(bucket.flat for bucket in state.buckets.buckets)]
    tensors += [slots["momentum_buffer"] for slots in state.optimizer.state.values()]
    tensors += [*state.average.average.values(), *state.average._next_views]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    parameters = sum(p.numel() for p in state.model.parameters())
    # besides, the averages have the statistics of batch normalisation
    assert inputs.STATE_BYTES * parameters <= sum(storages.values()) < 1.02 * inputs.STATE_BYTES * parameters


@pytest.mark.parametrize(
    ("one_s", "two_s", "mbit", "per_pass", "reduce"),
    [
        (2.135, 1.132, 1000, 1, "fast"),
        (2.169, 1.095, 1000, 1, "fast16"),
        (2.09, 1.643, 100, 1, "fast"),
        (2.07, 1.370, 100, 1, "fast16"),
        (1.993, 1.306, 100, 4, "fast"),
        (1.937, 1.055, 100, 4, "fast16"),
    ],
)
def test_steps_of_two_ranks_over_links_follow_from_one_rank(one_s, two_s, mbit, per_pass, reduce):
    """benchmarks/README.md, "Links": yolov5n, 320 px, steps of 64 images; nothing is fitted but the seconds of one rank."""
    host = replace(
        GPU,
        cores=1,
        image_s=one_s / 64,
        inside=LOOPBACK,
        between=Link(LATENCY_S, bytes_s_of(f"{mbit}mbit", TCP_SHARE)),
        on_cpu=True,
        spread=0.02,
    )
    work = replace(WORK, network=network_of("yolov5n"), img=320, per_pass=per_pass, workers=0, reduce=reduce)
    step = step_time(work, [replace(host, load_s=0.0)] * 2)
    assert step.total == pytest.approx(two_s, rel=0.1)
