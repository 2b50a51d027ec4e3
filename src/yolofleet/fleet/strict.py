"""Models of values that come from a host, which the launcher does not trust.

A host may be broken, have another version, or be malicious. So types are strict, and numbers, texts and lists have
limits. Hosts make these values as plain dictionaries, because a host agent must start in a Python without pydantic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo

MOST = 2**63 - 1  # of any number
LONGEST_TEXT = 200_000  # characters; the kernel allows a variable 128 KiB
MOST_ITEMS = 10_000  # of a list or mapping
HERE = "this machine"  # its own names are trusted, whatever they are


class Model(BaseModel):
    """Refuse wrong types; ignore unknown keys, which a newer version may add."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", populate_by_name=True, defer_build=True
    )


def text(check: Callable[[str], object] | str = "", longest: int = LONGEST_TEXT) -> PlainValidator:
    """Return the validator of a text.

    pydantic's own refuses lone surrogates, which stand for bytes in names of files that are not UTF-8.

    Args:
        check: a pattern that the whole text must match, or a function that raises ValueError.
    """
    pattern = re.compile(check, re.ASCII) if isinstance(check, str) else None

    def validate(value: Any, info: ValidationInfo) -> str:
        if not isinstance(value, str) or len(value) > longest:
            raise ValueError(f"expected a text of at most {longest} characters")
        if info.context == HERE:
            return value
        if pattern is not None and pattern.pattern and not pattern.fullmatch(value):
            raise ValueError(f"expected {pattern.pattern}")
        if callable(check):
            check(value)
        return value

    return PlainValidator(validate)


def _check_path(value: str) -> None:
    if b"\0" in os.fsencode(value):
        raise ValueError("a path has no null byte")


Whole = Annotated[int, Field(ge=-MOST, le=MOST)]
Number = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
Text = Annotated[str, text()]
PathText = Annotated[str, text(_check_path)]
Few = Field(max_length=MOST_ITEMS)
FromList = Field(strict=False)  # JSON has no tuples
