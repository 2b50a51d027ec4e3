"""The real training step on the accelerator: two devices, launches and memory. ``tests/gpu/test_steps_on_gpus.py`` has the steps
of one device, which run here too, and ``test_waits.py`` the waits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import miniature
import pytest
import torch
from miniature import Accelerator
from small_training import CLASSES, SmallRun, described, small_run
from walks import sampled

ZERO, BOTH = ("mini:0",), ("mini:0", "mini:1")


def assert_equal(there: SmallRun, here: SmallRun) -> None:
    mine, theirs = there.tensors(), here.tensors()
    assert mine.keys() == theirs.keys()
    assert not [name for name, t in mine.items() if not torch.equal(t, theirs[name])]


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


@pytest.mark.parametrize("optimizer", sampled(["RMSProp", "Adamax"], 2))
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


def test_the_losses_of_a_validation_need_no_float64_of_the_device(accelerator: Accelerator):
    from yolofleet.families.build import build_model
    from yolofleet.inference.evaluate.run import predictions
    from yolofleet.tasks.table import task_of

    run = small_run(devices=ZERO)
    model = build_model(described("yolov3-narrow"), CLASSES).to(run.world.device).eval()
    labels = task_of(model).made_up(3)
    accelerator.reset()
    with torch.inference_mode():
        images = torch.zeros((1, 3, 64, 64), dtype=torch.uint8)
        _, loss = predictions(model, images, labels.of_images([labels]), run.loss, "fp32", run.world.device)
    assert loss is not None and loss[0].dtype == "float64"
    assert accelerator.launched() and not accelerator.doubles


@pytest.mark.slow
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
