"""What a task of a user raises or lacks is reported with the line of its code, in loader processes too."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yolofleet.config.user_code import load_class
from yolofleet.families.family import Family
from yolofleet.families.recipe_class import TrainingRecipe
from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.table import task_of

CIRCLES = Path(__file__).resolve().parents[2] / "toy_task" / "circles.py"


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the task of circles, which a run finds."""
    # another test has imported a copy, whose folder stays in the path
    monkeypatch.delitem(sys.modules, CIRCLES.stem, raising=False)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not Path(one, CIRCLES.name).exists()])
    load_class(f"{CIRCLES}:Circular", TrainingRecipe, "--recipe-class")
    circles = sys.modules[CIRCLES.stem]
    monkeypatch.setitem(FAMILIES, "circles", Family("circles", list, list, list, task=circles.CircleTask()))
    return circles.CircleTask


def test_an_exception_of_a_method_names_its_line(users: Any) -> None:
    task = task_of(SimpleNamespace(task="circles"))
    for labels in (task.labels, pickle.loads(pickle.dumps(task.labels))):
        with pytest.raises(ConfigError, match=r"CircleTask\.labels failed: AttributeError") as refused:
            labels(None, 0)  # type: ignore[arg-type]
        line = next(
            n for n, text in enumerate(CIRCLES.read_text().splitlines(), 1) if "index.labels(" in text
        )
        assert refused.value.source == f"{CIRCLES}:{line}"


def test_a_part_that_a_task_lacks_is_named(users: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(users, "fitness_of")
    with pytest.raises(ConfigError, match=r"CircleTask\.judgement failed: .* no attribute 'fitness_of'"):
        task_of(SimpleNamespace(task="circles")).judgement  # noqa: B018
    with pytest.raises(TypeError, match=r"abstract class Half .*\bdraw\b"):
        type("Half", (users.__base__,), {})()
