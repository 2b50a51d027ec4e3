"""The run's folder here and on every host: one folder where they see one disk, and copied at the end where not."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from yolofleet.config.resume import CHECKPOINTS, ELSEWHERE
from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.errors import ClusterError, YolofleetError
from yolofleet.launch.keeper import AGENT
from yolofleet.launch.remote import Remote
from yolofleet.launch.watch import say
from yolofleet.report.folder import RunFolder, make_folder, storage_error, write_text

HERE = "launcher"
NOT_FETCHED = ("checkpoints",)


@dataclass
class Folders:
    """The run's folder here and on every host.

    Attributes:
        there: its full path on each host.
        owners: whose disk it is on: HERE, or the name of the host that made it.
        mark: the file by which they know.
    """

    here: RunFolder
    there: list[str]
    owners: list[str]
    mark: str

    @classmethod
    def claim(
        cls, verb: str, settings: TrainConfig | ValConfig, remotes: Sequence[Remote], resumed: Path | None
    ) -> Folders:
        """Make the same folder here and on every host; a name that is taken anywhere is passed over."""
        mark = f".fleet-{secrets.token_hex(6)}"
        passed_over: list[Folders] = []
        try:
            while True:
                found = cls._claim(verb, settings, remotes, resumed, mark)
                if all(found.owners):
                    found.give_back(remotes, discard=False)  # the marks have done their work
                    make_folder(found.here.logs)
                    return found
                passed_over.append(found)  # kept for now, so that the next try gets another name
        finally:
            for one in passed_over:
                one.give_back(remotes, discard=True)

    @classmethod
    def _claim(
        cls,
        verb: str,
        settings: TrainConfig | ValConfig,
        remotes: Sequence[Remote],
        resumed: Path | None,
        mark: str,
    ) -> Folders:
        """The next free name; the last owner is "" where a host had it already."""
        here = (
            RunFolder(resumed)
            if resumed is not None
            else RunFolder.create(
                verb, project=settings.project, name=settings.name, exist_ok=settings.exist_ok
            )
        )
        found = cls(here, [], [], mark)
        used = resumed is not None or settings.exist_ok
        try:
            (here.path / mark).write_text(HERE, encoding="utf-8")
            for remote in remotes:  # one after the other: those of one disk must find the mark of the first
                answer = remote.ask("claim", folder=str(here.path), mark=mark, owner=remote.name, used=used)
                found.there.append(answer["folder"])
                found.owners.append(answer["owner"])
                if not answer["owner"]:
                    break
        except BaseException as problem:
            found.give_back(remotes, discard=True)
            if isinstance(problem, OSError):
                raise storage_error(problem, here.path) from None
            raise
        return found

    def log(self, node: int, rank: int, text: str) -> None:
        """Keep what a rank, or the agent of a host, says."""
        path = self.here.logs / f"agent-{node}.log" if rank == AGENT else self.here.log(rank)
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(text)

    def resume_command(self, settings: TrainConfig | ValConfig, remotes: Sequence[Remote]) -> str:
        """What goes on from the states that the run has saved; "" when there are none."""
        if isinstance(settings, ValConfig):
            return ""
        saved = False
        if self.owners[0] == HERE:
            saved = any(self.here.path.glob(CHECKPOINTS))
        else:
            with suppress(ClusterError):
                saved = bool(
                    remotes[0].ask("list_files", 5, folder=f"{self.there[0]}/checkpoints", without=[])
                )
        hosts = f"--fleet {settings.fleet}" if settings.fleet else f"--hosts {settings.hosts}"
        return f"yolofleet train --resume {self.here.path} {hosts}" if saved else ""

    def fetch(self, remotes: Sequence[Remote], *, discard: bool) -> None:
        """Copy what lies elsewhere; of a start that failed, leave nothing anywhere.

        States to resume from are large and stay where they are.
        """
        owners = {owner: node for node, owner in reversed(list(enumerate(self.owners))) if owner != HERE}
        for owner, node in owners.items():
            try:
                if not discard:
                    fetch_folder(remotes[node], self.there[node], self.here.path)
            except (ClusterError, OSError) as problem:
                words = problem.what if isinstance(problem, ClusterError) else str(problem)
                say(f"warning: the results stay on {owner}, in {self.there[node]}: {words}")
        if self.owners[0] != HERE and not discard:
            owner, folder = self.owners[0], self.there[0]
            say(f"results are in {self.here.path}; states to resume from stay on {owner}, in {folder}")
            with suppress(YolofleetError):
                write_text(self.here.path / ELSEWHERE, f"{owner}:{folder}/checkpoints\n")
        self.give_back(remotes, discard=discard)

    def give_back(self, remotes: Sequence[Remote], *, discard: bool) -> None:
        """Remove the marks; with ``discard`` everything that a start that failed leaves."""
        for remote, folder, owner in zip(remotes, self.there, self.owners, strict=False):
            if owner == remote.name:
                with suppress(ClusterError):
                    remote.ask("unclaim", timeout_s=5, folder=folder, mark=self.mark, discard=discard)
        with suppress(OSError):
            (self.here.path / self.mark).unlink(missing_ok=True)
        if discard:
            self.here.discard_unless_used()


def fetch_folder(remote: Remote, there: str, here: Path) -> None:
    """Copy the files of a run, but checkpoints and the logs that came as they were written.

    Raises:
        ClusterError: the host is lost, or names files outside of the folder.
    """
    for name, size in remote.ask("list_files", folder=there, without=list(NOT_FETCHED)):
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise ClusterError(f"{remote.name} names a file outside of its folder: {name[:80]}")
        target = here.joinpath(*parts)
        if parts[0].startswith(".fleet-") or (
            parts[0] == "logs" and target.suffix == ".log" and target.exists()
        ):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.part")
        try:
            with temporary.open("wb") as file:
                while file.tell() < size:
                    answer = remote.ask("read_piece", file=f"{there}/{name}", offset=file.tell())
                    piece = base64.b64decode(answer["data"])
                    if not piece:
                        break
                    file.write(piece)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
