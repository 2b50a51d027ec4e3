"""Batch norm of several micro-batches in a pass, by PyTorch's kernels and by Triton's, which its interpreter runs.

The tests of Triton's kernels need the package triton, which comes with torch for GPUs: ``pip install triton``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from yolofleet.training.parallel import grouped_norm
from yolofleet.training.parallel.batchnorm import RunningStatistics
from yolofleet.training.parallel.grouped_norm import PYTORCH, GroupedBatchNorm2d, Kernels, kernels_of

KERNELS = "yolofleet.training.parallel.grouped_norm_triton"
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
LAUNCHES = 2  # of Triton's kernels, in each direction
# read and write of a plain layer in each direction, in passes over its activation: the kernels of PyTorch read it for the
# statistics and again for the result
FORWARD, BACKWARD = 3, 5


@pytest.fixture(scope="module")
def triton() -> Kernels:
    """Triton's kernels, run by its interpreter on the CPU."""
    if not INTERPRETS:
        pytest.skip("test_triton_agrees_in_its_interpreter runs this in a process of its own")
    from yolofleet.training.parallel import grouped_norm_triton

    return Kernels(grouped_norm_triton.normalise, grouped_norm_triton.differentiate)


def has_interpreter() -> bool:
    """Whether Triton is installed. The interpreter of older versions does not work with NumPy 2.4."""
    found = version("triton") if find_spec("triton") else ""
    return bool(found) and tuple(int(part) for part in found.split(".")[:2]) >= (3, 9)


@pytest.mark.skipif(INTERPRETS or not has_interpreter(), reason="needs the package triton from 3.9 on")
def test_triton_agrees_in_its_interpreter() -> None:
    """Triton decides when it is imported whether its interpreter runs all kernels of the process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout.splitlines()[-1], done.stdout


@pytest.fixture(params=["PyTorch", "Triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return PYTORCH if request.param == "PyTorch" else request.getfixturevalue("triton")


def layers(
    channels: int, groups: int, images: int, kernels: Kernels
) -> tuple[nn.BatchNorm2d, GroupedBatchNorm2d]:
    """A plain layer whose statistics are those of its last part, and a grouped one with the same weights."""
    torch.manual_seed(0)
    plain, grouped = (nn.BatchNorm2d(channels, eps=1e-3, momentum=1.0) for _ in range(2))
    nn.init.uniform_(plain.weight, 0.5, 2)
    nn.init.uniform_(plain.bias, -1, 1)
    grouped.load_state_dict(plain.state_dict())
    RunningStatistics(nn.Sequential(grouped)).pass_together(groups, images)
    assert isinstance(grouped, GroupedBatchNorm2d)
    grouped.kernels = kernels
    return plain, grouped


def random(*shape: int, dtype: torch.dtype = torch.float32, away: float = 0.0) -> Tensor:
    """Random values, channels-last."""
    return (torch.randn(shape) + away).to(dtype).to(memory_format=torch.channels_last)


def apart(plain: nn.BatchNorm2d, x: Tensor, grad: Tensor, images: int) -> list[Tensor]:
    """Result, gradients and statistics of a plain layer that sees the parts one by one, as one backward pass."""
    x = x.detach().clone().requires_grad_()
    outs, statistics = [], []
    for part in x.split(images):
        outs.append(plain(part))
        assert plain.running_mean is not None and plain.running_var is not None
        statistics += [plain.running_mean.clone(), plain.running_var.clone()]
    out = torch.cat(outs)
    of_x, of_weight, of_bias = torch.autograd.grad(out, (x, plain.weight, plain.bias), grad)
    return [out.detach(), of_x, of_weight, of_bias, torch.stack(statistics)]


def together(grouped: GroupedBatchNorm2d, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = grouped(x)
    of_x, of_weight, of_bias = torch.autograd.grad(out, (x, grouped.weight, grouped.bias), grad)
    parts = -(-len(x) // grouped.images)
    statistics = torch.stack([grouped.means, grouped.variances], 1).flatten(0, 1)[: 2 * parts]
    return [out.detach(), of_x, of_weight, of_bias, statistics]


@pytest.mark.parametrize("channels", [3, 16, 72])
@pytest.mark.parametrize("images", [2, 5, 6])
def test_results_are_those_of_a_layer_that_sees_the_parts_one_by_one(
    channels: int, images: int, kernels: Kernels
) -> None:
    """PyTorch's kernels have the same bits. A pass of 5 ends with a part of one image, one of 2 has a single part."""
    plain, grouped = layers(channels, 3, 2, kernels)
    x, grad = random(images, channels, 9, 7, away=0.5), random(images, channels, 9, 7)
    for found, expected in zip(together(grouped, x, grad), apart(plain, x, grad, 2), strict=True):
        if kernels is PYTORCH:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_results_in_half_precision_are_rounded_once(dtype: torch.dtype, kernels: Kernels) -> None:
    """Against a layer in float32 that gets the same values."""
    plain, grouped = layers(20, 2, 2, kernels)
    x, grad = random(3, 20, 16, 16, dtype=dtype), random(3, 20, 16, 16, dtype=dtype)
    expected = apart(plain, x.float(), grad.float(), 2)
    found = together(grouped, x, grad)
    assert [t.dtype for t in found] == [dtype, dtype, *[torch.float32] * 3]
    for number, (t, other) in enumerate(zip(found, expected, strict=True)):
        rounding = torch.finfo(dtype).eps if number < 2 else 1e-4
        torch.testing.assert_close(t.float(), other, rtol=rounding, atol=1e-3)


def test_variances_far_from_zero_are_exact(kernels: Kernels) -> None:
    """The mean of squares minus the square of the mean would be wrong by more than the variance, which is 1e-4."""
    _, grouped = layers(8, 2, 2, kernels)
    x = random(4, 8, 24, 24) * 0.01 + 100
    grouped(x)
    expected = torch.stack([part.double().transpose(0, 1).flatten(1).var(1) for part in x.split(2)])
    torch.testing.assert_close(grouped.variances.double(), expected, rtol=1e-3, atol=0)


def test_other_layouts_are_taken_too(kernels: Kernels) -> None:
    plain, grouped = layers(6, 2, 2, kernels)
    x = torch.randn(4, 6, 8, 8)  # channels first
    grad = torch.randn(6, 1, 1).expand(4, 6, 8, 8)
    for found, expected in zip(together(grouped, x, grad), apart(plain, x, grad, 2), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


# -- cost --------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts the bytes that PyTorch's operations read and write; views none, inputs of batch norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.overloadpacket.__name__:
            reads = 1 + ("batch_norm" in func.overloadpacket.__name__)
            self.bytes += reads * volume(args) + volume([found])
        return found


def volume(values: Any) -> int:
    """Bytes of the tensors among ``values``."""
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(volume, values)) if isinstance(values, (list, tuple)) else 0


@pytest.fixture
def interpreted(triton: Kernels, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of what Triton's kernels load and store, bytes, and of their launches."""
    from triton.runtime import interpreter

    counted = {"bytes": 0, "launches": 0}
    builder, function = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
    load, store, run = builder.create_masked_load, builder.create_masked_store, function.run

    def counting_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        found = load(self, ptrs, mask, *rest)
        counted["bytes"] += int(mask.data.sum()) * found.data.itemsize
        return found

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counted["bytes"] += int(mask.data.sum()) * value.data.itemsize
        return store(self, ptrs, value, mask, *rest)

    def counting_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted["launches"] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(builder, "create_masked_load", counting_load)
    monkeypatch.setattr(builder, "create_masked_store", counting_store)
    monkeypatch.setattr(function, "run", counting_run)
    return counted


@pytest.mark.parametrize(("channels", "side"), [(16, 32), (64, 16)])
def test_triton_moves_at_most_a_twentieth_more_than_a_plain_layer(
    channels: int, side: int, triton: Kernels, interpreted: dict[str, int]
) -> None:
    _, grouped = layers(channels, 2, 4, triton)
    x, grad = (random(8, channels, side, side, dtype=torch.bfloat16) for _ in range(2))
    out = grouped(x.requires_grad_())
    forward = interpreted["bytes"]
    assert FORWARD <= forward / x.nbytes <= 1.05 * FORWARD
    assert interpreted["launches"] == LAUNCHES
    out.backward(grad)
    assert BACKWARD <= (interpreted["bytes"] - forward) / x.nbytes <= 1.05 * BACKWARD
    assert interpreted["launches"] == 2 * LAUNCHES


def test_pytorch_copies_only_the_gradient() -> None:
    """Two passes more than a plain layer, which this counts too. Parts and their concatenation would be four more."""
    plain, grouped = layers(16, 2, 4, PYTORCH)
    x, grad = (random(8, 16, 32, 32, dtype=torch.bfloat16).requires_grad_(need) for need in (True, False))
    moved = []
    for layer in (plain, grouped):
        with Traffic() as traffic:
            layer(x).backward(grad)
        x.grad = None
        moved.append(traffic.bytes / x.nbytes)
    assert moved == pytest.approx([FORWARD + BACKWARD, FORWARD + BACKWARD + 2], rel=0.05)


# -- choice ------------------------------------------------------------------------------------------------------


def test_kernels_are_pytorchs_where_triton_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    kernels_of.cache_clear()
    assert kernels_of(device) is PYTORCH
    monkeypatch.setattr(grouped_norm, "has_triton", lambda device: True)
    monkeypatch.setitem(sys.modules, "triton", None)  # the import fails
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    kernels_of.cache_clear()
    assert kernels_of(device) is PYTORCH
    kernels_of.cache_clear()


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_kernels_are_tried_before_the_first_step(
    factor: float, triton: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a factor of 1.01 the gradient is wrong."""

    def differentiate(grad: Tensor, *others: Any) -> Any:
        of_x, of_weight, of_bias = triton.differentiate(grad, *others)
        return factor * of_x, of_weight, of_bias

    tried = Kernels(triton.normalise, cast(Any, differentiate))
    monkeypatch.setattr(grouped_norm, "has_triton", lambda device: True)
    monkeypatch.setattr(sys.modules[KERNELS], "differentiate", differentiate)
    kernels_of.cache_clear()
    assert kernels_of(torch.device("cpu")) == (tried if factor == 1 else PYTORCH)
    kernels_of.cache_clear()
