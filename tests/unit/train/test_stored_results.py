"""Which state and which results a run takes from its copy, also if the list of the store does not fit its objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from yolofleet.families.weights.format import write_tensors
from yolofleet.runs.checkpoint.store import load_snapshot
from yolofleet.runs.report.console import NullConsole
from yolofleet.storage.object_store import ObjectStore
from yolofleet.storage.shards import Stored
from yolofleet.support.errors import CheckpointError
from yolofleet.training.parallel.world import World
from yolofleet.training.resume import bring_results, snapshot_for_all

pytestmark = pytest.mark.skipif("os.name == 'nt'")
STATE = Path(__file__).parents[2] / "golden/run/exp/checkpoints/step-00000004.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


def test_a_restart_on_a_machine_without_the_files_brings_only_what_is_missing(tmp_path: Path) -> None:
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


# -- a list that does not fit the objects


def state(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/step-{step:08d}.safetensors"


def write_states(folder: Path, *steps: int) -> None:
    """Write states of these steps and the results of a run."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text(f"until step {max(steps)}")
    snapshot = load_snapshot(STATE)
    for step in steps:
        write_tensors(state(folder, step), snapshot.tensors, {"state": snapshot.values, "step": step})


def after_listing(monkeypatch: pytest.MonkeyPatch, *changes: Callable[[dict[str, Stored]], None]) -> None:
    """Give each of the first lists of the store to one of ``changes``, before their reader reads an object."""
    listing, left = ObjectStore.listing, list(changes)

    def changed(store: ObjectStore) -> tuple[dict[str, Stored], list[str]]:
        files, odd = listing(store)
        if left:
            left.pop(0)(files)
        return files, odd

    monkeypatch.setattr(ObjectStore, "listing", changed)


def resumed_step(store: Path, run: Path) -> tuple[int, str]:
    """Return the step at which ``--resume`` goes on, and what it prints."""
    world, log = World.single(), run / "log"
    world.console = NullConsole(log)
    snapshot = snapshot_for_all(world, f"file://{store}", run, None, is_writer=True)
    world.console.close()
    assert snapshot is not None
    return snapshot.step, log.read_text()


@pytest.mark.parametrize("fault", ["other digest", "gone"])
def test_a_state_that_is_not_as_listed_is_passed_over_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    write_states(store, 4, 6)

    def change(files: dict[str, Stored]) -> None:
        key = state(store, 6).relative_to(store).as_posix()
        if fault == "gone":
            state(store, 6).unlink()
        else:
            files[key] = replace(files[key], digest="0" * 32)

    after_listing(monkeypatch, change)
    step, said = resumed_step(store, run)
    assert step == 4 and "passed over" in said and "step-00000006" in said
    assert ("does not exist" if fault == "gone" else "the digest that the listing says") in said


def test_a_state_here_is_not_given_up_for_an_older_one_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    write_states(store, 4, 6)
    write_states(run, 5)
    after_listing(monkeypatch, lambda files: state(store, 6).unlink())
    assert resumed_step(store, run)[0] == 5


def test_a_copy_that_a_lost_process_still_changes_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    write_states(store, 4)

    def go_on(files: dict[str, Stored]) -> None:
        """Save the next state, and delete the one before, as a run with --keep-last 1 does."""
        write_states(store, 16)
        state(store, 4).unlink()

    after_listing(monkeypatch, go_on)
    assert resumed_step(store, run)[0] == 16
    write_states(store, 4)
    after_listing(monkeypatch, go_on)
    bring_results(f"file://{store}", run, is_restart=False)
    assert (run / "results.csv").read_text() == "until step 16"


def test_a_copy_without_any_state_as_listed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_states(tmp_path / "store", 4)

    def change(files: dict[str, Stored]) -> None:
        for key in files:
            files[key] = replace(files[key], digest="0" * 32)

    after_listing(monkeypatch, change, change)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*step-00000004"):
        resumed_step(tmp_path / "store", tmp_path / "run")
