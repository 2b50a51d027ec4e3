import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
