"""The losses and images of the current epoch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import Progress


class Tally:
    """This rank's part of the losses of the current epoch.

    Args:
        terms: their number.
        progress: of the state to go on from, which has the sums over all ranks: rank 0 adds them to its part.

    Attributes:
        images: of the epoch so far, of all ranks.
        own_images: that the sums of this rank are over.
    """

    def __init__(self, terms: int, progress: Progress, world: World) -> None:
        self._world = world
        self._terms = torch.zeros(terms, device=world.device)  # loss terms x images
        self.images, self.own_images = progress.epoch_images, progress.epoch_images * world.is_main
        if progress.epoch_terms and world.is_main:
            self._terms += torch.tensor(progress.epoch_terms, device=world.device)

    def add(self, plan: StepPlan, terms: Tensor, own_images: int) -> None:
        """Add a step; ``terms``: [T] this rank's part of its loss."""
        self._terms += terms * plan.images
        self.images += plan.images
        self.own_images += own_images

    def leave_out(self, plan: StepPlan, own_images: int) -> None:
        """Take a step out of the means that has changed nothing, and whose terms are 0."""
        self.images -= plan.images
        self.own_images -= own_images

    def own_means(self) -> list[float]:
        """Return the mean of each term over this rank's images; [] without any. Reading it waits for the device.

        It is an estimate of the mean over all: all ranks get random samples of one shuffled stream.
        """
        return [value / self.own_images for value in self._terms.tolist()] if self.own_images else []

    def sums(self) -> list[float]:
        """Return the sum of each term x images over all ranks. Collective: every rank."""
        return self._world.sum_rows(self._terms.tolist())

    def means(self) -> list[float]:
        """Return the mean of each term; NaN if all steps were left out. Collective: every rank."""
        return [total / (self.images or math.nan) for total in self.sums()]

    def clear(self) -> None:
        """Begin another epoch."""
        self._terms.zero_()
        self.images = self.own_images = 0
