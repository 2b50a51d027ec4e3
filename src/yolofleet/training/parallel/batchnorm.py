"""Batch normalisation whose statistics do not depend on the number of ranks.

Each micro-batch is normalised by its own statistics. V micro-batches in sequence would change the running statistics r
linearly (m: momentum, s_v: statistics of micro-batch v):

    r' = (1 - m)^V r + sum_v m (1 - m)^(V - 1 - v) s_v

So every rank adds its weighted s_v to a buffer, and the ranks sum the buffer together with the gradients.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Running mean and variance of all training-mode BatchNorm2d layers of a model, as one flat tensor.

    The layers get momentum 1, so that a forward pass leaves the micro-batch's statistics in their buffers (variance
    unbiased, n / (n - 1), as in torch). ``running`` holds the statistics for inference. Call :meth:`begin_pass`
    before each forward pass, and :meth:`collect` after it.

    Args:
        counts_here: this rank adds its statistics. With synchronised layers all ranks have equal statistics, and only
            one rank adds them.
    """

    def __init__(self, model: nn.Module, *, counts_here: bool = True) -> None:
        self.counts_here = counts_here
        self.layers = [
            (name, m) for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and m.training
        ]
        momenta = {m.momentum for _, m in self.layers}
        assert len(momenta) <= 1, f"layers of one model share their momentum, not {momenta}"
        self.momentum = float(momenta.pop() or 0.1) if momenta else 0.0
        self.size = 2 * sum(m.num_features for _, m in self.layers)
        means = [m.running_mean for _, m in self.layers if m.running_mean is not None]
        device = means[0].device if means else torch.device("cpu")
        self.running = torch.zeros(self.size, device=device)
        self._batch = torch.zeros((1, self.size), device=device)  # a row for each micro-batch of a pass
        self._images = 0  # of a micro-batch; 0: a pass is one micro-batch
        self.is_fused = False  # Triton's kernels normalise the micro-batches of a pass
        self.views: dict[str, Tensor] = {}  # state_dict name -> view of `running`
        at = 0
        for name, m in self.layers:
            for buffer in ("running_mean", "running_var"):
                value = getattr(m, buffer)
                view = self.running[at : at + m.num_features]
                view.copy_(value)
                self.views[f"{name}.{buffer}"] = view
                setattr(m, buffer, self._batch[0, at : at + m.num_features])
                at += m.num_features
            m.momentum = 1.0
            m.num_batches_tracked = None  # `batches` counts for all layers
        self.batches = 0

    def pass_together(self, micro_batches: int, images: int) -> None:
        """Keep the statistics of up to ``micro_batches`` micro-batches of ``images`` images in a forward pass."""
        # only runs whose passes have several micro-batches load this module
        from yolofleet.training.parallel.grouped_norm import PYTORCH, GroupedBatchNorm2d, kernels_of

        self._batch = self.running.new_zeros((micro_batches, self.size))
        self._images, kernels = images, kernels_of(self.running.device)
        self.is_fused = kernels is not PYTORCH
        at = 0
        for _, m in self.layers:
            c = m.num_features
            m.__class__ = GroupedBatchNorm2d
            layer = cast(GroupedBatchNorm2d, m)
            layer.images, layer.kernels = images, kernels
            layer.means, layer.variances = self._batch[:, at : at + c], self._batch[:, at + c : at + 2 * c]
            layer.running_mean, layer.running_var = layer.means[0], layer.variances[0]
            at += 2 * c

    def begin_pass(self) -> None:
        """Zero the buffers before a forward pass in training.

        torch computes (1 - momentum) * old + momentum * new also for momentum 1, and 0 * NaN is NaN. So an overflow in
        one pass would stay in the buffers and reach the statistics of every later step.
        """
        self._batch.zero_()

    def collect(self, total: Tensor, ordinal: int, micro_batches: int, images: int) -> None:
        """Add the shares of the micro-batches of a pass to ``total``. Call after its forward pass.

        Args:
            ordinal: of the first of them within the step, which has ``micro_batches``.
            images: of the pass.
        """
        if self.size and self.counts_here:
            m, last = self.momentum, micro_batches - 1
            rows = -(-images // self._images) if self._images else 1
            for number, row in enumerate(self._batch[:rows], ordinal):
                total.add_(row, alpha=m * (1 - m) ** (last - number))

    def merge(self, total: Tensor, micro_batches: int, finite: Tensor) -> None:
        """Add one step to the running average, unless ``finite`` (bool) is False. Call after the reduction."""
        if self.size:
            merged = (self.running * (1 - self.momentum) ** micro_batches).add_(total)
            torch.where(finite, merged, self.running, out=self.running)
        self.batches += micro_batches
