"""The task of a user's family as a run calls it: its exceptions are reported with the line of the user's code."""

from __future__ import annotations

from typing import Any

from yolofleet.families.recipe_class import reporting
from yolofleet.tasks.task import Task


class UsersTask:
    """Has all parts of ``task``. Each of its methods raises ConfigError for an exception of the user's code."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        what = f"{type(self._task).__name__}.{name}"
        part = reporting(getattr, what)(self._task, name)
        return reporting(part, what) if callable(getattr(Task, name, None)) else part

    def __reduce__(self) -> Any:
        return UsersTask, (self._task,)
