"""Run the command line as a user does, in processes of its own, on a data set that takes seconds."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.cli import main
from yolofleet.datasets.shapes import make_shapes

DEADLINE_S = 900
SMALL = [
    "--model",
    "yolov5n",
    "--img",
    "64",
    "--batch",
    "8",
    "--nominal-batch",
    "8",
    "--micro-batch",
    "2",
    "--no-plots",
]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def environment(folder: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ours = {"YOLOFLEET_CACHE": str(folder / "cache"), "YOLOFLEET_OFFLINE": "1"}
    return {"OMP_NUM_THREADS": "1"} | env | ours | {"PYTHONUNBUFFERED": "1"}


def yolofleet(
    folder: Path, *args: str | Path, code: int | None = 0, deadline_s: float = DEADLINE_S
) -> Outcome:
    """Run to the end in ``folder``; asserts the exit code unless it is None."""
    done = subprocess.run(
        [sys.executable, "-m", "yolofleet", *map(str, args)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextmanager
def working_in(folder: Path, **variables: str) -> Iterator[None]:
    """Make ``folder`` the working folder of this process inside the block, with the variables of
    :func:`environment`, and put both back."""
    before, place = dict(os.environ), Path.cwd()
    os.environ.clear()
    os.environ.update(environment(folder) | variables)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)


def called(*args: str | Path, script: Path | None = None) -> Outcome:
    """Run a command line in this process, which costs no start of Python and torch.

    Args:
        script: runs instead of the command ``yolofleet``.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    argv, code = list(map(str, args)), 0
    with redirect_stdout(out), redirect_stderr(err):
        if script is None:
            code = main(argv)
        else:
            before, sys.argv = sys.argv, [str(script), *argv]
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.argv = before
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


def killed_at_step(folder: Path, step: int, run: Path, *args: str | Path, then_s: float = 0.0) -> None:
    """Start, wait until the state of ``step`` or a later one is on disk and ``then_s`` longer, and SIGKILL every
    process of it."""
    launcher = started(folder, *args, out=subprocess.DEVNULL, err=subprocess.DEVNULL)
    deadline = time.monotonic() + 5 * DEADLINE_S
    try:
        while not any(int(f.stem.split("-")[1]) >= step for f in run.glob("checkpoints/step-*.safetensors")):
            assert launcher.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.02)
        time.sleep(then_s)
    finally:
        for process in family(launcher.pid):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        launcher.wait()


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
