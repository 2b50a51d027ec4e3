"""Count the floating-point operations and the memory of a network without running it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.families.networks.blocks import Upsample
from yolofleet.families.networks.detector import Detector


def gflops(model: Detector, img: int = 640) -> float:
    """Return 10^9 floating-point operations for one image of ``img`` x ``img`` pixels.

    The rules are those of YOLOv5's published figures: a multiply-add counts 2; convolutions and linear layers count
    without bias; a batch normalisation counts 4 multiply-adds per value, an upsampled map 1; other operations count 0.
    """
    total = 0

    def count(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += _operations(module, output)

    _watch(model, img, count)
    return 2 * total / 1e9


def ready_shares(model: Detector, points: int = 8) -> tuple[float, ...]:
    """Return the shares of the backward pass, in operations, after which 1/points ... of the gradients are final.

    Gradients count in the order of the buckets, which begin with the last parameters. A bucket waits for its last gradient.
    """
    order: list[nn.Module] = []
    operations: dict[nn.Module, int] = {}

    def count(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        order.append(module)
        operations[module] = operations.get(module, 0) + _operations(module, output)

    shadow = _watch(model, 640, count)
    total, done = sum(operations.values()), 0
    ready: dict[nn.Module, float] = {}
    for module in reversed(list(dict.fromkeys(order))):
        done += operations[module]
        ready[module] = done / total
    of_parameter = {p: ready[m] for m in ready for p in m.parameters(recurse=False)}
    trained = [p for p in shadow.parameters() if p.requires_grad]
    size, filled, latest = sum(p.numel() for p in trained), 0, 0.0
    shares: list[float] = []
    for p in reversed(trained):
        latest = max(latest, of_parameter.get(p, 0.0))
        filled += p.numel()
        while len(shares) < points and filled * points >= (len(shares) + 1) * size:
            shares.append(latest)
    return tuple(shares)


def saved_bytes(model: Detector, img: int = 640) -> int:
    """Return the bytes that the backward pass of one image needs of its forward pass in fp32, without the parameters."""
    shadow, img = copy.deepcopy(model).to("meta").train(), whole_px(model, img)
    parameters = {p.untyped_storage()._cdata for p in shadow.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # two layers may need the same values

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        shadow(torch.zeros(1, 3, img, img, device="meta"))
    return sum(storage.nbytes() for storage in kept.values())


def _operations(module: nn.Module, output: Tensor) -> int:
    """Return the multiply-adds of a layer that makes ``output`` of one image."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        return output.numel() * module.weight[0].numel()
    return output.numel() * (4 if isinstance(module, nn.BatchNorm2d) else 1)


def whole_px(model: Detector, img: int) -> int:
    """Return an image size rounded up to the largest stride, pixels."""
    return -(-img // max(model.strides)) * max(model.strides)


def _watch(model: Detector, img: int, count: Callable[[nn.Module, Any, Tensor], None]) -> nn.Module:
    """Call ``count`` for each layer that is counted, in the order of a forward pass; return the copy that it sees."""
    shadow = copy.deepcopy(model).to("meta")  # shapes only
    for module in shadow.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d, Upsample)):
            module.register_forward_hook(count)
    img = whole_px(model, img)
    with torch.no_grad():
        shadow(torch.zeros(1, 3, img, img, device="meta"))
    return shadow
