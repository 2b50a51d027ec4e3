"""How the processes of a host ended, and which of their failures is the cause.

The workers write why they fail (:meth:`RunFolder.failure`); torchrun's agent logs how each of them ended. Standard library
alone, because host agents use this module.
"""

from __future__ import annotations

import json
import platform
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.foreign import open_foreign, read_foreign
from yolofleet.support.errors import ClusterError, DeviceError, ExitCode, Stopped, YolofleetError
from yolofleet.support.system.cgroup import UNKNOWN, OomKills
from yolofleet.support.text import announce, echo

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
    """Return how a process ended; ``killed``: those that the kernel killed meanwhile for lack of memory."""
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
MOST_LOG_BYTES = 256 << 10  # of the agent's log; a message holds it


def words_and_log(files: Iterable[Path], log: Path, begin: int) -> tuple[list[LastWords], str]:
    """Return why the workers of this machine failed, and the end of the log of torchrun's agent.

    Args:
        files: which the workers write. log: a file in the same folder.
        begin: where the log of this attempt begins.
    """
    folder, text = RunFolder(log.parent.parent), _end_of(log, MOST_LOG_BYTES, begin)
    words = last_words(files)
    return [*words, *words_of_aborted(folder, text, words)], text


def words_of_agent(why: str, rank: int) -> LastWords:
    """Return the error of torchrun's agent, which has started no worker, as that of its first ``rank``."""
    from yolofleet.fleet.hosts.messages import LastWords  # a host agent loads pydantic only here

    code, now_s = ClusterError.exit_code, time.time()
    return LastWords(rank=rank, host=platform.node(), message=why, exit_code=code, time=now_s, of_all=True)


def last_words(files: Iterable[Path]) -> list[LastWords]:
    """Return why workers failed, as they wrote it (:meth:`RunFolder.failure`). Skip files that are not valid."""
    found: list[LastWords] = []
    for file in filter(Path.exists, files):
        from yolofleet.fleet.hosts.messages import LastWords  # a host agent loads pydantic only here

        with suppress(OSError, ValueError, OverflowError, RecursionError):
            words = json.loads(read_foreign(file, limit_bytes=MOST_WORDS_BYTES, follow=False))
            found.append(LastWords.model_validate(words))
    return found


def words_of_aborted(folder: RunFolder, log: str, known: Sequence[LastWords]) -> list[LastWords]:
    """Return why ranks aborted whose GPU failed, by what torch wrote.

    torch's thread that watches NCCL aborts the process at such an error, often before the worker can write why it fails.

    Args:
        log: of torchrun's agent, which has the messages of rank 0, too. Other ranks have logs in ``folder``.
        known: the reasons that workers of this machine wrote.
    """
    found: list[LastWords] = []
    for rank, code in ends_in(log):
        if code != -signal.SIGABRT or any(one.rank == rank for one in known):
            continue
        said = log if rank == 0 else _end_of(folder.log(rank), MOST_WORDS_BYTES)
        host = platform.node()
        if (problem := DeviceError.told_by(said, f"the GPU of rank {rank} on {host}")) is not None:
            from yolofleet.fleet.hosts.messages import LastWords  # a host agent loads pydantic only here

            told, code = problem.render(), problem.exit_code
            found.append(
                LastWords(rank=rank, host=host, message=told, exit_code=code, time=time.time(), leaves=True)
            )
    return found


def _end_of(log: Path, most_bytes: int, begin: int = 0) -> str:
    with suppress(OSError), open_foreign(log, follow=False) as file:
        file.seek(max(begin, log.stat().st_size - most_bytes))
        return file.read(most_bytes).decode("utf-8", "replace")
    return ""


@dataclass(frozen=True)
class Ending:
    """How the processes of one machine ended."""

    code: int  # exit code of torchrun's agent; below 0: a signal
    words: Sequence[LastWords]  # why its workers failed
    log: str  # the end of the agent's log
    source: str  # the file of that log
    host: str = ""  # its name, if there are several
    ahead_s: float = 0.0  # how far its clock is ahead
    killed: OomKills = UNKNOWN  # see :func:`exit_text`


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed."""

    text: str  # what failed, in one line
    kind: str  # the same text for the same fault, whatever the rank
    step: int  # number of steps done; -1: none
    may_pass: bool  # another attempt may succeed
    host: str = ""  # where it failed; "" if no host is to blame: all ranks waited, or a rank lost another one
    # the further lines of the error, such as what to try; printed if another attempt follows
    details: str = ""


def print_cause(endings: Sequence[Ending], resume: str, asked: str = "") -> ExitCode:
    """Print the cause of the first unrequested exit. Return the exit code of the launcher, with that text.

    Args:
        endings: the earliest first.
        resume: the command that resumes the run; "" if there is no checkpoint.
        asked: the signal that asked the launcher to stop; the workers got the agent's SIGTERM.
    """
    timed = [(w, w.time - ending.ahead_s) for ending in endings for w in ending.words]
    # The first failure is the cause. Ranks that lost their peers afterwards report only that.
    words = [w for w, _ in sorted(timed, key=lambda one: (is_consequence(one[0], asked), one[1]))]
    ends = [(ending, *end) for ending in endings for end in reversed(ends_in(ending.log))]
    killed = next((end for end in ends if end[2] < 0 and end[2] != -signal.SIGTERM), None)
    if words and not (killed and is_consequence(words[0], asked)):
        first = words[0]
        said = first.message.replace("  from : SIGTERM\n", f"  from : {asked or 'SIGTERM'}\n")
        causes = {w.message.partition("\n")[0] for w in words}  # rank 0 may have a longer hint
        if not first.of_all and (len(words) == 1 or len(causes) > 1):
            said += f"\n  on   : rank {first.rank}, host {first.host}"
        announce(said)
        return ExitCode.with_text(first.exit_code, said)
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
    announce(problem.render())
    return ExitCode.with_text(problem.exit_code, problem.render())


def is_consequence(words: LastWords, asked: str = "") -> bool:
    """Return whether a worker failed because another one did: torchrun's agent asks the others to stop then."""
    return words.secondary or (not asked and words.exit_code == Stopped.exit_code)


AGAIN = r"; then (yolofleet .*|the same command again)$"  # the end of a hint; it is cut off where the launcher starts the next attempt itself
CALL = r"\.py:\d+ \S+$"  # a line of a stack, which the log has


def failure_of(endings: Sequence[Ending], steps: int) -> Failure:
    """Return the cause of the first unrequested exit, to decide whether to start the run again.

    Args:
        endings: the earliest first.
        steps: number of steps done; -1: none.
    """
    timed = [(w, w.time - ending.ahead_s, ending) for ending in endings for w in ending.words]
    words = sorted(timed, key=lambda one: (is_consequence(one[0]), one[1]))
    if not words or is_consequence(words[0][0]):  # no rank could say why
        for ending in endings:
            for rank, code in reversed(ends_in(ending.log)):
                if code < 0 and code != -signal.SIGTERM:
                    how = exit_text(code, ending.killed)
                    on = f" on {ending.host}" if ending.host else ""
                    return Failure(f"rank {rank}{on} {how}", f"exit code {code}", steps, True, ending.host)
        for ending in endings:
            if ending.code < 0 and ending.code != -signal.SIGTERM:
                return agent_failure(ending, steps)
    if words:
        first, _, ending = words[0]
        lines = first.message.strip().splitlines() or [""]
        on = f" on {ending.host}" if ending.host else ""
        is_bug = first.exit_code == 1  # a traceback; its last line is the exception
        what = lines[-1] if is_bug else lines[0]
        kind = what if is_bug else what.partition(":")[0]  # the class of our error
        may_pass = first.exit_code in (1, ClusterError.exit_code)
        text = what if first.of_all else f"rank {first.rank}{on}: {what}"
        more = [] if is_bug else [re.sub(AGAIN, "", line) for line in lines[1:] if not re.search(CALL, line)]
        host = "" if first.of_all or is_consequence(first) else ending.host
        return Failure(text, kind, steps, may_pass, host, "\n".join(more))
    return agent_failure(endings[0], steps)


def agent_failure(ending: Ending, steps: int) -> Failure:
    """Return the failure of torchrun's agent, which ended without a worker's error report."""
    on = f" on {ending.host}" if ending.host else ""
    how = exit_text(ending.code, ending.killed) if ending.code < 0 else f"ended with code {ending.code}"
    return Failure(f"torchrun's agent{on} {how}", f"agent {ending.code}", steps, ending.code < 0, ending.host)


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


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
