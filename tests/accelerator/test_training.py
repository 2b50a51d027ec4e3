"""The real training step on the accelerator: the CPU's bits, overflow, resume, memory. Waits: ``test_waits.py``."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import miniature
import pytest
import torch
from miniature import Accelerator
from small_training import CLASSES, SmallRun, described, small_run

from yolofleet.runs.checkpoint.store import Snapshot

ZERO, BOTH = ("mini:0",), ("mini:0", "mini:1")
PPYOLOE = {"model": "ppyoloe-narrow", "images": 4}


def assert_equal(there: SmallRun, here: SmallRun) -> None:
    mine, theirs = there.tensors(), here.tensors()
    assert mine.keys() == theirs.keys()
    assert not [name for name, t in mine.items() if not torch.equal(t, theirs[name])]


def restored(run: SmallRun, **settings: object) -> SmallRun:
    """A new run that continues from the state of ``run``, which passes through host memory."""
    snapshot: Snapshot = run.state.snapshot({})
    fresh = small_run(**settings)  # type: ignore[arg-type]
    fresh.state.restore(snapshot)
    fresh.step, fresh.progress = run.step, run.progress
    return fresh


@pytest.mark.parametrize(
    ("settings", "progress"),
    [
        ({"model": "yolov5-narrow", "images": 4}, 0.0),
        ({"exact": True, "optimizer": "Adam"}, 0.0),
        ({**PPYOLOE, "optimizer": "AdamW"}, 0.0),
        ({**PPYOLOE, "exact": True}, 0.9),
        ({"model": "yolov5-narrow", "images": 6, "per_pass": 2}, 0.0),
    ],
    ids=["yolov5", "yolov3-exact-adam", "ppyoloe-atss-adamw", "ppyoloe-aligned-exact", "passes-of-two"],
)
def test_one_device_gives_the_bits_of_the_cpu(settings: dict, progress: float):
    there, here = small_run(devices=ZERO, pin=True, **settings), small_run(**settings)
    for run in (there, here):
        run.progress = progress
        run.do(2)
    assert_equal(there, here)


@pytest.mark.parametrize("exact", [False, True])
def test_two_devices_give_the_bits_of_two_threads_of_the_cpu(exact: bool):
    there = small_run(devices=BOTH, exact=exact, pin=True)
    here = small_run(devices=("cpu", "cpu"), exact=exact)
    for run in (there, here):
        run.do(2)
    assert_equal(there, here)
    if exact:
        alone = small_run(exact=True)
        alone.do(2)
        assert_equal(there, alone)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RAdam"])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(optimizer: str):
    settings = {"devices": ZERO, "optimizer": optimizer, "images": 2, "pin": True}
    whole = small_run(**settings)  # type: ignore[arg-type]
    whole.do(3)
    first = small_run(**settings)  # type: ignore[arg-type]
    first.do(1)
    resumed = restored(first, **settings)
    resumed.do(2)
    assert_equal(resumed, whole)
    elsewhere = restored(first, **{**settings, "devices": ("cpu",), "pin": False})
    elsewhere.do(2)
    assert_equal(elsewhere, whole)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RAdam"])
def test_an_overflow_in_the_first_step_changes_nothing(optimizer: str):
    run = small_run(devices=ZERO, precision="fp16", optimizer=optimizer, images=2, pin=True)
    before = run.tensors()
    run.state.scaler.load_state_dict({"scale": 2.0**126, "_growth_tracker": 0})
    run.do(1)
    after = run.tensors()
    assert run.state.scaler.state_dict()["scale"] == 2.0**125
    on_host = ("step",) if optimizer == "RAdam" else ()
    changed = [name for name, t in before.items() if not torch.equal(t, after[name])]
    assert not [name for name in changed if not name.endswith(on_host)]
    run.state.scaler.load_state_dict({"scale": 256.0, "_growth_tracker": 0})
    run.do(2)
    assert all(t.isfinite().all() for t in run.tensors().values())
    assert not torch.equal(run.tensors()["model/model.0.conv.weight"], before["model/model.0.conv.weight"])


@pytest.mark.parametrize(
    ("devices", "settings", "goes_on"),
    [
        (ZERO, {"model": "yolov5-narrow", "per_pass": 2}, "skip"),
        (ZERO, {"exact": True, "per_pass": 2}, "skip"),
        (ZERO, {"exact": True, "per_pass": 2}, "rollback"),
        (ZERO, {"sync_bn": True}, "skip"),
        (BOTH, {"exact": True}, "skip"),
        (BOTH, {"exact": True}, "rollback"),
        (ZERO, PPYOLOE, "rollback"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple | dict) else value,
)
def test_an_overflow_in_the_forward_pass_leaves_no_trace_in_later_steps(
    devices: tuple[str, ...], settings: dict, goes_on: str
):
    settings = {"devices": devices, "images": 4, "pin": True, **settings}
    run, other = small_run(**settings), small_run(**settings)
    for one in (run, other):
        one.do()
    saved = run.state.snapshot({})
    run.overflow(math.inf)
    if goes_on == "rollback":
        run.state.restore(saved)
        run.step = other.step
    else:
        other.leave_out()
    for one in (run, other):
        one.do(2)
    run.state.check_finite()
    assert_equal(run, other)


def test_parameters_reach_another_device_in_few_launches(accelerator: Accelerator):
    run = small_run(devices=BOTH, images=4, pin=True)
    run.do(1)
    lead, other = (replica.model for replica in run.state.replicas.all)
    with torch.no_grad():
        for p in lead.parameters():
            p.add_(1)
    accelerator.reset()
    run.state.replicas.copy_to_devices()
    assert 0 < accelerator.launched("replicas.py") < 5 < len(list(lead.parameters()))
    for mine, theirs in zip(lead.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


@pytest.mark.parametrize("optimizer", ["RMSProp", "Adamax"])
def test_an_update_without_fused_kernels_has_few_launches_of_its_own(
    accelerator: Accelerator, optimizer: str
):
    run = small_run(devices=ZERO, optimizer=optimizer, images=2, pin=True)
    run.do(1)
    run.state.optimizer.step = lambda: None  # those of torch's optimizer are not counted
    accelerator.reset()
    run.do(1)
    assert 0 < accelerator.launched("optimiser.py") < 10 < len(list(run.state.model.parameters()))


def test_memory_that_runs_out_is_an_error_that_the_run_knows(accelerator: Accelerator):
    from yolofleet.support.devices import is_out_of_memory

    run = small_run(devices=ZERO, images=4, pin=True)
    run.do(1)
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + 2**16
    with pytest.raises(RuntimeError) as caught:
        run.do(1)
    assert is_out_of_memory(caught.value)


def test_the_largest_micro_batch_that_fits_is_chosen(accelerator: Accelerator):
    from yolofleet.config.schema import TrainConfig
    from yolofleet.training.rank.memory_probe import LargestPass, largest_that_fits, probed_micro_batch

    run = small_run(devices=ZERO, exact=True, pin=True)
    largest = LargestPass(run.state, run.loss, "fp32", 64, 3)
    device, room = accelerator.devices[0], 2**19
    while True:  # until four images fit
        device.limit_bytes = device.used_bytes() + room
        try:
            largest_that_fits([4], largest.run, run.world.device)
            break
        except torch.OutOfMemoryError:
            room += room // 2
    chosen = probed_micro_batch(TrainConfig(batch=128, micro_batch=-1), largest, run.world)
    assert 4 <= chosen < 128
    with pytest.raises(torch.OutOfMemoryError):
        largest.run(2 * chosen)
    device.limit_bytes = 2**34
    run.do(1)
    assert all(t.isfinite().all() for t in run.tensors().values())


def test_as_many_micro_batches_pass_together_as_fit(accelerator: Accelerator):
    from yolofleet.config.schema import TrainConfig
    from yolofleet.training.rank.memory_probe import LargestPass, probed_per_pass

    config = TrainConfig(batch=32, micro_batch=2)
    run = small_run(devices=ZERO, pin=True, images=32)
    largest, device = LargestPass(run.state, run.loss, "fp32", 64, 3), accelerator.devices[0]
    assert probed_per_pass(config, largest, 16) == 16
    room, chosen = 2**19, 0
    while not chosen:  # until one micro-batch fits
        device.limit_bytes = device.used_bytes() + room
        try:
            chosen = probed_per_pass(config, largest, 16)
        except torch.OutOfMemoryError:
            room += room // 2
    assert 1 <= chosen < 16
    device.limit_bytes = 2**34
    run.per_pass = chosen
    run.do(1)
    assert all(t.isfinite().all() for t in run.tensors().values())
    assert probed_per_pass(config.model_copy(update={"reduce": "exact"}), largest, 16) == 1
    assert probed_per_pass(config.model_copy(update={"micro_batches_per_pass": 20}), largest, 16) == 16
    assert probed_per_pass(config.model_copy(update={"device": "0:2"}), largest, 16) == 1
    nine_images = replace(largest, most_images=9)
    assert probed_per_pass(config, nine_images, 16) == 4
    assert probed_per_pass(config.model_copy(update={"micro_batches_per_pass": 20}), nine_images, 16) == 4
    on_the_host = LargestPass(small_run().state, run.loss, "fp32", 64, 3)
    assert probed_per_pass(config, on_the_host, 16) == 1


def test_a_trial_leaves_the_memory_of_a_validation_beside_the_training(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    from yolofleet.config.schema import TrainConfig, ValConfig
    from yolofleet.families.build import build_model
    from yolofleet.inference.evaluate.run import EvaluationSettings
    from yolofleet.training.rank.memory_probe import LargestPass, memory_of_validation, probed_per_pass

    monkeypatch.setattr(miniature, "SWEEP_BYTES", -(2**60))  # freed memory is free at once
    run = small_run(devices=ZERO, pin=True, images=32)
    device = accelerator.devices[0]
    description = described("yolov3-narrow")
    largest = LargestPass(
        *(run.state, run.loss, "fp32", 64, 3),
        evaluation=EvaluationSettings(ValConfig(img=256, batch=16)),
        averaged=lambda: build_model(description, CLASSES).to(run.world.device),
    )
    config = TrainConfig(batch=32, micro_batch=2, val_overlap=True)
    accelerator.reset()
    beside = memory_of_validation(config, largest, run.world)
    held = device.used_bytes()
    del beside
    assert accelerator.launched("nms.py") > 0
    assert held > device.used_bytes() + 16 * 3 * 256 * 256 * 4, "at least the images of a batch"
    device.limit_bytes = held
    assert probed_per_pass(config, largest, 16) == 16
    chosen = 0
    while not chosen:  # until one micro-batch fits
        device.limit_bytes += 2**21
        beside = None
        with suppress(torch.OutOfMemoryError):
            beside = memory_of_validation(config, largest, run.world)
            chosen = probed_per_pass(config, largest, 16)
        del beside
    assert chosen < 16
