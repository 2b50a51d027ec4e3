"""What follows a step: the rule table of validations, checkpoints, stops and the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from yolofleet.training.requests import Asked
from yolofleet.training.state import Progress
from yolofleet.training.step_end import Actions, EndedStep, EndRules, Validate, actions_after

NOW, BESIDE = Validate.NOW, Validate.BESIDE_TRAINING
EPOCH: dict[str, Any] = {"epochs_before": 2, "epochs": 3}  # the step has the last image of epoch 3
MID: dict[str, Any] = {"epochs_before": 2, "epochs": 2}
SAVE, KEEP = Asked(save=True), Asked(keep=True)
EACH: dict[str, Any] = {"save_period": 1}  # a checkpoint after each epoch
BESIDE_RULES: dict[str, Any] = {"overlaps": True}
FOLLOWS: dict[str, Any] = {"overlaps": True, "follows_accuracy": True}


@pytest.mark.parametrize(
    ("ended", "rules", "expected"),
    [
        # in mid-epoch: only requests and --save-steps count
        (MID, {}, Actions()),
        (MID, EACH, Actions()),
        (MID | {"asked": SAVE}, {}, Actions(saves=True)),
        (MID | {"asked": KEEP}, {}, Actions(keeps=True)),
        (MID | {"asked": Asked(save=True, keep=True)}, {}, Actions(saves=True)),
        (MID | {"steps": 10}, {"save_steps": 5}, Actions(saves=True)),
        (MID | {"steps": 11}, {"save_steps": 5}, Actions()),
        # the end of an epoch
        (EPOCH, {}, Actions(NOW, in_period=True, closes_epoch=True)),
        (EPOCH, {"val_period": 0}, Actions(closes_epoch=True)),
        (EPOCH, {"val_period": 2}, Actions(closes_epoch=True)),
        (EPOCH | {"epochs": 4}, {"val_period": 2}, Actions(NOW, in_period=True, closes_epoch=True)),
        # a step of several epochs passes a multiple of the period
        (EPOCH | {"epochs": 5}, {"val_period": 4}, Actions(NOW, in_period=True, closes_epoch=True)),
        (EPOCH, EACH, Actions(NOW, in_period=True, closes_epoch=True, writes_weights=True, saves=True)),
        (EPOCH, {"save_period": 2, "val_period": 0}, Actions(closes_epoch=True, writes_weights=True)),
        (EPOCH, {"save_period": 0, "val_period": 0}, Actions(closes_epoch=True, writes_weights=True)),
        (EPOCH | {"asked": SAVE}, {"val_period": 0}, Actions(closes_epoch=True, writes_weights=True, saves=True)),
        # a stop request ended the validation: the epoch stays open, so that a resumed run repeats its end
        (EPOCH | {"is_interrupted": True}, EACH, Actions(in_period=True, saves=True, stops=True)),
        (EPOCH | {"is_interrupted": True, "is_last": True}, {}, Actions(in_period=True, saves=True, stops=True)),
        # the end of the run: it validates and saves
        (
            EPOCH | {"is_last": True},
            {"val_period": 2},
            Actions(NOW, closes_epoch=True, writes_weights=True, saves=True, ends=True),
        ),
        (
            MID | {"is_last": True},  # --max-steps in mid-epoch: its figures belong to no --val-period
            {},
            Actions(NOW, closes_epoch=True, writes_weights=True, saves=True, ends=True),
        ),
        (
            EPOCH | {"is_out_of_patience": True},
            {"val_period": 2},
            Actions(closes_epoch=True, writes_weights=True, saves=True, ends=True),
        ),
        (MID | {"is_out_of_patience": True}, {}, Actions(saves=True, ends=True)),
        # --val-overlap: beside the training, unless it is over
        (EPOCH, BESIDE_RULES, Actions(BESIDE, in_period=True, closes_epoch=True)),
        (
            EPOCH | {"is_last": True},
            BESIDE_RULES,
            Actions(NOW, in_period=True, closes_epoch=True, writes_weights=True, saves=True, ends=True),
        ),
        (
            EPOCH | {"is_out_of_patience": True},
            BESIDE_RULES,
            Actions(NOW, in_period=True, closes_epoch=True, writes_weights=True, saves=True, ends=True),
        ),
        # a validation of an earlier step goes on: a checkpoint need not wait for it
        (MID | {"is_validating": True, "asked": SAVE}, BESIDE_RULES, Actions(saves=True)),
        (MID | {"is_validating": True, "asked": KEEP}, BESIDE_RULES, Actions(keeps=True)),
        # --sampler weights: no state without the figures of an earlier step, except one of the step where it began
        (MID | {"is_validating": True}, FOLLOWS, Actions()),
        (MID | {"is_validating": True, "asked": SAVE}, FOLLOWS, Actions(awaits_validation=True, saves=True)),
        (MID | {"is_validating": True, "asked": KEEP}, FOLLOWS, Actions()),
        (
            EPOCH,
            FOLLOWS | EACH,
            Actions(BESIDE, in_period=True, closes_epoch=True, writes_weights=True, saves=True),
        ),
        (EPOCH | {"asked": KEEP}, FOLLOWS, Actions(BESIDE, in_period=True, closes_epoch=True, keeps=True)),
    ],
)  # fmt: skip
def test_what_follows_a_step(ended: dict[str, Any], rules: dict[str, Any], expected: Actions) -> None:
    assert actions_after(EndedStep(**ended), EndRules(**rules)) == expected


def test_an_epoch_that_max_steps_cuts_short_counts_as_one() -> None:
    assert [EndedStep(**facts).epoch for facts in (MID, EPOCH, EPOCH | {"epochs": 5})] == [3, 3, 5]


def test_a_state_tells_that_a_validation_had_begun() -> None:
    """The format of states of earlier versions, too."""
    assert Progress().open_validation is None
    assert Progress(class_ap={"1": [0.5], "2": [0.25]}).open_validation is None
    assert Progress(class_ap={"1": [0.5], "2": []}).open_validation == 2
