"""Run the command line as a user does, in processes of its own, on a data set that takes seconds."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_files import TINY

from yolofleet.cli import main
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.families.custom import NETWORKS
from yolofleet.families.table import FAMILIES

DEADLINE_S = 900
SIZES = [
    "--img", "64", "--batch", "8", "--nominal-batch", "8", "--micro-batch", "2", "--no-plots",
]  # fmt: skip
SMALL = ["--model", str(TINY), *SIZES]
YOLOV5N = ["--model", "yolov5n"]  # for runs on other hosts, and for runs that must not end too early
SMALL_YOLOV5N = [*YOLOV5N, *SIZES]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Output with single spaces, as tables are padded."""
        return " ".join(self.out.split())

    @property
    def facts(self) -> Any:
        """The output of ``--json -``."""
        return json.loads(self.out)


def environment(folder: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ours = {"YOLOFLEET_CACHE": str(folder / "cache"), "YOLOFLEET_OFFLINE": "1"}
    return {"OMP_NUM_THREADS": "1"} | env | ours | {"PYTHONUNBUFFERED": "1"}


def ran(
    folder: Path,
    *command: str | Path,
    code: int | None = 0,
    deadline_s: float = DEADLINE_S,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a program to the end in ``folder``, with more environment variables; asserts the exit code unless it is None."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment(folder) | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Outcome(done.returncode, done.stdout, done.stderr)


def yolofleet(folder: Path, *args: str | Path, **more: Any) -> Outcome:
    """Run the command line in a process of its own, see :func:`ran`."""
    return ran(folder, sys.executable, "-m", "yolofleet", *args, **more)


def wait_until(ready: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until ``ready()`` is true, while the process runs."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not ready():
        assert process is None or process.poll() is None, "".join(process.communicate())
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)


@contextmanager
def working_in(folder: Path, **variables: str) -> Iterator[None]:
    """Make ``folder`` the working folder of this process inside the block, with the variables of
    :func:`environment`, and put both back."""
    before, place = dict(os.environ), Path.cwd()
    inside = environment(folder) | variables
    os.environ.clear()
    os.environ.update(inside)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def user_code_forgotten() -> Iterator[None]:
    """Remove the code of ``--recipe-class`` afterwards, its families and networks: a command keeps them until its process ends."""
    tables: list[dict[str, Any]] = [FAMILIES, NETWORKS]
    before, folders = [dict(table) for table in tables], list(sys.path)
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)
        own, sys.path[:] = {*sys.path} - {*folders}, folders
        for name, module in list(sys.modules.items()):
            if str(Path(getattr(module, "__file__", None) or "").parent) in own:
                del sys.modules[name]  # another test may have a file of that name


def called(*args: str | Path, script: Path | None = None) -> Outcome:
    """Run a command line in this process, which costs no start of Python and torch.

    Args:
        script: runs instead of the command ``yolofleet``.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    argv, code = list(map(str, args)), 0
    with redirect_stdout(out), redirect_stderr(err), user_code_forgotten():
        if script is None:
            code = main(argv)
        else:
            before, sys.argv = sys.argv, [str(script), *argv]
            sys.path.insert(0, str(script.parent))  # as Python does
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.argv = before
                sys.path.remove(str(script.parent))
    return Outcome(code, *(stream.buffer.getvalue().decode("utf-8") for stream in (out, err)))


def small_shapes(folder: Path, images: int = 20, val_images: int = 10) -> Path:
    return make_shapes(folder / "small shapes", images=images, val_images=val_images, img=64, seed=3)


def train_args(data: Path, *more: str | Path) -> list[str | Path]:
    return ["train", "--data", data, *SMALL, "--epochs", "2", "--threads", "1", *more]


def results(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of rank 0 that have this kind."""
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def started(
    folder: Path, *args: str | Path, out: int = subprocess.PIPE, err: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start the command line in ``folder``, in a session of its own; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "yolofleet", *map(str, args)],
        cwd=folder,
        env=environment(folder),
        stdout=out,
        stderr=err,
        text=True,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Forked:
    """A copy of this process that runs ``work`` in ``folder``, with torch loaded: a process of its own loads it for seconds."""

    def __init__(self, folder: Path, env: Mapping[str, str], log: Path, work: Callable[[], int]) -> None:
        import yolofleet.training.rank.train  # noqa: F401  (loads torch once, and not in each copy)

        self.code: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            with log.open("ab", buffering=0) as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (
                open(number, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
                for number in (1, 2)
            )
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(status[1])
        return self.code

    def wait(self, timeout: float = DEADLINE_S) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | subprocess.Popen[str] | Forked


def started_ranks(
    places: Sequence[Path],
    *args: str | Path,
    home: Path,
    log: Path,
    first: Callable[[], object] = lambda: None,
) -> list[Process]:
    """Start the ranks of one run, one in each of ``places``, as torchrun starts them, in copies of this process.

    Args:
        args: of the command line. Entries of ``places`` that are equal are ranks of one machine.
        home: has the cache. log: what all of them print.
        first: called in each rank before the command.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(places))}
    argv, ranks = list(map(str, args)), list[Process]()

    def work() -> int:
        first()
        return main(argv)

    for rank, place in enumerate(places):
        local = {"LOCAL_RANK": str(places[:rank].count(place)), "LOCAL_WORLD_SIZE": str(places.count(place))}
        env = environment(home) | (address | local | {"RANK": str(rank)} if len(places) > 1 else {})
        if sys.platform == "linux":
            ranks.append(Forked(place, env, log, work))
            continue
        with log.open("ab") as file:
            command = [sys.executable, "-m", "yolofleet", *argv]
            ranks.append(subprocess.Popen(command, cwd=place, env=env, stdout=file, stderr=file))
    return ranks


def in_ranks(folder: Path, ranks: int, *args: str | Path, code: int = 0, device: str = "cpu") -> str:
    """Run the command line in ``folder`` as so many ranks on CPUs, and return what they print; asserts their exit codes.

    A launcher would load torch twice more, for seconds. Tests of launchers use :func:`yolofleet`.
    """
    log = folder / f"ranks {len(list(folder.glob('ranks *.log')))}.log"
    processes = started_ranks([folder] * ranks, *args, "--device", device, home=folder, log=log)
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        kill(processes)
    assert codes == [code] * ranks, f"{args}: {codes}\n{log.read_text()}"
    return log.read_text()


def kill(processes: Sequence[Process]) -> None:
    """SIGKILL processes and their descendants, and wait for the processes."""
    for process in processes:
        for pid in family(process.pid) if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def killed_at_step(
    folder: Path, step: int, run: Path, *args: str | Path, then_s: float = 0.0, ranks: int = 0
) -> None:
    """Start, wait until the state of ``step`` or a later one is on disk and ``then_s`` longer, and SIGKILL every
    process of it.

    Args:
        ranks: without a launcher, see :func:`in_ranks`; 0: with one.
    """
    processes: Sequence[Process]
    log = folder / "killed.log"
    if ranks:
        processes = started_ranks([folder] * ranks, *args, "--device", "cpu", home=folder, log=log)
    else:
        with log.open("w") as output:
            processes = [started(folder, *args, out=output.fileno(), err=output.fileno())]
    deadline = time.monotonic() + 5 * DEADLINE_S
    try:
        while not any(int(f.stem.split("-")[1]) >= step for f in run.glob("checkpoints/step-*.safetensors")):
            assert processes[0].poll() is None, (
                f"it ended before it could be killed:\n{log.read_text()[-4000:]}"
            )
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.02)
        time.sleep(then_s)
    finally:
        kill(processes)


def killed_in_the_middle(folder: Path, run: Path, *args: str | Path) -> None:
    """Kill a run of two ranks after its second step, and remove what it has written after its third one."""
    killed_at_step(folder, 2, run, *args, "--name", run.name, ranks=2)
    for state in run.glob("checkpoints/step-*[4-9].safetensors"):
        state.unlink()
    (run / "results.json").unlink(missing_ok=True)


def family(pid: int) -> list[int]:
    """A process and its descendants (Linux)."""
    found, parents = [pid], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found
