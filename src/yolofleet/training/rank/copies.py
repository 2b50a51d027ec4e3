"""The copies of a run in a store (``--checkpoint-to``), as rank 0 starts and ends them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, Queue

from yolofleet.config.resolve import FIRST_START, Resolved
from yolofleet.config.schema import TrainConfig
from yolofleet.config.stored.resume_options import is_address
from yolofleet.runs.checkpoint.bucket_copy import BEGIN, COPIES_TO, ENDED, FAILED, LAST_S, LOG, Order
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import COMMAND_ID, RunFolder
from yolofleet.storage.atomic import open_append
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.errors import (
    ClusterError,
    ConfigError,
    DeviceError,
    Stopped,
    StorageError,
    YolofleetError,
)
from yolofleet.support.system.children import start_module
from yolofleet.training.parallel.world import World, main_does
from yolofleet.training.resume import bring_results

TELL_S = 5.0  # until the user reads that the run waits for its copies
STOP_S = 60.0  # a run that is asked to stop waits no longer; the process goes on for LAST_S
# without a word from the process, which says so when it has copied a file or renewed a lease
SILENT_S = LAST_S + 120.0
TASK = "copying"
HAS_RESULTS = "this folder has all results of "  # in the log, with the address of the run
MAX_LOG_BYTES = 16 << 20
ERRORS = {"ConfigError": ConfigError, "StorageError": StorageError}


@contextmanager
def copied_run(resolved: Resolved[TrainConfig], world: World, folder: RunFolder) -> Iterator[None]:
    """Copy the run folder of rank 0 while the block runs, and the rest after it. Collective: every rank.

    Raises:
        ConfigError: an address has another run, or another process continues this one.
        StorageError: a store refuses, or some files are not copied when the run has ended.
    """
    copies: CopyingProcess | None = None

    def begin() -> None:
        nonlocal copies
        resume, is_restart = resolved.value.resume, world.restarts > 0
        address = resume if is_address(resume) else resolved.value.checkpoint_to if is_restart else ""
        address = address.removesuffix("/")
        # a restart asks the store only for what is not here: it may be down now
        has_results = is_restart and HAS_RESULTS + address in _log_of_copies(folder)
        copies = CopyingProcess(resolved, folder, world.console, is_restart=is_restart)
        try:
            copies.wait_until_ready()
            if address and not has_results:
                bring_results(address, folder.path, is_restart=is_restart)
            with suppress(OSError), open_append(folder.logs / LOG) as log:
                log.write(f"{HAS_RESULTS}{copies.address}\n".encode())
        except BaseException:
            copies.tell(ENDED)  # without BEGIN nothing is copied
            raise
        copies.tell(BEGIN)

    main_does(world, TASK, begin)
    try:
        yield
    except BaseException as problem:
        is_final = isinstance(problem, YolofleetError) and not isinstance(problem, ClusterError | DeviceError)
        if copies is not None:
            copies.tell(ENDED if is_final else FAILED)
        if isinstance(problem, Stopped):  # on all ranks
            with suppress(StorageError, ClusterError):  # it was told; the state is on the disk
                main_does(world, TASK, partial(copies.wait_until_ended, STOP_S) if copies else None)
        raise
    if copies is not None:
        copies.tell(ENDED)
    main_does(world, TASK, copies.wait_until_ended if copies else None)


def _log_of_copies(folder: RunFolder) -> list[str]:
    """Return the lines of the log of copies: ``COPIES_TO`` and ``HAS_RESULTS`` with addresses, and what libraries print."""
    with suppress(OSError, ValueError):
        return read_foreign_text(folder.logs / LOG, limit_bytes=MAX_LOG_BYTES).splitlines()
    return []


class CopyingProcess:
    """The process that copies to ``address``, and what it says; ``is_restart``: a launcher has started the processes again.

    Raises StorageError: the process cannot be started.
    """

    def __init__(
        self, resolved: Resolved[TrainConfig], folder: RunFolder, console: NullConsole, *, is_restart: bool
    ) -> None:
        self.folder, self.console = folder, console
        config = resolved.value
        self.address = address = config.checkpoint_to.removesuffix("/")
        is_current = is_restart or address == config.resume
        before = _log_of_copies(folder) if config.resume else []
        was_ours = resolved.sources["checkpoint_to"] == FIRST_START or COPIES_TO + address in before
        self._said: Queue[list[str]] = Queue()
        self._missing, self._heard_s = "", time.monotonic()
        command = os.environ.get(COMMAND_ID) or folder.attempt.partition("\n")[0] or secrets.token_hex(8)
        order = Order(
            str(folder.path.resolve()),
            address,
            continues=is_current or was_ours,
            is_current=is_current,
            keep=config.keep_last,
            command=command,
            is_restart=is_restart,
        )
        try:
            with open_append(folder.logs / LOG) as log:
                self._process = start_module(
                    "yolofleet.runs.checkpoint.bucket_copy",
                    environment=os.environ,
                    output=subprocess.PIPE,
                    errors=log,
                    stdin=subprocess.PIPE,
                    has_own_session=True,
                )
            self.tell(order.line())
        except OSError as problem:
            raise StorageError(f"cannot start the process that copies the run: {problem}") from None
        threading.Thread(target=self._listen, daemon=True, name="copies").start()

    def tell(self, line: bytes) -> None:
        """Send a line: BEGIN, ENDED or FAILED."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Show what the process says while the run goes on."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                kind, *texts = json.loads(line)
            except ValueError:  # a library has printed it
                continue
            self._heard_s = time.monotonic()
            if kind == "note":
                self.console.note(texts[0])
            elif kind == "warning":
                self.console.warn(texts[0])
            elif kind == "missing":
                self._missing = texts[0]
            elif kind in ("ready", "refused"):
                self._said.put([kind, *texts])
        code = self._process.wait()
        if code and not self._missing:
            self._missing = f"the process that copies ended with code {code} ({self.folder.logs / LOG})"
            self.console.warn(f"{self._missing}: nothing more is copied to {self.address}")
        self._said.put(["ended"])

    def wait_until_ready(self) -> None:
        """Wait until the process may write. Raises ConfigError, StorageError."""
        kind, *texts = self._said.get()
        if kind == "refused":
            name, what, hint = texts
            raise ERRORS.get(name, StorageError)(what, hint=hint)
        if kind == "ended":
            raise StorageError(self._missing or "the process that copies the run has ended")

    def wait_until_ended(self, most_s: float = float("inf")) -> None:
        """Wait until everything is copied. Raise StorageError if something is not."""
        began_s, is_told = time.monotonic(), False
        while True:
            with suppress(Empty):
                self._said.get(timeout=1.0)
                break
            waited_s = time.monotonic() - began_s
            if waited_s > TELL_S and not is_told:
                is_told = True
                self.console.note(f"the rest of the files is copied to {self.address}")
            if waited_s > most_s or time.monotonic() - max(self._heard_s, began_s) > SILENT_S:
                self._missing = self._missing or "the store has not taken the last files in time"
                break
        if self._missing:
            raise StorageError(
                f"the copies of the run are not complete: {self._missing}",
                hint=f"all files are in {self.folder.path}; {self.folder.resume_command} copies the rest",
            )
