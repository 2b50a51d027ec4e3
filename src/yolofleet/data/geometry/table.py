"""A table: a dataclass whose fields are columns, arrays with a row for each object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self


class Table:
    """The base of such dataclasses. The first axis of each field has the length of the table."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def rows(self, chosen: Any) -> Self:
        """Return the rows that ``chosen`` (numbers, flags or a slice) selects, in its order."""
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Concatenate at least one table."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(*(np.concatenate([getattr(table, name) for table in tables]) for name in names))
