"""A run on several hosts: check, start torchrun's agent on each, watch, end everything everywhere.

The launcher's life is the run's: when it ends, however it ends, or loses a host, everything ends on every host. One
loop reads what the hosts say (``remote.py``); the console of rank 0 is the view, and every rank's log is kept here.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

from yolofleet.config.checks import check_train
from yolofleet.config.load import Resolved, dump_config
from yolofleet.config.resolve import DEFAULT
from yolofleet.config.resources import resources_of
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.errors import ConfigError, DataError, Stopped
from yolofleet.files.atomic import write_bytes
from yolofleet.fleet.description import Fleet
from yolofleet.fleet.hosts.package_sync import packed
from yolofleet.fleet.hosts.remote import Remote, Unreachable
from yolofleet.fleet.hosts.wire_protocol import Frame
from yolofleet.fleet.launch.folders import LAUNCHER, Folders
from yolofleet.fleet.launch.preflight import (
    Plan,
    enter_folders,
    files_of,
    free_port,
    inspect,
    on_each,
    raise_faults,
)
from yolofleet.fleet.launch.watch import Watch, say
from yolofleet.report.folder import RESUME_COMMAND, RunFolder
from yolofleet.system.signals import stoppable

PORT_TRIES = 3
SEND_S = 120.0  # for the code
OPENERS = 32  # logins at a time
FILES_PER_HOST = 3  # descriptors: ssh's input, output and errors
OTHER_FILES = 10 * OPENERS  # of this process, and of all that ssh is started with
QUIET_S = 2.0  # logins that take longer are spoken of
LEFT_BY_MISTAKES = (ConfigError.exit_code, DataError.exit_code, Stopped.exit_code)


@contextmanager
def crew(fleet: Fleet, *, lost: list[Unreachable] | None = None) -> Iterator[list[Remote]]:
    """Log in to all hosts at the same time. Everything that is started there ends with the block.

    Args:
        lost: takes the reasons of hosts that cannot be reached, and the others come alone.
    Raises:
        Unreachable: one host or more, unless ``lost`` takes them; the first one's reason, and what the others said.
        ConfigError: this machine runs Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "several machines cannot be started from Windows",
            hint="type it on Linux, macOS or in WSL; for this machine alone: --device",
        )
    inbox: Queue[tuple[Remote, Frame]] = Queue()
    remotes = [Remote(host, inbox) for host in fleet.hosts]
    allow_files(FILES_PER_HOST * len(remotes) + OTHER_FILES)
    try:
        problems = log_in(remotes)
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


def log_in(remotes: Sequence[Remote]) -> list[Unreachable]:
    """Log in to all; returns why it was not possible where it was not. After Ctrl-C, who closes the remotes ends the
    logins."""

    def login(remote: Remote) -> Unreachable | None:
        try:
            remote.open()
        except Unreachable as problem:
            return problem
        return None

    pool = ThreadPoolExecutor(min(OPENERS, len(remotes)))
    try:
        logins = [pool.submit(login, remote) for remote in remotes]
        if wait(logins, QUIET_S).not_done:
            say(f"logging in to {len(remotes)} host{'s' if len(remotes) > 1 else ''} ...")
        return [problem for done in logins if (problem := done.result()) is not None]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def allow_files(count: int) -> None:
    """Let this process have so many files open, if it may."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        YolofleetError: it could not be started, or its figures not be written.
    """
    settings = config.value
    verb = settings.verb
    texts = [job_text(config, recipe, fleet, node) for node in range(len(fleet.hosts))]
    with stoppable(), crew(fleet) as remotes:
        plan = check(config, fleet, remotes)
        terminal = terminal_size()
        code: int | None = None
        saved: bool | None = False
        folders = Folders.claim(verb, settings, remotes, resumed)
        try:
            job = {
                "id": f"{folders.here.path.name}-{secrets.token_hex(3)}",
                "title": f"{verb} {folders.here.path}",
                "command": None,
            }
            secret = secrets.token_hex(32)  # to the hosts through ssh, and nowhere else
            resume = folders.resume_command(settings) if recipe is not None else ""
            if recipe is not None:
                folders.begin(texts[0], remotes, is_resumed=resumed is not None)
            saved = None  # from here on nobody knows until the hosts are asked
            for tries_left in reversed(range(PORT_TRIES)):
                watch = Watch(fleet, remotes, folders.log)
                parts = []
                for node in range(len(remotes)):
                    there = place(fleet, plan, node)
                    there["meeting"]["secret"] = secret
                    part = {
                        "env": there["env"] | {RESUME_COMMAND: resume},
                        "folder": folders.sites[node].folder,
                        "text": texts[node],
                        "streamed": folders.sites[node].owner != LAUNCHER,
                        "terminal": terminal if node == 0 else None,
                    }
                    parts.append({**job, **there, **part})
                watch.follow(parts)
                if not (watch.met_busy_port and tries_left):
                    break
                say(f"note: port {plan.port} of {remotes[0].name} was taken in the meantime; trying another")
                plan = replace(plan, port=free_port(fleet, remotes, passed_over=[plan.port]))
            saved = folders.has_states(remotes)
            code = watch.explain("" if saved is False else resume)
        finally:
            discard = saved is False and code in (None, *LEFT_BY_MISTAKES)
            folders.fetch(remotes, saved=saved, discard=discard, config=texts[0])
        if (
            settings.json_out not in ("", "-")
            and code == 0
            and folders.here.results_json.is_file()  # else it was said why not
        ):
            figures = folders.here.results_json.read_bytes()
            write_bytes(Path(settings.json_out), figures, into_special=True)
    return code, folders.here


def run_command(fleet: Fleet, command: Sequence[str]) -> int:
    """Run any command once on every host, each line with its host's name; when one fails, all are ended.

    The variables of torchrun are set, so that ``torchrun SCRIPT`` is one job of all hosts.

    Returns:
        0, or the exit code of the command that failed first.
    """
    with stoppable(), crew(fleet) as remotes:
        enter_folders(remotes)
        findings, plan = inspect(fleet, remotes, resources_of(TrainConfig()))
        for finding in findings:
            if finding.level == "fault" and not finding.code.startswith("gpu"):  # it may need none
                say(f"warning: {finding.where}: {finding.seen}")
        watch = Watch(fleet, remotes, lambda *_: None, plain=True)
        title = shlex.join(command)
        job = {"id": f"run-{secrets.token_hex(3)}", "title": title, "command": list(command), "text": ""}
        here = {"folder": ".", "streamed": False, "terminal": None}
        watch.follow([{**job, **place(fleet, plan, node), **here} for node in range(len(remotes))])
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
    if getattr(config.value, "json_out", "") not in ("", "-"):  # a file of this machine's
        own["json_out"], sources["json_out"] = "", DEFAULT
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
    findings, plan = inspect(fleet, remotes, resources_of(settings), files_of(settings))
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
    ranks = f"{fleet.processes} process{'es' if fleet.processes > 1 else ''}"
    return "\n".join([f"fleet: {many}, {ranks}, meeting at {plan.spots[0].address}:{plan.port}", *rows])


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
        # the host agent has all variables of its host; these are its user's choice of a card against ours
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
