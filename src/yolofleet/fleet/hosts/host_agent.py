"""The host agent: the process that runs a job on one host of a fleet. ``remote.argv_on`` starts it through ssh.

It exchanges lines of JSON with the launcher on standard input and output (``wire_protocol.py``). It ends everything that
it started when its standard input ends, or when it hears nothing for ``silence_s``. No process that it started outlives
it: it adopts orphans, and its children die with it. Standard library alone, so that it starts on a host where a library
is missing, and the doctor can report that; Linux.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from yolofleet.fleet.doctor.machine_facts import software
from yolofleet.fleet.hosts import jobs, requests
from yolofleet.fleet.hosts.endings import words_and_log, words_of_agent
from yolofleet.fleet.hosts.running import JobOnHost, Running, Values, no_command, start
from yolofleet.fleet.hosts.wire_protocol import (
    AGENT,
    HEARTBEAT_S,
    MOST_MESSAGE_BYTES,
    PROTOCOL,
    STOPPED_BY_LAUNCHER,
    STOPPED_ON_REQUEST,
)
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import YolofleetError
from yolofleet.support.system.cgroup import oom_kills
from yolofleet.support.system.children import adopt_orphans, resize
from yolofleet.support.system.proc import end_descendants, reap_orphans

if TYPE_CHECKING:
    from yolofleet.fleet.hosts.messages import LastWords

SILENCE_S = 20.0  # timeout of heartbeats, until a job says another
LAST_MESSAGES_S = 2.0  # for the last messages to leave
# the rest of an ended job's output and logs is left out if the launcher takes nothing for so long
LAST_OUTPUT_S = 5.0
LOGS_EVERY_S = 0.5
KEEP_RECORDS_S = 3600.0
POLL_S = 0.2  # between two checks whether the agent has ended
MOST_PENDING_BYTES = 8 << 20  # of messages that the launcher does not read; then output is left out
OUTPUT_PIECES = 64  # at a time, before other messages have their turn


class HostAgent:
    """The loop of one connection to a launcher, by the file descriptors of its two directions."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.received, self.pending = bytearray(), bytearray()
        self.lock = threading.Lock()  # guards `pending`: answers come from threads
        self.wakes, self.wake = os.pipe()
        for descriptor in (incoming, outgoing, self.wakes, self.wake):
            os.set_blocking(descriptor, False)
        self.silence_s = SILENCE_S
        self.heard_at_s = self.spoke_at_s = self.taken_at_s = self.kept_at_s = time.monotonic()
        self.job: JobOnHost | None = None
        self.running: Running | None = None
        self.warming: int | None = None  # number of the request that waits until torch is loaded
        self.leaving = ""  # the reason
        self.ends_at_once = False
        self.has_left_out = False

    def send(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self.lock:
            self.pending += line
        with suppress(OSError):
            os.write(self.wake, b"w")

    def run(self) -> int:
        """Serve the launcher until it is gone and everything has ended."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.send(type="hello", **introduction())
        try:
            while self.running is not None or not self.leaving:
                self._wait()
                now = time.monotonic()
                if not self.leaving and now - self.heard_at_s > self.silence_s:
                    self.leave(f"no message from the launcher for {self.silence_s:.0f} s")
                if now - self.spoke_at_s > HEARTBEAT_S:
                    self.send(type="beat")
                    self.spoke_at_s = now
                if now - self.kept_at_s > KEEP_RECORDS_S:
                    jobs.keep()
                    self.kept_at_s = now
                if self.running is not None:
                    self._follow(self.running)
                if self.warming is not None and self.job is not None and self.job.is_warm():
                    self.send(type="reply", id=self.warming, value=None)
                    self.warming = None
        finally:
            self._finish()
        return 0

    # -- the job -----------------------------------------------------------------------------------

    def _follow(self, running: Running) -> None:
        if self.leaving:
            running.end(self.leaving, 0.0 if self.ends_at_once else running.grace_s)
        over, now = running.is_over(), time.monotonic()
        has_forwarded = self._forward(running.here, everything=over)
        if over:
            running.ended_at_s = min(running.ended_at_s, now)
        reap_orphans(but=running.agent.pid)
        is_alone = self.leaving not in ("", STOPPED_ON_REQUEST)
        is_stuck = now - max(running.ended_at_s, self.taken_at_s) > LAST_OUTPUT_S
        if not over or not (has_forwarded or is_alone or is_stuck):
            return
        returned = running.agent.returncode
        exit_code = -signal.SIGKILL if returned is None else returned
        words: list[LastWords] = []
        log, logs = "", running.here.logs
        if logs is not None:  # not a command
            files = map(RunFolder(logs.parent).failure, running.ranks)
            words, log = words_and_log(files, running.here.tails[AGENT].path, running.log_offset)
            if not words and running.here.agent is not None and running.here.agent.why:
                words = [words_of_agent(running.here.agent.why, running.ranks[0])]
        self.send(
            type="exit",
            code=exit_code,
            words=[one.model_dump() for one in words],
            log=log,
            why=running.why,
            stopped=running.stopped,
            step=running.here.agent.steps_done() if running.here.agent is not None else -1,
            killed=asdict(oom_kills().since(running.killed_before)),
        )
        jobs.write(replace(running.record, ended_s=time.time(), code=exit_code))
        running.close()
        self.running = None

    def _forward(self, job: JobOnHost, *, everything: bool) -> bool:
        """Forward output and logs of the job. Return False if the connection cannot take all of it now."""
        for _ in range(OUTPUT_PIECES):
            if job.is_mute or (everything and self._is_full):
                break
            try:
                piece = os.read(job.output, 1 << 16)
            except BlockingIOError:
                break
            except OSError:  # the terminal's other end is closed
                piece = b""
            if not piece:
                job.is_mute = True
            elif not self._is_full:
                self.send(type="output", text=job.decode(piece))
                self.has_left_out = False
            elif not self.has_left_out:  # a worker that prints must not wait for the launcher
                self.has_left_out = True
                self.send(type="output", text="\n[...]\n")
        now = time.monotonic()
        if job.streamed and (everything or now - job.tailed_at_s > LOGS_EVERY_S):
            job.tailed_at_s = now
            for rank, tail in job.tails.items():
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
        """End the job in order; SIGINT: at once.

        Other signals change nothing the second time: `fleet stop` may be typed twice, and a shutdown sends SIGTERM and
        SIGHUP.
        """
        self.ends_at_once = self.ends_at_once or number == signal.SIGINT
        self.leave(STOPPED_ON_REQUEST)

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wakes, selectors.EVENT_READ)
            if not self.leaving:
                selector.register(self.incoming, selectors.EVENT_READ)
            if self.pending:
                selector.register(self.outgoing, selectors.EVENT_WRITE)
            running = self.running
            if running is not None and running.agent.poll() is None and not running.here.is_mute:
                selector.register(running.here.output, selectors.EVENT_READ)
            busy = self.running is not None or self.leaving or self.warming is not None
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
                self.spoke_at_s = self.taken_at_s = time.monotonic()
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
                    self.leave(f"unexpected protocol message of the launcher: {problem!r}")

    def _handle(self, message: Values) -> None:
        kind = message["type"]
        if kind == "ask" and message["request"] == "warm_up":
            self._warm_up(message["id"], message["arguments"]["job"])
        elif kind == "ask" and message["request"] == "save_state":
            threading.Thread(target=self._save_state, args=(message["id"],), daemon=True).start()
        elif kind == "ask":
            asked = (message["id"], str(message["request"]), dict(message["arguments"]))
            threading.Thread(target=self._answer, args=asked, daemon=True).start()
        elif kind == "resize" and self.job is not None:
            resize(self.job.output, message["terminal"])
        elif kind == "stop" and self.running is not None:
            self.running.end(STOPPED_BY_LAUNCHER, float(message["grace_s"]))
        elif kind == "start" and self.running is None:
            self.silence_s = float(message["job"]["silence_s"])
            try:
                self.job = self.job or JobOnHost.of(message["job"])
                self.running = start(message["job"], self.job)
            except Exception as problem:  # of any kind: the launcher waits for the end
                code, why = 1, f"cannot start here: {_words(problem)}"
                if isinstance(problem, OSError) and message["job"]["command"]:
                    code, why = no_command(problem, message["job"]["command"][0])
                self.send(type="exit", code=code, why=why)

    def _warm_up(self, number: int, job: Values) -> None:
        try:
            self.job = self.job or JobOnHost.of(job)
            self.warming = number
        except (OSError, YolofleetError) as problem:  # such as a full disk: the launcher can use it later
            self.send(type="reply", id=number, error=_words(problem))

    def _save_state(self, number: int) -> None:
        problem = self.job.save_state() if self.job is not None else ""
        self.send(type="reply", id=number, **({"error": problem} if problem else {"value": None}))

    def _answer(self, number: int, request: str, arguments: Values) -> None:
        try:
            self.send(type="reply", id=number, value=requests.answer(request, arguments))
        except Exception as problem:  # of any kind: the launcher waits for an answer
            self.send(type="reply", id=number, error=_words(problem))

    def _finish(self) -> None:
        """Send the last messages; then end what requests have started."""
        gives_up_at_s = time.monotonic() + LAST_MESSAGES_S
        while self.pending and time.monotonic() < gives_up_at_s:
            self._wait()
        if self.job is not None:
            self.job.close()
        end_descendants(os.getpid())
        requests.discard()


def _words(problem: Exception) -> str:
    if isinstance(problem, YolofleetError):
        return problem.what
    return (str(problem) if isinstance(problem, (OSError, LookupError)) else "") or repr(problem)


def introduction() -> Values:
    """Return the fields of the message ``hello``."""
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
    os.dup2(2, 1)  # prints of libraries must not get between messages
    adopt_orphans()
    exit_code = HostAgent(incoming, outgoing).run()
    sys.stderr.flush()
    os._exit(exit_code)  # threads of requests may still wait


if __name__ == "__main__":
    sys.exit(main())
