"""torchrun's agent for all attempts of a run, in one process of this host. Standard library alone; Linux.

A run that goes on after a failure is started again: an attempt.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from yolofleet.hosts.job import SAVING_S, StoreEnd
from yolofleet.system.children import die_with, module_argv
from yolofleet.system.proc import children

END_S = 10.0  # for the process and its fork server to end; usually much less


class ServedAgent:
    """The process that runs torchrun's agent for one attempt after another (``parallel/torchrun_agent.py --serve``).

    It has the part of ``subprocess.Popen``'s interface that says how the current attempt goes on.

    Args:
        environment: of the process and of all workers.
        output, log: descriptors or files of standard output and standard error.
    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], output: int | None, log: IO[bytes]) -> None:
        self._channel, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )  # keeps messages apart
        with theirs:
            self._process = subprocess.Popen(
                module_argv(
                    "yolofleet.parallel.torchrun_agent",
                    "--serve",
                    str(theirs.fileno()),
                    environment[SAVING_S],
                ),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
                pass_fds=(theirs.fileno(),),
            )
        self._channel.setblocking(False)
        self.is_ready = False  # it has loaded everything
        self._has_hung_up = False
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the process can take another attempt."""
        return self._process.poll() is None

    def begin(self, arguments: Sequence[str], store: StoreEnd) -> None:
        """Start an attempt.

        Args:
            arguments: of torchrun.
            store: with the socket of the run's store if this host owns it.
        """
        self.returncode = None
        message = json.dumps({"arguments": list(arguments)}).encode()
        with suppress(OSError):  # it has died, and poll() says so
            socket.send_fds(self._channel, [message], [] if store.listener is None else [store.listener])

    def poll(self) -> int | None:
        """Return the exit code of the attempt; None while it runs."""
        if self.returncode is None:
            self.read()
        return self.returncode

    def read(self) -> None:
        """Take the messages of the process."""
        with suppress(OSError):  # BlockingIOError: no message has arrived
            while answer := self._channel.recv(1 << 10):
                message = json.loads(answer)
                self.is_ready = self.is_ready or "ready" in message
                self.returncode = message.get("code", self.returncode)
            self._has_hung_up = True
        if self.returncode is None:
            self.returncode = self._process.poll()

    def terminate(self) -> None:
        """Ask the attempt to end: its workers save, and stop."""
        self._process.terminate()

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code of the attempt once it has ended. Raise ``subprocess.TimeoutExpired``."""
        while (code := self.poll()) is None:
            if self._has_hung_up:
                return self._process.wait(timeout_s)
            if not select.select([self._channel], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("agent", timeout_s or 0.0)
        return code

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def processes(self) -> list[int]:
        """Return this process and those that it keeps for the next attempt: the fork server and its tracker."""
        return [self.pid, *children(self.pid)] if self.lives else []

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()
        self._process.wait()
