"""The accelerator itself: it behaves as a GPU where a GPU differs from a CPU."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from miniature import Accelerator, ChangedTooEarly, UnexpectedWait

ZERO, ONE = torch.device("mini", 0), torch.device("mini", 1)


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


def test_memory_runs_out_and_comes_back(accelerator: Accelerator):
    accelerator.devices[0].limit_bytes = accelerator.devices[0].used_bytes() + 2**20
    kept = torch.ones(2**17, device=ZERO)  # 512 KiB
    with pytest.raises(torch.OutOfMemoryError, match="mini out of memory"):
        torch.ones(2**18, device=ZERO)
    torch.ones(2**18, device=ONE)  # has a limit of its own
    del kept
    assert torch.ones(2**17, device=ZERO).view(2, -1)[0].sum().item() == 2**16  # a view takes no memory


def test_every_thread_begins_with_device_0_and_the_default_streams(accelerator: Accelerator):
    def state() -> tuple[int, int]:
        return torch.accelerator.current_device_index(), torch.accelerator.current_stream(ONE).number

    with torch.mini.stream(torch.mini.Stream(ONE)):
        assert state()[0] == 1 and state()[1] > 0
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(state).result() == (0, 0)
    assert state() == (0, 0)


def test_a_stream_is_waited_for_alone_and_after_what_it_waited_for():
    there = torch.ones(1, device=ZERO)
    side = torch.mini.Stream(ZERO)
    ours, beside = torch.zeros(1).pin_memory(), torch.zeros(1).pin_memory()
    ours.copy_(there, non_blocking=True)
    with torch.mini.stream(side):
        beside.copy_(there, non_blocking=True)
    there.sum().item()  # waits for the current stream
    assert (ours.item(), beside.item()) == (1, 0)
    ours.zero_()
    ours.copy_(there, non_blocking=True)
    side.wait_stream(torch.accelerator.current_stream(ZERO))
    side.synchronize()
    assert (ours.item(), beside.item()) == (1, 1)


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
    from yolofleet.data.geometry.boxes import xyxy_from_cxcywh

    xyxy_from_cxcywh(boxes)
    boxes.view(2, 10)
    assert {file for file, _ in accelerator.launches} == {"boxes.py"}
