"""A verb of `data` that a signal stops leaves nothing, and says so."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from commands import called, working_in
from small_data import yolo_set

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
VERBS = {
    "convert": ["convert", "set", "--to", "yolo", "--images", "copy"],
    "split": ["split", "set"],
    "merge": ["merge", "set", "other"],
    "shard": ["shard", "set"],
    "unshard": ["unshard", "shards"],
    "make": ["make", "shapes", "--images", "2", "--val-images", "1", "--img", "32"],
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two data sets and shards, made before any signal."""
    root = tmp_path_factory.mktemp("sets")
    with working_in(root, YOLOFLEET_CACHE=str(root / "cache")):
        for name in ("set", "other"):
            yolo_set(root / name, {f"{n}": "0 0.5 0.5 0.4 0.4\n" for n in range(4)}, names=f"[{name}]")
            Path(f"{name}/data.yaml").write_text(f"train: images/train\nval: images/train\nnames: [{name}]\n")
        assert called("data", "shard", "set", "--out", "shards").code == 0
    return root


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_signal_before_the_result_has_its_name_leaves_nothing(sets, tmp_path, monkeypatch, verb, name):
    shutil.copytree(sets, tmp_path / "here")
    there = sorted((tmp_path / "here").iterdir())
    before, hangup = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    rename = os.rename

    def stopped(self, target):
        """A closed terminal sends several signals."""
        if self.name.startswith(".out-"):
            assert any(self.rglob("*.*"))
            signal.raise_signal(getattr(signal, name))
        rename(self, target)

    monkeypatch.setattr(Path, "rename", stopped)
    rmtree = shutil.rmtree

    def twice(*args, **options):
        if name != "SIGINT":
            signal.raise_signal(signal.SIGHUP)
        rmtree(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", twice)
    with working_in(tmp_path / "here", YOLOFLEET_CACHE=str(tmp_path / "cache")):
        done = called("data", *VERBS[verb], "--out", "out")
    monkeypatch.undo()
    signal.signal(signal.SIGHUP, hangup)  # that of nohup
    assert sorted((tmp_path / "here").iterdir()) == there
    assert done.code == (130 if name == "SIGINT" else 75) and "Traceback" not in done.err
    assert name == "SIGINT" or f"stopped by {name}; incomplete files were removed" in done.err
    assert signal.getsignal(signal.SIGTERM) is before
