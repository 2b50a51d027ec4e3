"""Start torchrun's agent on this machine, watch it, and say in one message why it ended."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from yolofleet.errors import ClusterError, Stopped, YolofleetError
from yolofleet.launch.job import JobSpec, agent_argv, agent_environment

EXIT_SIGNALS = {
    -9: "was killed (SIGKILL): most likely the kernel's out-of-memory killer; lower --batch, --workers or use --cache disk",
    -7: "died of a bus error: /dev/shm is most likely full; use --workers 0 or --cache disk",
    -11: "died of a segmentation fault; run again with --workers 0 and --device cpu to narrow it down",
    -15: "was ended from outside (SIGTERM)",
}

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGUSR1 as :class:`Stopped`. Training's steps (``train/loop.py``) and a launcher that has
    started its processes know better what to do with a signal, and have handlers of their own."""
    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, _stop) for number in STOP_SIGNALS}
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(
        "stopped on request, outside of training: there was nothing to save",
        source=signal.Signals(number).name,
        hint="give the same command again",
    )


def error_path(folder: Path, rank: int) -> Path:
    """Where the worker of ``rank`` leaves its last words, as JSON."""
    return folder / "logs" / f"error-rank-{rank}.json"


def run_agent(job: JobSpec) -> int:
    """Run a job to its end; returns the exit code of DESIGN section 4.

    The agent gets a session of its own: Ctrl-C reaches it once, through us, as SIGTERM.
    """
    logs = job.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in logs.glob("error-rank-*.json"):
        stale.unlink()
    agent: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if agent is None:
            _stop(number, frame)
        elif agent.poll() is None:
            with suppress(OSError):
                os.write(2, b"\nstopping after this step, then saving\n")
            agent.terminate()

    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, *STOP_SIGNALS)}
        with (logs / "agent.log").open("ab") as agent_log:
            started_at = agent_log.tell()
            agent = subprocess.Popen(
                agent_argv(job),
                env=agent_environment(os.environ),
                stderr=agent_log,
                stdin=subprocess.DEVNULL,
                start_new_session=os.name == "posix",
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        code = agent.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if agent is not None and agent.poll() is None:
            agent.kill()
    if code == 0:
        return 0
    return explain(job.folder, code, started_at)


def explain(folder: Path, code: int, log_offset: int) -> int:
    """Print why the workers ended; returns the exit code to give."""
    words = []
    for path in sorted((folder / "logs").glob("error-rank-*.json")):
        try:
            words.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    # the first failure is the cause; ranks that lost their peers afterwards only say so
    words.sort(key=lambda w: (w.get("secondary", False), w.get("time", 0.0)))
    try:
        log = (folder / "logs" / "agent.log").read_bytes()[log_offset:].decode("utf-8", "replace")
    except OSError:
        log = ""
    ends = [
        (int(rank), int(exit_code))  # the root cause comes last
        for rank, exit_code in re.findall(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", log, re.DOTALL)
    ]
    killed = next((end for end in ends if end[1] < 0 and end[1] != -signal.SIGTERM), None)
    if words and not (killed and words[0].get("secondary", False)):
        first = words[0]
        print(first["message"], file=sys.stderr)
        if not first.get("of_all") and any(w["message"] != first["message"] for w in words):
            print(f"  on   : rank {first['rank']}, host {first['host']}", file=sys.stderr)
        return int(first["exit_code"])
    saved = any(folder.glob("checkpoints/step-*.safetensors"))
    hint = f"yolofleet train --resume {folder}" if saved else "give the same command again"
    if ends:
        rank, exit_code = killed or ends[-1]
        what = EXIT_SIGNALS.get(exit_code, f"ended with exit code {exit_code}")
        problem: YolofleetError = ClusterError(
            f"rank {rank} {what}", source=str(folder / "logs" / "agent.log"), hint=hint
        )
    elif code in (-signal.SIGTERM, 128 + signal.SIGTERM) or "SignalException" in log:
        known = "what was saved last is there" if saved else "nothing had been saved"
        problem = Stopped(f"stopped on request; {known}", hint=hint)
    else:
        tail = "\n".join(log.strip().splitlines()[-15:])
        problem = ClusterError(
            "the processes could not be started", source=f"{folder / 'logs' / 'agent.log'}\n{tail}"
        )
    print(problem.render(), file=sys.stderr)
    return problem.exit_code
