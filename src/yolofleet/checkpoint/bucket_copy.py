"""Copy a run folder to addresses in stores while the run goes on: the process ``python -m yolofleet.checkpoint.bucket_copy``.

It is a process of its own, so that training never waits for a store, and a killed worker leaves it time to copy the last state.
Its standard input has one line of JSON, the :class:`Order`; a line when the folder has the results so far, and a line when the run
has ended or failed. Within ``LAST_S`` the process then copies the rest and ends too. If the run failed or was killed, which the end of the input shows, the process does not
give its lease back, because the same command may start the run again. Each line of its standard output is a JSON list of a kind
and texts.

A state is copied after the results and weights, so a resumed run never has a state without the results before it. Older states
are deleted when a newer one is whole in the store. Files that grow, such as logs, are copied now and then, and at the end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from yolofleet.checkpoint.bucket_lease import RENEW_S, BucketLease, LeaseTaken
from yolofleet.checkpoint.names import NAME, step_of
from yolofleet.errors import ConfigError, StorageError, YolofleetError
from yolofleet.files.foreign import open_foreign
from yolofleet.files.object_writer import ObjectWriter, unchanging
from yolofleet.redaction import Redaction
from yolofleet.text import echo

POLL_S = 2.0
GROWING_S, GROWING_SHARE = (
    30.0,
    0.05,
)  # between two copies of a growing file: at least, and most share of the time for it
ATTEMPT_S = 5.0  # of tries for one object before the outage is told
LAST_S = 300.0  # for the rest after the run has ended
ENDED, FAILED = b"ended\n", b"failed\n"
COPIES_TO = "this run is copied to "
STATES, RESULTS = "checkpoints", "results.csv"
WITH_STATES = (
    "config.yaml",
    RESULTS,
    "weights",
)  # what is copied before a state; these files are replaced, and never grow
LEFT_OUT = (".before-", "-before-", ".request")  # in the names of what is no result of this run

Kind = Literal["ready", "refused", "note", "warning", "left"]


@dataclass(frozen=True)
class Target:
    """An address that gets copies.

    Attributes:
        states: also of the states of the run.
        continues: the run there is this one; else there must be none.
    """

    address: str
    states: bool
    continues: bool


@dataclass(frozen=True)
class Order:
    """What to copy. ``command``: see :class:`BucketLease`; ``keep``: number of states."""

    folder: str
    targets: list[Target]
    keep: int
    command: str

    def line(self) -> bytes:
        """Return the line that :meth:`parse` reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: str) -> Order:
        values = json.loads(line)
        return cls(**{**values, "targets": [Target(**target) for target in values["targets"]]})


def say(kind: Kind, *texts: str) -> None:
    """Send a message to the run."""
    with suppress(OSError):  # the run is gone
        echo(json.dumps([kind, *map(Redaction(os.environ), texts)]))


def _line() -> bytes:
    """Return the next line of standard input; b"" at its end. Read no further, so that ``select`` sees the next line."""
    line = b""
    while not line.endswith(b"\n") and (letter := os.read(0, 1)):
        line += letter
    return line


class Copier:
    """Copies a run folder to one target.

    Attributes:
        left: the number of files that the last pass has not copied.
    """

    def __init__(self, order: Order, target: Target) -> None:
        self.folder, self.keep, self.target = Path(order.folder), max(order.keep, 1), target
        self.store = ObjectWriter(target.address, ATTEMPT_S)
        self.lease = BucketLease(ObjectWriter(target.address, ATTEMPT_S), order.command)
        self.left = 0
        self._copied = dict[str, tuple[int, int, int]]()
        self._due_s = dict[str, float]()
        self._states = list[str]()  # in the store, in the order of their writing
        self._seen = dict[str, tuple[int, int, int]]()  # states of this folder
        self._newest = ""  # of them

    def begin(self) -> None:
        """Get the lease, and read what is there.

        Raises:
            ConfigError: there is another run, or another process continues this one. StorageError: the store refuses.
        """
        self.lease.claim(lambda text: say("note", text))
        there = self.store.objects()[0]
        if not self.target.continues and any(map(_is_of_a_run, there)):
            self.lease.renew(ends=True)
            raise ConfigError(
                f"{self.target.address} has a run already",
                hint=f"--resume {self.target.address} continues it; or name another address",
            )
        states = [
            Path(key) for key in there if key.startswith(f"{STATES}/") and NAME.fullmatch(Path(key).name)
        ]
        self._states = [str(path) for path in sorted(states, key=step_of)]

    def copy(self, *, is_last: bool) -> None:
        """Copy what has changed.

        Raises:
            LeaseTaken: another process continues the run. StorageError: the store refuses; the next pass tries again.
        """
        found = self._files()
        changed = {key: mark for key, mark in found.items() if self._copied.get(key) != mark}
        # after a rollback, the newest state is not that of the highest step
        new = {key: mark for key, mark in found.items() if _is_state(key) and self._seen.get(key) != mark}
        self._seen |= new
        self._newest = max(new, key=lambda key: step_of(Path(key)), default=self._newest)
        states = [self._newest] if self._newest in changed else []
        others = sorted(key for key in changed if not _is_state(key))
        if not is_last and not states:
            others = [key for key in others if time.monotonic() >= self._due_s.get(key, 0.0)]
        before = [key for key in others if key.split("/")[0] in WITH_STATES]
        order = [*before, *states, *(key for key in others if key not in before)]
        self.left = len(order)
        for key in order:
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                self._copy(key)
                self._copied[key] = changed[key]
                if _is_state(key):
                    self._prune(key)
            self.left -= 1

    def _copy(self, key: str) -> None:
        self.lease.guard()
        began_s, path = time.monotonic(), self.folder / key
        try:
            frozen = unchanging if _is_replaced(key) else _as_now
            with frozen(path) as file:
                self.store.put(file, key)
        except OSError as problem:
            if isinstance(problem, FileNotFoundError):
                raise
            raise StorageError(f"cannot read {path}: {problem.strerror or problem}") from None
        took_s = time.monotonic() - began_s
        self._due_s[key] = time.monotonic() + max(GROWING_S, took_s / GROWING_SHARE)

    def _prune(self, newest: str) -> None:
        self._states = [*(key for key in self._states if key != newest), newest]
        while len(self._states) > self.keep:
            self.lease.guard()
            self.store.remove(self._states.pop(0))

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Return the regular files of the run by their path in the folder, with values that change with the content."""
        found: dict[str, tuple[int, int, int]] = {}
        for root, folders, names in os.walk(self.folder):
            below = os.path.relpath(root, self.folder)
            folders[:] = [
                name for name in folders if _is_result(name) and (self.target.states or name != STATES)
            ]
            for name in filter(_is_result, names):
                path = Path(root, name)
                with suppress(OSError):
                    status = path.lstat()
                    if path.is_file() and not path.is_symlink():
                        key = name if below == "." else f"{below}/{name}"
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
    return _is_state(key) or key.split("/")[0] in WITH_STATES


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
    """All targets of a run."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.copiers: list[Copier] = []
        self._ended_s, self._gives_back = 0.0, True
        self._told = False
        self._over = threading.Event()

    def run(self) -> None:
        """Copy until the run has ended, then the rest."""
        try:
            for target in self.order.targets:
                copier = Copier(self.order, target)
                copier.begin()
                self.copiers.append(copier)
                echo(
                    f"{COPIES_TO}{target.address}", to=sys.stderr
                )  # the log; a later resume may copy there again
        except YolofleetError as problem:
            self._release()
            say("refused", type(problem).__name__, problem.what, problem.hint)
            return
        say("ready")
        if not _line():
            self._release()
            return
        threading.Thread(target=self._renew, daemon=True, name="lease").start()
        while not self._pass():
            self._ended_s = self._ended_s or self._wait()
        self._over.set()
        if self._gives_back:
            self._release()

    def _wait(self) -> float:
        """Wait for the next pass; return the time if the run has ended, else 0."""
        if not select.select([0], [], [], POLL_S)[0]:
            return 0.0
        self._gives_back = _line() == ENDED
        return time.monotonic()

    def _pass(self) -> bool:
        """Copy what has changed; return whether nothing is left to do."""
        is_last, problem = bool(self._ended_s), None
        for copier in self.copiers[:]:
            try:
                copier.copy(is_last=is_last)
            except LeaseTaken as taken:
                self._stop(copier, taken)
            except YolofleetError as refused:
                problem = refused
        if problem is None:
            if self._told:
                self._told = False
                say("note", "the copies in the store are complete again")
            return is_last
        if not self._told:
            self._told = True
            say("warning", f"{problem.what}: the run goes on, and its files are copied later")
        if is_last and time.monotonic() - self._ended_s > LAST_S:
            say("left", f"{sum(copier.left for copier in self.copiers)} files are not copied: {problem.what}")
            return True
        time.sleep(POLL_S if is_last else 0.0)
        return False

    def _stop(self, copier: Copier, taken: LeaseTaken) -> None:
        self.copiers.remove(copier)
        say("warning", f"{taken.what}; this process copies nothing more there")

    def _renew(self) -> None:
        """Renew the leases while a large file is copied. End this process at once when one is taken."""
        while not self._over.wait(RENEW_S):
            for copier in self.copiers[:]:
                try:
                    copier.lease.renew()
                except LeaseTaken as taken:
                    if copier in self.copiers:
                        self._stop(copier, taken)
                    if not self.copiers:
                        os._exit(0)  # an object that is being written must not replace one of the new holder
                except StorageError:
                    pass  # the copies fail as well, and tell

    def _release(self) -> None:
        for copier in self.copiers:
            with suppress(YolofleetError):
                copier.lease.renew(ends=True)


def main() -> int:
    """Do what the order on standard input says."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of the standard input ends this process
    with suppress(OSError, AttributeError):
        os.nice(5)
    Copying(Order.parse(_line().decode())).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
