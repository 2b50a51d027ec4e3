"""The tasks by name: ours, and those of users' families."""

from __future__ import annotations

from typing import Any, cast

from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.task import Task

BUILT_IN: dict[str, Task] = {task.name: task for task in (BOXES,)}


def task_of(model: Any) -> Task:
    """Return the task of a network, or of an exported file, which have its name.

    Raises:
        ConfigError: no task has that name; its code must be named.
    """
    if task := BUILT_IN.get(model.task):
        return task
    found = {family.task.name: family.task for family in FAMILIES.values() if family.task is not None}
    if model.task not in found:
        raise ConfigError(
            f"the network finds {model.task!r}, a task of a recipe class, which must be named",
            hint="--recipe-class FILE.py:CLASS",
        )
    from yolofleet.tasks.users_task import UsersTask  # few runs need it

    return cast(Task, UsersTask(found[model.task]))
