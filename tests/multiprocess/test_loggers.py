"""Loggers for real: one run with all that are installed, its stores read back and compared with results.csv.

`make test-extra EXTRA=loggers` installs the packages that `make test` does without.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from commands import called, free_port, in_ranks, small_shapes, train_args, wait_until, working_in
from logger_stores import Rows, agree, table, tensorboard_rows

from yolofleet.config.loggers import PACKAGES
from yolofleet.runs.loggers.child import MOST_MEMORY_BYTES
from yolofleet.runs.loggers.running import MOST_WAITING, Loggers
from yolofleet.support.system.children import module_argv, module_environment

SECRET = "k3y-that-nobody-may-see-0123456789"
KEYS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MY_TOKEN")


HERE = [name for name, package in PACKAGES.items() if (found := find_spec(package)) and found.origin]


def needs(name: str) -> None:
    if name not in HERE:
        pytest.skip(f"{PACKAGES[name]} is not installed: make test-extra EXTRA=loggers")


class Receiver(BaseHTTPRequestHandler):
    """Counts the requests."""

    def do_POST(self) -> None:
        cast(Any, self.server).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_CONNECT = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiver() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.asked = 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- one run with all loggers: two processes, then resumed with one ----------------------------------------------------


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, str]]:
    """The run folder, the number of requests that anyone sent, and what the runs printed."""
    folder = tmp_path_factory.mktemp("logged")
    data = small_shapes(folder, images=8, val_images=4)
    with receiver() as elsewhere:
        address = f"http://127.0.0.1:{elsewhere.server_port}"
        variables = {
            **{name: SECRET for name in KEYS},
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address),
            **{"HOME": str(folder), "WANDB_MODE": "online"},
        }
        args = train_args(data, "--log", ",".join(HERE), "--val-overlap", "--plots")
        run = folder / "runs" / "train" / "exp"
        with working_in(folder, **variables):
            said = in_ranks(folder, 2, *args)
            said += in_ranks(folder, 1, "train", "--resume", run, "--epochs", "3")
        yield run, elsewhere.asked, said


def wandb_rows(run: Path) -> Rows:
    """Read the files for `wandb sync`: LevelDB's log format with W&B's messages."""
    from wandb.proto import wandb_internal_pb2

    found: Rows = {}
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len({file.name for file in files}) == 1, "a resumed run keeps its identifier"
    for content in (file.read_bytes() for file in files):
        at, message = 7, b""
        while at < len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            message += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                record = cast(Any, wandb_internal_pb2).Record.FromString(message)
                message = b""
                items = {
                    "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item
                }
                if items:
                    values = {
                        k: v
                        for k, v in items.items()
                        if not k.startswith(("_", "validation/")) and k != "epoch"
                    }
                    found.setdefault(items["epoch"], {}).update(values)
    return found


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
metrics = [(m.timestamp, m.step, m.key, m.value) for k in run.data.metrics for m in client.get_metric_history(run.info.run_id, k)]
print(json.dumps({"status": run.info.status, "params": run.data.params, "metrics": sorted(metrics)}))
"""


def mlflow_rows(run: Path, server: str = "") -> Rows:
    """Read in a child process: the client leaves files and sockets open."""
    store = server or f"sqlite:///{run / 'mlflow' / 'mlflow.db'}"
    command = [sys.executable, "-c", READ_MLFLOW, store]
    stored = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert stored["status"] == "FINISHED" and stored["params"]["img"] == "64"
    found: Rows = {}
    for _, epoch, name, value in stored["metrics"]:
        found.setdefault(epoch, {})[name] = value
    return found


READERS: dict[str, Callable[[Path], Rows]] = {
    **{"tensorboard": tensorboard_rows, "wandb": wandb_rows, "mlflow": mlflow_rows}
}
STORES = {"wandb": "wandb/offline-run-*"}


@pytest.mark.parametrize("name", READERS)
def test_a_store_has_the_rows_of_results_csv(logged: tuple[Path, int, str], name: str) -> None:
    needs(name)
    run, *_ = logged
    assert len(table(run)) == 3
    agree(READERS[name](run), table(run))
    if stores := STORES.get(name):
        assert len(list(run.glob(stores))) == 2, "of the run, and of the resumed run"


def test_the_events_have_the_rows_of_results_csv(logged: tuple[Path, int, str]) -> None:
    run, *_ = logged
    columns = (run / "results.csv").read_text().splitlines()[0].split(",")
    rows: Rows = {}
    for event in map(json.loads, (run / "events.jsonl").read_text().splitlines()):
        if event["kind"] in ("epoch", "validation"):
            figures = {name: event.get(name) for name in columns if name != "epoch"}
            rows.setdefault(event["epoch"], {}).update({k: v for k, v in figures.items() if v is not None})
    agree(rows, table(run))


def test_loggers_send_nothing_elsewhere_and_store_no_key(logged: tuple[Path, int, str]) -> None:
    run, requests, said = logged
    assert requests == 0
    assert SECRET not in said and "not stored" not in said, said
    assert "figures are not sent" not in said
    for file in (file for file in run.rglob("*") if file.is_file()):
        assert SECRET.encode() not in file.read_bytes(), file


def stored_names(run: Path, name: str) -> str:
    """Return the names of everything in the store of a logger, also inside event files."""
    files = [file for file in (run / name).rglob("*") if file.is_file()]
    found = [str(file.relative_to(run)) for file in files]
    for file in files:
        if name == "tensorboard":
            found.append(file.read_bytes().decode("latin-1"))
    return "\n".join(found)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_store_has_the_pictures_of_the_validation(name: str, logged: tuple[Path, int, str]) -> None:
    needs(name)
    names = stored_names(logged[0], name)
    drawn = {
        path.stem for path in (logged[0] / "plots").iterdir()
    }  # without a detection there are no val_ ones
    pictures = drawn & {"val_labels", "val_predictions", "confusion_matrix"}
    assert "confusion_matrix" in pictures
    assert [picture for picture in pictures if picture not in names] == []


# -- stores that are slow or gone ------------------------------------------------------------------------------------------


RUN: Mapping[str, Any] = {"name": "exp", "project": "train", "settings": {"img": 64}, "resumed": False}


def row(epoch: int) -> dict[str, float]:
    return {"epoch": epoch, "step": 2 * epoch, "train/box_loss": 1 / epoch, "metrics/mAP50": float("nan")}


def test_rows_wait_for_a_store_that_comes_back_and_one_line_tells(tmp_path: Path) -> None:
    said: list[str] = []
    blocked = tmp_path / "tensorboard"
    blocked.touch()  # a file, so the logger cannot make its folder
    loggers = Loggers(["tensorboard"], {}, tmp_path, RUN, said.append)
    for epoch in (1, 2, 3):
        loggers.row(row(epoch))
    process = loggers._processes[0]
    wait_until(lambda: said or process._lines.qsize() > 0)
    blocked.unlink()
    loggers.row(row(4))
    loggers.close(finished=True)
    assert sorted(tensorboard_rows(tmp_path)) == [1, 2, 3, 4]
    assert len(said) == 1 and "--log tensorboard: FileExistsError" in said[0]


def test_rows_that_are_too_many_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_tensorboard(tmp_path, NEVER_ANSWERS))
    monkeypatch.setattr("yolofleet.runs.loggers.running.STOP_S", 0.0)
    said: list[str] = []
    loggers = Loggers(["tensorboard"], {}, tmp_path, RUN, said.append)
    for epoch in range(1, MOST_WAITING + 8):
        loggers.row(row(epoch))
    assert loggers._processes[0].dropped == 7
    loggers.close(finished=False)
    check_lost(said, "tensorboard", MOST_WAITING + 7, tells=False)


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    loggers = Loggers(["tensorboard"], {}, tmp_path, RUN, print)
    process = loggers._processes[0]
    loggers.row(row(1))
    wait_until(lambda: process._done == 1)
    child = process._child
    assert child is not None
    child.kill()
    child.wait()
    loggers.row(row(2))
    loggers.close(finished=True)
    assert sorted(tensorboard_rows(tmp_path)) == [1, 2]


def test_a_server_that_never_answers_costs_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    monkeypatch.setattr("yolofleet.runs.loggers.running.FINISH_S", 0.2)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:  # the client waits until its deadline
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        loggers = Loggers(["mlflow"], {"mlflow": address}, tmp_path, RUN, said.append)
        for epoch in (1, 2, 3):
            loggers.row(row(epoch))
        loggers.close(finished=True)
    check_lost(said, "mlflow", 3, tells=False)


def check_lost(said: list[str], name: str, rows: int, *, tells: bool = True) -> None:
    """One line about the failure, unless the child was killed before it failed, and one with the right number of rows."""
    assert [line.startswith(f"--log {name}: ") for line in said] == [True] * (1 + tells), said
    assert said[-1] == f"--log {name}: {rows} rows of the run not stored there; results.csv has all"
    assert "later rows try again" in said[0] or not tells


def test_a_run_does_not_wait_for_a_store_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolofleet.runs.loggers.running.FINISH_S", 1.0)
    data = small_shapes(tmp_path, images=8, val_images=4)
    packages = fake_tensorboard(tmp_path, NEVER_ANSWERS)
    with working_in(tmp_path, PYTHONPATH=packages):
        done = called(*train_args(data, "--log", "tensorboard", "--device", "cpu"))
    assert done.code == 0, done.err
    assert "--log tensorboard: 2 rows of the run not stored there; results.csv has all" in done.out + done.err


NEVER_ANSWERS = """
import time
def EventFileWriter(folder): time.sleep(3600)
"""
HANGS = """
import os, pathlib, time
class EventFileWriter:
    def __init__(self, folder): self.folder = pathlib.Path(folder)
    def add_event(self, event): pass
    def flush(self): pass
    def close(self):
        if os.fork() == 0:
            os.setsid()  # no signal to the process group reaches it, and it keeps the pipe open
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "pid").write_text(f"{os.getpid()}\\n")
        time.sleep(3600)
"""
HANGS_TOO = """
class Any:
    START = 0
    def __init__(self, **values): pass
Event = SessionLog = Summary = Any
Summary.Value = Any
"""


def fake_tensorboard(folder: Path, writer: str) -> str:
    """Make a package whose writer misbehaves; return the folder for PYTHONPATH."""
    files = {
        "summary/writer/event_file_writer.py": writer,
        **dict.fromkeys(("compat/proto/event_pb2.py", "compat/proto/summary_pb2.py"), HANGS_TOO),
    }
    for name, content in files.items():
        path = folder / "packages" / "tensorboard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        for part in path.parents[:3]:
            (part / "__init__.py").touch()
    return str(folder / "packages")


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_logger_that_hangs_in_close_and_leaves_a_process_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_tensorboard(tmp_path, HANGS))
    monkeypatch.setattr("yolofleet.runs.loggers.running.FINISH_S", 3.0)
    said: list[str] = []
    loggers = Loggers(["tensorboard"], {}, tmp_path, RUN, said.append)
    loggers.row(row(1))
    wait_until(lambda: loggers._processes[0]._done == 1)
    loggers.close(finished=True)
    try:
        assert said == ["--log tensorboard: not closed in time; the last rows may be missing there"]
    finally:
        pid = tmp_path / "tensorboard" / "pid"
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        os.kill(int(pid.read_text()), signal.SIGKILL)
        loggers._processes[0]._thread.join()  # the pipe is closed now


PARENT = """
import json, subprocess, sys, time
child = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdin.write(sys.argv[2] + "\\n" + '{"epoch": 1}\\n')
child.stdin.flush()
print(child.pid, child.stdout.readline(), flush=True)
child.stdin.write("true\\n")
child.stdin.flush()
time.sleep(3600)
"""


@needs_proc
def test_a_logger_whose_package_hangs_and_ignores_signals_ends_with_the_run(tmp_path: Path) -> None:
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    packages = fake_tensorboard(tmp_path, ignores + HANGS.replace("os.fork()", "1"))
    run = json.dumps({**RUN, "folder": str(tmp_path / "tensorboard"), "server": ""})
    argv = json.dumps(module_argv("yolofleet.runs.loggers.child", "tensorboard"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, argv, run],
        env=module_environment({**os.environ, "PYTHONPATH": packages}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, answer = parent.stdout.readline().split()
    assert answer == '""'
    parent.kill()
    parent.communicate()
    stat = Path("/proc", pid, "stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text())


@needs_proc
def test_a_logger_cannot_use_up_the_memory_of_the_host(tmp_path: Path) -> None:
    loggers = Loggers(["tensorboard"], {}, tmp_path, RUN, print)
    loggers.row(row(1))
    process = loggers._processes[0]
    wait_until(lambda: process._done == 1)
    assert process._child is not None
    limits = Path(f"/proc/{process._child.pid}/limits").read_text()
    loggers.close(finished=True)
    (limit,) = (line.split()[3] for line in limits.splitlines() if line.startswith("Max data size"))
    assert int(limit) <= MOST_MEMORY_BYTES


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a disk with 8 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if (done := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")
    try:
        with working_in(tmp_path, HOME=str(tmp_path)):
            yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file until the disk is full."""
    with (
        (folder / "fills the disk").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space"),
    ):
        while True:
            file.write(bytes(1 << 16))
    return folder / "fills the disk"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_full_disk_costs_the_rows_alone_and_they_are_counted(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    needs(name)
    monkeypatch.setattr("yolofleet.runs.loggers.running.FINISH_S", 300.0)
    fill(small_disk)
    said: list[str] = []
    loggers = Loggers([name], {}, small_disk, RUN, said.append)
    for epoch in (1, 2, 3):
        loggers.row(row(epoch))
    loggers.close(finished=True)
    check_lost(said, name, 3)


@pytest.mark.parametrize("name", PACKAGES)
def test_rows_wait_for_a_disk_that_is_full_for_a_while(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    needs(name)
    monkeypatch.setattr("yolofleet.runs.loggers.running.FINISH_S", 300.0)
    last = 60  # rows that are longer than the last page of a file

    def long_row(epoch: int) -> dict[str, float]:
        return {"epoch": epoch, **{f"train/column{number}": epoch / (number + 1) for number in range(30)}}

    said: list[str] = []
    loggers = Loggers([name], {}, small_disk, RUN, said.append)
    (process,) = loggers._processes
    loggers.row(long_row(1))
    wait_until(lambda: process._done == 1 or not process._lines.empty())
    assert process._done == 1, process._lines.get()
    filled = fill(small_disk)
    for epoch in range(2, last):
        loggers.row(long_row(epoch))
    wait_until(lambda: said or not process._lines.empty())
    assert process._done < last - 1
    filled.unlink()
    loggers.row(long_row(last))
    loggers.close(finished=True)
    assert len(said) == 1 and said[0].endswith("; the training goes on, and later rows try again"), said
    expected = {
        epoch: {k: v for k, v in long_row(epoch).items() if k != "epoch"} for epoch in range(1, last + 1)
    }
    agree(READERS[name](small_disk), expected)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    needs("mlflow")
    port = free_port()
    store = f"sqlite:///{tmp_path / 'server.db'}"
    options = ["--backend-store-uri", store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    options += ["--artifacts-destination", str(tmp_path / "artifacts")]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(answers)
        yield address, server
    finally:
        kill_group(server)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def test_an_mlflow_server_has_the_rows_and_a_resumed_run_continues_there(
    tmp_path: Path, mlflow_server: tuple[str, Any]
) -> None:
    address, _ = mlflow_server
    data = small_shapes(tmp_path, images=8, val_images=4)
    server = ["--log", f"mlflow={address}"]
    run = tmp_path / "runs" / "train" / "exp"
    with working_in(tmp_path):
        first = called(*train_args(data, *server, "--device", "cpu"))
        again = called("train", "--resume", run, "--epochs", "3", *server)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    agree(mlflow_rows(run, address), table(run))
    assert not (run / "mlflow" / "mlflow.db").exists()


def test_a_killed_mlflow_server_costs_its_rows_alone(tmp_path: Path, mlflow_server: tuple[str, Any]) -> None:
    address, server = mlflow_server
    said: list[str] = []
    loggers = Loggers(["mlflow"], {"mlflow": address}, tmp_path, RUN, said.append)
    loggers.row(row(1))
    wait_until(lambda: loggers._processes[0]._done == 1)
    kill_group(server)
    for epoch in (2, 3):
        loggers.row(row(epoch))
    loggers.close(finished=True)
    assert len(said) == 2 and said[1].startswith("--log mlflow: 2 rows of the run not stored there"), said
