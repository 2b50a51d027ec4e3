"""The training step and suppression on one device, in this process: updates as on the CPU, overflows, resuming, waits, boxes.

The simulated accelerator computes with the CPU's kernels, so all bits must be equal there. The kernels of a GPU round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gpu_devices import COUNT, DEVICE, IS_GPU, KIND, ON_CPUS, PRECISIONS, needs_gpu, only_cuda, only_gpus
from small_training import SmallRun, small_run
from walks import sampled

from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.nms import detections, nms
from yolofleet.families.weights.format import non_finite
from yolofleet.runs.checkpoint.store import Snapshot
from yolofleet.support.devices import float32_products, has_triton, is_host, synchronize
from yolofleet.training.parallel.grouped_norm import PYTORCH, kernels_of

pytestmark = needs_gpu
HERE = (str(DEVICE),)
BOTH = ("cpu", "cpu") if ON_CPUS else (f"{KIND}:0", f"{KIND}:1")
CPU = ("cpu",)
PIN = not is_host(DEVICE)
WHOLE = {"yolov5": "yolov5n", "yolov3": "yolov3-tiny", "ppyoloe": "ppyoloe-s"}
ALIGNED = 0.9  # fraction of a run in which PP-YOLOE has its second assigner
SAME_LOSS = 1e-3  # relative, on a GPU
SAME_UPDATE = 5e-3  # of a first update with other kernels; measured on CPUs: 2e-4
OPTIMIZERS = (
    ["SGD", "Adam", "AdamW", "RAdam", "RMSProp", "Adamax", "NAdam"]
    if IS_GPU
    else sampled(["SGD", "Adam", "AdamW", "RAdam"], 2)
)
SLOW = pytest.mark.slow
SLOW_HERE = () if IS_GPU else SLOW


def run_of(
    family: str = "yolov3", progress: float = 0.0, devices: tuple[str, ...] = HERE, **more: object
) -> SmallRun:
    """A run of a network of the family: whole on a GPU, narrow elsewhere."""
    if len(devices) > COUNT:
        pytest.skip(f"needs {len(devices)} accelerator devices")
    model = WHOLE[family] if IS_GPU else f"{family}-narrow"
    run = small_run(model, devices, pin=PIN and devices != CPU, **more)  # type: ignore[arg-type]
    run.progress = progress
    if IS_GPU:
        run.rate = 1e-4  # at 0.01, weights that differ by 1e-6 at first change the loss of the tenth step by up to 3 %
    return run


def moved(run: SmallRun, family: str = "yolov3") -> torch.Tensor:
    """Return how far the weights have moved since the start, float64 [parameters], on the CPU."""

    def weights(run: SmallRun) -> torch.Tensor:
        found = run.state.replicas.lead.model.parameters()
        return torch.cat([weight.detach().flatten().cpu().double() for weight in found])

    return weights(run) - weights(run_of(family, devices=CPU))


def assert_equal(there: SmallRun, here: SmallRun) -> None:
    mine, theirs = there.tensors(), here.tensors()
    assert mine.keys() == theirs.keys()
    assert not [name for name, t in mine.items() if not torch.equal(t, theirs[name])]


def assert_go_on_alike(one: SmallRun, other: SmallRun, steps: int = 2) -> None:
    """Train both for some steps: they must end with the same bits, and on a GPU with the same loss."""
    losses = [float(run.do(steps).terms.sum()) for run in (one, other)]
    if IS_GPU:
        assert losses[0] == pytest.approx(losses[1], rel=SAME_LOSS)
    else:
        assert_equal(one, other)


def restored(run: SmallRun, **settings: object) -> SmallRun:
    """A new run that continues from the state of ``run``, which passes through host memory."""
    snapshot: Snapshot = run.state.snapshot({})
    fresh = run_of(**settings)  # type: ignore[arg-type]
    fresh.state.restore(snapshot)
    assert_equal(fresh, run)
    fresh.step, fresh.progress = run.step, run.progress
    return fresh


@pytest.mark.parametrize(
    ("family", "settings", "progress"),
    [
        pytest.param("yolov5", {"images": 4}, 0.0, marks=SLOW_HERE),
        ("yolov3", {"exact": True, "optimizer": "Adam"}, 0.0),
        pytest.param("ppyoloe", {"images": 4, "optimizer": "AdamW"}, 0.0, marks=SLOW_HERE),
        ("ppyoloe", {"images": 4, "exact": True}, ALIGNED),
        pytest.param("yolov5", {"images": 6, "per_pass": 2}, 0.0, marks=SLOW_HERE),
    ],
    ids=["yolov5", "yolov3-exact-adam", "ppyoloe-atss-adamw", "ppyoloe-aligned-exact", "passes-of-two"],
)
def test_steps_move_the_weights_as_on_the_cpu(family: str, settings: dict, progress: float) -> None:
    """On a GPU at this rate, weights that differ by 1e-6 at first change the difference by at most 1.3e-3 of itself in ten steps."""
    if IS_GPU:  # Adam divides the rounding of small gradients by itself
        settings = {**settings, "optimizer": "SGD"}
    with float32_products(DEVICE, tf32=False):
        there, here = (run_of(family, progress, devices, **settings) for devices in (HERE, CPU))
        for run in (there, here):
            run.do(10 if IS_GPU else 2)
    if not IS_GPU:
        assert_equal(there, here)
        return
    mine, theirs = moved(there, family), moved(here, family)
    assert float((mine - theirs).norm() / theirs.norm()) < 0.01


def test_four_micro_batches_in_a_pass_move_the_weights_as_four_passes() -> None:
    with float32_products(DEVICE, tf32=False):
        together, alone = (run_of(per_pass=per_pass) for per_pass in (4, 1))
        for run in (together, alone):
            run.do(1)
    mine, theirs = moved(together), moved(alone)
    assert float((mine - theirs).norm() / theirs.norm()) <= SAME_UPDATE


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(optimizer: str) -> None:
    settings = {"optimizer": optimizer, "images": 2}
    whole = run_of(**settings)  # type: ignore[arg-type]
    whole.do(1)
    if not IS_GPU:
        assert_go_on_alike(restored(whole, **settings), restored(whole, **settings, devices=CPU))
    assert_go_on_alike(restored(whole, **settings), whole)


@pytest.mark.skipif(ON_CPUS, reason="the CPU has no fp16")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_in_the_first_step_changes_nothing(optimizer: str) -> None:
    run = run_of(precision="fp16", optimizer=optimizer, images=2)
    before = run.tensors()
    run.state.scaler.load_state_dict({"scale": 2.0**126, "_growth_tracker": 0})
    run.do(1)
    after = run.tensors()
    assert run.state.scaler.state_dict()["scale"] == 2.0**125
    changed = [name for name, t in before.items() if not torch.equal(t, after[name])]
    if optimizer in ("RAdam", "RMSProp", "Adamax", "NAdam"):  # they count steps on the host
        changed = [name for name in changed if not name.endswith("step")]
    assert not changed
    run.state.scaler.load_state_dict({"scale": 256.0, "_growth_tracker": 0})
    run.do(2)
    assert not non_finite(run.tensors())
    assert not torch.equal(run.tensors()["model/model.0.conv.weight"], before["model/model.0.conv.weight"])


@pytest.mark.parametrize(
    ("family", "devices", "settings", "goes_on"),
    [
        pytest.param("yolov5", HERE, {"per_pass": 2}, "skip", marks=SLOW_HERE),
        pytest.param("yolov3", HERE, {"sync_bn": True}, "skip", marks=SLOW_HERE),
        pytest.param("yolov3", HERE, {"exact": True, "per_pass": 2}, "rollback", marks=SLOW_HERE),
        ("yolov3", BOTH, {"exact": True}, "skip"),
        pytest.param("yolov3", HERE, {"exact": True, "per_pass": 2}, "skip", marks=SLOW),
        pytest.param("yolov3", BOTH, {"exact": True}, "rollback", marks=SLOW),
        pytest.param("ppyoloe", HERE, {}, "rollback", marks=SLOW),
    ],
)
def test_an_overflow_in_the_forward_pass_leaves_no_trace_in_later_steps(
    family: str, devices: tuple[str, ...], settings: dict, goes_on: str
) -> None:
    run, other = (run_of(family, devices=devices, images=4, **settings) for _ in range(2))
    for one in (run, other):
        one.do()
    saved = run.state.snapshot({})
    run.overflow(math.inf)
    if goes_on == "rollback":
        run.state.restore(saved)
        run.step = other.step
    else:
        other.leave_out()
    assert_go_on_alike(run, other)
    run.state.check_finite()


@only_gpus
def test_batch_norm_of_a_pass_uses_the_kernels_of_triton() -> None:
    """If they do not work, ``kernels_of`` silently chooses slower ones."""
    if not has_triton(DEVICE):
        pytest.skip("needs Triton, which comes with torch for NVIDIA GPUs")
    assert kernels_of(DEVICE) is not PYTORCH


@only_gpus
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


@contextmanager
def no_waits() -> Iterator[None]:
    """Let PyTorch raise an error where the host waits for a CUDA stream."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_cuda
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("family", WHOLE)
def test_the_host_waits_for_no_stream_in_a_steady_step(family: str, precision: str, exact: bool) -> None:
    """``tests/accelerator/test_waits.py`` counts the waits of the simulated accelerator."""
    run = run_of(family, precision=precision, exact=exact)
    run.do(4)  # exact sums read the device in their first steps, and fp16 looks for its scale
    shares = run.micro_batches(run.step)  # pinning memory may wait
    synchronize(DEVICE)
    with no_waits():
        run.do(1, shares=shares)


@only_cuda
def test_the_error_of_the_last_test_shows_a_wait() -> None:
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(2, device=DEVICE).sum().item()


@pytest.mark.parametrize("multi_label", [False, True])
def test_suppression_of_a_batch_keeps_the_boxes_that_it_keeps_on_the_cpu(multi_label: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    images, boxes = (32, 2000) if IS_GPU else (4, 400)
    decoded = torch.rand(images, boxes, 9, generator=draws)
    decoded[..., :2] *= 600
    decoded[..., 2:4] = 8 + 100 * decoded[..., 2:4]
    settings = {"conf": 0.3, "iou": 0.6, "max_det": 300, "multi_label": multi_label}
    here, there = (detections(Decoded(decoded.to(device)), **settings)[0] for device in ("cpu", DEVICE))
    for expected, found in zip(here, there, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("count", [1, 300, 5000] if IS_GPU else [1, 300])
def test_suppression_keeps_the_boxes_that_it_keeps_on_the_cpu(count: int) -> None:
    draws = torch.Generator().manual_seed(0)
    corners = torch.rand(count, 2, generator=draws) * 600
    boxes = torch.cat([corners, corners + 8 + torch.rand(count, 2, generator=draws) * 100], 1)
    scores = torch.rand(count, generator=draws)
    groups = torch.randint(0, 3, (count,), generator=draws)
    here = nms(boxes, scores, 0.5, groups=groups)
    there = nms(boxes.to(DEVICE), scores.to(DEVICE), 0.5, groups=groups.to(DEVICE))
    assert there.cpu().tolist() == here.tolist()
