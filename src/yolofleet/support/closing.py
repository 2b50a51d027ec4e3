"""Objects that a ``with`` block closes."""

from __future__ import annotations

from typing import TypeVar

Opened = TypeVar("Opened", bound="Closing")


class Closing:
    """Its subclasses have ``close``, which a ``with`` block calls at its end, also after a failure."""

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError
