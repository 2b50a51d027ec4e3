"""How many images of a pass kernels can index. No network runs."""

from __future__ import annotations

import copy
import sys
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INDEX_LIMIT = 2**31 - 1


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
