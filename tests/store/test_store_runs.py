"""The copy of a run in a bucket whose store or network fails: what the run does, and what a resume gets afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import DEADLINE_S, kill, results, small_shapes, started, wait_until, yolofleet
from commands import SMALL_YOLOV5N as SMALL
from server import BUCKET, Faults, Store

from yolofleet.runs.checkpoint import bucket_lease
from yolofleet.runs.checkpoint.bucket_lease import BucketLease
from yolofleet.storage import object_writer
from yolofleet.storage.object_writer import ObjectWriter
from yolofleet.support.errors import ConfigError, StorageError
from yolofleet.support.system.proc import descendants, rank_of

EPOCHS = 40
ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--epochs", str(EPOCHS)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shapes(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def quiet(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("quiet")
    yolofleet(folder, "train", "--data", data, *ARGS, "--device", "cpu", "--name", "quiet")
    return str(results(folder / "runs/train/quiet")["weights_sha256"])


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/runs/{tmp_path.name}"


def keys(store: Store, address: str) -> list[str]:
    prefix = address.removeprefix(f"s3://{BUCKET}/") + "/"
    found = store.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    return [entry["Key"].removeprefix(prefix) for entry in found]


def states(store: Store, address: str) -> list[str]:
    return [key for key in keys(store, address) if key.startswith("checkpoints/step-")]


def content(store: Store, address: str, name: str) -> bytes:
    key = f"{address.removeprefix(f's3://{BUCKET}/')}/{name}"
    return bytes(store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())


def check_copy(store: Store, address: str, run: Path) -> None:
    """The bucket has the newest state and the results of the run, and no more states than are kept."""
    there = set(keys(store, address))
    for name in ("config.yaml", "results.csv", "results.json", "weights/last.safetensors", "events.jsonl"):
        assert content(store, address, name) == (run / name).read_bytes(), name
    newest = max(path.name for path in (run / "checkpoints").glob("step-*"))
    name = f"checkpoints/{newest}"
    assert name in there and content(store, address, name) == (run / name).read_bytes()
    assert 1 <= len(states(store, address)) <= 2


# -- objects ---------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that goes up in three parts."""
    monkeypatch.setattr(object_writer, "PART_BYTES", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(11 << 20))
    return path


@pytest.mark.parametrize("flips", [0, 3])
def test_an_object_in_parts_is_that_of_the_file(
    faults: Faults, store: Store, address: str, large: Path, flips: int
) -> None:
    faults.flip_put = flips
    ObjectWriter(address).put(large, "object")
    assert faults.flip_put == 0 and faults.counts["POST object"] >= 2
    assert content(store, address, "object") == large.read_bytes()


def test_a_store_that_damages_every_object_is_refused(faults: Faults, address: str, large: Path) -> None:
    faults.flip_put = -1
    with pytest.raises(StorageError):
        ObjectWriter(address).put(large, "object")


def test_a_killed_copy_leaves_no_part_of_an_object(
    faults: Faults, store: Store, address: str, large: Path
) -> None:
    code = (
        "from pathlib import Path; from yolofleet.storage import object_writer; object_writer.PART_BYTES = 5 << 20; "
        f"object_writer.ObjectWriter({address!r}).put(Path({str(large)!r}), 'object')"
    )
    faults.delay_s = 1.0
    process = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: faults.counts["PUT object"] > 0)
    process.kill()
    process.wait()
    faults.delay_s = 0.0
    assert keys(store, address) == []


def test_an_object_that_exists_is_not_made_again_if_the_store_states_no_message(
    faults: Faults, address: str
) -> None:
    writer = ObjectWriter(address, 1.0)
    assert writer.create("one", b"first")
    faults.put_status = 412  # without a body
    assert not writer.create("one", b"second")
    assert writer.content("one") == b"first"


def test_one_of_two_resumes_at_the_same_moment_gets_the_lease(
    faults: Faults, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lease, "LOOK_S", 0.1)
    first = BucketLease(ObjectWriter(address), "")
    first.claim(lambda text: None)
    first.renew(ended=True)
    done = list[int]()

    def claim(_: int) -> int:
        lease = BucketLease(ObjectWriter(address), "")
        try:
            lease.claim(lambda text: None)
        except ConfigError:
            done.append(0)
            return 0
        done.append(lease.number)
        while len(done) < 4:
            lease.renew()
            time.sleep(0.2)
        return lease.number

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(claim, range(4))) == [0, 0, 0, 2]


# -- runs ------------------------------------------------------------------------------------------------------


def trained(folder: Path, data: Path, address: str, *more: str) -> str:
    copied = ("--checkpoint-to", address)
    done = yolofleet(folder, "train", "--data", data, *ARGS, *copied, "--device", "cpu:2", *more)
    assert "Traceback" not in done.err + done.out
    return done.out + done.err


def when_copied(
    faults: Faults, writes: int, fault: str, value: object, until: Callable[[], object] | None = None
) -> threading.Thread:
    """Begin a fault when so many objects have been written, and end it when ``until()`` is true; None: never."""

    def work() -> None:
        while faults.counts["PUT object"] < writes:
            time.sleep(0.01)
        setattr(faults, fault, value)
        if until is not None:
            wait_until(until)
            setattr(faults, fault, 0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_all_epochs(run: Path) -> bool:
    table = run / "results.csv"
    return table.exists() and len(table.read_text().splitlines()) == EPOCHS + 1


def test_a_quiet_run_is_copied_whole_and_its_secret_is_nowhere(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path
) -> None:
    trained(tmp_path, data, address)
    run = tmp_path / "runs/train/exp"
    assert results(run)["weights_sha256"] == quiet
    check_copy(store, address, run)
    for path in run.rglob("*"):
        assert path.is_dir() or store.secret.encode() not in path.read_bytes(), path
    for key in keys(store, address):
        assert store.secret.encode() not in content(store, address, key), key


@pytest.mark.parametrize("fault", ["down", "503", "full", "refused"])
def test_an_outage_delays_the_copies_and_not_the_run(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path, fault: str
) -> None:
    name, value = {
        "down": ("down", True),
        "503": ("status", 503),
        "full": ("put_status", 507),
        "refused": ("status", 403),
    }[fault]

    run = tmp_path / "runs/train/exp"
    # the store comes back only after the last epoch, for which the run must not have waited
    thread = when_copied(faults, 8, name, value, lambda: has_all_epochs(run))
    said = trained(tmp_path, data, address)
    thread.join()
    log = (run / "logs/rank-0.log").read_text()
    assert log.count("its files are copied later") == 1, log
    assert "complete again" in log and "Traceback" not in log, said
    assert results(run)["weights_sha256"] == quiet
    check_copy(store, address, run)


def after_a_minute() -> bool:
    time.sleep(60)
    return True


def test_a_restart_while_the_store_is_down_goes_on_and_copies_later(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path
) -> None:
    thread = when_copied(faults, 8, "down", True, after_a_minute)
    command: list[str | Path] = ["train", "--data", data, *ARGS, "--checkpoint-to", address]
    run = started(tmp_path, *command, "--device", "cpu:2", err=subprocess.STDOUT)
    try:
        wait_until(lambda: faults.down, run)
        os.kill(next(pid for pid in descendants(run.pid) if rank_of(pid) == 0), signal.SIGKILL)
        said = run.communicate(timeout=DEADLINE_S)[0]
    finally:
        run.kill()
    thread.join()
    assert run.returncode == 0 and "started again" in said and "Traceback" not in said, said
    folder = tmp_path / "runs/train/exp"
    assert results(folder)["weights_sha256"] == quiet
    check_copy(store, address, folder)


def test_damaged_writes_are_repeated(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path
) -> None:
    faults.flip_put = 6
    trained(tmp_path, data, address)
    assert faults.flip_put == 0
    check_copy(store, address, tmp_path / "runs/train/exp")


def test_a_store_that_stays_away_ends_with_what_is_missing(
    faults: Faults, data: Path, quiet: str, address: str, tmp_path: Path
) -> None:
    when_copied(faults, 8, "down", True)
    copied = ("--checkpoint-to", address)
    done = yolofleet(tmp_path, "train", "--data", data, *ARGS, *copied, "--device", "cpu", code=3)
    assert "the copies of the run are not complete" in done.err and "files are not copied" in done.err
    assert "--checkpoint-to" in done.err  # the command that copies the rest
    run = tmp_path / "runs/train/exp"
    assert results(run)["weights_sha256"] == quiet
    faults.down = False
    done = yolofleet(tmp_path, "train", "--resume", run, *copied, "--device", "cpu")
    assert "the run had ended already" in done.out


@pytest.mark.parametrize("wrong", ["secret", "bucket"])
def test_a_run_that_cannot_be_copied_does_not_begin(
    faults: Faults, data: Path, address: str, tmp_path: Path, wrong: str
) -> None:
    variables = {"AWS_SECRET_ACCESS_KEY": "Wrong0Wrong0Wrong0"} if wrong == "secret" else {}
    to = address if wrong == "secret" else "s3://no-such-bucket/run"
    command: list[str | Path] = ["train", "--data", data, *ARGS, "--checkpoint-to", to]
    done = yolofleet(tmp_path, *command, "--device", "cpu:2", variables=variables, code=3)
    assert done.err.count("StorageError") == 1 and "Traceback" not in done.err and "Wrong0" not in done.err
    assert not (tmp_path / "runs/train/exp").exists()


@pytest.mark.parametrize("fault", ["flip", "cut", "slow"])
def test_a_resume_reads_through_a_bad_network(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path, fault: str
) -> None:
    first = started(tmp_path, "train", "--data", data, *ARGS, "--checkpoint-to", address, "--device", "cpu:2")
    try:
        wait_until(lambda: states(store, address), first)
    finally:
        kill([first])
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    if fault == "slow":
        faults.delay_s = 0.5
    else:
        setattr(faults, fault, 3)
    done = yolofleet(tmp_path, "train", "--resume", address, "--device", "cpu")
    run = next((tmp_path / "runs/train").iterdir())
    assert results(run)["weights_sha256"] == quiet, done.err
    assert "has not ended on" in done.out + done.err  # it has waited for the lease of a machine that is gone
    check_copy(store, address, run)


def test_a_damaged_state_in_the_bucket_is_passed_over(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs/train/exp"
    trained(tmp_path, data, address)
    newest = max(states(store, address))
    damaged = bytearray(content(store, address, newest))
    damaged[len(damaged) // 2] ^= 1
    prefix = address.removeprefix(f"s3://{BUCKET}/")
    store.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{newest}", Body=bytes(damaged))
    shutil.rmtree(run)
    done = yolofleet(tmp_path, "train", "--resume", address, "--device", "cpu:2")
    again = tmp_path / "runs/train" / tmp_path.name
    assert "passed over" in done.out and results(again)["weights_sha256"] == quiet
    check_copy(store, address, again)


def test_a_clock_that_is_off_by_an_hour_changes_nothing(
    faults: Faults, store: Store, data: Path, quiet: str, address: str, tmp_path: Path
) -> None:
    libraries = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("libfaketime missing (apt-get install libfaketime)")
    variables = {"LD_PRELOAD": str(libraries[0]), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    copied = ("--checkpoint-to", address, "--device", "cpu")
    half = ("--max-steps", "40")
    yolofleet(
        tmp_path, "train", "--data", data, *ARGS, *copied, *half, variables=variables | {"FAKETIME": "-1h"}
    )
    shutil.rmtree(tmp_path / "runs")
    yolofleet(
        tmp_path,
        *("train", "--resume", address, "--max-steps", "0", "--device", "cpu"),
        variables=variables | {"FAKETIME": "+1h"},
    )
    run = next((tmp_path / "runs/train").iterdir())
    assert results(run)["weights_sha256"] == quiet
    check_copy(store, address, run)


def test_a_bucket_that_changes_under_a_run_is_not_mixed_into_it(
    faults: Faults, store: Store, tmp_path: Path, data: Path, quiet: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(data.parent, other)
    for path in (other / "images/train").iterdir():
        path.write_bytes(path.read_bytes() + b"others")
    store.upload(data.parent, "changes")
    address, run = f"s3://{BUCKET}/changes/data.yaml", tmp_path / "runs/train/run"
    args = ["train", "--data", address, *ARGS, "--cache", "none", "--device", "cpu", "--name", "run"]
    process = started(tmp_path, *args, err=subprocess.STDOUT)
    wait_until(lambda: (run / "results.csv").exists(), process)
    store.upload(other, "changes")
    yolofleet(tmp_path, "data", "check", address)
    said = process.communicate()[0]
    assert process.returncode == 0 and results(run)["weights_sha256"] == quiet, said
    refused = yolofleet(tmp_path, "train", "--resume", run, "--epochs", str(EPOCHS + 1), code=3)
    assert "20 changed: images/train/000000.png (other content)" in refused.out + refused.err
    store.upload(data.parent, "changes")  # the digests decide, not the times
    again = yolofleet(tmp_path, "train", "--resume", run, "--epochs", str(EPOCHS + 1))
    assert "warning" not in again.out + again.err
