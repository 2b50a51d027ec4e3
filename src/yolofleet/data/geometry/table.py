"""A table: a dataclass whose fields are columns, arrays with a row for each object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self


def as_objects(values: Sequence[Any]) -> np.ndarray:
    """Return values, which may be sequences, as a column: object [n]."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def ranges(starts: np.ndarray | int, counts: np.ndarray) -> np.ndarray:
    """Return the numbers start, start + 1, ... of each range, one range after the other: int64 [sum of the counts]."""
    before = np.cumsum(counts) - counts
    numbers: np.ndarray = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return numbers


class Table:
    """The base of such dataclasses. The first axis of each field has the length of the table.

    A column that is no array has a class with ``__getitem__`` and ``joined``, as a table has them.
    """

    # the names of the fields, as ``dataclass`` sets them; ``fields`` takes five times as long
    __match_args__: tuple[str, ...]

    def __len__(self) -> int:
        return len(getattr(self, self.__match_args__[0]))

    def rows(self, chosen: Any) -> Self:
        """Return the rows that ``chosen`` (numbers, flags or a slice) selects, in its order."""
        return type(self)(*[getattr(self, name)[chosen] for name in self.__match_args__])

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Concatenate at least one table."""
        parts = [[getattr(table, name) for table in tables] for name in cls.__match_args__]
        return cls(*[np.concatenate(p) if isinstance(p[0], np.ndarray) else p[0].joined(p) for p in parts])
