"""The copies of a run in stores (``--checkpoint-to``, ``--results-to``), as rank 0 starts and ends them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue

from yolofleet.checkpoint.bucket_copy import COPIES_TO, ENDED, FAILED, Kind, Order, Target
from yolofleet.config.resolve import FIRST_START, Resolved
from yolofleet.config.resume import COPIES, is_address
from yolofleet.config.schema import TrainConfig
from yolofleet.errors import ClusterError, ConfigError, DeviceError, Stopped, StorageError, YolofleetError
from yolofleet.files.atomic import open_append
from yolofleet.files.foreign import read_foreign_text
from yolofleet.parallel.world import World
from yolofleet.rank.folder import torchrun_agent
from yolofleet.report.console import NullConsole
from yolofleet.report.folder import COMMAND_ID, RunFolder
from yolofleet.system.children import start_module
from yolofleet.train.stored_run import bring_results

ROUND_S = 5.0  # ranks meet after this time, so that no collective times out while rank 0 waits
TASK = "copying"
LOG, MAX_LOG_BYTES = "copies.log", 16 << 20
FAILURES = {"ConfigError": ConfigError, "StorageError": StorageError}


@contextmanager
def copied_run(
    resolved: Resolved[TrainConfig], world: World, folder: RunFolder, console: NullConsole
) -> Iterator[None]:
    """Copy the run folder of rank 0 while the block runs, and the rest after it. Collective: every rank.

    Raises:
        ConfigError: an address has another run, or another process continues this one.
        StorageError: a store refuses, or some files are not copied when the run has ended.
    """
    targets = targets_of(resolved, folder, is_restart=world.restarts > 0)
    copies = Copies(resolved, targets, folder, console) if world.is_main else None
    _meet(world, copies, "ready")
    if copies is not None:
        if is_address(resolved.value.resume) and not world.restarts:
            with world.activity.doing(TASK):
                bring_results(resolved.value.resume, folder.path)
        copies.begin()
    try:
        yield
    except Stopped:
        with suppress(StorageError):  # it was told; the state is on the disk
            _end(world, copies)
        raise
    except BaseException as problem:
        if copies is not None:
            is_over = isinstance(problem, YolofleetError) and not isinstance(
                problem, ClusterError | DeviceError
            )
            copies.end(ENDED if is_over else FAILED, is_alone=True)
        raise
    _end(world, copies)


def targets_of(resolved: Resolved[TrainConfig], folder: RunFolder, *, is_restart: bool) -> list[Target]:
    """Return the addresses that get copies of the run; ``is_restart``: a launcher has started the processes again."""
    config, found, before = resolved.value, list[Target](), list[str]()
    if config.resume:
        with suppress(OSError, ValueError):
            before = read_foreign_text(folder.logs / LOG, limit_bytes=MAX_LOG_BYTES).splitlines()
    for name in COPIES:
        if address := getattr(config, name).removesuffix("/"):
            continues = is_restart or address == config.resume or resolved.sources[name] == FIRST_START
            continues |= COPIES_TO + address in before
            found.append(Target(address, name == "checkpoint_to", continues))
    return found


def _end(world: World, copies: Copies | None) -> None:
    if copies is not None:
        copies.end(ENDED)
    _meet(world, copies, "ended")


def _meet(world: World, copies: Copies | None, state: str) -> None:
    """Wait until the process that copies has come to a state. Collective: every rank. Raises its error, here or on rank 0."""
    problem: YolofleetError | None = None
    with world.activity.doing(TASK):
        while True:
            answer = b""
            if copies is not None:
                try:
                    answer = b"there" if copies.wait_for(state, ROUND_S) else b"wait"
                except YolofleetError as error:
                    problem, answer = error, b"failed"
            answer = world.broadcast_bytes(answer)
            if answer != b"wait":
                break
    if problem is not None:
        raise problem
    if answer == b"failed":
        raise ClusterError("rank 0 could not copy the run", hint="see the error that rank 0 reports")


class Copies:
    """The process that copies, and what it says. Raises StorageError if it cannot be started."""

    def __init__(
        self, resolved: Resolved[TrainConfig], targets: list[Target], folder: RunFolder, console: NullConsole
    ) -> None:
        self.folder, self.console = folder, console
        self._names = ", ".join(target.address for target in targets)
        self._said: Queue[list[str]] = Queue()
        self._left, self._is_alone, self._is_told = "", False, False
        command = os.environ.get(COMMAND_ID) or torchrun_agent() or secrets.token_hex(8)
        order = Order(str(folder.path.resolve()), targets, resolved.value.keep_last, command)
        try:
            with open_append(folder.logs / LOG) as log:
                self._process = start_module(
                    "yolofleet.checkpoint.bucket_copy",
                    environment=os.environ,
                    output=subprocess.PIPE,
                    errors=log,
                    stdin=subprocess.PIPE,
                    has_own_session=True,
                )
            self._write(order.line())
        except OSError as problem:
            raise StorageError(f"cannot start the process that copies the run: {problem}") from None
        threading.Thread(target=self._listen, daemon=True, name="copies").start()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Show what the process says while the run goes on."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind: Kind
            kind, *texts = json.loads(line)
            if kind in ("note", "warning"):
                if not self._is_alone:
                    (self.console.note if kind == "note" else self.console.warn)(texts[0])
            elif kind == "left":
                self._left = texts[0]
            else:
                self._said.put([kind, *texts])
        code = self._process.wait()
        if code and not self._left:
            self._left = f"the process that copies ended with code {code} ({self.folder.logs / LOG})"
            self.console.warn(f"{self._left}: nothing more is copied to {self._names}")
        self._said.put(["ended"])

    def wait_for(self, state: str, timeout_s: float) -> bool:
        """Return whether the process has come to a state.

        Raises:
            ConfigError, StorageError: it cannot begin, or it has ended before it copied everything.
        """
        try:
            kind, *texts = self._said.get(timeout=timeout_s)
        except Empty:
            if state == "ended" and not self._is_told:
                self._is_told = True
                self.console.note(f"the rest of the files is copied to {self._names}")
            return False
        if kind == "refused":
            name, what, hint = texts
            raise FAILURES.get(name, StorageError)(what, hint=hint)
        if kind == "ended" and (self._left or state != "ended"):
            raise StorageError(
                f"the copies of the run are not complete: {self._left}",
                hint=f"all files are in {self.folder.path}; {self.folder.resume_command} copies the rest",
            )
        return kind == state

    def begin(self) -> None:
        """Let the process copy what is in the folder."""
        self._write(b"begin\n")

    def end(self, how: bytes, *, is_alone: bool = False) -> None:
        """Say that the run has ENDED or FAILED; ``is_alone``: nobody waits for the rest of the copies, or shows messages."""
        self._is_alone = is_alone
        self._write(how)
