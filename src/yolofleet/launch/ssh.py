"""A run on several hosts: check, start torchrun's agent on each, watch, end everything everywhere.

The launcher's life is the run's: when it ends, however it ends, or loses a host, everything ends on every host. One
loop reads what the hosts say (``remote.py``); the console of rank 0 is the view, and every rank's log is kept here.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from queue import Empty, Queue
from typing import Any

from yolofleet.config.checks import check_train
from yolofleet.config.load import Resolved, dump_config
from yolofleet.config.resolve import DEFAULT
from yolofleet.config.resume import CHECKPOINTS, ELSEWHERE
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.errors import ClusterError, ConfigError, DataError, Stopped, YolofleetError
from yolofleet.launch.code import packed
from yolofleet.launch.fleet import Fleet
from yolofleet.launch.keeper import AGENT, ASKED
from yolofleet.launch.local import STOP_SIGNALS, Ending, ends_in, stoppable, tell
from yolofleet.launch.preflight import (
    Plan,
    enter_folders,
    files_of,
    free_port,
    inspect,
    on_each,
    raise_faults,
)
from yolofleet.launch.remote import Frame, Remote, Unreachable
from yolofleet.report.folder import RunFolder, make_folder, storage_error, write_text

SETTLE_S = 2.0  # after a failure: others may fail by themselves, and say why
FAILED_GRACE_S = 8.0
AFTER_GRACE_S = 10.0  # a host that has not ended everything by then is given up
PORT_TRIES = 3
BUSY_PORT = ("EADDRINUSE", "Address already in use", "address already in use")
SEND_S = 120.0  # for the code
OPENERS = 32  # logins at a time
HERE = "launcher"
NOT_FETCHED = ("checkpoints",)
LEFT_BY_MISTAKES = (ConfigError.exit_code, DataError.exit_code, Stopped.exit_code)


def say(text: str) -> None:
    """A line of the launcher's own."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def crew(fleet: Fleet, *, lost: list[Unreachable] | None = None) -> Iterator[list[Remote]]:
    """Log in to all hosts at the same time. Everything that is started there ends with the block.

    Args:
        lost: takes the reasons of hosts that cannot be reached, and the others come alone.
    Raises:
        Unreachable: one host or more, unless ``lost`` takes them; the first one's reason, and what the others said.
    """
    inbox: Queue[tuple[Remote, Frame]] = Queue()
    remotes = [Remote(host, inbox) for host in fleet.hosts]

    def login(remote: Remote) -> Unreachable | None:
        try:
            remote.open()
        except Unreachable as problem:
            return problem
        return None

    try:
        with ThreadPoolExecutor(min(OPENERS, len(remotes))) as pool:
            problems = [problem for problem in pool.map(login, remotes) if problem is not None]
        if problems and lost is None:
            first, others = problems[0], problems[1:]
            if others:
                first.source = "\n".join([first.source or "", *(problem.what for problem in others)]).strip()
            raise first
        if lost is not None:
            lost += problems
        gone = {problem.host for problem in problems}
        yield [remote for remote in remotes if remote.name not in gone]
    finally:
        with ThreadPoolExecutor(len(remotes)) as pool:
            list(pool.map(Remote.close, remotes))


# -- a run ---------------------------------------------------------------------------------------------------


def run_on_fleet(
    config: Resolved[TrainConfig] | Resolved[ValConfig],
    recipe: Resolved[Recipe] | None,
    fleet: Fleet,
    resumed: Path | None = None,
) -> tuple[int, RunFolder]:
    """Train or validate on a fleet; returns the exit code and the folder of the run as it is seen from here.

    Args:
        resumed: the folder of the run that is continued.
    Raises:
        YolofleetError: it could not be started.
    """
    verb = "val" if recipe is None else "train"
    settings = config.value
    texts = [job_text(config, recipe, fleet, node) for node in range(len(fleet.hosts))]
    with stoppable(), crew(fleet) as remotes:
        plan = check(config, fleet, remotes)
        folders = Folders.claim(verb, settings, remotes, resumed)
        job = {
            "id": f"{folders.here.path.name}-{secrets.token_hex(3)}",
            "title": f"{verb} {folders.here.path}",
            "command": None,
            "terminal": terminal_size(),
        }
        code = None
        try:
            for _ in range(PORT_TRIES):
                watch = Watch(fleet, remotes, folders.log)
                for node, remote in enumerate(remotes):
                    remote.start(
                        {
                            **job,
                            **place(fleet, plan, node),
                            "folder": folders.there[node],
                            "text": texts[node],
                            "streamed": folders.owners[node] != HERE,
                            "terminal": job["terminal"] if node == 0 else None,
                        }
                    )
                watch.follow()
                if not watch.met_busy_port:
                    break
                say(f"note: port {plan.port} of {remotes[0].name} was taken in the meantime; trying another")
                plan = replace(plan, port=free_port(fleet, remotes, passed_over=[plan.port]))
            code = watch.explain(folders.resume_command(settings, remotes))
        finally:
            folders.fetch(remotes, discard=code in (None, *LEFT_BY_MISTAKES))
        if (
            isinstance(settings, ValConfig)
            and settings.json_out not in ("", "-")
            and folders.owners[0] != HERE
        ):
            with suppress(OSError):
                shutil.copyfile(folders.here.results_json, settings.json_out)
    return code, folders.here


def run_command(fleet: Fleet, command: Sequence[str]) -> int:
    """Run any command once on every host, each line with its host's name; when one fails, all are ended.

    The variables of torchrun are set, so that ``torchrun SCRIPT`` is one job of all hosts.

    Returns:
        0, or the exit code of the command that failed first.
    """
    with stoppable(), crew(fleet) as remotes:
        enter_folders(remotes)
        findings, plan = inspect(fleet, remotes, TrainConfig())
        for finding in findings:
            if finding.level == "fault":
                say(f"warning: {finding.where}: {finding.seen}")
        watch = Watch(fleet, remotes, lambda *_: None, prefix=len(remotes) > 1)
        title = " ".join(command)
        job = {"id": f"run-{secrets.token_hex(3)}", "title": title, "command": list(command), "text": ""}
        for node, remote in enumerate(remotes):
            here = {"folder": ".", "streamed": False, "terminal": None}
            remote.start({**job, **place(fleet, plan, node), **here})
        watch.follow()
        return watch.command_code()


def job_text(config: Resolved[Any], recipe: Resolved[Recipe] | None, fleet: Fleet, node: int) -> str:
    """The configuration as one host gets it: with its own devices and data, and as if it had been started there.

    Raises:
        ConfigError: its settings cannot stand together.
    """
    host = fleet.hosts[node]
    own: dict[str, Any] = {"device": host.device, "hosts": "", "fleet": "", "sync_code": False}
    sources = {
        **config.sources,
        "device": fleet.source,
        "hosts": DEFAULT,
        "fleet": DEFAULT,
        "sync_code": DEFAULT,
    }
    if host.data:
        own["data"], sources["data"] = host.data, fleet.source
    there = Resolved(config.value.model_copy(update=own), sources, config.notes)
    if recipe is not None:
        check_train(there, recipe)
    return dump_config(there, recipe)


def check(config: Resolved[Any], fleet: Fleet, remotes: Sequence[Remote]) -> Plan:
    """Everything that can be known before the start; says where the fleet meets.

    Raises:
        ClusterError, ConfigError: what would fail later.
    """
    enter_folders(remotes)
    settings = config.value
    if settings.sync_code:
        package = packed()
        on_each(remotes, lambda remote: remote.ask("take_code", SEND_S, **package))
    if not isinstance(settings, TrainConfig):
        shared = TrainConfig.model_fields.keys() & ValConfig.model_fields.keys() - {"batch"}
        settings = TrainConfig(**{name: getattr(settings, name) for name in shared})
    findings, plan = inspect(fleet, remotes, settings, files_of(config.value))
    if settings.sync_code:  # it is what was installed that differs
        findings = [finding for finding in findings if finding.code != "package-differs"]
    for finding in findings:
        if finding.level == "warn":
            say(f"warning: {finding.where}: {finding.seen}")
    raise_faults(findings)
    say(describe(fleet, plan))
    return plan


def describe(fleet: Fleet, plan: Plan) -> str:
    """Who runs what, and where they meet."""
    rows = [
        f"  {host.name}: {host.processes} process{'es' if host.processes > 1 else ''} on {host.device}, "
        f"{spot.address} ({spot.card})"
        for host, spot in zip(fleet.hosts, plan.spots, strict=True)
    ]
    many = f"{len(fleet.hosts)} host{'s' if len(fleet.hosts) > 1 else ''}"
    return "\n".join(
        [f"fleet: {many}, {fleet.processes} processes, meeting at {plan.spots[0].address}:{plan.port}", *rows]
    )


def place(fleet: Fleet, plan: Plan, node: int) -> dict[str, Any]:
    """What a job says of one host's place."""
    host = fleet.hosts[node]
    return {
        "meeting": {
            "node": node,
            "nodes": len(fleet.hosts),
            "address": plan.spots[0].address,
            "port": plan.port,
            "card": plan.spots[node].card,
        },
        "first_rank": fleet.first_rank(node),
        "processes": host.processes,
        # the keeper has all variables of its host; these are its user's choice of a card against ours
        "env": {name: value for name, value in host.env.items() if name.endswith("_SOCKET_IFNAME")},
        "silence_s": fleet.silence_s,
        "grace_s": fleet.grace_s,
    }


def terminal_size() -> dict[str, Any] | None:
    """Of the terminal that the view goes to; None: it goes into a file or pipe."""
    if not sys.stdout.isatty():
        return None
    columns, rows = shutil.get_terminal_size()
    return {"rows": rows, "columns": columns, "term": os.environ.get("TERM", "dumb")}


# -- watching ------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """What is known of one host's part of the job."""

    remote: Remote
    ending: Frame | None = None  # its frame `exit`
    lost: str = ""  # why it will not come
    ended_at_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.ending is not None or bool(self.lost)


@dataclass
class Watch:
    """Follows one start of a job to the end of all its processes.

    Args:
        log: takes (node, rank or AGENT, text).
    """

    fleet: Fleet
    remotes: Sequence[Remote]
    log: Callable[[int, int, str], None]
    prefix: bool = False  # every line with its host: there is no rank 0 that speaks for all
    nodes: list[Node] = field(init=False)
    wishes: int = 0  # signals that asked to stop
    order: list[int] = field(default_factory=list)  # nodes as they ended
    stopped_at_s: float = 0.0
    give_up_at_s: float = float("inf")
    began_line: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = [Node(remote) for remote in self.remotes]

    def follow(self) -> None:
        """Until every host has ended everything, or is given up."""
        inbox = self.remotes[0].inbox
        with self._signals():
            while not all(node.is_over for node in self.nodes):
                with suppress(Empty):
                    remote, frame = inbox.get(timeout=0.2)
                    self._take(self.remotes.index(remote), frame)
                self._look()

    def _take(self, number: int, frame: Frame) -> None:
        node = self.nodes[number]
        kind = frame["type"]
        if kind == "output":
            self._show(number, str(frame["text"]))
        elif kind == "log":
            self.log(number, int(frame["rank"]), str(frame["text"]))
        elif kind == "exit" and not node.is_over:
            node.ending = frame
            self._ended(number)
        elif kind == "gone" and not node.is_over:
            self._lose(number, node.remote.words() or "the connection ended")

    def _ended(self, number: int) -> None:
        self.nodes[number].ended_at_s = time.monotonic()
        self.order.append(number)

    def _lose(self, number: int, why: str) -> None:
        self.nodes[number].lost = why
        self._ended(number)
        threading.Thread(target=self.nodes[number].remote.close, daemon=True).start()

    def _look(self) -> None:
        """Does anything ask for an end?"""
        now = time.monotonic()
        for number, node in enumerate(self.nodes):
            if not node.is_over and now - node.remote.heard_at_s > self.fleet.silence_s:
                self._lose(number, f"nothing heard from it for {self.fleet.silence_s:.0f} s")
        failed = [n for n in self.nodes if n.is_over and (n.lost or (n.ending or {}).get("code") != 0)]
        lost = any(node.lost for node in failed)
        if self.wishes > 1:
            self._stop(0.0)
        elif self.wishes:
            self._stop(self.fleet.grace_s)
        elif failed and (lost or now - min(node.ended_at_s for node in failed) > SETTLE_S):
            self._stop(FAILED_GRACE_S)
        if now > self.give_up_at_s:
            for number, node in enumerate(self.nodes):
                if not node.is_over:
                    self._lose(number, "it did not end its processes in time")

    def _stop(self, grace_s: float) -> None:
        """Ask the hosts that still run to end; once, or again to hasten."""
        now = time.monotonic()
        give_up_at_s = now + grace_s + AFTER_GRACE_S
        if self.stopped_at_s and give_up_at_s > self.give_up_at_s - 1.0:
            return
        self.stopped_at_s = self.stopped_at_s or now
        self.give_up_at_s = give_up_at_s
        for node in self.nodes:
            if not node.is_over:
                node.remote.stop(grace_s)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and the like: the first asks all hosts to save and stop, the second ends them at once."""

        def wish(number: int, _frame: Any) -> None:
            self.wishes += 1
            words = b"\nstopping all hosts after this step, then saving; Ctrl-C again ends at once\n"
            with suppress(OSError):
                os.write(2, words if self.wishes == 1 else b"\nending all hosts at once\n")

        previous = {}
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, wish) for number in (signal.SIGINT, *STOP_SIGNALS)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _show(self, number: int, text: str) -> None:
        """On the screen as it came; what is not the console's has its host before each line."""
        if self.prefix or number > 0:
            mark, shown = f"{self.remotes[number].name}: ", ""
            for line in text.splitlines(keepends=True):
                shown += line if self.began_line.get(number) else mark + line
                self.began_line[number] = not line.endswith("\n")
            text = shown
        with suppress(OSError, ValueError):  # nobody reads
            sys.stdout.write(text)
            sys.stdout.flush()

    # -- why it ended ------------------------------------------------------------------------------

    @property
    def met_busy_port(self) -> bool:
        """The agents did not meet because somebody took the port; nothing had begun."""
        first = self.nodes[0].ending or {}
        return (
            not self.wishes
            and first.get("code") not in (0, None)
            and not any((node.ending or {}).get("words") for node in self.nodes)
            and not ends_in(str(first.get("log", "")))
            and any(words in str(first.get("log", "")) for words in BUSY_PORT)
        )

    def explain(self, resume: str) -> int:
        """Print why the run ended, unless all is well; returns the exit code."""
        if all((node.ending or {}).get("code") == 0 for node in self.nodes):
            return 0
        ended = [self.nodes[number] for number in self.order]
        endings = [self._ending(node) for node in ended]
        asked = bool(self.wishes) or any((n.ending or {}).get("why") == ASKED for n in ended)
        causes = [w for ending in endings for w in ending.words if not w.get("secondary")]
        causes = [w for w in causes if w.get("exit_code") != Stopped.exit_code]
        problem: YolofleetError | None = None
        if causes:  # ranks that lost them or were asked to stop say no more than that
            endings = [
                replace(ending, words=[w if w in causes else {**w, "secondary": True} for w in ending.words])
                for ending in endings
            ]
        elif not asked:
            problem = next((p for node in ended if (p := self._own_end(node, resume))), None)
        if problem is not None:
            say(problem.render())
            return problem.exit_code
        return tell([e for e in endings if e.code or e.words] or endings, resume)

    def command_code(self) -> int:
        """Of a plain command: its exit code where it failed first, which is said."""
        for node in (self.nodes[number] for number in self.order):
            frame = node.ending or {"code": ClusterError.exit_code, "why": node.lost}
            code, why = int(frame["code"]), str(frame["why"])
            if code:
                ended = (
                    f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                )
                say(f"{node.remote.name}: {why or ended}")
                return code if code > 0 else 128 - code
        return 0

    def _own_end(self, node: Node, resume: str) -> ClusterError | None:
        """A host that was lost, or whose agent somebody killed."""
        first = self.fleet.first_rank(self.nodes.index(node))
        last = first + node.remote.host.processes - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        hint = resume or "give the same command again"
        if node.lost:
            what, *more = node.lost.splitlines()
            return ClusterError(
                f"{node.remote.name} is lost, with {ranks}: {what}", source=" ".join(more) or None, hint=hint
            )
        frame = node.ending or {}
        if int(frame.get("code") or 0) < 0 and not frame.get("why"):
            name = signal.Signals(-int(frame["code"])).name
            return ClusterError(
                f"torchrun's agent of {ranks} on {node.remote.name} was ended by {name}", hint=hint
            )
        return None

    def _ending(self, node: Node) -> Ending:
        frame = node.ending or {"code": 1, "words": [], "log": "", "why": node.lost}
        code = -signal.SIGTERM if frame["why"] and int(frame["code"]) < 0 else int(frame["code"])
        return Ending(
            code=code,
            words=list(frame["words"]),
            log=str(frame["log"]) or str(frame["why"]),
            source=f"logs/agent-{self.nodes.index(node)}.log",
            host=node.remote.name,
            ahead_s=node.remote.ahead_s,
        )


# -- folders -------------------------------------------------------------------------------------------------


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
