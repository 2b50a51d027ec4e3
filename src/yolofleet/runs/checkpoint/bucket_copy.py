"""Copy a run folder to an address in a store while the run goes on: the process ``python -m yolofleet.runs.checkpoint.bucket_copy``.

It is a process of its own, so that training never waits for a store, and a killed worker leaves it time to copy the last state.
Its standard input has one line of JSON, the :class:`Order`; BEGIN when the folder has the results so far, and ENDED or FAILED at the
end of the run. Then the process copies the rest and ends too, at the latest after ``LAST_S`` without progress. If the run failed or
was killed, which the end of the input shows, the process does not give its lease back, because the same command may start the run
again. Each line of its standard output is a JSON list of a kind and texts.

A state is copied after the results and weights, so a resumed run never has a state without the results before it. Older states
are deleted when a newer one is whole in the store. Files that grow, such as logs, are copied now and then, and at the end.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from yolofleet.runs.checkpoint.bucket_lease import LEASE_S, RENEW_S, BucketLease, LeaseTaken
from yolofleet.runs.checkpoint.names import EVENTS, LISTING, NAME, RESULTS, STATES, step_of
from yolofleet.storage.foreign import open_foreign
from yolofleet.storage.object_writer import ObjectWriter, unchanging
from yolofleet.support.errors import ConfigError, StorageError, YolofleetError
from yolofleet.support.redaction import Redaction
from yolofleet.support.text import echo, quoted

POLL_S = 2.0
GROWING_S, GROWING_SHARE = 30.0, 0.05  # between two copies of a growing file; at most this share of the time
ATTEMPT_S = 5.0  # of tries for one object before the outage is told
LAST_S = 300.0  # without any progress, after the run has ended
LOG = "copies.log"  # what the process and its libraries print
BEGIN, ENDED, FAILED = b"begin\n", b"ended\n", b"failed\n"
COPIES_TO = "this run is copied to "
LEFT_OUT = ("-before-", ".request", LOG)  # in the names of what is no result of this run

Kind = Literal["ready", "refused", "note", "warning", "alive", "missing"]


@dataclass(frozen=True)
class Order:
    """What to copy."""

    folder: str
    address: str
    continues: bool  # the run at the address is this one; else there must be none
    is_current: bool  # nothing there is later than the folder, or the run goes on from there
    keep: int  # number of states
    command: str  # see :class:`BucketLease`
    # the processes of a run that goes on were started again. If the store is down, copying begins later. If
    # another command has continued the run meanwhile, a later state there is not replaced
    is_restart: bool = False

    def line(self) -> bytes:
        """Return the line that ``main`` reads."""
        return json.dumps(asdict(self)).encode() + b"\n"


_saying = threading.Lock()


def say(kind: Kind, *texts: str) -> None:
    """Send a message to the run."""
    with _saying, suppress(OSError):  # the run is gone
        echo(json.dumps([kind, *map(Redaction(os.environ), texts)]))


def _line() -> bytes:
    """Return the next line of standard input; b"" at its end. Read no further, so that ``select`` sees the next line."""
    line = b""
    while not line.endswith(b"\n") and (letter := os.read(0, 1)):
        line += letter
    return line


class Copier:
    """Copies a run folder to its address."""

    def __init__(self, order: Order) -> None:
        self.order, self.folder = order, Path(order.folder)
        self.store = ObjectWriter(order.address, ATTEMPT_S)
        self.lease = BucketLease(self.store, order.command)
        self.has_begun = False  # it has the lease, and knows what is there
        self.missing = self.copied = 0  # files that the last pass has not copied; that all passes have copied
        self._marks = dict[str, tuple[int, int, int]]()  # of what is copied
        self._due_s = dict[str, float]()
        self._states = list[str]()  # in the store, in the order of their writing
        self._seen = dict[str, tuple[int, int, int]]()  # states of this folder
        self._newest = ""  # of them
        self._unreadable = set[str]()
        self._again_s = math.inf

    def begin(self) -> None:
        """Get the lease, and read what is there.

        Raises:
            ConfigError: there is another run, or a later state of this one, or another process continues this one.
            StorageError: the store refuses.
        """
        self.store.check_links()
        self.lease.claim(lambda text: say("note", text))
        try:
            self._check()
        except YolofleetError:
            with suppress(YolofleetError):  # the store may be down; then the next holder waits
                self.lease.renew(ended=True, command=self.lease.command_before)
            raise
        if self.lease.took_over:  # what the last holder was writing may still come
            self._again_s = time.monotonic() + LEASE_S
        self.has_begun = True
        # in the log: a later resume may copy there again
        echo(f"{COPIES_TO}{self.order.address}", to=sys.stderr)

    def _check(self) -> None:
        there, order = self.store.objects()[0], self.order
        self._states = sorted(filter(_is_state, there), key=_step)
        if not order.continues and any(map(_is_of_a_run, there)):
            raise ConfigError(
                f"{order.address} has a run already",
                hint=f"--resume {quoted(order.address)} continues it; or name another address",
            )
        here = max(map(_step, filter(_is_state, self._files())), default=-1)
        is_current = order.is_current and (self.lease.follows_own or not order.is_restart)
        if self._states and not is_current and _step(self._states[-1]) > here:
            raise ConfigError(
                f"{order.address} has a later state than {self.folder}: of step {_step(self._states[-1])}, not {here}",
                hint=f"--resume {quoted(order.address)} goes on from there",
            )

    def copy(self, *, is_last: bool) -> None:
        """Copy what has changed; begin first if that has failed.

        Raises:
            LeaseTaken: another process continues the run. ConfigError: see :meth:`begin`. StorageError: the store refuses;
                the next pass tries again.
        """
        if not self.has_begun:
            self.missing = len(self._files())
            self.begin()
        if time.monotonic() >= self._again_s:
            self._again_s = math.inf
            self._marks.clear()
            left = sorted(filter(_is_state, self.store.objects()[0]), key=_step)
            self._states = [*(key for key in left if key not in self._states), *self._states]
        found = self._files()
        changed = {key: mark for key, mark in found.items() if self._marks.get(key) != mark}
        # after a rollback, the newest state is not that of the highest step
        new = {key: mark for key, mark in found.items() if _is_state(key) and self._seen.get(key) != mark}
        self._seen |= new
        self._newest = max(new, key=_step, default=self._newest)
        states = [self._newest] if self._newest in changed else []
        before = sorted(key for key in changed if _is_replaced(key) or (states and key == EVENTS))
        now_s = time.monotonic()
        others = sorted(
            key
            for key in changed
            if key not in before and not _is_state(key) and (is_last or now_s >= self._due_s.get(key, 0.0))
        )
        order = [*before, *states, *others]
        self.missing = len(order)
        for key in order:
            try:
                self._copy(key)
                self._marks[key] = changed[key]
                self.copied += 1
                if _is_state(key):
                    self._prune(key)
                say("alive")
            except FileNotFoundError:  # it was deleted meanwhile
                pass
            except OSError as problem:
                if key not in self._unreadable:
                    self._unreadable.add(key)
                    say("warning", f"{self.folder / key} is not copied: {problem.strerror or problem}")
            self.missing -= 1

    def _copy(self, key: str) -> None:
        self.lease.guard()
        began_s = time.monotonic()
        frozen = unchanging if _is_state(key) or _is_replaced(key) else _as_now
        with frozen(self.folder / key) as file:
            self.store.put(file, key)
        took_s = time.monotonic() - began_s
        self._due_s[key] = time.monotonic() + max(GROWING_S, took_s / GROWING_SHARE)

    def _prune(self, newest: str) -> None:
        self._states = [*(key for key in self._states if key != newest), newest]
        while len(self._states) > max(self.order.keep, 1):
            self.lease.guard()
            self.store.remove(self._states.pop(0))

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Return the regular files of the run by their path in the folder, with values that change with the content."""
        found: dict[str, tuple[int, int, int]] = {}
        # states first: what belongs to a state is written before it
        for top in (self.folder / STATES, self.folder):
            for root, below, names in os.walk(top):
                below[:] = [name for name in below if _is_result(name) and name != STATES]
                for name in filter(_is_result, names):
                    path = Path(root, name)
                    with suppress(OSError):
                        status = path.lstat()
                        if stat.S_ISREG(status.st_mode):
                            key = path.relative_to(self.folder).as_posix()
                            found[key] = (status.st_size, status.st_mtime_ns, status.st_ino)
        return found


def _is_result(name: str) -> bool:
    return (
        not name.startswith(".")
        and name.isprintable()
        and "\\" not in name
        and not any(p in name for p in LEFT_OUT)
    )


def _is_state(key: str) -> bool:
    folder, _, name = key.partition("/")
    return folder == STATES and NAME.fullmatch(name) is not None


def _is_of_a_run(key: str) -> bool:
    """Return whether a file shows that a run has begun to train, and has not only failed at its start."""
    return key == RESULTS or _is_state(key)


def _is_replaced(key: str) -> bool:
    """Return whether each new content is another file, written before the state that it belongs to."""
    return key.split("/")[0] in ("config.yaml", RESULTS, "weights") or key == LISTING


def _step(key: str) -> int:
    return step_of(Path(key))


@contextmanager
def _as_now(path: Path) -> Iterator[Path]:
    """Yield a copy of the present content of a file that may grow. Raises OSError."""
    with (
        tempfile.NamedTemporaryFile(prefix="yolofleet-copy-") as copy,
        open_foreign(path, follow=False) as file,
    ):
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            copy.write(piece)
            left -= len(piece)
        copy.flush()
        yield Path(copy.name)


class Copying:
    """The copying of a run until its end."""

    def __init__(self, order: Order) -> None:
        self.copier = Copier(order)
        self._ending, self._gives_back = False, True
        self._outage_is_told = self._is_refused = False
        self._copied, self._progress_s = 0, 0.0
        self._over = threading.Event()

    def run(self) -> None:
        """Copy until the run has ended, then the rest."""
        threading.Thread(target=self._renew, daemon=True, name="lease").start()
        try:
            self.copier.begin()
        except YolofleetError as problem:
            if not (self.copier.order.is_restart and isinstance(problem, StorageError)):
                self._over.set()
                say("refused", type(problem).__name__, problem.what, problem.hint)
                return
        say("ready")
        if _line() == BEGIN:
            while not self._pass():
                if not self._ending and self._wait():
                    self._ending, self._progress_s = True, time.monotonic()
        self._over.set()
        if self._gives_back:
            self._renew_once(ended=True)

    def _wait(self) -> bool:
        """Wait for the next pass; return whether the run has ended."""
        if not select.select([0], [], [], POLL_S)[0]:
            return False
        self._gives_back = _line() == ENDED
        if not self._gives_back:
            self._renew_once(failed=True)
        return True

    def _pass(self) -> bool:
        """Copy what has changed; return whether nothing is left to do."""
        is_last = self._ending
        if self._is_refused:
            return is_last
        try:
            self.copier.copy(is_last=is_last)
        except (LeaseTaken, ConfigError) as refused:
            self._stop(refused)
        except StorageError as problem:
            return self._wait_out(problem, is_last=is_last)
        if self._outage_is_told and not self._is_refused:
            self._outage_is_told = False
            say("note", "the copies in the store are complete again")
        return is_last

    def _wait_out(self, problem: StorageError, *, is_last: bool) -> bool:
        """Tell an outage once; return whether it has lasted too long after the end of the run."""
        if not self._outage_is_told:
            self._outage_is_told = True
            say("warning", f"{problem.what}: the run goes on, and its files are copied later")
        if self.copier.copied != self._copied:
            self._copied, self._progress_s = self.copier.copied, time.monotonic()
        if is_last and time.monotonic() - self._progress_s > LAST_S:
            say("missing", f"{self.copier.missing} files are not copied: {problem.what}")
            return True
        time.sleep(POLL_S if is_last else 0.0)
        return False

    def _stop(self, refused: YolofleetError) -> None:
        if not self._is_refused:
            self._is_refused = True
            say("warning", f"{refused.what}; this process copies nothing more there")
            say("missing", refused.what)

    def _renew(self) -> None:
        """Renew the lease while a large file is copied. End this process at once when it is taken."""
        while not self._over.wait(RENEW_S):
            had = not self._is_refused
            self._renew_once()
            if had and self._is_refused:
                os._exit(0)  # an object that is being written must not replace one of the new holder

    def _renew_once(self, **state: bool) -> None:
        if self.copier.has_begun and not self._is_refused:
            try:
                self.copier.lease.renew(**state)
                say("alive")
            except LeaseTaken as taken:
                self._stop(taken)
            except StorageError:
                pass  # the copies fail as well, and tell


def main() -> int:
    """Do what the order on standard input says."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of the standard input ends this process
    with suppress(OSError, AttributeError):
        os.nice(5)
    Copying(Order(**json.loads(_line()))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
