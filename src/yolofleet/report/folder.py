"""The folder that a run leaves behind, and how text gets into it. No torch: the launcher uses it too."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from yolofleet.errors import ConfigError
from yolofleet.files.atomic import make_folder, storage_error
from yolofleet.files.lock import exclusive

RESUME_COMMAND = (
    "YOLOFLEET_RESUME_COMMAND"  # of the environment: from a launcher that knows better than the run
)


@dataclass(frozen=True)
class RunFolder:
    """``runs/<verb>/<name>``: where everything of a run lies.

    Only rank 0 makes it; other ranks get its path and may append to their own files under ``logs``.

    Attributes:
        is_new: :meth:`create` made it just now; nobody else has put anything into it.
    """

    path: Path
    is_new: bool = field(default=False, compare=False)

    @classmethod
    def create(
        cls, verb: str, *, project: Path | None = None, name: str = "exp", exist_ok: bool = False
    ) -> RunFolder:
        """Make ``project/name``, or name2, name3, ... when taken; two runs never get the same one.

        Raises:
            ConfigError: ``name`` is empty or leaves the project folder.
            StorageError: the disk refused.
        """
        project = project or Path("runs") / verb
        if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"--name {name!r} is not a folder name",
                hint="letters, digits, - and _; --project sets the parent",
            )
        try:
            project.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = project / (name if number == 1 else f"{name}{number}")
                try:
                    path.mkdir(parents=True)  # exclusive: the first of two racing runs wins
                except FileExistsError:
                    if exist_ok and path.is_dir():
                        return cls(path)
                    if exist_ok:  # a file of that name
                        raise
                    continue
                return cls(path, is_new=True)
            raise AssertionError("unreachable")
        except OSError as problem:
            raise storage_error(problem, project / name) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder inside the block: two processes that continue one run would spoil its states.

        Raises:
            ConfigError: another process holds it.
            StorageError: the disk refused.
        """
        with ExitStack() as stack:
            try:
                is_mine = stack.enter_context(exclusive(self.path / ".lock"))
            except OSError as problem:
                raise storage_error(problem, self.path) from None
            if not is_mine:
                raise ConfigError(
                    f"another process writes into {self.path} at this moment",
                    hint="wait until it has ended, or choose another --name",
                )
            yield

    def discard_unless_used(self) -> None:
        """Take back the folder of a run that failed before it had a result: a mistake in a command leaves
        nothing behind. Only files that say no more than the message are deleted; if there is any other, or the
        folder was there before, everything stays. What the system refuses to delete stays too.
        """
        if not self.is_new:
            return
        with suppress(OSError):
            found = sorted(self.path.rglob("*"), reverse=True)  # what is inside a folder before the folder
            files = [path for path in found if not path.is_dir()]
            if any(path.parent != self.logs and path.name not in _OF_NO_RESULT for path in files):
                return
            for path in files:
                path.unlink()
            for path in found:
                if path.is_dir():
                    path.rmdir()
            self.path.rmdir()

    @property
    def resume_command(self) -> str:
        """What continues this training run from what it has saved."""
        known = os.environ.get(RESUME_COMMAND)
        return known or shlex.join(["yolofleet", "train", "--resume", str(self.path)])

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def job(self) -> Path:
        """What our launcher tells its workers: the same text as ``config``, which a resumed run keeps until
        it is known that it can be resumed."""
        return self.logs / "job.yaml"

    @property
    def results_csv(self) -> Path:
        return self.path / "results.csv"

    @property
    def results_json(self) -> Path:
        return self.path / "results.json"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """What rank ``rank`` says, as text."""
        return self.logs / f"rank-{rank}.log"

    def events(self, rank: int) -> Path:
        """The event stream of a rank: ``events.jsonl`` for rank 0, beside its log for others.

        One file per rank, because appending from two hosts can tear lines on NFS.
        """
        return self.path / "events.jsonl" if rank == 0 else self.logs / f"rank-{rank}.events.jsonl"

    def failure(self, rank: int) -> Path:
        """Where the worker of ``rank`` leaves its last words, as JSON, when it fails."""
        return self.logs / f"error-rank-{rank}.json"

    def make_tree(self) -> None:
        """The sub-folders of a training run.

        Raises:
            StorageError: the disk refused.
        """
        for folder in (self.weights, self.checkpoints, self.plots, self.logs):
            make_folder(folder)


_OF_NO_RESULT = ("config.yaml", "events.jsonl", ".lock")
