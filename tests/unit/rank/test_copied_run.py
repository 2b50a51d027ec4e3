"""When a run that is copied brings its results from the address."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yolofleet.support.errors import StorageError
from yolofleet.training.rank import copies
from yolofleet.training.rank.copies import copied_run

ADDRESS = "file:///store/run"


class Process:
    """Stands in for the process that copies."""

    address = ADDRESS

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_until_ready(self) -> None: ...
    def wait_until_ended(self) -> None: ...
    def tell(self, line: bytes) -> None: ...


def test_results_are_brought_until_all_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart after an attempt that has brought only some of them must not begin new results."""
    brought, fails = list[str](), iter([True, False, False])

    def bring(address: str, run: Path, *, is_restart: bool) -> None:
        brought.append(address)
        if next(fails):
            raise StorageError("the link is slow")

    monkeypatch.setattr(copies, "CopyingProcess", Process)
    monkeypatch.setattr(copies, "bring_results", bring)
    monkeypatch.setattr(copies, "main_does", lambda world, task, work: work and work())
    (tmp_path / copies.LOG).write_text(f"{copies.COPIES_TO}{ADDRESS}\n")
    resolved: Any = SimpleNamespace(value=SimpleNamespace(resume=ADDRESS, checkpoint_to=f"{ADDRESS}/"))
    folder: Any = SimpleNamespace(logs=tmp_path, path=tmp_path)

    def attempt(restarts: int) -> None:
        world: Any = SimpleNamespace(restarts=restarts, console=None)
        with copied_run(resolved, world, folder):
            pass

    with pytest.raises(StorageError, match="slow"):
        attempt(0)
    for restarts in (1, 2, 3):
        attempt(restarts)
    assert brought == [ADDRESS, ADDRESS]  # from the third attempt on, the store may be down
    attempt(0)
    assert len(brought) == 3  # a resume asks it again
