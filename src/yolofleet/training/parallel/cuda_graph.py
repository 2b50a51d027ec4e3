"""The training passes of a network as CUDA graphs: the host launches all kernels of a direction in one call.

A step of a small network has about 1,000 kernels, and launching them can take longer than computing them. Graphs hold
the kernels that PyTorch would launch, so results have equal bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from yolofleet.support import devices

LAUNCH_BOUND = 0.8  # of the time of a pass; on an H200 a graph saved 24 % at 0.93 and nothing at 0.71
ROOM = 2.5  # times the memory of a pass: a graph keeps its own, and passes of other sizes need theirs


class TrainingPass:
    """The forward pass of a network, as a function of the images [N, 3, H, W] and of its trainable parameters.

    Args:
        casts: makes the context of the pass. It must not keep casts of weights, because a graph has to repeat them.
    """

    def __init__(self, model: nn.Module, casts: Callable[[], AbstractContextManager[object]]) -> None:
        self.model, self.casts = model, casts
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def __call__(self, images: Tensor, *trainable: Tensor) -> list[Tensor]:
        with self.casts():
            values = dict(zip(self.trainable, trainable, strict=True))
            found: list[Tensor] = functional_call(self.model, values, (images,))
            return found

    def launch_share(self, images: Tensor) -> float:
        """Return the part of the time of a pass in both directions in which the host launches kernels."""
        parameters = list(self.trainable.values())

        def run() -> None:
            outputs = [out.float().sum() for out in self(images, *parameters)]
            torch.autograd.grad(outputs, parameters, allow_unused=True)

        run()
        devices.synchronize(images.device)
        began_s = time.perf_counter()
        run()
        launched_s = time.perf_counter()
        devices.synchronize(images.device)
        return (launched_s - began_s) / (time.perf_counter() - began_s)


class GraphedPass:
    """Calls a network for passes of one shape. Results and gradients of a call are valid until the next one.

    Args:
        images: float32 [N, 3, H, W], with the layout of all later ones.

    Raises:
        RuntimeError: torch cannot capture the network; or the device has too little memory.
    """

    def __init__(self, training_pass: TrainingPass, images: Tensor) -> None:
        self._trainable = tuple(training_pass.trainable.values())
        # The graph gets the memory of the parameters under other names. With the parameters themselves autograd would
        # keep their nodes of the stream of the capture, and every later backward pass would wait for that stream.
        same = [p.detach().requires_grad_() for p in self._trainable]
        devices.release_memory(images.device)
        before = devices.reserved_bytes(images.device)
        self._call = devices.graphed(training_pass, (images, *same))
        devices.count_as_held(self, images.device, devices.reserved_bytes(images.device) - before)

    def __call__(self, images: Tensor) -> list[Tensor]:
        found: list[Tensor] = self._call(images, *self._trainable)
        return found
