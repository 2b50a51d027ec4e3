"""The accelerator itself: it behaves as a GPU where a GPU differs from a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from miniature import Accelerator, ChangedTooEarly, UnexpectedWait

from yolofleet.devices import HostCopy, device_count, device_of, to_device
from yolofleet.devices import accelerator as kind

ZERO, ONE = torch.device("mini", 0), torch.device("mini", 1)


def test_the_program_sees_two_devices():
    assert (kind(), device_count()) == ("mini", 2)
    assert (device_of("0,1", 1), device_of("auto", 0)) == (ONE, ZERO)
    assert torch.ones(2, device=ONE).device == ONE
    assert torch.ones(2).to(ZERO).to(ONE).to(ZERO).device == ZERO


def test_operations_that_mix_devices_are_refused():
    here = torch.ones(2, device=ZERO)
    for other in (torch.ones(2), torch.ones(2, device=ONE)):
        with pytest.raises(RuntimeError, match="on the same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2, 2]  # a CPU tensor without dimensions may take part


def test_a_backward_pass_that_mixes_devices_is_refused():
    class Stray(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.ones(2)

    x = torch.ones(2, device=ONE, requires_grad=True)
    with pytest.raises(RuntimeError, match="on the same device"):
        Stray.apply(x).sum().backward()


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t[0] > 0),
        lambda t: t.cpu(),
        lambda t: t.tolist(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: torch.zeros(2).copy_(t),
    ],
)
def test_reading_a_value_on_the_host_is_a_wait(accelerator: Accelerator, read):
    tensor = torch.ones(2, device=ZERO)
    read(tensor)
    assert len(accelerator.waits) == 1
    with accelerator.only_waits(), pytest.raises(UnexpectedWait, match="the host waits for mini:0"):
        read(tensor)


def test_numpy_cannot_read_a_device():
    with pytest.raises(TypeError, match="can't convert"):
        torch.ones(2, device=ZERO).numpy()


def test_a_copy_to_the_host_arrives_when_the_host_waits():
    there = torch.tensor([1.0, 2.0], device=ZERO)
    here = torch.zeros(2).pin_memory()
    here.copy_(there, non_blocking=True)
    there.add_(5)  # queued behind the copy
    assert here.tolist() == [0, 0]
    torch.accelerator.synchronize(ZERO)
    assert here.tolist() == [1, 2]

    fresh = there.to("cpu", non_blocking=True)
    assert math.isnan(fresh[0])
    event = torch.Event(device=ZERO)
    event.record()
    assert not event.query()
    event.synchronize()
    assert fresh.tolist() == [6, 7]


def test_an_event_covers_only_what_was_queued_before_it():
    there = torch.ones(1, device=ZERO)
    early, late = torch.zeros(1).pin_memory(), torch.zeros(1).pin_memory()
    early.copy_(there, non_blocking=True)
    event = torch.Event(device=ZERO)
    event.record()
    late.copy_(there, non_blocking=True)
    event.synchronize()
    assert (early.item(), late.item()) == (1, 0)


def test_memory_that_a_copy_reads_must_not_change():
    here = torch.ones(4).pin_memory()
    here.to(ZERO, non_blocking=True)
    here.add_(1)
    with pytest.raises(ChangedTooEarly):
        torch.accelerator.synchronize(ZERO)
    here.to(ZERO, non_blocking=True)
    torch.accelerator.synchronize(ZERO)
    here.add_(1)
    torch.accelerator.synchronize(ZERO)


def test_pageable_memory_makes_a_copy_wait(accelerator: Accelerator):
    pageable = torch.ones(4)
    pageable.to(ZERO, non_blocking=True)
    assert [wait.what for wait in accelerator.waits] == ["copy of pageable memory"]
    assert accelerator.unpinned == accelerator.waits
    accelerator.reset()
    to_device(pageable, ZERO)
    pageable.pin_memory().to(ZERO, non_blocking=True)
    assert not accelerator.waits


def test_a_host_copy_is_read_behind_its_event(accelerator: Accelerator):
    there = torch.ones(3, device=ONE)
    copy = HostCopy(there)
    there.zero_().add_(7)
    assert copy.read().tolist() == [1, 1, 1]
    (wait,) = accelerator.waits
    assert (wait.what, wait.where, wait.behind) == ("event", "devices.py:read", 2)


def test_new_memory_holds_garbage():
    for make in (torch.empty(3, device=ZERO), torch.empty_like(torch.ones(3, device=ZERO))):
        assert all(math.isnan(value) for value in make.tolist())
    assert torch.zeros(3, device=ZERO).new_empty(2, dtype=torch.int64).tolist() == [0x5A5A5A] * 2


def test_memory_runs_out_and_comes_back(accelerator: Accelerator):
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + 2**20
    kept = torch.ones(2**17, device=ZERO)  # 512 KiB
    with pytest.raises(torch.OutOfMemoryError, match="mini out of memory"):
        torch.ones(2**18, device=ZERO)
    torch.ones(2**18, device=ONE)  # has a limit of its own
    del kept
    assert torch.ones(2**17, device=ZERO).view(2, -1)[0].sum().item() == 2**16  # a view takes no memory


def test_fused_sgd_leaves_garbage_when_its_first_step_is_skipped():
    weight = torch.nn.Parameter(torch.ones(2, device=ZERO))
    weight.grad = torch.ones_like(weight)
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    sgd.found_inf = torch.ones((), device=ZERO)
    sgd.step()
    assert weight.tolist() == [1, 1]
    assert sgd.state[weight]["momentum_buffer"].isnan().all().item()


def test_fused_adam_needs_its_count_on_the_device():
    weight = torch.nn.Parameter(torch.ones(2, device=ZERO))
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.Adam([weight], lr=0.1, fused=True)
    adam.step()
    adam.state[weight]["step"] = adam.state[weight]["step"].cpu()
    with pytest.raises(RuntimeError, match="on the same device"):
        adam.step()


def test_autocast_computes_convolutions_in_half(accelerator: Accelerator):
    convolution = torch.nn.Conv2d(3, 4, 3, device=ZERO)
    with torch.autocast("mini", torch.bfloat16):
        out = convolution(torch.ones(1, 3, 8, 8, device=ZERO))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert convolution.weight.grad.dtype == torch.float32
    assert {dtype for _, dtype in accelerator.seen_dtypes} == {torch.bfloat16}


def test_inference_mode_hides_no_part_of_an_operation(accelerator: Accelerator):
    """Without autograd the device gets ``conv2d`` and ``nonzero_numpy`` whole."""
    convolution = torch.nn.Conv2d(3, 4, 3, device=ZERO)
    with torch.inference_mode(), torch.autocast("mini", torch.bfloat16):
        out = convolution(torch.ones(1, 3, 8, 8, device=ZERO))
        (out > 0).nonzero(as_tuple=True)
        weights = convolution.weight.unbind(0)
    assert accelerator.seen_dtypes == {("aten::convolution", torch.bfloat16)}
    assert [wait.what for wait in accelerator.waits] == ["aten::nonzero"]
    assert out.is_inference() and not weights[0].is_inference()


def test_operations_are_counted_where_the_package_starts_them(accelerator: Accelerator):
    boxes = torch.rand(5, 4, device=ZERO)
    accelerator.reset()
    from yolofleet.geometry.boxes import xyxy_from_cxcywh

    xyxy_from_cxcywh(boxes)
    boxes.view(2, 10)
    assert {file for file, _ in accelerator.launches} == {"boxes.py"}
