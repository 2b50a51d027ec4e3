"""What the tests with real processes share: a folder and a data set in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import small_shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder whose name is not plain ASCII."""
    return tmp_path_factory.mktemp("träin ing")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    """A small data set in ``folder``."""
    return small_shapes(folder)
