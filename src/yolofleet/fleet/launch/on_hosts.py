"""Run a job on several hosts: check them, start torchrun's agent on each, follow it, and end everything everywhere.

The job ends when the launcher ends, for whatever reason, or loses a host. One loop reads the messages of all hosts
(``watch.py``). The console shows rank 0, and this machine keeps the logs of all ranks.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yolofleet.config.resources import RunResources
from yolofleet.errors import ConfigError, DataError, Stopped
from yolofleet.fleet.description import Fleet
from yolofleet.fleet.hosts.login import logged_in
from yolofleet.fleet.hosts.package_sync import packed
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.folders import LAUNCHER, Folders
from yolofleet.fleet.launch.preflight import (
    Plan,
    enter_folders,
    free_port,
    inspect,
    on_each,
    raise_faults,
)
from yolofleet.fleet.launch.watch import Watch, say
from yolofleet.report.folder import RESUME_COMMAND, RunFolder
from yolofleet.system.signals import stoppable

PORT_TRIES = 3
SEND_S = 120.0  # timeout for the copy of the package
USER_ERRORS = (ConfigError.exit_code, DataError.exit_code, Stopped.exit_code)


@dataclass(frozen=True)
class FleetJob:
    """A run on hosts. The launcher ships the texts, and knows nothing else of what the run computes.

    Attributes:
        verb: for the job's title.
        texts: the configuration that each host gets, in the hosts' order.
        resources: what the run asks of each host.
        files: names of files that every rank reads; the launcher compares them between hosts.
        make_folder: makes the run's folder on this machine, with the next free name at each call.
        is_resumed: the run continues one that exists.
        may_exist: the run's folder may exist on a host.
        may_link: the run's folder may hold symbolic links to other folders.
        syncs_package: the hosts run this machine's package.
        resume_options: options of ``yolofleet train --resume FOLDER`` that name the hosts; None if the run writes no
            states that it could resume from.
    """

    verb: str
    texts: Sequence[str]
    resources: RunResources
    make_folder: Callable[[], RunFolder]
    files: Sequence[str] = ()
    is_resumed: bool = False
    may_exist: bool = False
    may_link: bool = False
    syncs_package: bool = False
    resume_options: Sequence[str] | None = None


def run_job(job: FleetJob, fleet: Fleet) -> tuple[int, RunFolder]:
    """Run a job to its end. Return the exit code and the run's folder on this machine.

    Raises:
        YolofleetError: the job cannot be started.
    """
    can_resume = job.resume_options is not None
    with stoppable(), logged_in(fleet) as remotes:
        plan = check(job, fleet, remotes)
        code: int | None = None
        saved: bool | None = False
        folders = Folders.claim(
            job.make_folder,
            remotes,
            is_resumed=job.is_resumed,
            may_exist=job.may_exist,
            may_link=job.may_link,
        )
        try:
            resume = folders.resume_command(job.resume_options or ()) if can_resume else ""
            if can_resume:
                folders.begin(job.texts[0], remotes, is_resumed=job.is_resumed)
            saved = None  # from here on, only the hosts know whether there are states
            watch = _start_and_follow(job, fleet, remotes, plan, folders, resume)
            saved = folders.has_states(remotes)
            code = watch.explain("" if saved is False else resume)
        finally:
            discard = saved is False and code in (None, *USER_ERRORS)
            folders.fetch(remotes, saved=saved, discard=discard, config=job.texts[0])
    return code, folders.here


def _start_and_follow(
    job: FleetJob, fleet: Fleet, remotes: Sequence[Remote], plan: Plan, folders: Folders, resume: str
) -> Watch:
    """Start the job on all hosts and follow it to its end, again on another port if its port turns out to be busy."""
    title = f"{job.verb} {folders.here.path}"
    shared = {"id": f"{folders.here.path.name}-{secrets.token_hex(3)}", "title": title, "command": None}
    secret = secrets.token_hex(32)  # only the hosts get it, through ssh
    terminal = terminal_size()
    for tries_left in reversed(range(PORT_TRIES)):
        watch = Watch(fleet, remotes, folders.log)
        parts = []
        for node, site in enumerate(folders.sites):
            there = place(fleet, plan, node)
            there["meeting"]["secret"] = secret
            part = {
                "env": there["env"] | {RESUME_COMMAND: resume},
                "folder": site.folder,
                "text": job.texts[node],
                "streamed": site.owner != LAUNCHER,
                "terminal": terminal if node == 0 else None,
            }
            parts.append({**shared, **there, **part})
        watch.follow(parts)
        if not (watch.met_busy_port and tries_left):
            break
        say(f"note: another process took port {plan.port} of {remotes[0].name}; trying another port")
        plan = replace(plan, port=free_port(fleet, remotes, passed_over=[plan.port]))
    return watch


def run_command(fleet: Fleet, command: Sequence[str], resources: RunResources) -> int:
    """Run a command once on every host, and print each line after its host's name. If one fails, end all.

    The command gets torchrun's variables, so ``torchrun SCRIPT`` is one job of all hosts.

    Returns:
        0, or the exit code of the command that failed first.
    """
    with stoppable(), logged_in(fleet) as remotes:
        enter_folders(remotes)
        findings, plan = inspect(fleet, remotes, resources)
        for finding in findings:
            if finding.level == "fault" and not finding.code.startswith("gpu"):  # a command may need no GPU
                say(f"warning: {finding.where}: {finding.seen}")
        watch = Watch(fleet, remotes, lambda *_: None, plain=True)
        title = shlex.join(command)
        job = {"id": f"run-{secrets.token_hex(3)}", "title": title, "command": list(command), "text": ""}
        here = {"folder": ".", "streamed": False, "terminal": None}
        watch.follow([{**job, **place(fleet, plan, node), **here} for node in range(len(remotes))])
        return watch.command_code()


def check(job: FleetJob, fleet: Fleet, remotes: Sequence[Remote]) -> Plan:
    """Check the hosts, print warnings, and return where the hosts meet.

    Raises:
        ClusterError, ConfigError: the job would fail later.
    """
    enter_folders(remotes)
    if job.syncs_package:
        package = packed()
        on_each(remotes, lambda remote: remote.ask("take_code", SEND_S, **package))
    findings, plan = inspect(fleet, remotes, job.resources, job.files)
    if job.syncs_package:  # the finding compares the installed packages, which the job does not use
        findings = [finding for finding in findings if finding.code != "package-differs"]
    for finding in findings:
        if finding.level == "warn":
            say(f"warning: {finding.where}: {finding.seen}")
    raise_faults(findings)
    say(describe(fleet, plan))
    return plan


def describe(fleet: Fleet, plan: Plan) -> str:
    """Return lines that name each host's processes and the address where the hosts meet."""
    rows = [
        f"  {host.name}: {host.processes} process{'es' if host.processes > 1 else ''} on {host.device}, "
        f"{endpoint}"
        for host, endpoint in zip(fleet.hosts, plan.endpoints, strict=True)
    ]
    many = f"{len(fleet.hosts)} host{'s' if len(fleet.hosts) > 1 else ''}"
    ranks = f"{fleet.processes} process{'es' if fleet.processes > 1 else ''}"
    return "\n".join([f"fleet: {many}, {ranks}, meeting at {plan.endpoints[0].address}:{plan.port}", *rows])


def place(fleet: Fleet, plan: Plan, node: int) -> dict[str, Any]:
    """Return the fields of the message ``start`` that differ between hosts."""
    host = fleet.hosts[node]
    return {
        "meeting": {
            "node": node,
            "nodes": len(fleet.hosts),
            "address": plan.endpoints[0].address,
            "port": plan.port,
            "card": plan.endpoints[node].interface,
        },
        "first_rank": fleet.first_rank(node),
        "processes": host.processes,
        # The host agent already has all variables of its host. These override the interface that we choose.
        "env": {name: value for name, value in host.env.items() if name.endswith("_SOCKET_IFNAME")},
        "silence_s": fleet.silence_s,
        "grace_s": fleet.grace_s,
    }


def terminal_size() -> dict[str, Any] | None:
    """Return rows, columns and type of the terminal on standard output; None for a file or a pipe."""
    if not sys.stdout.isatty():
        return None
    columns, rows = shutil.get_terminal_size()
    return {"rows": rows, "columns": columns, "term": os.environ.get("TERM", "dumb")}
