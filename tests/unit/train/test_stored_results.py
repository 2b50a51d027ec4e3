"""Which results a run takes from its copy when its processes start again."""

from __future__ import annotations

from pathlib import Path

import pytest

from yolofleet.training.resume import bring_results

pytestmark = pytest.mark.skipif("os.name == 'nt'")


def test_a_restart_on_a_machine_without_the_files_brings_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    store, run = tmp_path / "store", tmp_path / "run"
    for folder, words in ((store, "copy"), (run, "here")):
        (folder / "weights").mkdir(parents=True)
        (folder / "weights/best.safetensors").write_text(words)
    for name in ("results.csv", "events.jsonl"):
        (store / name).write_text("copy")
    bring_results(f"file://{store}", run, is_restart=True)
    assert (run / "weights/best.safetensors").read_text() == "here"
    assert (run / "results.csv").read_text() == (run / "events.jsonl").read_text() == "copy"
    assert not list(tmp_path.glob("run/*-before-*"))
