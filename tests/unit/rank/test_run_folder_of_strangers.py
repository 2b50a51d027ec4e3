"""The folder of a run that somebody else made, and a host that sends what it was not asked for."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from run_events import read_events

from yolofleet.config.schema import TrainConfig
from yolofleet.config.stored.resume import find_run
from yolofleet.fleet.hosts.endings import last_words
from yolofleet.fleet.hosts.fleet import Host
from yolofleet.fleet.hosts.messages import answer_of
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.folders import Folders, Site, fetch_folder
from yolofleet.fleet.launch.local import explain
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.storage import atomic
from yolofleet.storage.atomic import emit_json, open_append, whole_file, whole_folder, write_text
from yolofleet.support.errors import ConfigError, StorageError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and named pipes")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim.txt"
    file.write_text("precious")
    return file


# -- links


def test_a_log_that_is_a_link_is_not_written(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to(victim)
    with NullConsole(tmp_path / "rank-0.log") as console:
        console.fact("words")
    assert victim.read_text() == "precious"
    Folders(RunFolder(tmp_path / "run"), [], "").log(0, 0, "words")  # no such folder: no error either


def test_an_event_stream_that_is_a_link_is_not_written(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(victim)
    warnings: list[str] = []
    with EventLog(tmp_path / "events.jsonl", warn=warnings.append) as events:
        events.write("step", loss=1.0)
    assert victim.read_text() == "precious"
    assert len(warnings) == 1 and "it is a symbolic link" in warnings[0]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "device"])
def test_only_a_regular_file_is_appended_to(tmp_path: Path, victim: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": victim, "dangling": tmp_path / "new", "device": Path("/dev/null")}[kind])
    with pytest.raises(OSError, match=r"symbolic link|not a regular file"):
        open_append(path)
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()


def test_what_is_appended_follows_what_is_there(tmp_path: Path) -> None:
    for words in (b"a", b"b"):
        with open_append(tmp_path / "log") as file:
            file.write(words)
    assert (tmp_path / "log").read_bytes() == b"ab"
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("one")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"cut')
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("two")
    assert [event["kind"] for event in read_events(RunFolder(tmp_path))] == ["one", "two"]


def test_last_words_and_the_log_of_the_agent_are_not_read_through_links(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    victim.write_text('{"message": "precious", "exit_code": 0, "rank": 0, "host": "h", "time": 0}')
    (logs / "error-rank-0.json").symlink_to(victim)
    (logs / "agent.log").symlink_to(victim)
    os.mkfifo(logs / "error-rank-1.json")
    assert last_words(sorted(logs.glob("error-rank-*.json"))) == []
    explain(tmp_path / "run", 1, 0)
    assert "precious" not in capsys.readouterr().err


def stored_run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "exp"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-000000001.safetensors").touch()
    (folder / "config.yaml").touch()
    return folder


def test_a_file_that_says_where_states_are_is_text_and_no_link(tmp_path: Path, victim: Path) -> None:
    """The target of a link would stand in the message."""
    where = stored_run(tmp_path) / "checkpoints" / "where.txt"
    where.with_name("step-000000001.safetensors").unlink()
    where.write_bytes(b"node-a:/data/exp/checkpoints\n")
    resume = TrainConfig(resume=str(where.parents[1]), allow=("linked-folders",))
    with pytest.raises(ConfigError, match="are on node-a, in /data/exp/checkpoints"):
        find_run(resume, is_named=False)
    where.write_bytes(b"node-\xff\xfe:/work")
    with pytest.raises(ConfigError, match=r"where\.txt cannot be read"):
        find_run(resume, is_named=False)
    where.unlink()
    where.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"where\.txt cannot be read: it is a symbolic link") as caught:
        find_run(resume, is_named=False)
    assert "precious" not in caught.value.render()


def test_resume_auto_passes_a_state_that_links_to_nothing(tmp_path: Path) -> None:
    folder = stored_run(tmp_path)
    (folder / "checkpoints" / "step-000000002.safetensors").symlink_to("nowhere")
    found = find_run(TrainConfig(resume="auto", project=folder.parent), is_named=False)
    assert found is not None and found.folder == folder


@pytest.mark.parametrize("name", ["checkpoints", "logs", "weights", "plots", "tensorboard"])
def test_a_run_with_a_linked_folder_continues_only_when_asked(tmp_path: Path, name: str) -> None:
    folder, other = stored_run(tmp_path), tmp_path / "other"
    if name == "checkpoints":
        (folder / name).rename(other)
    other.mkdir(exist_ok=True)
    (folder / name).symlink_to(other)
    with pytest.raises(ConfigError, match="is a symbolic link to") as caught:
        find_run(TrainConfig(resume=str(folder)), is_named=False)
    assert "--allow linked-folders" in caught.value.hint and str(other) in caught.value.what
    found = find_run(TrainConfig(resume=str(folder), allow=("linked-folders",)), is_named=False)
    assert found is not None and found.folder == folder


def test_a_used_folder_with_a_link_out_of_it_is_refused_unless_asked(tmp_path: Path, victim: Path) -> None:
    run = RunFolder.create("train", project=tmp_path)
    (run.path / "a" / "b").mkdir(parents=True)
    (run.path / "a" / "latest").symlink_to("b")
    again = partial(RunFolder.create, "train", project=tmp_path, exist_ok=True)
    assert again() == run
    for target in (victim, tmp_path / "missing", tmp_path, Path("..", "..", "..")):
        (run.path / "a" / "b" / "link").symlink_to(target)
        with pytest.raises(ConfigError, match="b/link is a symbolic link to"):
            again()
        assert again(may_link=True) == run
        (run.path / "a" / "b" / "link").unlink()


# -- two at once


def test_two_processes_do_not_continue_one_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    script = (
        "import sys; from pathlib import Path; from yolofleet.runs.report.folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked():\n    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout and other.stdin
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another process is writing into"), folder.locked():
        pass
    # the next attempt of a run waits for the ranks of the last one
    threading.Timer(0.3, other.stdin.close).start()
    with folder.locked(wait_s=60):
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()
    assert other.wait() == 0
    other.stdout.close()


class OneRank:
    """What `shared_folder` needs of a World of one process."""

    is_main, restarts = True, 0

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content


def test_a_run_holds_the_lock_of_its_folder_until_it_ends(tmp_path: Path) -> None:
    from yolofleet.training.rank.folder import shared_folder

    world, where = cast(Any, OneRank()), TrainConfig(project=tmp_path, exist_ok=True)
    with ExitStack() as lock:
        made = shared_folder(world, where, None, lock)
        assert made.path == tmp_path / "exp" and (made.path / ".lock").exists()
        for given in (made, None):  # a second --resume, a second --exist-ok
            with pytest.raises(ConfigError, match="another process is writing into"), ExitStack() as second:
                shared_folder(world, where, given, second)
    with ExitStack() as lock:
        assert shared_folder(world, where, made, lock) == made
    made.discard_unless_used()


def test_a_lock_whose_file_cannot_be_deleted_is_freed(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked():
        (tmp_path / ".lock").rename(tmp_path / "held")
    with atomic.exclusive(tmp_path / "held") as is_free:
        assert is_free


def test_the_lock_is_not_taken_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(StorageError), RunFolder(tmp_path).locked():
        pass
    assert not (tmp_path / "new").exists()


# -- what a host sends


class FakeHost(Remote):
    """Has files of a name and content, and says of what size they are."""

    def __init__(self, files: dict[str, bytes], sizes: dict[str, int] | None = None) -> None:
        super().__init__(Host("n0", "cpu"))
        self.files, self.sizes = files, sizes or {}
        self.asked: list[str] = []

    def ask(self, request: str, timeout_s: float = 0, **arguments: Any) -> Any:
        self.asked.append(request)
        if request == "list_files":
            sizes = [[name, self.sizes.get(name, len(data))] for name, data in self.files.items()]
            return answer_of(request, sizes)
        if request == "read_piece":
            data = self.files[arguments["file"].removeprefix("/there/")][arguments["offset"] :]
            piece = {
                "data": base64.b64encode(data).decode(),
                "offset": arguments["offset"],
                "size": len(data),
            }
            return answer_of(request, piece)
        return None


def test_only_results_are_fetched_from_a_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {
        "results.csv": b"1", "results.json": b"2", "events.jsonl": b"3", "logs/rank-3.log": b"4",
        "logs/rank-3.events.jsonl": b"5", "weights/best.safetensors": b"6", "plots/PR_curve.png": b"7",
        "labels/Übung 猫.txt": b"8", "predictions.json": b"9", "tensorboard/events.out.tfevents.1.n0": b"0",
        "plots/train_step0.jpg": b"a", "logs/agent-0.log": b"b", "wandb/offline-run-1_2-a/run-a.wandb": b"c",
        "mlflow/mlflow.db": b"d",
    }  # fmt: skip
    evil = {
        "config.yaml": b"fleet: evil", "logs/job.yaml": b"x", ".bashrc": b"x", "weights/evil.pt": b"x",
        "checkpoints/step-1.safetensors": b"x", "plots/../x.png": b"x", "plots/a b.png": b"x",
        "labels/\x1b]0;.txt": b"x", "results.csv.lnk": b"x", "sitecustomize.py": b"x", "labels/a/b.txt": b"x",
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text("ours")
    del evil["plots/../x.png"]  # refused with an error, in test_fleet_hosts.py
    fetch_folder(FakeHost({**wanted, **evil}), "/there", tmp_path)
    found = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert found == {**wanted, "config.yaml": b"ours"}
    said = capsys.readouterr().err
    assert "not results of a run, so they stay on n0: .bashrc, weights/evil.pt" in said
    assert "and 3 more" in said and "config.yaml" not in said and "\x1b" not in said


def test_a_result_is_no_larger_than_it_was_announced_or_may_be(tmp_path: Path) -> None:
    files = {"results.csv": b"x" * 50, "results.json": b"x"}
    fetch_folder(FakeHost(files, {"results.csv": 7, "results.json": 1 << 31}), "/there", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    assert (tmp_path / "results.csv").read_bytes() == b"x" * 7


def test_results_are_not_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    (run / "results.csv").symlink_to(victim)
    (run / "plots").symlink_to(other)
    fetch_folder(FakeHost({"results.csv": b"new"}), "/there", run)
    assert victim.read_text() == "precious" and (run / "results.csv").read_text() == "new"
    with pytest.raises(OSError, match="symbolic link"):
        fetch_folder(FakeHost({"plots/results.png": b"new"}), "/there", run)
    assert not list(other.iterdir())


def test_the_launcher_writes_the_configuration_of_a_run_itself(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("epochs: 1\n")
    host = FakeHost({"config.yaml": b"fleet: evil"})
    folders = Folders(RunFolder(tmp_path), [Site("/there", "n0", True)], ".fleet-1")
    folders.fetch([host], saved=True, discard=False, config="epochs: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "epochs: 2\n"


# -- figures for a device or a pipe


def test_figures_for_a_pipe_do_not_replace_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    emit_json({"a": 1}, str(pipe))
    assert os.read(reader, 100) == b'{\n  "a": 1\n}\n'
    os.close(reader)
    assert pipe.is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]


def made_device(path: Path, minor: int) -> Path:
    """A character device of major number 1 (3: null, 7: full) at ``path``; skips the test where nobody may make one."""
    try:
        os.mknod(path, 0o20666, os.makedev(1, minor))
        with path.open("wb"):
            pass
    except OSError:
        pytest.skip("devices cannot be made here")
    return path


def test_figures_for_a_device_do_not_replace_it(tmp_path: Path) -> None:
    """`val --json /dev/full` as root made a file of the device."""
    device = made_device(tmp_path / "full", 7)
    with pytest.raises(StorageError, match="No space left on device"):
        emit_json({"a": 1}, str(device))
    assert device.is_char_device()


def test_figures_for_a_stream_that_is_a_file_do_not_replace_its_link(tmp_path: Path) -> None:
    """As root, ``--json /dev/stdout > FILE`` made a file of /dev/stdout. (A test of that name would harm the machine.)"""
    script = "from yolofleet.storage.atomic import emit_json; emit_json({'a': 1}, '/proc/self/fd/1')"
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, text=True)
    assert (tmp_path / "out").read_text() == '{\n  "a": 1\n}\n', done.stderr


def test_other_writes_replace_a_pipe_and_a_link_to_a_device(tmp_path: Path) -> None:
    """A pipe as ``results.csv`` of a stranger's run folder blocked for ever, and a link to a device was written to."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        signal.alarm(20)  # a write into the pipe would wait for a reader
        try:
            write_text(tmp_path / name, "new")
        finally:
            signal.alarm(0)
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "new"


def test_other_writes_refuse_a_device(tmp_path: Path) -> None:
    device = made_device(tmp_path / "null", 3)
    for write in (lambda path: write_text(path, "new"), write_whole):
        with pytest.raises((StorageError, OSError), match="it is a device"):
            write(device)
    assert device.is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


def write_whole(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"new")


def test_figures_for_standard_output_by_its_name_arrive() -> None:
    script = "from yolofleet.storage.atomic import emit_json; emit_json({'a': 1}, '/dev/stdout')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == '{\n  "a": 1\n}\n', done.stderr


# -- folders whole or not at all


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "set") as made:
        (made / "a").touch()
        raise OSError("full")
    assert not list(tmp_path.iterdir())
    (tmp_path / "set").mkdir()
    mask = os.umask(0o027)
    try:
        with whole_folder(tmp_path / "set") as made:
            (made / "a").touch()
    finally:
        os.umask(mask)
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["a"]
    assert (tmp_path / "set").stat().st_mode & 0o777 == 0o750
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "set"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
