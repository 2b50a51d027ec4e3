"""The folder of this user among the temporary files of all users: for jobs, and for the cache of an account without a home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from yolofleet.fleet.hosts import jobs
from yolofleet.storage.caches import cache_root
from yolofleet.support.errors import StorageError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is, of an account that has no home folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("YOLOFLEET_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    return tmp_path / f"yolofleet-{os.getuid()}"


def test_only_this_user_can_open_it(own: Path) -> None:
    for folder in (cache_root(), jobs.folder()):
        assert folder.parent == own
    assert own.stat().st_mode & 0o777 == jobs.folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["open", "readable", "link", "file", "foreign"])
def test_a_folder_that_others_may_have_changed_is_refused(own: Path, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        own.touch()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.mkdir(mode=0o700)
        own.chmod({"open": 0o777, "readable": 0o750}.get(kind, 0o700))
        if kind == "foreign":
            if os.getuid():
                pytest.skip("only root can give a folder to another user")
            os.chown(own, 12345, 12345)
    for folder in (cache_root, jobs.folder):
        with pytest.raises(StorageError, match="yolofleet-"):
            folder()
