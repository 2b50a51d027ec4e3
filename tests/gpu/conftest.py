"""A data set for each test; and the simulated accelerator, if there is one (``gpu_devices.py``), forgets earlier tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import small_shapes
from gpu_devices import KIND


@pytest.fixture(autouse=True)
def _begin() -> None:
    if KIND == "mini":
        import miniature

        miniature.ACCELERATOR.begin()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return small_shapes(tmp_path)
