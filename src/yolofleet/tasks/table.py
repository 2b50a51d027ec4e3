"""The tasks by name: ours, and those of users' families."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.task import Task

# The module of a task is imported when a network has the task.
BUILT_IN = {
    "boxes": ("yolofleet.tasks.boxes.task", "BOXES"),
    "masks": ("yolofleet.tasks.masks.task", "MASKS"),
}


def task_of(model: Any) -> Task:
    """Return the task of a network, or of an exported file, which have its name.

    Raises:
        ConfigError: no task has that name; its code must be named.
    """
    if model.task in BUILT_IN:
        module, name = BUILT_IN[model.task]
        return cast(Task, getattr(import_module(module), name))
    found = {family.task.name: family.task for family in FAMILIES.values() if family.task is not None}
    if model.task not in found:
        raise ConfigError(
            f"the network finds {model.task!r}, a task of a recipe class, which must be named",
            hint="--recipe-class FILE.py:CLASS",
        )
    return cast(Task, UsersTask(found[model.task]))


class UsersTask:
    """Has all parts of ``task``. Each of its methods raises ConfigError for an exception of the user's code."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        from yolofleet.families.recipe_class import reporting  # few runs need it

        what = f"{type(self._task).__name__}.{name}"
        part = reporting(getattr, what)(self._task, name)
        return reporting(part, what) if callable(getattr(Task, name, None)) else part

    def __reduce__(self) -> Any:
        return UsersTask, (self._task,)
