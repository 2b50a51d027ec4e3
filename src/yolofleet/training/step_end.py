"""What follows a step: validate, save, stop or end the run. A pure function decides it from facts.

``training/loop.py`` collects the facts, which are equal on every rank, and carries the actions out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from yolofleet.training.requests import NOTHING, Asked


@dataclass(frozen=True)
class EndRules:
    """The settings that decide. A period of 0 means never.

    Attributes:
        val_period: epochs between validations.
        save_period: epochs between checkpoints; None: the request to save decides.
        save_steps: steps between checkpoints.
        overlaps: training goes on beside a validation (``--val-overlap``), if there are images to validate.
        follows_accuracy: the figures of a validation decide which images later epochs show (``--sampler weights``).
    """

    val_period: int = 1
    save_period: int | None = None
    save_steps: int = 0
    overlaps: bool = False
    follows_accuracy: bool = False


@dataclass(frozen=True)
class EndedStep:
    """What is known after a step.

    Attributes:
        steps: steps done.
        epochs_before: epochs that the state counts as done.
        epochs: epochs whose last image has been trained.
        is_last: the limits of the run end it here.
        is_out_of_patience: so far, ``--patience`` ends the run after ``epochs``.
        is_validating: the validation of an earlier step overlaps with this one.
        is_interrupted: a stop request ended the validation after this step.
    """

    steps: int = 1
    epochs_before: int = 0
    epochs: int = 0
    is_last: bool = False
    asked: Asked = NOTHING
    is_out_of_patience: bool = False
    is_validating: bool = False
    is_interrupted: bool = False

    @property
    def ends_epoch(self) -> bool:
        return self.epochs > self.epochs_before

    @property
    def epoch(self) -> int:
        """The number of the epoch that ends. A run that ends in mid-epoch counts it as one."""
        return max(self.epochs, self.epochs_before + 1)


class Validate(Enum):
    """How to validate."""

    NOT = auto()
    NOW = auto()
    BESIDE_TRAINING = auto()


@dataclass(frozen=True)
class Actions:
    """What the loop does after a step, in this order.

    Attributes:
        in_period: ``validate`` is one of ``--val-period``, so its figures may decide later images.
        closes_epoch: count the epoch, and write its row. The loop does this after a validation ``NOW``.
        writes_weights: write the weights of the epoch.
        awaits_validation: wait for the validation that overlaps with the step.
        keeps: keep the state in memory.
        stops: raise ``Stopped``.
        ends: the run is at its end.
    """

    validate: Validate = Validate.NOT
    in_period: bool = False
    closes_epoch: bool = False
    writes_weights: bool = False
    awaits_validation: bool = False
    saves: bool = False
    keeps: bool = False
    stops: bool = False
    ends: bool = False


def actions_after(ended: EndedStep, rules: EndRules) -> Actions:
    """Return what follows a step.

    After a validation ``NOW``, call it again: the figures may exhaust the patience, and a stop request may have ended it.
    """
    closes_epoch = (ended.ends_epoch or ended.is_last) and not ended.is_interrupted
    ends = (ended.is_last or ended.is_out_of_patience) and not ended.is_interrupted
    in_period = ended.ends_epoch and crosses_period(rules.val_period, ended.epochs_before, ended.epoch)
    validate = Validate.NOT
    if closes_epoch and (ended.is_last or in_period):
        validate = Validate.BESIDE_TRAINING if rules.overlaps and not ends else Validate.NOW
    asks_save = ended.asked.save or ended.is_interrupted or ends
    saves = asks_save or crosses_period(rules.save_steps, ended.steps - 1, ended.steps)
    if closes_epoch and rules.save_period is not None:
        saves |= crosses_period(rules.save_period, ended.epochs_before, ended.epoch)
    # A run that continues from a state of this step could not repeat the validation of an earlier step.
    needs_figures = ended.is_validating and rules.follows_accuracy
    return Actions(
        validate=validate,
        in_period=in_period,
        closes_epoch=closes_epoch,
        writes_weights=closes_epoch and (asks_save or rules.save_period is not None),
        awaits_validation=saves and needs_figures,
        saves=saves,
        keeps=ended.asked.keep and not saves and not needs_figures,
        stops=ended.is_interrupted,
        ends=ends,
    )


def crosses_period(period: int, before: int, after: int) -> bool:
    """Return whether a multiple of ``period`` (0 = never) lies in (before, after]."""
    return period > 0 and after // period > before // period
