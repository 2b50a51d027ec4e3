"""The copy of a run folder: what is copied, in which order, and what happens when the store or the lease is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yolofleet.runs.checkpoint import bucket_copy, bucket_lease
from yolofleet.runs.checkpoint.bucket_copy import Copier, Copying, Order
from yolofleet.runs.checkpoint.bucket_lease import BucketLease, LeaseTaken
from yolofleet.storage.object_writer import ObjectWriter
from yolofleet.storage.shards import Stored
from yolofleet.support.errors import ConfigError, StorageError

pytestmark = pytest.mark.skipif("os.name == 'nt'")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as a training leaves it."""
    folder = tmp_path / "run"
    for name in ("config.yaml", "results.csv", "events.jsonl", "weights/last.safetensors", "logs/rank-0.log"):
        write(folder, name)
    return folder


def write(folder: Path, name: str, content: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("." + path.name)
    temporary.write_text(content or name)
    temporary.replace(path)


def state(folder: Path, step: int) -> str:
    name = f"checkpoints/step-{step:08d}.safetensors"
    write(folder, name)
    return name


def order_of(folder: Path, *, continues: bool = False, is_current: bool = True) -> Order:
    return Order(str(folder), f"file://{folder.parent}/store/run", continues, is_current, keep=2, command="")


def copier_of(folder: Path, *, continues: bool = False, is_current: bool = True) -> Copier:
    copier = Copier(order_of(folder, continues=continues, is_current=is_current))
    copier.begin()
    return copier


def stored(folder: Path) -> dict[str, str]:
    store = folder.parent / "store/run"
    files = {str(p.relative_to(store)): p.read_text() for p in store.rglob("*") if p.is_file()}
    return {name: text for name, text in files.items() if not name.startswith(".lease/")}


def test_the_copy_has_the_files_of_the_run_and_no_others(run: Path, tmp_path: Path):
    state(run, 3)
    expected = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    for name in (
        ".lock",
        "logs/stop.request",
        "checkpoints-before-1/step-00000001.safetensors",
        "wei\nrd.txt",
    ):
        write(run, name)
    (tmp_path / "secret").write_text("secret")
    (run / "plots").mkdir()
    (run / "plots/link.png").symlink_to(tmp_path / "secret")
    (run / "linked").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    copier_of(run).copy(is_last=True)
    assert stored(run) == {name: name for name in expected}


def test_results_and_weights_are_there_before_the_state(run: Path, monkeypatch: pytest.MonkeyPatch):
    written = list[str]()
    put = ObjectWriter.put

    def recorded(store: ObjectWriter, file: Path, key: str) -> None:
        written.append(key)
        put(store, file, key)

    monkeypatch.setattr(ObjectWriter, "put", recorded)
    copier = copier_of(run)
    for step in (2, 4):
        written.clear()
        name = state(run, step)
        for other in ("results.csv", "weights/last.safetensors", "logs/rank-0.log"):
            write(run, other, f"after step {step}")
        copier.copy(is_last=False)
        before = written[: written.index(name)]
        assert {"results.csv", "weights/last.safetensors"} <= set(before) and "logs/rank-0.log" not in before
        assert stored(run)["results.csv"] == f"after step {step}"


def test_the_newest_states_are_kept(run: Path):
    copier = copier_of(run)
    for step in (1, 2, 3, 4):
        state(run, step)
        copier.copy(is_last=False)
    assert sorted(name for name in stored(run) if "step-" in name) == [state(run, step) for step in (3, 4)]
    # another process goes on with a fresh folder, as on a new machine
    copier.lease.renew(ended=True)
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    copier = copier_of(run, continues=True)
    copier.copy(is_last=False)
    assert len([name for name in stored(run) if "step-" in name]) == 2
    name = state(run, 5)
    copier.copy(is_last=False)
    assert sorted(name for name in stored(run) if "step-" in name) == [state(run, 4), name]


def test_after_a_rollback_the_state_of_a_lower_step_is_the_newest(run: Path):
    copier = copier_of(run)
    for step in (10, 20, 12, 14):
        state(run, step)
        copier.copy(is_last=False)
    assert sorted(name for name in stored(run) if "step-" in name) == [
        f"checkpoints/step-{step:08d}.safetensors" for step in (12, 14)
    ]


def test_a_new_run_does_not_replace_another_one(run: Path):
    state(run, 1)
    copier = copier_of(run)
    copier.copy(is_last=True)
    copier.lease.renew(ended=True)
    before = stored(run)
    with pytest.raises(ConfigError, match="has a run already") as refused:
        copier_of(run)
    assert "--resume file://" in refused.value.hint
    assert stored(run) == before
    copier_of(run, continues=True)  # the refused process has given the lease back


def test_what_a_failed_start_left_is_no_run(run: Path):
    (run / "results.csv").unlink()
    copier = copier_of(run)
    copier.copy(is_last=True)
    copier.lease.renew(ended=True)
    state(run, 1)
    copier_of(run).copy(is_last=True)


def test_growing_files_are_copied_now_and_then_and_at_the_end(run: Path):
    copier = copier_of(run)
    copier.copy(is_last=False)
    for name in ("events.jsonl", "results.csv"):
        with (run / name).open("a") as file:
            file.write(" more")
    copier.copy(is_last=False)
    assert stored(run)["events.jsonl"] == "events.jsonl"
    copier.copy(is_last=True)
    assert stored(run)["events.jsonl"] == "events.jsonl more"


def test_a_file_that_vanishes_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch):
    name = state(run, 1)
    copier = copier_of(run)
    files = copier._files()
    monkeypatch.setattr(copier, "_files", lambda: files)
    (run / name).unlink()
    copier.copy(is_last=True)
    assert name not in stored(run) and "events.jsonl" in stored(run)


class Messages(list[list[str]]):
    def said(self, kind: str) -> list[str]:
        return [texts[0] for found, *texts in self if found == kind]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    found = Messages()
    monkeypatch.setattr(bucket_copy, "say", lambda kind, *texts: found.append([kind, *texts]))
    monkeypatch.setattr(bucket_copy, "POLL_S", 0.01)
    monkeypatch.setattr(bucket_copy, "_line", lambda: b"begin\n")
    return found


class Ends:
    """Says after some passes that the run has ended."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_an_outage_is_told_once_and_made_up_for(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
):
    put, refusals = ObjectWriter.put, iter(range(7))

    def refuse(self: ObjectWriter, file: Path, key: str) -> None:
        if next(refusals, None) is not None:
            raise StorageError(f"cannot write {key}")
        put(self, file, key)

    monkeypatch.setattr(ObjectWriter, "put", refuse)
    state(run, 1)
    copying = Copying(order_of(run))
    monkeypatch.setattr(copying, "_wait", Ends(20))
    copying.run()
    assert len(messages.said("warning")) == 1 and "the run goes on" in messages.said("warning")[0]
    assert messages.said("note") == ["the copies in the store are complete again"]
    assert not messages.said("missing")
    assert set(stored(run)) == {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    lease = json.loads(next((run.parent / "store/run/.lease").glob("0*")).read_text())
    assert lease["ended"]


def test_an_outage_without_end_is_told_with_the_number_of_files(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: ObjectWriter, file: Path, key: str) -> None:
        raise StorageError(f"cannot write {key}")

    monkeypatch.setattr(ObjectWriter, "put", refuse)
    monkeypatch.setattr(bucket_copy, "LAST_S", 0.3)
    copying = Copying(order_of(run))
    monkeypatch.setattr(copying, "_wait", Ends(2))
    copying.run()
    assert len(messages.said("warning")) == 1
    assert messages.said("missing") == ["5 files are not copied: cannot write config.yaml"]


def test_a_process_that_loses_its_lease_copies_nothing_more(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_lease, "LEASE_S", 0.0)
    monkeypatch.setattr(bucket_lease, "GUARD_S", 0.0)
    lost = copier_of(run)
    state(run, 1)
    lost.copy(is_last=False)
    held = copier_of(run, continues=True)
    write(run, "results.csv", "of the holder")
    held.copy(is_last=False)
    before = stored(run)
    write(run, "results.csv", "of the loser")
    state(run, 2)
    with pytest.raises(LeaseTaken):
        lost.copy(is_last=False)
    assert stored(run) == before
    copying = Copying(order_of(run))
    copying.copier = lost
    copying._pass()
    assert "goes on on" in messages.said("warning")[0]
    copying._pass()
    assert len(messages.said("missing")) == 1 and stored(run) == before
    held.copy(is_last=True)


def test_a_refusal_reaches_the_run(run: Path, messages: Messages):
    state(run, 1)
    held = copier_of(run)
    held.copy(is_last=True)
    held.lease.renew(ended=True)
    Copying(order_of(run)).run()
    assert messages[-1][:2] == ["refused", "ConfigError"] and "has a run already" in messages[-1][2]


@pytest.mark.parametrize("is_restart", [True, False])
def test_a_store_that_is_down_ends_a_start_but_no_restart(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch, is_restart: bool
):
    objects, refusals = ObjectWriter.objects, iter(range(4))

    def refuse(self: ObjectWriter, folder: str = "") -> tuple[dict[str, Stored], list[str]]:
        if next(refusals, None) is not None:
            raise StorageError("cannot list the store")
        return objects(self, folder)

    monkeypatch.setattr(ObjectWriter, "objects", refuse)
    state(run, 1)
    copying = Copying(replace(order_of(run, continues=is_restart), is_restart=is_restart))
    monkeypatch.setattr(copying, "_wait", Ends(20))
    copying.run()
    if not is_restart:
        assert [kind for kind, *_ in messages] == ["refused"] and not stored(run)
        return
    assert messages[0] == ["ready"] and len(messages.said("warning")) == 1 and not messages.said("missing")
    assert messages.said("note") == ["the copies in the store are complete again"]
    assert set(stored(run)) == {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    lease = json.loads(next((run.parent / "store/run/.lease").glob("0*")).read_text())
    assert lease["ended"]


def test_a_restart_that_finds_another_holder_after_an_outage_copies_nothing(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
):
    state(run, 1)
    held = copier_of(run)
    held.copy(is_last=False)
    before, check_links, refusals = stored(run), ObjectWriter.check_links, iter(range(2))

    def refuse(self: ObjectWriter) -> None:
        if next(refusals, None) is not None:
            raise StorageError("the store is down")
        check_links(self)
        held.lease.renew()

    monkeypatch.setattr(ObjectWriter, "check_links", refuse)
    monkeypatch.setattr(bucket_lease, "LOOK_S", 0.01)
    monkeypatch.setattr(BucketLease, "_newest", renewing(held.lease))
    state(run, 2)
    copying = Copying(replace(order_of(run, continues=True), is_restart=True))
    monkeypatch.setattr(copying, "_wait", Ends(20))
    copying.run()
    assert "goes on on" in messages.said("missing")[0] and stored(run) == before
    held.lease.renew(ended=True)


def test_a_restart_does_not_replace_what_another_command_has_added(run: Path) -> None:
    """A machine that was cut off comes back after the run has been resumed elsewhere and has ended there."""

    def process(command: str, *, is_restart: bool) -> Copier:
        order = replace(order_of(run, continues=True), command=command, is_restart=is_restart)
        copier = Copier(order)
        copier.begin()
        return copier

    name = state(run, 10)
    lost = process("A", is_restart=False)
    lost.copy(is_last=False)
    other = process("A", is_restart=True)  # its own command: it goes on
    other.copy(is_last=False)
    other.lease.renew(ended=True)
    later = state(run, 50)
    write(run, "results.csv", "after step 50")
    ended = process("B", is_restart=False)
    ended.copy(is_last=True)
    ended.lease.renew(ended=True)
    (run / later).unlink()
    write(run, "results.csv", "after step 10")
    before = stored(run)
    for _ in range(2):  # the refused one has had the lease
        with pytest.raises(ConfigError, match="has a later state than"):
            process("A", is_restart=True)
    assert stored(run) == before and later in before
    ended = process("B", is_restart=True)  # a restart of the last command may go back
    ended.copy(is_last=True)
    assert stored(run)["results.csv"] == "after step 10" and name in stored(run)


def test_a_lease_is_free_again_if_the_store_fails_after_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("down")

    def never(_: float) -> None:
        raise AssertionError("waits for a holder that has given up")

    name = state(run, 3)
    with monkeypatch.context() as down, pytest.raises(StorageError, match="down"):
        down.setattr(Copier, "_check", fail)
        Copier(order_of(run)).begin()
    monkeypatch.setattr(bucket_lease.time, "sleep", never)
    other = copier_of(run)  # of another command
    other.copy(is_last=True)
    assert name in stored(run)


def renewing(lease: BucketLease) -> Callable[[BucketLease], tuple[int, dict[str, Any], float]]:
    """Look for the newest lease while its holder goes on renewing it."""
    newest = BucketLease._newest

    def look(self: BucketLease) -> tuple[int, dict[str, Any], float]:
        found = newest(self)
        lease.renew()
        return found

    return look


def test_a_folder_that_is_behind_its_copy_replaces_nothing(run: Path) -> None:
    state(run, 1)
    copier = copier_of(run)
    copier.copy(is_last=False)
    name = state(run, 9)
    write(run, "results.csv", "after step 9")
    copier.copy(is_last=True)
    copier.lease.renew(ended=True)
    (run / name).unlink()
    write(run, "results.csv", "after step 1")
    before = stored(run)
    with pytest.raises(ConfigError, match="has a later state than") as refused:
        copier_of(run, continues=True, is_current=False)
    assert "--resume file://" in refused.value.hint and stored(run) == before
    state(run, 9)
    copier_of(run, continues=True, is_current=False).copy(is_last=True)
    assert stored(run)["results.csv"] == "after step 1"


def test_links_in_a_store_on_a_disk_are_not_followed(run: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("key")
    store = tmp_path / "store/run"
    store.mkdir(parents=True)
    (store / "weights").symlink_to(private)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        copier_of(run)
    (store / "weights").unlink()
    (store / "inner").write_text("inner")
    (store / "results.csv").symlink_to(store / "inner")
    copier_of(run, continues=True).copy(is_last=True)
    assert (store / "inner").read_text() == "inner" and not (store / "results.csv").is_symlink()
    assert [path.name for path in private.iterdir()] == ["key"]


def test_a_file_that_cannot_be_read_stops_no_other(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, opened = state(run, 1), bucket_copy.unchanging

    def refuse(path: Path):
        if path.name == "last.safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(bucket_copy, "unchanging", refuse)
    copier = copier_of(run)
    copier.copy(is_last=False)
    copier.copy(is_last=True)
    assert name in stored(run) and "weights/last.safetensors" not in stored(run)
    assert len(messages.said("warning")) == 1
    assert "last.safetensors is not copied" in messages.said("warning")[0]


def test_what_the_last_holder_still_writes_is_replaced(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lease, "LEASE_S", 0.0)
    monkeypatch.setattr(bucket_copy, "LEASE_S", 0.0)
    lost = copier_of(run)
    state(run, 4)
    lost.copy(is_last=False)
    held = copier_of(run, continues=True)
    held._again_s = float("inf")
    held.copy(is_last=False)
    lost.store.put(run / "config.yaml", "results.csv")
    lost.store.put(run / "config.yaml", "checkpoints/step-00000002.safetensors")
    held.copy(is_last=False)
    assert stored(run)["results.csv"] == "config.yaml"
    held._again_s = 0.0
    held.copy(is_last=False)
    for step in (5, 6):
        state(run, step)
        held.copy(is_last=False)
    assert stored(run)["results.csv"] == "results.csv"
    assert sorted(name for name in stored(run) if "step-" in name) == [state(run, step) for step in (5, 6)]


def test_nothing_is_copied_before_the_run_says_so(
    run: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_copy, "_line", lambda: bucket_copy.ENDED)
    Copying(order_of(run)).run()
    assert ["ready"] in messages and not messages.said("warning") and stored(run) == {}
    copier_of(run)  # the lease was given back
