"""The accelerator itself: it behaves as a GPU where a GPU differs from a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import miniature
import pytest
import torch
from miniature import Accelerator, ChangedTooEarly, UnexpectedWait

from yolofleet import devices
from yolofleet.devices import HostCopy, device_count, device_of, selected, to_device
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


def test_a_host_copy_is_read_behind_its_event(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "WITH_SLEEPING_EVENTS", ("mini",))  # as for CUDA
    there = torch.ones(3, device=ONE)
    copy = HostCopy(there)
    assert copy._event.blocking and not devices.completion(ONE).blocking
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


def test_an_event_without_a_stream_is_one_of_the_current_device(accelerator: Accelerator):
    there = torch.ones(1, device=ONE)
    for event, stream, arrives in (
        (torch.Event(device=ONE), None, 0),  # torch drops the index
        (torch.Event(device=ONE), torch.accelerator.current_stream(ONE), 1),
        (torch.mini.Event(), torch.mini.current_stream(ONE), 1),
    ):
        here = torch.zeros(1).pin_memory()
        here.copy_(there, non_blocking=True)
        event.record(stream)
        event.synchronize()
        assert here.item() == arrives
    with selected(ONE):
        here = torch.zeros(1).pin_memory()
        here.copy_(there, non_blocking=True)
        event = torch.Event(device=ZERO)
        event.record()
        event.synchronize()
        assert here.item() == 1


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


def test_freed_memory_belongs_to_its_stream_until_the_device_has_no_other(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(miniature, "SWEEP_BYTES", -(2**60))  # freed memory is seen at once
    torch.accelerator.empty_cache()
    free, _ = torch.accelerator.get_memory_info(ZERO)
    accelerator.devices[0].limit_bytes -= free - 2**20

    def free_kib() -> int:
        return torch.accelerator.get_memory_info(ZERO)[0] // 1024

    def use(kib: int) -> None:
        torch.ones(256 * kib, device=ZERO)

    use(600)
    use(500)
    assert free_kib() == 1024 - 600, "a stream uses its memory again"
    with torch.mini.stream(torch.mini.Stream(ZERO)):
        use(400)
        assert free_kib() == 1024 - 600 - 400, "and another one has memory of its own"
        use(500)
        assert free_kib() == 1024 - 500, "torch frees all pools before it gives up"
    torch.accelerator.empty_cache()
    assert free_kib() == 1024


def test_selecting_a_device_makes_a_context_and_its_guard_only_there(accelerator: Accelerator):
    def contexts(do: Callable[[], object]) -> list[bool]:
        accelerator.reset()
        do()
        return [device.has_context for device in accelerator.devices]

    def set_and_return() -> None:
        torch.accelerator.set_device_index(1)
        torch.accelerator.set_device_index(0)

    def guarded() -> None:
        with torch.mini.device(ONE):
            pass

    assert contexts(guarded) == [False, True]
    assert contexts(lambda: torch.ones(1, device=ONE)) == [False, True]
    assert contexts(set_and_return) == [True, True]
    assert contexts(lambda: torch.accelerator.synchronize(ONE)) == [True, True]
    stream = torch.mini.current_stream(ONE)
    assert contexts(lambda: torch.Event(device=ONE).record(stream)) == [True, True]
    assert contexts(lambda: torch.mini.Event().record(stream)) == [False, True]


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
