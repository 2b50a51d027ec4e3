"""Who may write the copy of a run: claims that follow each other, meet, or find a holder that is gone."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from yolofleet.runs.checkpoint import bucket_lease
from yolofleet.runs.checkpoint.bucket_lease import BucketLease, LeaseTaken
from yolofleet.storage.object_writer import ObjectWriter
from yolofleet.support.errors import ConfigError, StorageError

pytestmark = pytest.mark.skipif("os.name == 'nt'")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_lease, "LOOK_S", 0.05)
    monkeypatch.setattr(bucket_lease, "LEASE_S", 2.0)


def lease(folder: Path, command: str = "") -> BucketLease:
    return BucketLease(ObjectWriter(f"file://{folder}/run", 1.0), command)


def claimed(folder: Path, command: str = "") -> BucketLease:
    found = lease(folder, command)
    found.claim(lambda text: None)
    return found


def test_a_lease_that_was_given_back_goes_on_with_the_next_number(tmp_path: Path):
    for number in (1, 2, 3):
        held = claimed(tmp_path)
        assert held.number == number
        held.renew()
        held.renew(ended=True)
    assert [p.name for p in sorted((tmp_path / "run/.lease").iterdir())] == ["00000003.json", "clock"]


def test_a_holder_that_goes_on_keeps_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_lease, "LEASE_S", 1e9)
    held, said = claimed(tmp_path), list[str]()
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.2):
            held.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="goes on on"):
            lease(tmp_path).claim(said.append)
    finally:
        over.set()
        thread.join()
    assert len(said) == 1 and "waiting up to" in said[0]
    held.renew()


def test_a_holder_that_is_silent_loses_its_lease_and_notices(tmp_path: Path):
    lost = claimed(tmp_path)
    began_s = time.monotonic()
    held = claimed(tmp_path)
    assert time.monotonic() - began_s > 0.9 * bucket_lease.LEASE_S and held.number == 2
    with pytest.raises(LeaseTaken, match="goes on on"):
        lost.renew()
    held.renew()
    with pytest.raises(LeaseTaken):
        lost.renew(ended=True)
    held.renew()  # the loser has not ended it


def test_the_time_of_silence_counts_by_the_clock_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_lease, "LEASE_S", 1e6)
    claimed(tmp_path)
    os.utime(tmp_path / "run/.lease/00000001.json", (time.time() - 2e6,) * 2)
    waits = list[str]()
    held = lease(tmp_path)
    held.claim(waits.append)
    assert held.number == 2 and not waits


def test_the_same_command_takes_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_lease, "LEASE_S", 1e9)
    lost = claimed(tmp_path, "command 1")
    assert claimed(tmp_path, "command 1").number == 2
    with pytest.raises(LeaseTaken):
        lost.renew()


def test_guard_renews_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lost = claimed(tmp_path, "same")
    claimed(tmp_path, "same")
    lost.guard()
    monkeypatch.setattr(bucket_lease, "GUARD_S", 0.0)
    with pytest.raises(LeaseTaken):
        lost.guard()


def test_of_many_that_claim_at_once_one_gets_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_lease, "LEASE_S", 1e9)
    claimed(tmp_path).renew(ended=True)
    start, done = threading.Barrier(8), list[bool]()

    def claim(_: int) -> bool:
        start.wait()
        try:
            held = claimed(tmp_path)
        except ConfigError:
            done.append(False)
            return False
        done.append(True)
        while len(done) < 8:
            held.renew()
            time.sleep(0.1)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(8))) == 1


def test_a_listing_that_misses_the_holder_gives_no_second_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    claimed(tmp_path).renew(ended=True)
    held = claimed(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="the run goes on on"):
        patch.setattr(BucketLease, "_newest", lambda _: (0, {}, 0.0))
        claimed(tmp_path)
    held.renew()
    held.renew(ended=True)
    assert claimed(tmp_path).number == 3


def test_a_pipe_in_the_place_of_a_lease_is_refused(tmp_path: Path):
    claimed(tmp_path).renew(ended=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run/.lease/00000002.json").symlink_to(tmp_path / "pipe")
    with pytest.raises(StorageError, match="named pipe"):
        claimed(tmp_path)


def test_a_store_without_conditions_lets_two_begin_and_one_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def create(store: ObjectWriter, key: str, content: bytes) -> bool:
        start.wait(900)
        store.write(key, content)
        return True

    claimed(tmp_path).renew(ended=True)
    start = threading.Barrier(2)
    monkeypatch.setattr(ObjectWriter, "create", create)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: claimed(tmp_path), range(2)))
    assert [one.number for one in both] == [2, 2]
    going_on = []
    for one in both:
        try:
            one.renew()
            going_on.append(one)
        except LeaseTaken:
            pass
    assert len(going_on) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b"{}"])
def test_a_damaged_lease_counts_as_that_of_an_unknown_holder(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_lease, "LEASE_S", 0.4)
    claimed(tmp_path)
    (tmp_path / "run/.lease/00000001.json").write_bytes(content)
    began_s = time.monotonic()
    assert claimed(tmp_path).number == 2
    assert time.monotonic() - began_s > 0.9 * bucket_lease.LEASE_S


def test_a_lease_that_a_user_deletes_is_written_again(tmp_path: Path):
    held = claimed(tmp_path)
    for path in (tmp_path / "run/.lease").iterdir():
        path.unlink()
    held.renew()
    assert (tmp_path / "run/.lease/00000001.json").exists()


def test_a_holder_whose_run_has_failed_is_waited_for(tmp_path: Path) -> None:
    """It copies the rest for a while, and renews its lease meanwhile."""
    held, over = claimed(tmp_path), threading.Event()

    def copy_the_rest() -> None:
        for _ in range(10):
            held.renew(failed=True)
            time.sleep(0.1)
        over.set()

    thread = threading.Thread(target=copy_the_rest)
    thread.start()
    assert claimed(tmp_path).number == 2
    assert over.is_set()
    thread.join()
