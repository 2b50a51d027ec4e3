"""Start torchrun's agent on this machine, wait for it, and explain in one message why it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from yolofleet.errors import ClusterError, Stopped, YolofleetError
from yolofleet.files.atomic import open_append
from yolofleet.files.foreign import open_foreign, read_foreign
from yolofleet.fleet.job import JobSpec, agent_argv, agent_environment
from yolofleet.report.folder import RunFolder
from yolofleet.system.cgroup import UNKNOWN, OomKills, oom_kills
from yolofleet.system.children import die_with_parent, module_environment
from yolofleet.system.proc import end_descendants
from yolofleet.system.signals import STOP_SIGNALS, interrupt
from yolofleet.text import echo

if TYPE_CHECKING:
    from yolofleet.fleet.hosts.messages import LastWords

EXIT_SIGNALS = {
    -9: "was killed (SIGKILL)",
    -6: "aborted: a library met a state that it cannot continue from; see its logs/rank-*.log",
    -7: "died of a bus error: /dev/shm is most likely full; use --workers 0 or --cache disk",
    -11: "died of a segmentation fault; run again with --workers 0 and --device cpu to narrow it down",
    -15: "was ended by another process (SIGTERM)",
}

LESS_MEMORY = "lower --micro-batch or --workers, or use --cache disk"


def exit_text(exit_code: int, killed: OomKills) -> str:
    """Return how a process ended.

    Args:
        killed: processes that the kernel killed for lack of memory meanwhile.
    """
    what = EXIT_SIGNALS.get(exit_code, f"ended with exit code {exit_code}")
    if exit_code != -9:
        return what
    if killed.group:
        return f"{what} by the kernel's out-of-memory killer: the machine, or its control group, has too little memory; {LESS_MEMORY}"
    by = "by a user, or by a memory guard such as systemd-oomd"
    if killed.machine == 0 or (killed.machine is None and killed.group == 0):
        return f"{what} {by}; the kernel's own out-of-memory killer killed no process"
    meanwhile = "" if killed.machine is None else f": it killed {killed.machine} on this machine meanwhile"
    if killed.group is None:
        return f"{what}: most likely the kernel's out-of-memory killer{meanwhile}; {LESS_MEMORY}"
    return (
        f"{what} {by}, or by the kernel's out-of-memory killer{meanwhile}, but none in the control group of "
        f"this run; {LESS_MEMORY}"
    )


MOST_WORDS_BYTES = 1 << 20
MOST_LOG_BYTES = 64 << 20  # of the agent's log of one start


def last_words(files: Iterable[Path]) -> list[LastWords]:
    """Return why workers failed, as they wrote it (:meth:`RunFolder.failure`). Skip files that are not valid."""
    found: list[LastWords] = []
    for file in filter(Path.exists, files):
        from yolofleet.fleet.hosts.messages import LastWords  # a host agent loads pydantic only here

        with suppress(OSError, ValueError, OverflowError, RecursionError):
            words = json.loads(read_foreign(file, limit_bytes=MOST_WORDS_BYTES, follow=False))
            found.append(LastWords.model_validate(words))
    return found


def run_agent(job: JobSpec) -> int:
    """Run a job to its end. Return the exit code.

    The agent has its own session, so Ctrl-C reaches it only through this process, as SIGTERM. A second Ctrl-C kills it.
    """
    logs = job.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in logs.glob("error-rank-*.json"):
        stale.unlink()
    agent: subprocess.Popen[bytes] | None = None
    before = oom_kills()
    asked, at_once = "", False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked, at_once
        if agent is None:
            interrupt(number, frame)
        elif agent.poll() is None:
            at_once = at_once or (bool(asked) and number == signal.SIGINT)
            words = (
                "ending at once"
                if at_once
                else "stopping after this step, then saving; Ctrl-C again ends at once"
            )
            with suppress(OSError):
                os.write(2, f"\n{words}\n".encode())
            if at_once:
                end_descendants(
                    agent.pid, deadline_s=1.0
                )  # on Linux; elsewhere the workers end when they lose each other
                agent.kill()
            elif not asked:
                agent.terminate()
            asked = asked or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, *STOP_SIGNALS)}
        with open_append(logs / "agent.log") as agent_log:
            started_at = agent_log.tell()
            agent = subprocess.Popen(
                agent_argv(job),
                env=module_environment(agent_environment(os.environ)),
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
    if at_once:
        stopped = Stopped(
            "ended at once, on request; the last checkpoint is kept", hint=resume_command(job.folder)
        )
        echo(stopped.render(), to=sys.stderr)
        return stopped.exit_code
    return explain(job.folder, code, started_at, oom_kills().since(before), asked)


@dataclass(frozen=True)
class Ending:
    """How the processes of one machine ended.

    Attributes:
        code: of torchrun's agent; below 0: a signal.
        words: why its workers failed.
        log: of the agent.
        source: the file of that log.
        host: its name, if there are several.
        ahead_s: how far its clock is ahead.
        killed: see :func:`exit_text`.
    """

    code: int
    words: Sequence[LastWords]
    log: str
    source: str
    host: str = ""
    ahead_s: float = 0.0
    killed: OomKills = UNKNOWN


def explain(folder: Path, code: int, log_offset: int, killed: OomKills = UNKNOWN, asked: str = "") -> int:
    """Print why the workers of this machine ended. Return the exit code of the launcher.

    Args:
        asked: the signal that asked the launcher to stop; the workers got the agent's SIGTERM.
    """
    words = last_words(sorted((folder / "logs").glob("error-rank-*.json")))
    log_path = folder / "logs" / "agent.log"
    try:
        with open_foreign(log_path, follow=False) as file:
            file.seek(log_offset)
            log = file.read(MOST_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        log = ""
    return tell([Ending(code, words, log, str(log_path), killed=killed)], resume_command(folder), asked)


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run; "" if there is no checkpoint."""
    saved = any(folder.glob("checkpoints/step-*.safetensors"))
    return RunFolder(folder).resume_command if saved else ""


def tell(endings: Sequence[Ending], resume: str, asked: str = "") -> int:
    """Print the cause of the first end that nobody requested. Return the exit code of the launcher.

    Args:
        endings: the earliest first.
        resume: the command that resumes the run; "" if there is no checkpoint.
        asked: see :func:`explain`.
    """
    timed = [(w, w.time - ending.ahead_s) for ending in endings for w in ending.words]
    # The first failure is the cause. Ranks that lost their peers afterwards report only that.
    words = [w for w, _ in sorted(timed, key=lambda one: (one[0].secondary, one[1]))]
    ends = [(ending, *end) for ending in endings for end in reversed(ends_in(ending.log))]
    killed = next((end for end in ends if end[2] < 0 and end[2] != -signal.SIGTERM), None)
    if words and not (killed and words[0].secondary):
        first = words[0]
        said = first.message.replace("  from : SIGTERM\n", f"  from : {asked or 'SIGTERM'}\n")
        echo(said, to=sys.stderr)
        if not first.of_all and any(w.message != first.message for w in words):
            echo(f"  on   : rank {first.rank}, host {first.host}", to=sys.stderr)
        return first.exit_code
    hint = resume or "give the same command again"
    ending = endings[0]
    if ends:
        ending, rank, exit_code = killed or ends[0]
        what = exit_text(exit_code, ending.killed)
        on = f" on {ending.host}" if ending.host else ""
        problem: YolofleetError = ClusterError(f"rank {rank}{on} {what}", source=ending.source, hint=hint)
        echo(crash_text(ending.log), end="", to=sys.stderr)
    elif ending.code in (-signal.SIGTERM, 128 + signal.SIGTERM) or "SignalException" in ending.log:
        known = "the last checkpoint is kept" if resume else "there is no checkpoint"
        problem = Stopped(f"stopped on request; {known}", source=asked or None, hint=hint)
    else:
        tail = "\n".join(ending.log.strip().splitlines()[-15:])
        on = f" on {ending.host}" if ending.host else ""
        problem = ClusterError(f"the processes could not be started{on}", source=f"{ending.source}\n{tail}")
    echo(problem.render(), to=sys.stderr)
    return problem.exit_code


def ends_in(log: str) -> list[tuple[int, int]]:
    """Return (rank, exit code) of the failed workers in an agent's log. The root cause comes last."""
    found = re.findall(r"^\s*rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*(-?\d+)", log, re.MULTILINE)
    return [(int(rank), int(exit_code)) for rank, exit_code in found]


def crash_text(agent_log: str) -> str:
    """Return the last traceback in an agent's log, above the agent's own report; "" without one.

    A process that died early, or was killed, writes its traceback there.
    """
    processes = re.split(
        r"^[WE]\d{4} .*torch/distributed/elastic", agent_log, maxsplit=1, flags=re.MULTILINE
    )[0]
    begin = max(processes.rfind(words) for words in ("Traceback (most recent call", "Fatal Python error"))
    return processes[begin:].strip()[:4000] + "\n" if begin >= 0 else ""
