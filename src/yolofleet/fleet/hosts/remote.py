"""The launcher's end of the channel to one host: system OpenSSH with a host agent behind it.

ssh is started from an argv list, asks for nothing (BatchMode), and has a session of its own, so that Ctrl-C reaches
the launcher alone. Closing :class:`Remote`, or dying, closes the host agent's standard input, which ends everything
there.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

from yolofleet import __version__
from yolofleet.errors import ClusterError
from yolofleet.fleet.description import HERE, Host
from yolofleet.fleet.doctor.shapes import fits
from yolofleet.fleet.hosts.wire_protocol import (
    A_PROBES,
    ANSWERS,
    MOST_FRAME_BYTES,
    PROTOCOL,
    Frame,
    frame_of,
    is_sound,
)
from yolofleet.system.children import module_argv, with_this_package

CONNECT_S = 10
OPEN_S = 30.0
ASK_S = 30.0
BEAT_S = 2.0
SSH_FAILED = 255  # exit code of ssh's own; others are the command's
MOST_NOISE_LINES = 50  # what a login shell prints before the host agent speaks
MOST_NOISE_BYTES = 2000  # of one such line
MOST_WAITING = 64  # frames of all hosts; then they are read no faster than they are taken
HANG_UP_S = 1.0  # for ssh to end when it is told to
STRANGER = "unexpected protocol message"
SSH_OPTIONS = (
    *("-T", "-a", "-x"),  # no terminal, no agent, no X11
    "-oBatchMode=yes",
    f"-oConnectTimeout={CONNECT_S}",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
    "-oClearAllForwardings=yes",
    "-oControlMaster=no",
    "-oControlPath=none",  # a connection of its own: nothing of it stays
    "-oRemoteCommand=none",
    "-oLogLevel=ERROR",
)


class Unreachable(ClusterError):
    """No host agent answers on a host.

    Args:
        kind: no-ssh, unknown-host, key-refused, host-key, port-refused, no-route, time-out, closed, no-python,
            no-package, other-version, not-linux, or other.
    """

    def __init__(self, host: str, kind: str, what: str, *, source: str = "", hint: str = "") -> None:
        super().__init__(f"{host}: {what}", source=source or None, hint=hint or None)
        self.host, self.kind = host, kind


class Refused(ClusterError):
    """A host says why it cannot do what it was asked for."""


class Remote:
    """One host. The order is :meth:`open`, then questions, :meth:`start`, :meth:`frames`, :meth:`close`.

    Args:
        inbox: where frames go that are not answers, as (this, frame); several hosts may share one. The last is
            ``{"type": "gone"}``.
    """

    def __init__(self, host: Host, inbox: Queue[tuple[Remote, Frame]] | None = None) -> None:
        self.host = host
        self.inbox: Queue[tuple[Remote, Frame]] = Queue() if inbox is None else inbox
        self.hello: Frame = {}
        self.heard_at_s = time.monotonic()
        self.ahead_s = 0.0  # its clock, to about the time of a login
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: dict[int, Queue[Frame]] = {}
        self._asked = 0
        self._sending = threading.Lock()
        self._greeted: Queue[Frame | None] = Queue()
        self._strange = ""  # what it said that no host agent says
        self._readers: list[threading.Thread] = []
        self._noise: deque[str] = deque(maxlen=MOST_NOISE_LINES)
        self._errors: deque[str] = deque(maxlen=MOST_NOISE_LINES)
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self.host.name

    def open(self, timeout_s: float = OPEN_S) -> Frame:
        """Log in and wait for the host agent's greeting, which is returned (see ``host_agent.introduction``).

        Raises:
            Unreachable: says why.
        """
        try:
            self._process = subprocess.Popen(
                host_agent_argv(self.host),
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
        if self._closed.is_set():  # somebody did not want to wait for it
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
                _has_ended(self._process, HANG_UP_S)  # its exit code says something
            self.close()
            if self._strange:
                raise Unreachable(self.name, "other", STRANGER, source=self._strange, hint=SAME_VERSION)
            raise unreachable(self.host, self._process.returncode, self.words())
        self.hello, self.ahead_s = hello, float(hello["time_s"]) - time.time()
        threading.Thread(target=self._beat, daemon=True).start()
        self._check()
        return hello

    def _check(self) -> None:
        version = self.hello.get("software", {}).get("yolofleet")
        if self.hello.get("protocol") != PROTOCOL:
            self.close()
            raise Unreachable(
                self.name,
                "other-version",
                f"has yolofleet {version}, and here is {__version__}: they do not understand each other",
                hint=SAME_VERSION,
            )
        if self.hello.get("platform") != "linux":
            self.close()
            raise Unreachable(
                self.name,
                "not-linux",
                f"runs {self.hello.get('platform')}; hosts of a fleet run Linux",
                hint="one machine alone needs no fleet: --device",
            )

    def ask(self, request: str, timeout_s: float = ASK_S, **arguments: Any) -> Any:
        """The answer to a request (``fleet/hosts/requests.py``, ``fleet/doctor/probes.py``). Any thread may ask.

        Raises:
            Refused: the host says why not.
            ClusterError: it is lost, does not answer in time, or answers something else.
        """
        with self._sending:
            self._asked += 1
            number = self._asked
        answer = self._replies[number] = Queue()
        try:
            if self._closed.is_set():
                raise ClusterError(f"{self.name} is lost", source=self.words() or None, hint=self._look)
            self._send({"type": "ask", "id": number, "request": request, "arguments": arguments})
            reply = answer.get(timeout=timeout_s)
        except Empty:
            raise ClusterError(
                f"{self.name} did not answer ({request}) within {timeout_s:.0f} s", hint=self._look
            ) from None
        finally:
            del self._replies[number]
        if not reply:
            raise ClusterError(
                f"{self.name}: the connection to it broke", source=self.words() or None, hint=self._look
            )
        if "error" in reply:
            raise Refused(f"{self.name}: {reply['error']}", source=f"request {request}", hint=self._look)
        if not fits(reply["value"], ANSWERS.get(request, A_PROBES)):
            self._strange = f"{request}: {json.dumps(reply['value'])[:200]}"
            self.close()
            raise ClusterError(f"{self.name} is lost: {STRANGER}", source=self._strange, hint=SAME_VERSION)
        return reply["value"]

    @property
    def _look(self) -> str:
        return f"look at that host: {'yolofleet doctor' if self.name == HERE else f'ssh {self.name}'}"

    def start(self, job: Frame) -> None:
        """Start a job (``host_agent.start``); what it says comes as frames."""
        self._send({"type": "start", "job": job})

    def stop(self, grace_s: float) -> None:
        """End the job: SIGTERM now, SIGKILL after ``grace_s``. The frame ``exit`` says when it is over."""
        self._send({"type": "stop", "grace_s": grace_s})

    def frames(self) -> Iterator[Frame]:
        """What arrives, until the connection ends (of a Remote with an inbox of its own)."""
        while True:
            _, frame = self.inbox.get()
            if frame["type"] == "gone":
                return
            yield frame

    def words(self) -> str:
        """Why the connection ended, as far as it is known: what ssh, the shell there or a stranger said."""
        strange = [f"{STRANGER}: {self._strange}"] if self._strange else []
        return "\n".join([*strange, *self._errors, *self._noise]).strip()

    def close(self, wait_s: float = 5.0) -> None:
        """End the connection. Everything that is started there ends with it, whether or not that is waited for."""
        self._closed.set()
        process = self._process
        if process is None:
            return
        assert process.stdin and process.stdout and process.stderr
        if not self.hello or self._strange or not self._sending.acquire(timeout=HANG_UP_S):
            wait_s = 0.0  # nothing there has to end first, or who sends is stuck
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
            if not reader.is_alive():  # else somebody whom we do not know holds its other end
                stream.close()

    # -- threads -----------------------------------------------------------------------------------

    def _send(self, message: Frame) -> None:
        """A connection that has ended is noticed by who reads."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with self._sending, suppress(OSError, ValueError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._send({"type": "beat"})

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        greeted = False
        with suppress(OSError, ValueError):
            while line := self._process.stdout.readline(MOST_FRAME_BYTES):
                self.heard_at_s = time.monotonic()
                frame = frame_of(line)
                kind = frame.get("type")
                if not greeted and kind != "hello":
                    self._noise.append(_said(line))
                elif not is_sound(frame) or (greeted and kind == "hello"):
                    self._strange = ascii(_said(line)[:200])
                    break
                elif kind == "hello":
                    greeted = True
                    self._greeted.put(frame)
                elif kind == "reply":
                    waiting = self._replies.get(frame["id"])
                    if waiting is not None:
                        waiting.put(frame)
                elif kind != "beat":
                    self._hand_over(frame)
        self._closed.set()
        for waiting in list(self._replies.values()):
            waiting.put({})
        if greeted:
            self.inbox.put((self, {"type": "gone"}))
        else:
            self._greeted.put(None)

    def _hand_over(self, frame: Frame) -> None:
        """When there is room: what comes too fast waits on its host, which leaves some out."""
        while self.inbox.qsize() >= MOST_WAITING and not self._closed.wait(0.01):
            self.heard_at_s = time.monotonic()  # there is more of it, unread
        self.inbox.put((self, frame))

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


def host_agent_argv(host: Host) -> list[str]:
    """The command that starts a host agent on a host."""
    command = module_argv("yolofleet.fleet.hosts.host_agent", python=host.python)
    if host.env:
        command = ["env", *(f"{name}={value}" for name, value in host.env.items()), *command]
    if host.name == HERE:
        return command
    return ["ssh", *SSH_OPTIONS, host.name, f"exec {shlex.join(command)}"]


def not_started(host: Host, problem: OSError) -> Unreachable:
    """Why ssh, or a host agent on this machine, cannot be started."""
    words = problem.strerror or str(problem)
    if problem.filename is None:  # it is there, but this machine has no room for one more
        what = f"no connection to it can be started here: {words}"
        many = problem.errno in (errno.EMFILE, errno.ENFILE)
        return Unreachable(
            host.name, "other", what, hint="allow more open files: ulimit -n 4096" if many else ""
        )
    what = f"cannot start {problem.filename}: {words}"
    if host.name == HERE:
        return Unreachable(host.name, "no-python", what, hint="say python: (fleet.yaml)")
    return Unreachable(host.name, "no-ssh", what, hint="install OpenSSH's client here")


SAME_VERSION = (
    "install the same version of yolofleet on every host, and let its shell print nothing after that"
)
REASONS = (  # words of ssh or the shell -> kind, what, hint; the first that fits
    ("could not resolve hostname", "unknown-host", "there is no host of that name",
     "check its spelling, /etc/hosts and ~/.ssh/config"),
    ("host identification has changed", "host-key", "its key is not the one that ssh knows",
     "was it installed anew? then: ssh-keygen -R {host}, and log in once with: ssh {host}"),
    ("host key verification failed", "host-key", "ssh does not know its key yet",
     "log in once, and confirm the key: ssh {host}"),
    ("permission denied", "key-refused", "it refuses the key (passwords are not asked for)",
     "ssh-copy-id {host}, or IdentityFile in ~/.ssh/config; this must work: ssh -oBatchMode=yes {host} true"),
    ("too many authentication failures", "key-refused", "it refuses the keys",
     "IdentityFile and IdentitiesOnly in ~/.ssh/config; this must work: ssh -oBatchMode=yes {host} true"),
    ("connection refused", "port-refused", "nobody listens on its ssh port",
     "is sshd running there, and Port in ~/.ssh/config right?"),
    ("no route to host", "no-route", "there is no way to it",
     "is it switched on, in this network, and not behind a firewall that rejects?"),
    ("network is unreachable", "no-route", "there is no way to its network", "check this machine's network (ip route)"),
    ("timed out", "time-out", "it does not answer",
     "is it switched on? a firewall may drop port 22; check with: ssh {host}"),
    ("no module named", "no-package", "{python} there has no yolofleet that can be started ({words})",
     "install yolofleet there, or say python: of an environment that has it (fleet.yaml)"),
    ("not found", "no-python", "there is no {python}", "say python: for this host (fleet.yaml)"),
    ("no such file", "no-python", "there is no {python}", "say python: for this host (fleet.yaml)"),
    ("connection reset", "closed", "it closed the connection", "its sshd log says why; check with: ssh {host}"),
    ("connection closed", "closed", "it closed the connection", "its sshd log says why; check with: ssh {host}"),
)  # fmt: skip


def unreachable(host: Host, code: int, words: str) -> Unreachable:
    """Why ssh, or the command behind it, ended with ``code`` before a host agent spoke."""
    said = words.lower()
    names = {
        "host": host.name,
        "python": host.python or sys.executable,
        "words": (words.splitlines() or [""])[-1],
    }
    for words_of_it, kind, what, hint in REASONS:
        if words_of_it in said:
            return Unreachable(
                host.name,
                kind,
                what.format(**names),
                source=f"ssh: {words}"[:2000],
                hint=hint.format(**names),
            )
    if code == SSH_FAILED and not said:
        return Unreachable(
            host.name,
            "closed",
            "the connection to it was lost before anything came",
            hint=f"is it on, and the network to it up? check with: ssh {host.name}",
        )
    return Unreachable(
        host.name,
        "other",
        f"no host agent could be started there (exit code {code})",
        source=words[-2000:],
        hint=f"this must work: ssh -oBatchMode=yes {host.name} {names['python']} -c 'import yolofleet'",
    )
