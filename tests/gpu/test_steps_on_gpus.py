"""The training step and suppression on one GPU, in this process: state after an overflow, waits, rate, boxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gpu_devices import DEVICE, KIND, PRECISIONS, needs_gpu, only_cuda, only_gpus
from small_training import SmallRun, small_run

from yolofleet.data.geometry.nms import nms
from yolofleet.support.devices import float32_products, has_triton, is_host, synchronize
from yolofleet.training.parallel.grouped_norm import PYTORCH, kernels_of

pytestmark = needs_gpu
PIN = not is_host(DEVICE)
CASES = {
    "yolov5n": ("yolov5n", 0.0),
    "yolov3-tiny": ("yolov3-tiny", 0.0),
    "ppyoloe-s with ATSS": ("ppyoloe-s", 0.0),
    "ppyoloe-s aligned": ("ppyoloe-s", 0.9),
}


def run_of(
    model: str = "yolov5n", progress: float = 0.0, device: str = str(DEVICE), **more: object
) -> SmallRun:
    run = small_run(model, (device,), pin=PIN and device != "cpu", **more)  # type: ignore[arg-type]
    run.progress = progress
    return run


@only_gpus
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_move_the_weights_as_on_the_cpu(case: str) -> None:
    """At this rate, weights that differ by 1e-6 at first change the difference by at most 1.3e-3 of itself.

    At a rate of 0.01 the loss of the tenth step would change by up to 3 %.
    """
    model, progress = CASES[case]

    def moved(device: str) -> torch.Tensor:
        run = run_of(model, progress, device)
        run.rate = 1e-4
        before = weights_of(run)
        run.do(10)
        return weights_of(run) - before

    with float32_products(DEVICE, tf32=False):
        there, here = moved(str(DEVICE)), moved("cpu")
    assert float((there - here).norm() / here.norm()) < 0.01


@only_gpus
def test_batch_norm_of_a_pass_uses_the_kernels_of_triton() -> None:
    """If they do not work, ``kernels_of`` silently chooses slower ones."""
    if not has_triton(DEVICE):
        pytest.skip("needs Triton, which comes with torch for NVIDIA GPUs")
    assert kernels_of(DEVICE) is not PYTORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [3, 48, 255, 1024])
@pytest.mark.parametrize("side", [5, 80])
def test_batch_norm_of_a_pass_is_that_of_float64(channels: int, side: int, dtype: torch.dtype) -> None:
    """Ten images in micro-batches of four; the last has two."""
    draws = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(10, channels, side, side, generator=draws).to(dtype) for _ in range(2))
    weight, bias = torch.rand(2, channels, generator=draws) + 0.5

    def results(device: torch.device, as_dtype: torch.dtype | None) -> list[torch.Tensor]:
        layout = torch.channels_last
        images, grads = (t.to(device, as_dtype or dtype, memory_format=layout) for t in (x, grad))
        w, b = (t.to(device, as_dtype or torch.float32) for t in (weight, bias))
        means, variances = w.new_zeros((2, 3, channels))
        kernels = PYTORCH if as_dtype else kernels_of(device)
        y, saved = kernels.normalise(images, w, b, means, variances, 4, 1e-3)
        found = [y, means, variances, *kernels.differentiate(grads, images, w, saved, 4, 1e-3)]
        return [t.cpu().double() for t in found]

    expected = results(torch.device("cpu"), torch.float64)
    for found, right in zip(results(DEVICE, None), expected, strict=True):
        rounding = torch.finfo(dtype).eps
        assert float((found - right).norm() / right.norm()) < max(rounding, 1e-5)


def weights_of(run: SmallRun) -> torch.Tensor:
    """Return all weights, float64 [parameters], on the CPU."""
    weights = run.state.replicas.lead.model.parameters()
    return torch.cat([weight.detach().flatten().cpu().double() for weight in weights])


@contextmanager
def no_waits() -> Iterator[None]:
    """Let PyTorch raise an error where the host waits for a CUDA stream."""
    if KIND != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("case", [case for case in CASES if "aligned" not in case])
def test_the_host_waits_for_no_stream_in_a_steady_step(case: str, precision: str, exact: bool) -> None:
    model, progress = CASES[case]
    run = run_of(model, progress, precision=precision, exact=exact)
    run.do(4)  # exact sums read the device in their first steps, and fp16 looks for its scale
    shares = run.micro_batches(run.step)  # pinning memory may wait
    synchronize(DEVICE)
    with no_waits():
        run.do(1, shares=shares)


@only_cuda
def test_the_error_of_the_last_test_shows_a_wait() -> None:
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(2, device=DEVICE).sum().item()


def test_suppression_keeps_the_boxes_that_it_keeps_on_the_cpu() -> None:
    draws = torch.Generator().manual_seed(0)
    for count in (1, 300, 5000):
        corners = torch.rand(count, 2, generator=draws) * 600
        boxes = torch.cat([corners, corners + 8 + torch.rand(count, 2, generator=draws) * 100], 1)
        scores = torch.rand(count, generator=draws)
        groups = torch.randint(0, 3, (count,), generator=draws)
        here = nms(boxes, scores, 0.5, groups=groups)
        there = nms(boxes.to(DEVICE), scores.to(DEVICE), 0.5, groups=groups.to(DEVICE))
        assert there.cpu().tolist() == here.tolist()
