"""A job on a host: start torchrun's agent or a command, read what it prints and logs, and end it.

A run that goes on after a failure is started again (an attempt). :class:`JobOnHost` stays on the host from the first
attempt to the last, :class:`Running` is one attempt. Standard library alone; Linux.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yolofleet.fleet.hosts import jobs
from yolofleet.fleet.hosts.agent_process import (
    SAVING_S,
    JobSpec,
    Rendezvous,
    ServedAgent,
    StoreEnd,
    agent_arguments,
    agent_environment,
)
from yolofleet.fleet.hosts.relay import Relay
from yolofleet.fleet.hosts.wire_protocol import AGENT
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import make_folder, open_append, write_text
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import StorageError
from yolofleet.support.system.cgroup import OomKills, oom_kills
from yolofleet.support.system.children import die_with, open_output
from yolofleet.support.system.proc import (
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
AGENT_S = 2.0  # for the agent to end once its workers were killed
BEFORE_WORKERS_S = 2.0  # grace of torchrun's agent without workers, which has nothing to save
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
class JobOnHost:
    """What stays on this host between the attempts of a job."""

    output: int  # descriptor of what the agent and its workers print
    workers_output: int  # the end that these write to
    logs: Path | None  # the folder of logs; None for a command
    streamed: bool  # the launcher does not see this disk, so it gets the logs
    environment: dict[str, str]
    agent: ServedAgent | None = None
    # logs of the current attempt, by rank and ``AGENT``; none for a command
    tails: dict[int, Tail] = field(default_factory=dict)
    is_mute: bool = False  # all processes have closed their end of ``output``
    tailed_at_s: float = 0.0
    decode: Callable[[bytes], str] = field(default_factory=decoder)

    @classmethod
    def of(cls, job: Values) -> JobOnHost:
        """Prepare this host for a job.

        Args:
            job: of the message ``start``.
        Raises:
            OSError, LookupError, TypeError, ValueError: see :func:`start`.
        """
        environment = agent_environment(os.environ, str(job["meeting"]["card"]))
        environment |= {SAVING_S: str(math.ceil(float(job["grace_s"]))), **job["env"]}
        output, workers_output = open_output(job["terminal"], environment)
        os.set_blocking(output, False)
        found = cls(output, workers_output, None, bool(job["streamed"]), environment)
        if not job["command"]:
            found.logs = Path(job["folder"]) / "logs"
            found.logs.mkdir(parents=True, exist_ok=True)
            log = found.logs / f"agent-{int(job['number'])}.log"
            found.tails = {AGENT: Tail(log)}
            found.agent = ServedAgent(environment, workers_output, log)
        return found

    def is_warm(self) -> bool:
        """Return whether the process for attempts has loaded everything, or has ended."""
        if self.agent is not None:
            self.agent.read()
        return self.agent is None or self.agent.is_ready or not self.agent.lives

    def save_state(self) -> str:
        """Write the state in memory to the disk, if it is newer; return why that is not possible, else ""."""
        try:
            if self.agent is not None and self.logs is not None:
                self.agent.save_state(make_folder(self.logs.parent / "checkpoints"))
        except (OSError, StorageError) as problem:
            return str(problem)
        return ""

    def processes(self) -> list[int]:
        """Return all processes of the attempt below this host agent, without those that stay for the next."""
        kept = self.agent.processes() if self.agent is not None else []
        return [pid for pid in descendants(os.getpid()) if pid not in kept]

    def close(self) -> None:
        """End what stays."""
        for descriptor in (self.output, self.workers_output):
            os.close(descriptor)
        if self.agent is not None:
            self.agent.close()


@dataclass
class Running:
    """One attempt of a job: torchrun's agent, or a command, and all processes below it."""

    record: jobs.Record
    here: JobOnHost
    agent: subprocess.Popen[bytes] | ServedAgent
    log_offset: int  # where the agent's log of this attempt begins
    grace_s: float
    relay: Relay | None = None  # to the run's store, if the run has other hosts
    killed_before: OomKills = field(default_factory=oom_kills)
    why: str = ""  # why the host agent ended the attempt; "" if it did not
    stopped: list[str] = field(default_factory=list)  # ranks that could not react when they were asked to end
    kill_at_s: float = float("inf")
    has_signalled_rest: bool = False
    ended_at_s: float = float("inf")

    @property
    def ranks(self) -> range:
        return range(self.record.ranks[0], sum(self.record.ranks))

    def end(self, why: str, grace_s: float) -> None:
        """Send SIGTERM now, and SIGKILL after ``grace_s``. A second call can only shorten the grace."""
        below = self.here.processes()
        if not self.why and self.agent.poll() is None:
            self.stopped = stopped_ranks(below)
            self.agent.terminate()
        self.why = self.why or why
        if self.here.logs and not below:
            grace_s = min(grace_s, BEFORE_WORKERS_S)
        self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)

    def is_over(self) -> bool:
        """Return whether the agent and all its processes have ended. End processes that outlive the agent."""
        agent_lives = self.agent.poll() is None
        if agent_lives and time.monotonic() < self.kill_at_s:
            return False
        left = self.here.processes()
        if not agent_lives and left and not self.has_signalled_rest:
            self.has_signalled_rest = True
            signal_all(left, signal.SIGTERM)  # workers whose agent was killed save, and stop
            was_killed = not self.why and (self.agent.returncode or 0) < 0
            grace_s = self.grace_s if was_killed else AFTER_AGENT_S
            self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)
        if time.monotonic() > self.kill_at_s:
            signal_all(left, signal.SIGKILL)
            if time.monotonic() > self.kill_at_s + AGENT_S:  # the agent does not end with its workers
                end_descendants(os.getpid())
                with suppress(subprocess.TimeoutExpired):
                    self.agent.wait(1)
                return True
        return not agent_lives and not left

    def close(self) -> None:
        """Close the relay."""
        if self.relay is not None:
            self.relay.close()


def stopped_ranks(pids: list[int]) -> list[str]:
    """Return texts about the workers among these processes that a signal or a debugger has stopped."""
    states = {pid: state_of(pid, started_ticks(pid)) for pid in pids}
    found = [(rank_of(pid), state) for pid, state in states.items() if state.letter in STOPPED]
    return [f"rank {rank}: {state.text()}" for rank, state in found if rank is not None]


# -- start ---------------------------------------------------------------------------------------------------


def start(job: Values, here: JobOnHost) -> Running:
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
    folder = Path(job["folder"])
    agent: subprocess.Popen[bytes] | ServedAgent
    relay, log_offset = None, 0
    if here.logs is None:
        agent = _start_command(list(job["command"]), here, place, processes)
    else:
        assert here.agent is not None
        agent, run, tails = here.agent, RunFolder(folder), here.tails
        here.tails = {AGENT: tails[AGENT]}
        for rank in range(first_rank, first_rank + processes):
            run.failure(rank).unlink(missing_ok=True)  # of an earlier attempt
            here.tails[rank] = tails.get(rank) or Tail(run.log(rank))
        log, text = tails[AGENT].path, here.logs / f"job-{int(job['number'])}.yaml"
        write_text(text, job["text"])
        if place.nodes > 1:
            relay = Relay(place, lambda line: append_line(log, line))
        store = relay.end if relay is not None else StoreEnd()
        try:
            spec = JobSpec(folder, processes, text, place, int(job["restarts"]))
            agent.begin(agent_arguments(spec, store.port), store)
            log_offset = agent.log_offset
        except BaseException:
            if relay is not None:
                relay.close()
            raise
    if relay is not None:
        relay.start()
    record = jobs.Record(
        job=job["id"],
        title=job["title"],
        host=socket.gethostname(),
        folder=str(folder.absolute()) if here.logs else "",
        node=place.node,
        ranks=(first_rank, processes),
        host_agent=(os.getpid(), started_at(os.getpid())),
        began_s=time.time(),
    )
    jobs.write(record)
    return Running(record, here, agent, log_offset, float(job["grace_s"]), relay)


def _start_command(
    command: list[str], here: JobOnHost, place: Rendezvous, processes: int
) -> subprocess.Popen[bytes]:
    # torchrun reads these variables as options, so that `torchrun SCRIPT` on every host is one job
    environment = here.environment | {
        "PET_NNODES": str(place.nodes),
        "PET_NODE_RANK": str(place.node),
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MASTER_ADDR": place.address,
        "PET_MASTER_PORT": str(place.port),
    }
    programs = str(Path(sys.executable).parent)  # torchrun, and other programs of this Python
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=here.workers_output,
        stderr=here.workers_output,
        start_new_session=True,
        preexec_fn=partial(die_with, os.getpid()),
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
