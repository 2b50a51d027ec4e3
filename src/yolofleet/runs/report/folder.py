"""The folder of a run and the paths in it. No torch, because the launcher uses it too."""

from __future__ import annotations

import itertools
import json
import os
import platform
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from yolofleet.runs.checkpoint.names import EVENTS, LISTING, RESULTS, STATES
from yolofleet.storage.atomic import exclusive, lock_record, make_folder, writing
from yolofleet.storage.foreign import check_links
from yolofleet.storage.mirrored import address_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import screen_line

if TYPE_CHECKING:
    from yolofleet.config.schema import TrainConfig, ValConfig

# environment variable that a launcher sets: its command includes the hosts, or resumes the whole study
RESUME_COMMAND = "YOLOFLEET_RESUME_COMMAND"
# environment variable that a launcher sets: identifies its command, also when it starts the processes again
COMMAND_ID = "YOLOFLEET_COMMAND_ID"

# environment variable of a detached run: how many launchers it had, because each counts its attempts from the beginning
COMMAND_TERM = "YOLOFLEET_COMMAND_TERM"

POLL_S = 0.1
TAKE_OVER_S = 5.0  # an attempt before this one gets so long to end
REQUESTS = ("stop", "save")


class Inside:
    """The path of a file or folder in the folder of a run or a study, whose ``path`` it begins with."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, folder: Any, kind: type) -> Path:
        return Path(folder.path, *self._parts)


class Owner(NamedTuple):
    """The process that holds the lock of a run's folder, as its lock file names it; ``attempt`` is larger for a later attempt of a run."""

    run: str = ""  # unknown
    attempt: Sequence[int] = ()
    host: str = platform.node()
    process: int = 0

    def record(self) -> bytes:
        return json.dumps([*self._replace(process=os.getpid()), secrets.token_hex(8)]).encode()

    def follows(self, record: bytes) -> bool:
        """Return whether this process belongs to a later attempt of the run of the holder with this record."""
        with suppress(ValueError, TypeError, RecursionError):
            run, attempt, *_ = json.loads(record)  # another person may have written it
            return self.run == run != "" and tuple(self.attempt) > tuple(attempt)
        return False


def shown_holder(record: bytes) -> str:
    """Return the process that holds a lock, as its lock file names it; "" if it names none."""
    with suppress(ValueError, TypeError, RecursionError):
        _, _, host, process, _ = json.loads(record)
        return screen_line(f"process {process} on {host}", limit=100)
    return ""


@dataclass(frozen=True)
class RunFolder:
    """The folder ``runs/<verb>/<name>``, which has all files of a run.

    Only rank 0 creates it; other ranks get its path and may append to their own files under ``logs``.
    """

    path: Path
    # :meth:`create` has created it in this process, so it has no files of other runs
    is_new: bool = field(default=False, compare=False)
    # False: the states that this disk has here are of another run
    is_of_run: bool = field(default=True, compare=False)
    # under a user's torchrun, what identifies this attempt; see ``training/rank/users_torchrun_restarts.py``
    attempt: str = field(default="", compare=False)
    # options of the command that resumes the run; see ``config.stored.resume_options``
    resume_options: tuple[str, ...] = field(default=(), compare=False)
    # folders around it that :meth:`create` has created, the innermost first
    new_parents: tuple[Path, ...] = field(default=(), compare=False)

    config = Inside("config.yaml")
    results_csv = Inside(RESULTS)
    results_json = Inside("results.json")
    report = Inside("report.html")
    card = Inside("README.md")  # the model card of a training
    report_json = Inside("report.json")  # figures and pictures of the last validation
    weights = Inside("weights")
    checkpoints = Inside(STATES)
    listing = Inside(LISTING)  # of the data set
    plots = Inside("plots")
    logs = Inside("logs")
    # The configuration from our launcher to its workers, with the format of ``config``. It is a file of its own, because a
    # resumed run must keep its ``config`` until the new one is accepted.
    job = Inside("logs", "job.yaml")
    status = Inside("logs", "status.json")  # the state of the run now, which rank 0 writes every few seconds
    torchrun_agents = Inside("logs", "torchrun-agents.txt")  # ``attempt`` of the newest attempt
    launcher_events = Inside("logs", "launcher.events.jsonl")  # on its machine: why it started the run again
    ranks = Inside("logs", "ranks.json")  # what every rank does now, while a run of several ranks lasts

    @classmethod
    def create(
        cls,
        verb: str,
        *,
        project: Path | None = None,
        name: str = "exp",
        exist_ok: bool = False,
        may_link: bool = False,
    ) -> RunFolder:
        """Create ``project/name``, or name2, name3, ... if it exists; two runs never get the same folder.

        Args:
            exist_ok: use a folder that exists. may_link: symbolic links in it may lead out of it.
        Raises:
            ConfigError: ``name`` is empty or points outside of the project folder, or a link leads out of the folder.
            StorageError: the folder cannot be created.
        """
        project = project or Path("runs") / verb
        if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"--name {name!r} is not a folder name",
                hint="use letters, digits, - and _; --project sets the parent folder",
            )
        new_parents = tuple(folder for folder in (project, *project.parents) if not folder.exists())
        with writing(project / name):
            project.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = project / (name if number == 1 else f"{name}{number}")
                try:
                    # fails if it exists, so two runs that start together get two folders
                    path.mkdir(parents=True)
                except FileExistsError:
                    if exist_ok and path.is_dir():
                        if not may_link:
                            check_links(path)
                        return cls(path)
                    if exist_ok:  # a file of that name
                        raise
                    continue
                return cls(path, is_new=True, new_parents=new_parents)
            raise AssertionError("unreachable")

    @property
    def shown(self) -> str:
        """The path; the address, if the folder is the mirror of one."""
        return address_of(self.path) or str(self.path)

    @property
    def name(self) -> str:
        return self.shown.rpartition("/")[2] if "://" in self.shown else self.path.absolute().name

    @contextmanager
    def locked(self, wait_s: float = 0.0, owner: Owner | None = None) -> Iterator[str]:
        """Lock the folder for the block, and yield a note for the user, or "", because two processes that resume one run would corrupt its checkpoints.

        An earlier attempt of the same run may hold the lock on a host that is lost. It loses it then, and can write no more.

        Args:
            wait_s: for another process that holds the lock.
            owner: this process.
        Raises:
            ConfigError: another process holds the lock.
            StorageError: the lock file cannot be written.
        """
        lock, owner, began_s, lost = self.path / ".lock", owner or Owner(), time.monotonic(), list[bytes]()

        def takes_over(holder: bytes) -> bool:
            is_due = time.monotonic() - began_s >= min(wait_s, TAKE_OVER_S) and owner.follows(holder)
            lost[:] = [holder] if is_due else []
            return is_due

        with ExitStack() as stack:
            with writing(self.path):
                while not stack.enter_context(exclusive(lock, owner.record(), takes_over)):
                    if time.monotonic() - began_s >= wait_s:
                        holder = shown_holder(lock_record(lock))
                        raise ConfigError(
                            f"another process is writing into {self.path}{f': {holder}' if holder else ''}",
                            hint="wait until it has ended, or choose another --name",
                        )
                    stack.close()
                    time.sleep(POLL_S)
            shown = shown_holder(lost[0]) if lost else ""
            yield f"note: {shown} did not end in time: it lost {self.path} to this attempt" if lost else ""

    def discard_unless_used(self) -> None:
        """Delete the folder of a run that failed before it had a result, so that a wrong command leaves no folder.

        The folder stays if it existed before, or has any file with more than the error message. Errors of the deletion
        are ignored.
        """
        if not self.is_new:
            return
        with suppress(OSError):
            found = sorted(self.path.rglob("*"), reverse=True)  # the entries of a folder before the folder
            files = [path for path in found if not path.is_dir()]
            if any(path.parent != self.logs and path.name not in _OF_NO_RESULT for path in files):
                return
            for path in files:
                path.unlink()
            for path in found:
                if path.is_dir():
                    path.rmdir()
            for folder in (self.path, *self.new_parents):
                folder.rmdir()

    @property
    def resume_command(self) -> str:
        """The command that resumes this training run."""
        known = os.environ.get(RESUME_COMMAND)
        return known or shlex.join(["yolofleet", "train", "--resume", str(self.path), *self.resume_options])

    def log(self, rank: int) -> Path:
        """Return the text log of ``rank``."""
        return self.logs / f"rank-{rank}.log"

    def events(self, rank: int) -> Path:
        """Return the event file of a rank: ``events.jsonl`` for rank 0, beside its log for others.

        Each rank has its own, because on NFS lines that two hosts append can be mixed.
        """
        return self.path / EVENTS if rank == 0 else self.logs / f"rank-{rank}.events.jsonl"

    def request(self, kind: str) -> Path:
        """Return the file whose existence asks the run to ``stop`` or to ``save``; see ``REQUESTS``."""
        return self.logs / f"{kind}.request"

    def take_request(self, kind: str) -> bool:
        """Remove the file of :meth:`request`; return whether it existed."""
        try:
            self.request(kind).unlink()
        except OSError:
            return False
        return True

    def failure(self, rank: int) -> Path:
        """Return the JSON file with the reason if the worker of ``rank`` fails."""
        return self.logs / f"error-rank-{rank}.json"

    def discard_report(self) -> None:
        """Delete the report that an earlier run, or an earlier part of this run, has left; ignore errors."""
        for path in (self.report, self.report_json):
            with suppress(OSError):
                path.unlink()
        if self.card.exists():
            from yolofleet.runs.report.sealed import discard_unchanged  # few runs need it

            discard_unchanged(self.card)

    def make_tree(self) -> None:
        """Create the sub-folders of a training run. Raise StorageError if one cannot be created."""
        for folder in (self.weights, self.checkpoints, self.plots, self.logs):
            make_folder(folder)


def new_folder(settings: TrainConfig | ValConfig) -> RunFolder:
    """Make the folder that the settings name.

    Raises:
        ConfigError: ``--name`` is not a folder name. StorageError: the disk refused.
    """
    return RunFolder.create(
        settings.verb,
        project=settings.project,
        name=settings.name,
        exist_ok=settings.exist_ok,
        may_link=settings.linked_folders,
    )


_OF_NO_RESULT = ("config.yaml", EVENTS, ".lock", Path(LISTING).name)
