"""What runs on every host of a fleet: ``remote.host_agent_argv`` starts it through ssh.

It speaks with the launcher in lines of JSON on standard input and output: requests and their answers, a job, and
frames of what the job says. Its life hangs on standard input: when that ends, or says nothing for ``silence_s``,
everything that was started here is ended. Nothing that it started outlives it: it adopts orphans, and what it
starts dies with it. Standard library alone; Linux.

From the launcher: ``{"type": "beat"}``, ``ask`` (id, request, arguments), ``start`` (job), ``stop`` (grace_s).
To it: ``hello``, ``beat``, ``reply`` (id, value or error), ``output`` (text for the screen), ``log`` (rank, text;
rank -1: the agent), ``exit`` (code, words, log, why, stopped, killed). ``wire_protocol.py`` says what they look like.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from yolofleet.errors import YolofleetError
from yolofleet.files.atomic import open_append, write_text
from yolofleet.files.foreign import open_foreign
from yolofleet.fleet.doctor.machine_facts import software
from yolofleet.fleet.hosts import jobs, package_sync, requests
from yolofleet.fleet.hosts.relay import Relay
from yolofleet.fleet.hosts.wire_protocol import (
    AGENT,
    HEARTBEAT_S,
    MOST_MESSAGE_BYTES,
    PROTOCOL,
    STOPPED_BY_LAUNCHER,
    STOPPED_ON_REQUEST,
)
from yolofleet.fleet.job import (
    SAVING_S,
    JobSpec,
    Meeting,
    StoreEnd,
    agent_argv,
    agent_environment,
    meeting_environment,
)
from yolofleet.fleet.launch.local import last_words
from yolofleet.report.folder import RunFolder
from yolofleet.system.cgroup import UNKNOWN, OomKills, oom_kills
from yolofleet.system.children import adopt_orphans, die_with_parent, module_environment
from yolofleet.system.proc import (
    STOPPED,
    descendants,
    end_descendants,
    rank_of,
    reap_orphans,
    signal_all,
    started_at,
    started_ticks,
    state_of,
)

SILENCE_S = 20.0
FAREWELL_S = 2.0  # for the last frames to leave
LAST_WORDS_S = 5.0  # for what a job has printed and logged to leave, once it has ended
AFTER_AGENT_S = 5.0  # for what is left when the agent has ended
BEFORE_WORKERS_S = 2.0  # torchrun's agent without workers has nothing to save
TAIL_S = 0.5
POLL_S = 0.2  # has the agent ended?
MOST_PENDING_BYTES = 8 << 20  # of frames that nobody reads; then output is left out
LOG_TAIL_BYTES = 32 << 10
Values = dict[str, Any]  # of a message


class Tail:
    """What is appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read(self) -> str:
        try:
            with open_foreign(self.path, follow=False) as file:
                file.seek(self.offset)
                piece = file.read(1 << 18)
        except OSError:
            return ""
        self.offset += len(piece)
        return self._decode(piece)


@dataclass
class Running:
    """The job of this host agent: torchrun's agent and everything below it."""

    record: jobs.Record
    agent: subprocess.Popen[bytes]
    output: int  # what the agent and its workers print
    tails: dict[int, Tail]  # by rank, and AGENT's own log; none for a plain command
    streamed: bool  # the launcher does not see this disk
    log_offset: int
    grace_s: float
    relay: Relay | None = None  # to the run's store, if the run has other hosts
    killed_before: OomKills = field(default_factory=oom_kills)
    why: str = ""
    stopped: list[str] = field(default_factory=list)  # ranks that could not react when they were asked to end
    kill_at_s: float = float("inf")
    swept: bool = False
    ended_at_s: float = float("inf")  # nothing of it was left
    is_mute: bool = False  # everything has closed its end of ``output``
    tailed_at_s: float = 0.0
    decode: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace").decode)

    @property
    def ranks(self) -> range:
        return range(self.record.ranks[0], sum(self.record.ranks))

    def end(self, why: str, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after ``grace_s``; a second call can only hasten it."""
        if not self.why and self.agent.poll() is None:
            self.stopped = stopped_ranks(descendants(self.agent.pid))
            self.agent.terminate()
        self.why = self.why or why
        if self.tails and not descendants(self.agent.pid):
            grace_s = min(grace_s, BEFORE_WORKERS_S)
        self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)

    def is_over(self) -> bool:
        """The agent and everything that it started are gone. Ends what outlives the agent."""
        agent_lives = self.agent.poll() is None
        if agent_lives and time.monotonic() < self.kill_at_s:
            return False
        left = descendants(os.getpid())
        if not agent_lives and left and not self.swept:
            self.swept = True
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
        if self.tails:
            path = self.tails[AGENT].path
            with suppress(OSError), open_foreign(path, follow=False) as file:
                file.seek(max(self.log_offset, path.stat().st_size - LOG_TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        return ""


def no_command(problem: OSError, name: str) -> tuple[int, str]:
    """Exit code, as shells have it, and words of a command that cannot be started."""
    if isinstance(problem, FileNotFoundError):
        return 127, f"there is no command {name}"
    return 126, f"{name} cannot be started: {problem.strerror or problem}"


def stopped_ranks(pids: list[int]) -> list[str]:
    """Of these processes the workers that somebody or something has stopped."""
    states = {pid: state_of(pid, started_ticks(pid)) for pid in pids}
    found = [(rank_of(pid), state) for pid, state in states.items() if state.letter in STOPPED]
    return [f"rank {rank}: {state.text()}" for rank, state in found if rank is not None]


def start(job: Values) -> Running:
    """Start torchrun's agent, or any command. Must run in the main thread, which lives as long as the host agent.

    Raises:
        OSError, StorageError: a folder or file cannot be written, or there is no such command.
        LookupError, TypeError, ValueError: that is no job.
    """
    meeting = Meeting(**job["meeting"])
    first_rank, processes = int(job["first_rank"]), int(job["processes"])
    environment = agent_environment(os.environ, meeting.card if meeting.nodes > 1 else "")
    folder, tails = Path(job["folder"]), {}
    if job["command"]:
        argv = list(job["command"])
        environment |= meeting_environment(meeting, processes)
        programs = str(
            Path(sys.executable).parent
        )  # torchrun's, and what else is installed beside this python
        environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    else:
        environment = module_environment(environment)
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        text = logs / f"job-{meeting.node}.yaml"
        write_text(text, job["text"])
        ranks = range(first_rank, first_rank + processes)
        for rank in ranks:
            RunFolder(folder).failure(rank).unlink(missing_ok=True)
        tails = {rank: Tail(logs / f"rank-{rank}.log") for rank in ranks}
        tails[AGENT] = Tail(logs / f"agent-{meeting.node}.log")
    grace_s = float(job["grace_s"])
    environment |= {SAVING_S: str(math.ceil(grace_s)), **job["env"]}
    host_agent = os.getpid()

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != host_agent:  # it died before that
            os._exit(1)

    relay, store = None, StoreEnd()
    output, workers_output = _output(job["terminal"], environment)
    try:
        if tails:
            if meeting.nodes > 1:
                relay = Relay(meeting, lambda line: append_line(tails[AGENT].path, line))
                store = relay.end
            argv = agent_argv(JobSpec(folder, processes, text, meeting), store)
        with open_append(tails[AGENT].path) if tails else nullcontext() as log:
            agent = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=workers_output,
                stderr=log or workers_output,
                start_new_session=True,
                preexec_fn=in_child,
                pass_fds=() if store.listener is None else (store.listener,),
            )
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
        node=meeting.node,
        ranks=(first_rank, processes),
        host_agent=(host_agent, started_at(host_agent)),
        began_s=time.time(),
    )
    jobs.write(record)
    log_offset = tails[AGENT].offset if tails else 0
    return Running(record, agent, output, tails, job["streamed"], log_offset, grace_s, relay)


def append_line(path: Path, line: str) -> None:
    with suppress(OSError), open_append(path) as file:
        file.write(f"{line}\n".encode("utf-8", "replace"))


def _output(terminal: Values | None, environment: dict[str, str]) -> tuple[int, int]:
    """(ours, the workers') ends of their standard output: a pipe, or a terminal like the launcher's."""
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


class HostAgent:
    """The loop of one connection.

    Args:
        incoming, outgoing: file descriptors.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.received, self.pending = bytearray(), bytearray()
        self.lock = threading.Lock()  # of `pending`: answers come from threads
        self.wakes, self.wake = os.pipe()
        for descriptor in (incoming, outgoing, self.wakes, self.wake):
            os.set_blocking(descriptor, False)
        self.silence_s = SILENCE_S
        self.heard_at_s = self.spoke_at_s = time.monotonic()
        self.running: Running | None = None
        self.leaving = ""  # why
        self.hasty = False
        self.left_out = False

    def send(self, **frame: Any) -> None:
        line = json.dumps(frame).encode() + b"\n"
        with self.lock:
            self.pending += line
        with suppress(OSError):
            os.write(self.wake, b"w")

    def run(self) -> int:
        """Until the launcher is gone and everything is ended."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.send(type="hello", **introduction())
        try:
            while self.running is not None or not self.leaving:
                self._wait()
                now = time.monotonic()
                if not self.leaving and now - self.heard_at_s > self.silence_s:
                    self.leave(f"nothing heard from the launcher for {self.silence_s:.0f} s")
                if now - self.spoke_at_s > HEARTBEAT_S:
                    self.send(type="beat")
                    self.spoke_at_s = now
                if self.running is not None:
                    self._follow(self.running)
        finally:
            self._farewell()
        return 0

    # -- the job -----------------------------------------------------------------------------------

    def _follow(self, running: Running) -> None:
        if self.leaving:
            running.end(self.leaving, 0.0 if self.hasty else running.grace_s)
        over, now = running.is_over(), time.monotonic()
        passed_on = self._pass_on(running, everything=over)
        if over:
            running.ended_at_s = min(running.ended_at_s, now)
        reap_orphans(but=running.agent.pid)
        nobody_listens = self.leaving not in ("", STOPPED_ON_REQUEST)
        if not over or not (passed_on or nobody_listens or now - running.ended_at_s > LAST_WORDS_S):
            return
        returned = running.agent.returncode
        exit_code = -signal.SIGKILL if returned is None else returned
        folder = RunFolder(Path(running.record.folder))
        self.send(
            type="exit",
            code=exit_code,
            words=[words.model_dump() for words in last_words(map(folder.failure, running.ranks))],
            log=running.log_tail(),
            why=running.why,
            stopped=running.stopped,
            killed=asdict(oom_kills().since(running.killed_before)),
        )
        jobs.write(jobs.ended(running.record, exit_code))
        os.close(running.output)
        if running.relay is not None:
            running.relay.close()
        self.running = None

    def _pass_on(self, running: Running, *, everything: bool) -> bool:
        """What was printed, and what the logs have got; False: the channel cannot take it all now."""
        for _ in range(64):  # and then it is the channel's turn
            if running.is_mute or (everything and self._is_full):
                break
            try:
                piece = os.read(running.output, 1 << 16)
            except BlockingIOError:
                break
            except OSError:  # the terminal's other end is closed
                piece = b""
            if not piece:
                running.is_mute = True
            elif not self._is_full:
                self.send(type="output", text=running.decode(piece))
                self.left_out = False
            elif not self.left_out:  # what prints must not wait for who reads
                self.left_out = True
                self.send(type="output", text="\n[...]\n")
        now = time.monotonic()
        if running.streamed and (everything or now - running.tailed_at_s > TAIL_S):
            running.tailed_at_s = now
            for rank, tail in running.tails.items():
                while not self._is_full and (text := tail.read()):
                    self.send(type="log", rank=rank, text=text)
        return not self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self.pending) >= MOST_PENDING_BYTES

    # -- the channel -------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        self.leaving = self.leaving or why

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """End in order; SIGINT: at once. Others hasten nothing: `fleet stop` may be typed twice, and a machine that is
        shut down sends SIGTERM and SIGHUP."""
        self.hasty = self.hasty or number == signal.SIGINT
        self.leave(STOPPED_ON_REQUEST)

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wakes, selectors.EVENT_READ)
            if not self.leaving:
                selector.register(self.incoming, selectors.EVENT_READ)
            if self.pending:
                selector.register(self.outgoing, selectors.EVENT_WRITE)
            running = self.running
            if running is not None and running.agent.poll() is None and not running.is_mute:
                selector.register(running.output, selectors.EVENT_READ)
            busy = self.running is not None or self.leaving
            ready = {key.fd for key, _ in selector.select(POLL_S if busy else 1.0)}
        if self.wakes in ready:
            with suppress(OSError):
                os.read(self.wakes, 1 << 16)
        if self.outgoing in ready:
            self._flush()
        if self.incoming in ready:
            self._receive()

    def _flush(self) -> None:
        with self.lock:
            try:
                sent = os.write(self.outgoing, self.pending[: 1 << 18])
                del self.pending[:sent]
                self.spoke_at_s = time.monotonic()
            except BlockingIOError:
                pass
            except OSError:  # the launcher is gone
                self.pending.clear()
                self.leave("the connection to the launcher is closed")

    def _receive(self) -> None:
        try:
            piece = os.read(self.incoming, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece or len(self.received) > MOST_MESSAGE_BYTES:
            self.leave("the launcher is gone")
            return
        self.heard_at_s = time.monotonic()
        self.received += piece
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        for line in lines:
            if line.strip() and not self.leaving:
                try:
                    self._handle(json.loads(line))
                except (LookupError, TypeError, ValueError, RecursionError) as problem:
                    self.leave(f"the launcher does not speak as one does: {problem!r}")

    def _handle(self, message: Values) -> None:
        kind = message["type"]
        if kind == "ask":
            asked = (message["id"], str(message["request"]), dict(message["arguments"]))
            threading.Thread(target=self._answer, args=asked, daemon=True).start()
        elif kind == "stop" and self.running is not None:
            self.running.end(STOPPED_BY_LAUNCHER, float(message["grace_s"]))
        elif kind == "start" and self.running is None:
            self.silence_s = float(message["job"]["silence_s"])
            try:
                self.running = start(message["job"])
            except Exception as problem:  # whatever it is, the launcher waits for the end
                code, why = 1, f"cannot start here: {_words(problem)}"
                if isinstance(problem, OSError) and message["job"]["command"]:
                    code, why = no_command(problem, message["job"]["command"][0])
                self.send(
                    type="exit", code=code, words=[], log="", why=why, stopped=[], killed=asdict(UNKNOWN)
                )

    def _answer(self, number: int, request: str, arguments: Values) -> None:
        try:
            self.send(type="reply", id=number, value=requests.answer(request, arguments))
        except Exception as problem:  # whatever it is, the launcher waits for an answer
            self.send(type="reply", id=number, error=_words(problem))

    def _farewell(self) -> None:
        """Let the last frames leave; then end what requests have started."""
        gives_up_at_s = time.monotonic() + FAREWELL_S
        while self.pending and time.monotonic() < gives_up_at_s:
            self._wait()
        end_descendants(os.getpid())
        package_sync.discard()


def _words(problem: Exception) -> str:
    if isinstance(problem, YolofleetError):
        return problem.what
    return (str(problem) if isinstance(problem, (OSError, LookupError)) else "") or repr(problem)


def introduction() -> Values:
    """Who and what is here."""
    return {
        "protocol": PROTOCOL,
        "platform": sys.platform,
        "pid": os.getpid(),
        "software": software(),
        "time_s": time.time(),
    }


def main() -> int:
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what anything prints here must not get between the frames
    adopt_orphans()
    exit_code = HostAgent(incoming, outgoing).run()
    sys.stderr.flush()
    os._exit(exit_code)  # threads of requests may still wait for something


if __name__ == "__main__":
    sys.exit(main())
