"""The run's folder here and on every host: one folder if they share a disk; else copied here at the end."""

from __future__ import annotations

import errno
import re
import secrets
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from yolofleet.config.stored.resume import CHECKPOINTS, ELSEWHERE, read_where
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.hosts.wire_protocol import AGENT
from yolofleet.fleet.launch.machines import RunPlan
from yolofleet.runs.checkpoint.names import NAME, step_of
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import make_folder as make_subfolder
from yolofleet.storage.atomic import open_append, storage_error, whole_file, write_text
from yolofleet.storage.foreign import links_refused
from yolofleet.support.errors import CheckpointError, ClusterError, Stopped
from yolofleet.support.terminal import Progress
from yolofleet.support.text import inform, size_text

JOB = ".job"  # in the folder of a detached run: the name of its job
LAUNCHER = "(this machine)"  # no host has such a name
NOT_FETCHED = ("checkpoints",)
# Files that a run leaves in its folder, and their largest sizes. Not config.yaml: this machine knows the settings, and
# a host must not decide how the run continues.
FETCHED = tuple(
    (re.compile(pattern), size_bytes)
    for pattern, size_bytes in (
        (r"results\.(csv|json)", 1 << 30),
        # not report.html: the launcher makes the page, so no host's script runs in a browser
        (r"report\.json", 64 << 20),
        (r"predictions\.json", 16 << 30),
        (r"logs/status\.json", 1 << 20),
        (r"(events|logs/rank-[0-9]{1,6}\.events)\.jsonl", 4 << 30),
        (r"logs/(rank|agent)(-[0-9]{1,6})?\.log", 4 << 30),
        (r"weights/(best|last)\.safetensors", 16 << 30),
        (r"plots/[A-Za-z0-9_]{1,100}\.(png|jpg)", 1 << 30),
        (r"labels/[^/]{1,255}\.txt", 64 << 20),
        (r"tensorboard/events\.out\.tfevents\.[^/]{1,200}", 4 << 30),
        (r"mlflow/mlflow\.db", 4 << 30),
        (r"wandb/offline-run-[\w-]{1,100}/run-\w{1,64}\.wandb", 4 << 30),
    )
)
MOST_LETTERS = 40  # in the name of a state: Python refuses numbers of thousands of digits
NAMED = 5  # names in a message about files that stay on a host
# every run has them; no message
LEFT_THERE = re.compile(
    r"config\.yaml|report\.html|README\.md|(wandb|mlflow)/.*"
    r"|logs/(job(-[0-9]+)?\.yaml|error-rank-[0-9]+\.json|ranks\.json)|\.lock|\.job|\.fleet-.*"
)
MOST_NAMED = 8  # hosts in where.txt
MOST_NAMES = 100  # attempts to find a free name
ASK_S = 5.0  # timeout at the end, when a host may be lost


@dataclass(frozen=True)
class Site:
    """The run's folder on one host."""

    folder: str  # its full path there
    owner: str  # LAUNCHER, or the first host that sees the same disk
    made: bool  # that host made it for this run


@dataclass
class Folders:
    """The run's folder here and on every host."""

    here: RunFolder
    sites: list[Site]  # one for each host, in the order of the hosts
    mark: str  # name of the file that shows which hosts share a disk
    # numbers of the hosts: first those that have the newest results. Empty: as in ``sites``
    order: list[int] = field(default_factory=list)
    # step of the newest state of each owner of a disk, as :meth:`has_states` last found it; -1: none
    newest: dict[str, int] = field(default_factory=dict)

    @classmethod
    def claim(cls, plan: RunPlan, remotes: Sequence[Remote]) -> Folders:
        """Make the same folder here and on every host. Skip names already in use on any host.

        Raises:
            ClusterError: ``MOST_NAMES`` names are taken. StorageError: a disk refused. ConfigError: on a host, the
                link leads out of the folder.
        """
        mark = f".fleet-{secrets.token_hex(6)}"
        may_exist = plan.resumed is not None or plan.config.value.exist_ok
        question = {"mark": mark, "used": may_exist, "may_link": plan.may_link}
        passed_over: list[Folders] = []
        try:
            while len(passed_over) < MOST_NAMES:
                found = cls(plan.folder(), [], mark)  # with the next free name at each call
                found._claim_on(remotes, question)
                if all(site.owner for site in found.sites):
                    found.give_back(remotes, discard=False)  # the marks are no longer needed
                    make_subfolder(found.here.logs)
                    return found
                passed_over.append(found)  # keep it, so that the next attempt gets another name
            raise ClusterError(
                f"{remotes[len(found.sites) - 1].name} has folders of all {MOST_NAMES} names that were tried",
                source=found.sites[-1].folder,
                hint="choose another --name",
            )
        finally:
            for one in passed_over:
                one.give_back(remotes, discard=True)

    def _claim_on(self, remotes: Sequence[Remote], question: dict[str, Any]) -> None:
        """Ask the hosts for the folder, up to the first host where another run has it; its owner is then ""."""
        try:
            (self.here.path / self.mark).write_text(LAUNCHER, encoding="utf-8")
            for (
                remote
            ) in remotes:  # one after another: hosts that share a disk must find the first one's mark
                answer = remote.ask("claim", folder=str(self.here.path), owner=remote.name, **question)
                if answer.linked:
                    raise links_refused(f"on {remote.name}, {answer.linked}", answer.folder)
                self.sites.append(Site(answer.folder, answer.owner, answer.made))
                if not answer.owner:
                    break
        except BaseException as problem:
            self.give_back(remotes, discard=True)
            if isinstance(problem, OSError):
                raise storage_error(problem, self.here.path) from None
            raise

    def claim_on(self, remote: Remote, others: Sequence[Remote], *, may_link: bool) -> None:
        """Make the folder on one more host, which becomes the last of ``sites``.

        Args:
            others: hosts that have it.
        Raises:
            ClusterError, ConfigError, StorageError: as :meth:`claim`.
        """
        found = Folders(RunFolder(self.here.path), [], self.mark)
        every = [*others, remote]
        found._claim_on(every, {"mark": self.mark, "used": True, "may_link": may_link})
        found.give_back(every, discard=False)
        self.sites.append(found.sites[-1])

    @property
    def states_are_elsewhere(self) -> bool:
        """Whether rank 0 writes checkpoints on a disk that this machine does not see."""
        return self.sites[self.order[0] if self.order else 0].owner != LAUNCHER

    def begin(self, config: str, remotes: Sequence[Remote], *, is_resumed: bool) -> None:
        """Write here what a resume needs, in case the launcher dies before it fetches the results.

        Args:
            config: text of the run's configuration.
        Raises:
            CheckpointError: no host has a checkpoint of the resumed run.
        """
        if not self.states_are_elsewhere:
            return
        where = self.here.path / ELSEWHERE
        if is_resumed and self.has_states(remotes) is False:
            raise CheckpointError(
                f"no host has a state of this run in {self.sites[0].folder}/checkpoints",
                source=f"{where}: {', '.join(read_where(where))}" if where.is_file() else None,
                hint="add a host that has them to --hosts, or copy them to one of these (scp -r)",
            )
        if not self.here.config.exists():
            write_text(self.here.config, config)
        lines = [
            f"{owner}:{self.sites[host_index].folder}/checkpoints\n"
            for owner, host_index in self._disks().items()
        ]
        write_text(where, "".join(lines[:MOST_NAMED]))

    def _disks(self) -> dict[str, int]:
        """Return the first host on each disk that this machine does not see, in order: owner -> number of the host."""
        found: dict[str, int] = {}
        for host_index in self.order or range(len(self.sites)):
            if self.sites[host_index].owner != LAUNCHER:
                found.setdefault(self.sites[host_index].owner, host_index)
        return found

    def log(self, host_index: int, rank: int, text: str) -> None:
        """Append to the log of a rank, or of a host's agent."""
        path = self.here.logs / f"agent-{host_index}.log" if rank == AGENT else self.here.log(rank)
        with suppress(OSError), open_append(path) as file:
            file.write(text.encode("utf-8", "replace"))

    def has_states(self, remotes: Sequence[Remote]) -> bool | None:
        """Return whether a host has a checkpoint; None if none of those that answer has one, and others are silent."""
        if not self.states_are_elsewhere and any(self.here.path.glob(CHECKPOINTS)):
            return True
        is_silent = False
        for owner, host_index in self._disks().items():
            folder = f"{self.sites[host_index].folder}/checkpoints"
            try:
                files = remotes[host_index].ask("list_files", ASK_S, folder=folder, without=[])
                states = [name for name, _ in files if len(name) < MOST_LETTERS and NAME.fullmatch(name)]
                self.newest[owner] = max((step_of(Path(name)) for name in states), default=-1)
            except ClusterError:
                is_silent = True
        return True if max(self.newest.values(), default=-1) >= 0 else None if is_silent else False

    def resume_command(self, options: Sequence[str]) -> str:
        """Return the command that resumes the run from the folder where this command was typed."""
        return shlex.join(["yolofleet", "train", "--resume", str(self.here.path), *options])

    def fetch(
        self, remotes: Sequence[Remote], *, saved: bool | None, discard: bool, config: str = ""
    ) -> None:
        """Copy results from other disks. Remove everything that a failed start left.

        Checkpoints are large, and stay where they are.

        Args:
            saved: whether there are checkpoints; None: unknown.
            config: text of ``config.yaml``, written here if the first host has another disk.
        Raises:
            Stopped: a signal asked to stop during the copy.
        """
        hosts = self.order or range(len(self.sites))
        # a full disk has older states and results than that of the copies
        self.order = sorted(hosts, key=lambda n: self.newest.get(self.sites[n].owner, -1), reverse=True)
        taken: set[str] = set()  # the first host's results; copies of them on other hosts are left there
        for owner, host_index in self._disks().items():
            folder = self.sites[host_index].folder
            try:
                if not discard:
                    taken |= fetch_folder(remotes[host_index], folder, self.here.path, without=taken)
            except (ClusterError, OSError) as problem:
                words = problem.what if isinstance(problem, ClusterError) else str(problem)
                # a host that the run went on without has only older ones
                if not (remotes[host_index].is_lost and taken):
                    inform(f"warning: the results stay on {owner}, in {folder}: {words}")
            except KeyboardInterrupt:
                raise Stopped(
                    "the run has ended, but its results are not copied: stopped on request",
                    hint=f"they are on {owner}, in {folder}",
                ) from None
        if self.states_are_elsewhere and not discard:
            site = self.sites[self.order[0] if self.order else 0]
            states = f"; states to resume from stay on {site.owner}, in {site.folder}"
            if (step := self.newest.get(site.owner, -1)) >= 0:
                states += f" (the newest: after step {step})"
            if config:
                write_text(self.here.config, config)
            inform(f"results are in {self.here.path}{'' if saved is False else states}")
        if saved is False and self.here.is_new:
            (self.here.path / ELSEWHERE).unlink(missing_ok=True)
        self.give_back(remotes, discard=discard)

    def give_back(self, remotes: Sequence[Remote], *, discard: bool) -> None:
        """Remove the marks; with ``discard`` also everything that a failed start leaves."""
        for remote, site in zip(remotes, self.sites, strict=False):
            if site.owner == remote.name:
                leave = {"folder": site.folder, "mark": self.mark, "discard": discard and site.made}
                with suppress(ClusterError):
                    remote.ask("unclaim", timeout_s=ASK_S, **leave)
        with suppress(OSError):
            (self.here.path / self.mark).unlink(missing_ok=True)
        if discard:
            self.here.discard_unless_used()


def fetch_folder(remote: Remote, there: str, here: Path, *, without: Collection[str] = ()) -> set[str]:
    """Copy the results of a run (``FETCHED``), except logs that arrived as they were written; return their names.

    Args:
        without: names of files that another host has supplied.
    Raises:
        ClusterError: the host is lost, or names files outside of the folder.
        OSError: the disk refused, or a folder is a symbolic link.
    """
    left, copied = [], set[str]()
    files = remote.ask("list_files", folder=there, without=list(NOT_FETCHED))
    done, total = 0, sum(size for _, size in files)
    for name, size in files:
        done += size
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise ClusterError(f"{remote.name} names a file outside of its folder: {name[:80]}")
        if not _is_result(name, size):
            left += [] if LEFT_THERE.fullmatch(name) else [name]
            continue
        if name in without:
            continue
        target = here.joinpath(*parts)
        if target.suffix == ".log" and target.exists() and target.stat().st_size >= size:
            continue
        if target.parent.is_symlink():
            raise OSError(errno.ELOOP, f"{target.parent} is a symbolic link")
        with whole_file(target) as file, Progress(sys.stderr) as progress:
            while file.tell() < size:
                progress.show(
                    f"copying from {remote.name}", done - size + file.tell(), total, amount=size_text
                )
                piece = remote.ask("read_piece", file=f"{there}/{name}", offset=file.tell()).content
                if not piece:
                    break
                file.write(piece[: size - file.tell()])
        copied.add(name)
    if left:
        more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        inform(
            f"note: these files are not results of a run, so they stay on {remote.name}: {', '.join(left[:NAMED])}{more}"
        )
    return copied


def _is_result(name: str, size_bytes: int) -> bool:
    most = next((most for pattern, most in FETCHED if pattern.fullmatch(name)), -1)
    return 0 <= size_bytes <= most and name.isprintable()
