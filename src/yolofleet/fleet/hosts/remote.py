"""The launcher's connection to one host: the system's OpenSSH with a host agent behind it.

The launcher starts ssh from an argv list. ssh asks no questions (BatchMode), and has its own session, so that Ctrl-C
reaches only the launcher. When :class:`Remote` is closed, or the launcher dies, the host agent's standard input ends,
and the host agent ends everything that runs there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import Any

from yolofleet import __version__
from yolofleet.fleet.hosts.fleet import HERE, Fleet, Host
from yolofleet.fleet.hosts.messages import (
    Gone,
    Heartbeat,
    Hello,
    Message,
    Reply,
    answer_of,
    message_of,
    values_of,
)
from yolofleet.fleet.hosts.ssh import SAME_VERSION, SSH_OPTIONS, Unreachable, not_started, unreachable
from yolofleet.fleet.hosts.wire_protocol import HEARTBEAT_S, MOST_MESSAGE_BYTES, PROTOCOL
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.system.children import module_argv, with_this_package
from yolofleet.support.text import inform

OPEN_S = 30.0
ASK_S = 30.0
MOST_NOISE_LINES = 50  # output of a login shell before the first message
MOST_NOISE_BYTES = 2000  # of one such line
MOST_WAITING = 64  # messages of all hosts; then they are read no faster than they are processed
HANG_UP_S = 1.0  # for ssh to end after SIGTERM
STRANGER = "unexpected protocol message"


class Refused(ClusterError):
    """A host reports why it cannot do what it was asked for."""


class Remote:
    """One host. Call :meth:`open`, then :meth:`ask` and :meth:`start`, at last :meth:`close`.

    Args:
        inbox: gets (this, message) for all messages but answers and heartbeats; several hosts may share one. The last
            message is ``Gone``.
    """

    def __init__(self, host: Host, inbox: Queue[tuple[Remote, Message]] | None = None) -> None:
        self.host = host
        self.inbox: Queue[tuple[Remote, Message]] = Queue() if inbox is None else inbox
        self.hello: Hello | None = None
        self.heard_at_s = time.monotonic()
        self.ahead_s = 0.0  # how far its clock is ahead, within the time of a login
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: dict[int, Queue[Reply | None]] = {}
        self._asked = 0
        self._sending = threading.Lock()
        self._greeted: Queue[Hello | None] = Queue()
        self._strange = ""  # its message that is not valid
        self._readers: list[threading.Thread] = []
        self._noise: deque[str] = deque(maxlen=MOST_NOISE_LINES)
        self._errors: deque[str] = deque(maxlen=MOST_NOISE_LINES)
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def is_lost(self) -> bool:
        return self._closed.is_set()

    def open(self, timeout_s: float = OPEN_S) -> Hello:
        """Log in, and return the host agent's first message (``host_agent.introduction``).

        Raises:
            Unreachable: the host cannot be reached, or runs no host agent of this version.
        """
        try:
            self._process = subprocess.Popen(
                argv_on(self.host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=with_this_package(os.environ),
            )
        except OSError as problem:
            raise not_started(self.host, problem) from None
        readers = [threading.Thread(target=work, daemon=True) for work in (self._read_errors, self._read)]
        for reader in readers:
            reader.start()
        self._readers = readers
        if self._closed.is_set():  # the launcher gave up meanwhile
            self.close()
        try:
            hello = self._greeted.get(timeout=timeout_s)
        except Empty:
            self.close()
            raise Unreachable(
                self.name, "time-out", f"no answer within {timeout_s:.0f} s", source=self.words()
            ) from None
        if hello is None:
            if not self._strange:
                _has_ended(self._process, HANG_UP_S)  # its exit code tells why
            self.close()
            if self._strange:
                raise Unreachable(self.name, "other", STRANGER, source=self._strange, hint=SAME_VERSION)
            raise unreachable(self.host, self._process.returncode, self.words())
        self.hello, self.ahead_s = hello, hello.time_s - time.time()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        self._check(hello)
        return hello

    def _check(self, hello: Hello) -> None:
        version = hello.software.get("yolofleet")
        if hello.protocol != PROTOCOL:
            self.close()
            raise Unreachable(
                self.name,
                "other-version",
                f"has yolofleet {version}, and this machine has {__version__}: their protocols differ",
                hint=SAME_VERSION,
            )
        if hello.platform != "linux":
            self.close()
            raise Unreachable(
                self.name,
                "not-linux",
                f"runs {hello.platform}; hosts of a fleet run Linux",
                hint="for one machine alone: --device",
            )

    def ask(self, request: str, timeout_s: float = ASK_S, **arguments: Any) -> Any:
        """Return the answer to a request (``requests.py``, ``fleet/doctor/probes.py``). Any thread may ask.

        Raises:
            Refused: the host reports why it cannot.
            ClusterError: the host is lost, does not answer in time, or its answer is not valid.
        """
        with self._sending:
            self._asked += 1
            number = self._asked
        answer = self._replies[number] = Queue()
        try:
            if self._closed.is_set():
                raise ClusterError(f"{self.name} is lost", source=self.words() or None, hint=self._check_hint)
            self._send({"type": "ask", "id": number, "request": request, "arguments": arguments})
            reply = answer.get(timeout=timeout_s)
        except Empty:
            raise ClusterError(
                f"{self.name} did not answer ({request}) within {timeout_s:.0f} s", hint=self._check_hint
            ) from None
        finally:
            del self._replies[number]
        if reply is None:
            raise ClusterError(
                f"{self.name}: the connection to it broke", source=self.words() or None, hint=self._check_hint
            )
        if reply.error is not None:
            raise Refused(f"{self.name}: {reply.error}", source=f"request {request}", hint=self._check_hint)
        try:
            return answer_of(request, reply.value)
        except ValueError:
            self._strange = f"{request}: {json.dumps(reply.value)[:200]}"
            self.close()
            raise ClusterError(
                f"{self.name} is lost: {STRANGER}", source=self._strange, hint=SAME_VERSION
            ) from None

    @property
    def _check_hint(self) -> str:
        return f"check that host: {'yolofleet doctor' if self.name == HERE else f'ssh {self.name}'}"

    def start(self, job: dict[str, Any]) -> None:
        """Start a job (``host_agent.start``). Its output comes as messages."""
        self._send({"type": "start", "job": job})

    def resize(self, terminal: dict[str, Any]) -> None:
        """Give the terminal of the job's processes another size."""
        self._send({"type": "resize", "terminal": terminal})

    def stop(self, grace_s: float) -> None:
        """End the job: SIGTERM now, SIGKILL after ``grace_s``. The message ``Exit`` comes when it has ended."""
        self._send({"type": "stop", "grace_s": grace_s})

    def words(self) -> str:
        """Return why the connection ended, as far as known: the output of ssh and of the shell there."""
        strange = [f"{STRANGER}: {self._strange}"] if self._strange else []
        return "\n".join([*strange, *self._errors, *self._noise]).strip()

    def close(self, wait_s: float = 5.0) -> None:
        """End the connection. Everything that runs there ends with it; wait for that at most ``wait_s``."""
        self._closed.set()
        process = self._process
        if process is None:
            return
        assert process.stdin and process.stdout and process.stderr
        if not self.hello or self._strange or not self._sending.acquire(timeout=HANG_UP_S):
            wait_s = 0.0  # nothing runs there, or the thread that sends is stuck
        else:
            with suppress(OSError):
                process.stdin.close()
            self._sending.release()
        if not _has_ended(process, wait_s):
            process.terminate()
            if not _has_ended(process, HANG_UP_S):
                process.kill()
                process.wait()
        with suppress(OSError):
            process.stdin.close()
        for reader, stream in zip(self._readers, (process.stderr, process.stdout), strict=False):
            reader.join(HANG_UP_S)
            if not reader.is_alive():  # else an unknown process holds the other end
                stream.close()

    # -- threads -----------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message. If the connection has ended, the reading thread notices it."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with self._sending, suppress(OSError, ValueError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self._send({"type": "beat"})

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        greeted = False
        with suppress(OSError, ValueError):
            while line := self._process.stdout.readline(MOST_MESSAGE_BYTES):
                self.heard_at_s = time.monotonic()
                values = values_of(line)
                if not greeted and values.get("type") != "hello":
                    self._noise.append(_said(line))
                    continue
                message = message_of(values)
                if message is None or (greeted and isinstance(message, Hello)):
                    self._strange = ascii(_said(line)[:200])
                    break
                if isinstance(message, Hello):
                    greeted = True
                    self._greeted.put(message)
                elif isinstance(message, Reply):
                    waiting = self._replies.get(message.id)
                    if waiting is not None:
                        waiting.put(message)
                elif not isinstance(message, Heartbeat):
                    self._hand_over(message)
        self._closed.set()
        for waiting in list(self._replies.values()):
            waiting.put(None)
        if greeted:
            self.inbox.put((self, Gone()))
        else:
            self._greeted.put(None)

    def _hand_over(self, message: Message) -> None:
        """Put a message into the inbox when it has room. Meanwhile the host waits, and leaves output out."""
        while self.inbox.qsize() >= MOST_WAITING and not self._closed.wait(0.01):
            self.heard_at_s = time.monotonic()  # more messages wait to be read
        self.inbox.put((self, message))

    def _read_errors(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        with suppress(OSError, ValueError):
            while line := self._process.stderr.readline(MOST_NOISE_BYTES):
                self._errors.append(_said(line))


def _said(line: bytes) -> str:
    return line[:MOST_NOISE_BYTES].decode("utf-8", "replace").rstrip()


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def argv_on(host: Host, module: str = "yolofleet.fleet.hosts.host_agent") -> list[str]:
    """Return the command that starts a module on a host."""
    command = module_argv(module, python=host.python)
    if host.env:
        command = ["env", *(f"{name}={value}" for name, value in host.env.items()), *command]
    if host.name == HERE or host.is_here:
        return command
    return ["ssh", *SSH_OPTIONS, host.name, f"exec {shlex.join(command)}"]


LOGINS_AT_ONCE = 32
FILES_PER_HOST = 3  # descriptors: ssh's input, output and errors
OTHER_FILES = 10 * LOGINS_AT_ONCE  # of this process, and those that starting an ssh needs
NOTICE_AFTER_S = 2.0  # print a notice when logins take longer


@contextmanager
def logged_in(
    fleet: Fleet, *, lost: list[Unreachable] | None = None, tells: bool = True
) -> Iterator[list[Remote]]:
    """Log in to all hosts at the same time. Everything that is started there ends with the block.

    Args:
        lost: if given, takes one error per unreachable host, and the block gets the other hosts.
        tells: print a notice when it takes long.
    Raises:
        Unreachable: a host is unreachable and ``lost`` is None. The source names all other unreachable hosts.
        ConfigError: this machine runs Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "several machines cannot be started from Windows",
            hint="type it on Linux, macOS or in WSL; for this machine alone: --device",
        )
    inbox: Queue[tuple[Remote, Message]] = Queue()
    remotes = [Remote(host, inbox) for host in fleet.hosts]
    _allow_open_files(FILES_PER_HOST * len(remotes) + OTHER_FILES)
    try:
        problems = _log_in(remotes, NOTICE_AFTER_S if tells else None)
        if problems and lost is None:
            first, others = problems[0], problems[1:]
            if others:
                first.source = "\n".join([first.source or "", *(problem.what for problem in others)]).strip()
            raise first
        if lost is not None:
            lost += problems
        gone = {problem.host for problem in problems}
        yield [remote for remote in remotes if remote.name not in gone]
    finally:
        with ThreadPoolExecutor(len(remotes)) as pool:
            list(pool.map(Remote.close, remotes))


def _log_in(remotes: Sequence[Remote], notice_after_s: float | None) -> list[Unreachable]:
    """Log in to all hosts. Return one error per unreachable host. After Ctrl-C the caller's close ends the logins."""

    def login(remote: Remote) -> Unreachable | None:
        try:
            remote.open()
        except Unreachable as problem:
            return problem
        return None

    pool = ThreadPoolExecutor(min(LOGINS_AT_ONCE, len(remotes)))
    try:
        logins = [pool.submit(login, remote) for remote in remotes]
        if wait(logins, notice_after_s).not_done:
            inform(f"logging in to {len(remotes)} host{'s' if len(remotes) > 1 else ''} ...")
        return [problem for done in logins if (problem := done.result()) is not None]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to ``count``, as far as the hard limit allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
