"""A data set that changes at its address while a run goes on: another command, a restart and a resume. A folder stands for the store."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
from commands import (
    DEADLINE_S,
    SMALL,
    SMALL_YOLOV5N,
    Forked,
    called,
    environment,
    free_port,
    in_ranks,
    kill,
    results,
    started,
    started_ranks,
    wait_until,
    working_in,
    yolofleet,
)

from yolofleet.cli import main
from yolofleet.support.system.proc import descendants, rank_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="finds the ranks in /proc; mirrors need locks"
)
ARGS = [
    *SMALL_YOLOV5N, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--epochs", "40",
    "--cache", "none",
]  # fmt: skip
RUN = Path("runs/train/run")


@pytest.fixture(scope="module")
def versions(folder: Path, data: Path) -> dict[tuple[str, bool], Path]:
    """The data set and one with other pixels, each as files and as shards."""
    other = folder / "other"
    shutil.copytree(data.parent, other)
    for path in (other / "images/train").iterdir():
        pixels = cv2.imread(str(path))
        assert pixels is not None
        cv2.imwrite(str(path), cv2.bitwise_not(pixels))
    found = {("files", False): data.parent, ("files", True): other}
    for is_other, source in ((False, data.parent), (True, other)):
        found["shards", is_other] = folder / f"shards {is_other}"
        with working_in(folder):
            done = called("data", "shard", source, "--out", found["shards", is_other], "--size", "64KiB")
        assert done.code == 0, done.err
    return found


@pytest.fixture(scope="module")
def quiet(folder: Path, data: Path) -> str:
    """The hash of the weights of a run without any trouble."""
    in_ranks(folder, 1, "train", "--data", data, *ARGS, "--name", "quiet")
    return str(results(folder / "runs/train/quiet")["weights_sha256"])


def upload(source: Path, store: Path) -> None:
    """Replace what differs, each file in one step, the lists of all files last."""
    for path in sorted(source.rglob("*"), key=lambda path: path.suffix == ".jsonl"):
        target = store / path.relative_to(source)
        if path.is_file() and not (target.exists() and target.read_bytes() == path.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, store.with_name("new"))
            store.with_name("new").replace(target)


class ChangedRun:
    """A run whose data set is another one since its second epoch.

    Attributes:
        process: the launcher, or the only process.
    """

    def __init__(self, folder: Path, versions: dict[tuple[str, bool], Path], form: str, ranks: int) -> None:
        self.folder, self.run, self.store = folder, folder / RUN, folder / "store"
        self.address = f"file://{self.store}"
        upload(versions[form, False], self.store)
        device = f"cpu:{ranks}" if ranks > 1 else "cpu"
        args = ["train", "--data", self.address, *ARGS, "--device", device, "--name", "run"]
        self.process = started(folder, *args, err=subprocess.STDOUT)
        results_csv = self.run / "results.csv"
        wait_until(
            lambda: (
                results_csv.exists()
                and len(results_csv.read_text().splitlines()) > 1
                and list(self.run.glob("checkpoints/step-*.safetensors"))
            ),
            self.process,
        )
        upload(versions[form, True], self.store)
        assert self.process.poll() is None

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate()
        return self.process.returncode, out

    def resumed(self, *more: str, code: int = 0) -> str:
        data = () if "--data" in more else ("--data", self.address)  # a run folder chooses no file://
        done = yolofleet(self.folder, "train", "--resume", RUN, *data, *more, code=code)
        return done.out + done.err


@pytest.fixture
def changed_run(
    request: pytest.FixtureRequest, tmp_path: Path, versions: dict[tuple[str, bool], Path]
) -> Iterator[ChangedRun]:
    run = ChangedRun(tmp_path, versions, *request.param)
    yield run
    kill([run.process])


def restarted(folder: Path, attempt: int, *args: str | Path, code: int = 0) -> str:
    """Start the only rank of a torchrun, in an attempt of this number; return what it prints."""
    log = folder / f"attempt {attempt}.log"
    env = environment(folder) | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "changed data",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }  # fmt: skip
    assert Forked(folder, env, log, lambda: main(list(map(str, args)))).wait() == code, log.read_text()
    return log.read_text()


def test_a_restart_over_other_shards_is_refused_until_it_is_accepted(
    tmp_path: Path, versions: dict[tuple[str, bool], Path]
) -> None:
    store = tmp_path / "store"
    upload(versions["shards", False], store)
    command = ["train", "--data", f"file://{store}", *SMALL, "--threads", "1", "--device", "cpu"]
    command += ["--epochs", "1", "--val-period", "0", "--name", "run"]
    restarted(tmp_path, 0, *command)
    upload(versions["shards", True], store)
    said = restarted(tmp_path, 1, *command, code=3)
    assert "from : the start after a failure" in said
    assert "20 changed: images/train/000000.png (other content), " in said and "and 16 more" in said
    said = restarted(tmp_path, 2, *command, "--allow", "changed-data")
    assert "warning: the run goes on with another data set: 20 changed: images/train/000000.png" in said


@pytest.mark.slow
@pytest.mark.parametrize("changed_run", [("files", 1), ("shards", 2)], indirect=True)
def test_another_command_leaves_the_files_of_a_run(changed_run: ChangedRun, quiet: str) -> None:
    yolofleet(changed_run.folder, "data", "check", changed_run.address)
    assert changed_run.process.poll() is None  # else the command came too late to matter
    code, said = changed_run.end()
    assert code == 0, said
    assert results(changed_run.run)["weights_sha256"] == quiet
    said = changed_run.resumed("--epochs", "41", code=3)
    assert "differs from the data set of the run: " in said and "images/train/000000.png" in said


def check_refused_then_accepted(changed_run: ChangedRun) -> None:
    """The same command is refused again; with the option it goes on, and so does the next one without it."""
    states = sorted(path.name for path in (changed_run.run / "checkpoints").glob("step-*"))
    said = changed_run.resumed(code=3)
    assert "differs from the data set of the run: " in said and "images/train/000000.png" in said
    assert sorted(path.name for path in (changed_run.run / "checkpoints").glob("step-*")) == states
    said = changed_run.resumed("--allow", "changed-data", "--epochs", "41")
    assert "warning: the run goes on with another data set: " in said
    said = changed_run.resumed("--epochs", "42")
    assert "warning: the run goes on" not in said
    assert "note: the data set has changed (--allow changed-data) after step" in said


@pytest.mark.slow
@pytest.mark.parametrize("changed_run", [("shards", 2)], indirect=True)
def test_a_restart_over_changed_data_is_refused(changed_run: ChangedRun) -> None:
    ranks = [pid for pid in descendants(changed_run.process.pid) if rank_of(pid) == 1]
    os.kill(ranks[0], signal.SIGKILL)
    code, said = changed_run.end()
    assert code == 3 and "from : the start after a failure" in said, said
    assert "20 changed: images/train/000000.png (other content), " in said and "and 16 more" in said
    check_refused_then_accepted(changed_run)


@pytest.mark.slow
@pytest.mark.parametrize("changed_run", [("files", 1), ("files", 2)], indirect=True)
def test_a_resume_over_changed_data_is_refused(changed_run: ChangedRun) -> None:
    os.kill(changed_run.process.pid, signal.SIGTERM)
    code, said = changed_run.end()
    assert code == 75, said
    check_refused_then_accepted(changed_run)


@pytest.mark.slow
@pytest.mark.parametrize("changed_run", [("shards", 1)], indirect=True)
def test_the_same_contents_in_another_place_give_the_weights_of_a_quiet_run(
    changed_run: ChangedRun, data: Path, quiet: str
) -> None:
    os.kill(changed_run.process.pid, signal.SIGTERM)
    changed_run.end()
    changed_run.resumed(code=3)
    shutil.copytree(data.parent, changed_run.folder / "new", copy_function=shutil.copyfile)  # other times
    assert "warning" not in changed_run.resumed("--data", "new")
    assert results(changed_run.run)["weights_sha256"] == quiet


def test_each_host_compares_its_own_copy(tmp_path: Path, data: Path) -> None:
    """Two folders stand for two hosts, each with a data set of its own."""
    places = [tmp_path / "a", tmp_path / "b"]
    shutil.copytree(data.parent, places[0] / "data")
    shutil.copytree(data.parent, places[1] / "data", copy_function=shutil.copyfile)
    run = places[0] / "runs/train/run"
    small = [*SMALL, "--threads", "1", "--val-period", "0"]

    def trained(*args: str, code: int = 0) -> str:
        log = tmp_path / "log"
        log.write_bytes(b"")
        ranks = started_ranks(places, "train", *args, "--device", "cpu", home=tmp_path, log=log)
        try:
            assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [code] * 2, log.read_text()
        finally:
            kill(ranks)
        return log.read_text()

    said = trained("--data", "data", *small, "--epochs", "1", "--name", "run")
    assert "have other times than those of" in said
    image = places[1] / "data/images/train/000003.png"
    content = image.read_bytes()
    image.touch()
    assert "warning" not in trained("--resume", str(run), "--epochs", "2")
    image.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = trained("--resume", str(run), "--epochs", "3", "--allow", "changed-data", code=3)
    # with or without the option, what the ranks learn from must be one data set
    assert "1 changed: images/train/000003.png (other content) (only on " in said
    image.write_bytes(content + b"longer")
    assert "the data set of rank 1 " in trained("--resume", str(run), "--epochs", "3", code=4)
