"""Count the floating-point operations and the memory of a network without running it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from yolofleet.families.networks.blocks import Upsample
from yolofleet.families.networks.detector import Detector

INDEX_LIMIT = 2**31 - 1


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
    shadow = copy.deepcopy(model).to("meta").train()
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


def may_exceed_index(images: int, side: int, classes: int) -> bool:
    """Return whether a pass of so many images could have a tensor above ``INDEX_LIMIT``, without a look at the network.

    The first tensor on ``meta`` takes 2 s of imports, which a usual pass need not pay.
    """
    # of built-in networks yolov3 has the largest activation, 32 values
    most_values_of_pixel = 64 + classes // 8
    return images * side**2 * most_values_of_pixel > INDEX_LIMIT


def images_within_index(model: nn.Module, side: int) -> int:
    """Return how many images of ``side`` pixels fit into a pass, so that no tensor has more than ``INDEX_LIMIT`` elements.

    Many kernels of accelerators count the elements of a tensor in 32 bits. Above that limit they fail or read foreign memory.

    Args:
        model: in evaluation mode, on any device. A user's network may not run without values: it has no limit.
    """
    seen = _LargestTensor()
    shapes = {
        id(t): torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        for t in chain(model.parameters(), model.buffers())
    }
    try:
        shadow = copy.deepcopy(model, shapes)  # deepcopy takes what it finds in the table for a copy
        with torch.no_grad(), seen:
            raws = shadow(torch.empty(1, 3, side, side, device="meta"))
            decoded: int = sum(raw.numel() for raw in raws)  # decoding joins the predictions of all levels
    except Exception:  # of a user's network
        return sys.maxsize
    return INDEX_LIMIT // max(seen.elements, decoded)


class _LargestTensor(TorchFunctionMode):
    """Keeps the number of elements of the largest result of all operations in the block."""

    elements = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
        return out


def _operations(module: nn.Module, output: Tensor) -> int:
    """Return the multiply-adds of a layer that makes ``output`` of one image."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        return output.numel() * module.weight[0].numel()
    return output.numel() * (4 if isinstance(module, nn.BatchNorm2d) else 1)


def _watch(model: Detector, img: int, count: Callable[[nn.Module, Any, Tensor], None]) -> nn.Module:
    """Call ``count`` for each layer that is counted, in the order of a forward pass; return the copy that it sees."""
    shadow = copy.deepcopy(model).to("meta")  # shapes only
    for module in shadow.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d, Upsample)):
            module.register_forward_hook(count)
    with torch.no_grad():
        shadow(torch.zeros(1, 3, img, img, device="meta"))
    return shadow
