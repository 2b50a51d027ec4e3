from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import working_in


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in which commands are typed, on a wide terminal."""
    with working_in(tmp_path, YOLOFLEET_CACHE=str(tmp_path / "cache"), COLUMNS="200"):
        yield tmp_path
