"""The few ways a run can fail, each with what happened, where it came from, what to try, and an exit code.

A user's or the world's fault is one of these and is shown without a traceback; our own fault is an
``assert`` and is.
"""

from __future__ import annotations


class YolofleetError(Exception):
    """Base of all foreseen failures.

    Args:
        what: one sentence with the values that are wrong.
        source: where the value came from (file:line, command line, environment).
        hint: what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, source: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.source = source
        self.hint = hint

    def render(self) -> str:
        """The message as a person sees it: one line, then optional ``from`` and ``try`` lines."""
        lines = [f"{type(self).__name__}: {self.what}"]
        if self.source:
            lines.append(f"  from : {self.source}")
        if self.hint:
            lines.append(f"  try  : {self.hint}")
        return "\n".join(lines)

    __str__ = render


class ConfigError(YolofleetError):
    """A setting, flag, recipe key or combination of them cannot be used."""

    exit_code = 2


class DataError(YolofleetError):
    """A data set, label or image is missing or broken."""

    exit_code = 3


class CheckpointError(YolofleetError):
    """A weights or checkpoint file is missing, broken, unsafe or does not fit."""

    exit_code = 3


class StorageError(YolofleetError):
    """The disk refused: full, read-only or failing."""

    exit_code = 3


class ClusterError(YolofleetError):
    """Processes or machines could not start, meet or talk."""

    exit_code = 4


class NumericsError(YolofleetError):
    """Training produced NaN or infinity."""

    exit_code = 5


class Stopped(YolofleetError):
    """The run was asked to stop; its state is saved and ``--resume`` continues it."""

    exit_code = 75
