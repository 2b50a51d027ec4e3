"""When ``--patience`` ends a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from yolofleet.training.state import Progress
from yolofleet.training.validations import Validations


def ends_after(
    epochs: int, *, best: int, fitness: float = 0.5, patience: int = 5, val_period: int = 1
) -> bool:
    state = SimpleNamespace(progress=Progress(best_epoch=best, best_fitness=fitness))
    report = SimpleNamespace(config=SimpleNamespace(patience=patience, val_period=val_period))
    nothing = cast(Any, None)
    run = Validations(cast(Any, state), cast(Any, report), nothing, cast(Any, [0]), nothing, nothing)
    return run.out_of_patience(epochs)


@pytest.mark.parametrize(
    ("epochs", "facts", "ends"),
    [
        (14, {"best": 10}, False),
        (15, {"best": 10}, True),
        (99, {"best": 10, "patience": 0}, False),
        (99, {"best": -1, "fitness": -1.0}, False),  # nothing has been validated yet
        (15, {"best": 15, "fitness": 0.0}, True),  # without accuracy the newest weights are the best
        # longer periods: only the validation after the best one can find nothing better
        (15, {"best": 10, "val_period": 10}, False),
        (20, {"best": 10, "val_period": 10}, True),
        (15, {"best": 10, "fitness": 0.0, "val_period": 10}, False),
        (20, {"best": 20, "fitness": 0.0, "val_period": 10}, True),
        (25, {"best": 10, "patience": 12, "val_period": 10}, True),
    ],
)
def test_patience_counts_epochs_since_the_best_validation(
    epochs: int, facts: dict[str, Any], ends: bool
) -> None:
    assert ends_after(epochs, **facts) == ends
