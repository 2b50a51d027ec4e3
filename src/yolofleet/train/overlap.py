"""A validation that goes on in a thread while training does (``--val-overlap``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from yolofleet import devices
from yolofleet.evaluate.gather import Evaluation
from yolofleet.evaluate.run import OnBatch, Validation

WAIT_S = 1.0


class OverlappedValidation:
    """Starts a validation in a thread.

    The thread runs no collective. :meth:`result` runs the only one, in the main thread, so all ranks run their collectives
    in the same order.

    Args:
        epoch: that it validates.
        weights: a copy of the averaged weights.
        prepare: makes the validation of these weights, on ``device``.
    """

    def __init__(
        self,
        epoch: int,
        weights: dict[str, Tensor],
        prepare: Callable[[OnBatch], Validation],
        device: torch.device,
    ) -> None:
        self.epoch, self.weights = epoch, weights
        self._batches = 0
        self._validation = prepare(self._on_batch)
        self._pool = ThreadPoolExecutor(1, "validation")
        self._run = self._pool.submit(self._in_thread, device)

    def _in_thread(self, device: torch.device) -> None:
        with devices.side_stream(device):
            self._validation.run()

    def _on_batch(self, done: int, _batches: int) -> None:
        self._batches = done

    def result(self, tick: Callable[[], None]) -> Evaluation:
        """Wait for the thread, and return the figures of all ranks. Collective: every rank.

        Args:
            tick: called while the thread makes progress.
        Raises:
            ValidationStopped: a rank left out batches.
        """
        seen = 0
        while wait([self._run], WAIT_S).not_done:
            if self._batches > seen:
                seen = self._batches
                tick()
        self._pool.shutdown()
        self._run.result()
        return self._validation.gathered()

    def abandon(self) -> None:
        """Leave out the rest, and wait for the thread. No collective."""
        self._validation.leave_out_rest()
        self._pool.shutdown()
