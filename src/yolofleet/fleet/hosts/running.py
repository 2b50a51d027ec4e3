"""A job on a host: start torchrun's agent or a command, read what it prints and logs, and end it.

Standard library alone; Linux.
"""

from __future__ import annotations

import codecs
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yolofleet.files.atomic import open_append, write_text
from yolofleet.files.foreign import open_foreign
from yolofleet.fleet.hosts import jobs
from yolofleet.fleet.hosts.relay import Relay
from yolofleet.fleet.hosts.wire_protocol import AGENT
from yolofleet.fleet.job import (
    SAVING_S,
    JobSpec,
    Rendezvous,
    StoreEnd,
    agent_argv,
    agent_environment,
    rendezvous_environment,
)
from yolofleet.report.folder import RunFolder
from yolofleet.system.cgroup import OomKills, oom_kills
from yolofleet.system.children import die_with_parent, module_environment
from yolofleet.system.proc import (
    STOPPED,
    descendants,
    end_descendants,
    rank_of,
    signal_all,
    started_at,
    started_ticks,
    state_of,
)

AFTER_AGENT_S = 5.0  # grace of processes that outlive the agent
BEFORE_WORKERS_S = 2.0  # grace of torchrun's agent without workers, which has nothing to save
LOG_TAIL_BYTES = 32 << 10
LOG_PIECE_BYTES = 1 << 18
Values = dict[str, Any]  # of a message


class Tail:
    """Read what is appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self._decode = decoder()

    def read(self) -> str:
        """Return the next piece; "" if there is none."""
        try:
            with open_foreign(self.path, follow=False) as file:
                file.seek(self.offset)
                piece = file.read(LOG_PIECE_BYTES)
        except OSError:
            return ""
        self.offset += len(piece)
        return self._decode(piece)


def decoder() -> Callable[[bytes], str]:
    """Return a decoder of UTF-8 in pieces."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode


@dataclass
class Running:
    """The job of a host agent: torchrun's agent, or a command, and all processes below it.

    Attributes:
        output: descriptor of what the agent and its workers print.
        tails: logs, by rank and ``AGENT``; none for a command.
        streamed: the launcher does not see this disk, so it gets the logs.
        log_offset: where the agent's log of this start begins.
        relay: to the run's store, if the run has other hosts.
        why: why the host agent ended the job; "" if it did not.
        stopped: ranks that could not react when they were asked to end.
        is_mute: all processes have closed their end of ``output``.
    """

    record: jobs.Record
    agent: subprocess.Popen[bytes]
    output: int
    tails: dict[int, Tail]
    streamed: bool
    log_offset: int
    grace_s: float
    relay: Relay | None = None
    killed_before: OomKills = field(default_factory=oom_kills)
    why: str = ""
    stopped: list[str] = field(default_factory=list)
    kill_at_s: float = float("inf")
    has_signalled_rest: bool = False
    ended_at_s: float = float("inf")
    is_mute: bool = False
    tailed_at_s: float = 0.0
    decode: Callable[[bytes], str] = field(default_factory=decoder)

    @property
    def ranks(self) -> range:
        return range(self.record.ranks[0], sum(self.record.ranks))

    def end(self, why: str, grace_s: float) -> None:
        """Send SIGTERM now, and SIGKILL after ``grace_s``. A second call can only shorten the grace."""
        if not self.why and self.agent.poll() is None:
            self.stopped = stopped_ranks(descendants(self.agent.pid))
            self.agent.terminate()
        self.why = self.why or why
        if self.tails and not descendants(self.agent.pid):
            grace_s = min(grace_s, BEFORE_WORKERS_S)
        self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)

    def is_over(self) -> bool:
        """Return whether the agent and all its processes have ended. End processes that outlive the agent."""
        agent_lives = self.agent.poll() is None
        if agent_lives and time.monotonic() < self.kill_at_s:
            return False
        left = descendants(os.getpid())
        if not agent_lives and left and not self.has_signalled_rest:
            self.has_signalled_rest = True
            signal_all(left, signal.SIGTERM)  # workers whose agent was killed save, and stop
            was_killed = not self.why and self.agent.returncode < 0
            grace_s = self.grace_s if was_killed else AFTER_AGENT_S
            self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)
        if time.monotonic() > self.kill_at_s:
            end_descendants(os.getpid())
            with suppress(subprocess.TimeoutExpired):
                self.agent.wait(1)
            return True
        return not agent_lives and not left

    def log_tail(self) -> str:
        """Return the end of the agent's log of this start."""
        if self.tails:
            path = self.tails[AGENT].path
            with suppress(OSError), open_foreign(path, follow=False) as file:
                file.seek(max(self.log_offset, path.stat().st_size - LOG_TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        return ""

    def close(self) -> None:
        """Close the output and the relay."""
        os.close(self.output)
        if self.relay is not None:
            self.relay.close()


def stopped_ranks(pids: list[int]) -> list[str]:
    """Return texts about the workers among these processes that a signal or a debugger has stopped."""
    states = {pid: state_of(pid, started_ticks(pid)) for pid in pids}
    found = [(rank_of(pid), state) for pid, state in states.items() if state.letter in STOPPED]
    return [f"rank {rank}: {state.text()}" for rank, state in found if rank is not None]


# -- start ---------------------------------------------------------------------------------------------------


def start(job: Values) -> Running:
    """Start torchrun's agent, or a command. Call it in the main thread, which lives as long as the host agent.

    Args:
        job: of the message ``start``.
    Raises:
        OSError, StorageError: a folder or file cannot be written, or the command does not exist.
        LookupError, TypeError, ValueError: the message is not valid.
    """
    meeting = dict(job["meeting"])
    place = Rendezvous(interface=meeting.pop("card"), **meeting)
    first_rank, processes = int(job["first_rank"]), int(job["processes"])
    environment = agent_environment(os.environ, place.interface if place.nodes > 1 else "")
    folder, grace_s = Path(job["folder"]), float(job["grace_s"])
    text, tails = folder / "logs" / f"job-{place.node}.yaml", {}
    if job["command"]:
        environment |= rendezvous_environment(place, processes)
        programs = str(Path(sys.executable).parent)  # torchrun, and other programs of this Python
        environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    else:
        environment = module_environment(environment)
        tails = _prepare_logs(folder, place.node, range(first_rank, first_rank + processes))
        write_text(text, job["text"])
    environment |= {SAVING_S: str(math.ceil(grace_s)), **job["env"]}
    relay, store = None, StoreEnd()
    output, workers_output = _output(job["terminal"], environment)
    try:
        if tails and place.nodes > 1:
            relay = Relay(place, lambda line: append_line(tails[AGENT].path, line))
            store = relay.end
        argv = agent_argv(JobSpec(folder, processes, text, place), store) if tails else list(job["command"])
        agent = _start_agent(argv, environment, workers_output, tails, store)
    except BaseException:
        os.close(output)
        if relay is not None:
            relay.close()
        raise
    finally:
        os.close(workers_output)
    if relay is not None:
        relay.start()
    os.set_blocking(output, False)
    record = jobs.Record(
        job=job["id"],
        title=job["title"],
        host=socket.gethostname(),
        folder=str(folder.absolute()) if tails else "",
        node=place.node,
        ranks=(first_rank, processes),
        host_agent=(os.getpid(), started_at(os.getpid())),
        began_s=time.time(),
    )
    jobs.write(record)
    log_offset = tails[AGENT].offset if tails else 0
    return Running(record, agent, output, tails, job["streamed"], log_offset, grace_s, relay)


def _prepare_logs(folder: Path, node: int, ranks: range) -> dict[int, Tail]:
    """Make the folder of logs, remove what workers of an earlier start left, and return the logs to follow."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        RunFolder(folder).failure(rank).unlink(missing_ok=True)
    tails = {rank: Tail(logs / f"rank-{rank}.log") for rank in ranks}
    return tails | {AGENT: Tail(logs / f"agent-{node}.log")}


def _start_agent(
    argv: list[str], environment: dict[str, str], output: int, tails: dict[int, Tail], store: StoreEnd
) -> subprocess.Popen[bytes]:
    host_agent = os.getpid()

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != host_agent:  # the host agent died before the call above
            os._exit(1)

    with open_append(tails[AGENT].path) if tails else nullcontext() as log:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log or output,
            start_new_session=True,
            preexec_fn=in_child,
            pass_fds=() if store.listener is None else (store.listener,),
        )


def no_command(problem: OSError, name: str) -> tuple[int, str]:
    """Return the exit code, as shells have it, and the reason of a command that cannot be started."""
    if isinstance(problem, FileNotFoundError):
        return 127, f"there is no command {name}"
    return 126, f"{name} cannot be started: {problem.strerror or problem}"


def append_line(path: Path, line: str) -> None:
    """Append a line to a log. Ignore a disk that refuses it."""
    with suppress(OSError), open_append(path) as file:
        file.write(f"{line}\n".encode("utf-8", "replace"))


def _output(terminal: Values | None, environment: dict[str, str]) -> tuple[int, int]:
    """Return (our end, the workers' end) of their standard output: a pipe, or a terminal like the launcher's."""
    if terminal is None:
        return os.pipe()
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    size = struct.pack("HHHH", int(terminal["rows"]), int(terminal["columns"]), 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    environment["TERM"] = str(terminal["term"])
    return ours, theirs
