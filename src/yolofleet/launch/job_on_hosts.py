"""Run a job on several hosts: check them, start torchrun's agent on each, follow it, and end everything everywhere.

The job ends when the launcher ends for any reason, even by SIGKILL. If a process or a host fails, the job continues
with the rest (``attempts.py``). One loop reads the messages of all hosts (``watch.py``). The console shows rank 0, and
this machine keeps the logs of all ranks.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from yolofleet.config.resources import RunResources
from yolofleet.doctor.findings import Finding
from yolofleet.errors import ConfigError, DataError, Stopped
from yolofleet.hosts.fleet import Fleet
from yolofleet.hosts.lease import LEASE_LOST
from yolofleet.hosts.login import logged_in
from yolofleet.hosts.package_sync import packed
from yolofleet.hosts.remote import Remote
from yolofleet.hosts.unreachable import Unreachable
from yolofleet.launch.attempts import Attempts, place
from yolofleet.launch.detached.renewal import Supervision
from yolofleet.launch.folders import Folders
from yolofleet.launch.live import live_copy
from yolofleet.launch.preflight import Plan, enter_folders, faults_of, inspect, on_each, raise_faults
from yolofleet.launch.restarts import RestartRules
from yolofleet.launch.watch import Watch, say
from yolofleet.report.folder import RunFolder
from yolofleet.system.signals import stoppable

SEND_S = 120.0  # timeout for the copy of the package
USER_ERRORS = (ConfigError.exit_code, DataError.exit_code, Stopped.exit_code)


@dataclass(frozen=True)
class FleetJob:
    """A run on hosts. The launcher ships the texts, and knows nothing else of what the run computes.

    Attributes:
        verb: for the job's title.
        text: returns the configuration that a host gets, from all hosts, its number, and the numbers of those that take
            part.
        resources: what the run asks of each host.
        files: names of files that every rank reads; the launcher compares them between hosts.
        make_folder: makes the run's folder on this machine, with the next free name at each call.
        is_resumed: the run continues one that exists.
        may_exist: the run's folder may exist on a host.
        may_link: symbolic links in the run's folder may lead out of it.
        syncs_package: the hosts run this machine's package.
        rules: when the run goes on after a failure.
        resume_options: options of ``yolofleet train --resume FOLDER`` that name the hosts; None if the run writes no
            states that it could resume from.
        supervision: this process supervises a detached run; None: it is the launcher that a person started.
    """

    verb: str
    text: Callable[[Fleet, int, Sequence[int]], str]
    resources: RunResources
    make_folder: Callable[[], RunFolder]
    files: Sequence[str] = ()
    is_resumed: bool = False
    may_exist: bool = False
    may_link: bool = False
    syncs_package: bool = False
    rules: RestartRules = field(default_factory=RestartRules)
    resume_options: Sequence[str] | None = None
    supervision: Supervision | None = None

    def inspect(self, fleet: Fleet, remotes: Sequence[Remote]) -> tuple[list[Finding], Plan]:
        """Return the findings about hosts that concern the job, and where they meet."""
        findings, plan = inspect(fleet, remotes, self.resources, self.files)
        if self.syncs_package:  # the finding compares the installed packages, which the job does not use
            findings = [finding for finding in findings if finding.code != "package-differs"]
        return findings, plan


def run_job(job: FleetJob, fleet: Fleet) -> tuple[int, RunFolder]:
    """Run a job to its end. Return the exit code and the run's folder on this machine.

    Raises:
        YolofleetError: the job cannot be started.
    """
    can_resume = job.resume_options is not None
    with stoppable(), checked(job, fleet) as (plan, fleet, remotes, config):
        code: int | None = None
        saved: bool | None = False
        folders = Folders.claim(
            job.make_folder,
            remotes,
            is_resumed=job.is_resumed,
            may_exist=job.may_exist,
            may_link=job.may_link,
        )
        resume = folders.resume_command(job.resume_options or ()) if can_resume else ""
        with Attempts(
            job, fleet, remotes, plan, folders, resume, lambda remote: prepare(job, [remote])
        ) as attempts:
            try:
                if can_resume:
                    folders.begin(config, remotes, is_resumed=job.is_resumed)
                saved = None  # from here on, only the hosts know whether there are states
                with live_copy(folders, lambda: attempts.remotes):
                    watch = attempts.run()
                saved = folders.has_states(attempts.remotes)
                code = watch.explain("" if saved is False else resume)
                if attempts.renewal is not None and attempts.renewal.why_lost:
                    say(attempts.renewal.why_lost)
                    code = LEASE_LOST
            finally:
                discard = saved is False and code in (None, *USER_ERRORS)
                folders.fetch(attempts.remotes, saved=saved, discard=discard, config=config)
    return code, folders.here


@contextmanager
def checked(job: FleetJob, fleet: Fleet) -> Iterator[tuple[Plan, Fleet, list[Remote], str]]:
    """Log in to the hosts, and check them. Yield where they meet, the hosts without unfit spares, and the configuration.

    Raises:
        YolofleetError: the job cannot be started.
    """
    left_out: list[Unreachable] = []
    active = range(len(fleet.active))
    config, *_ = [job.text(fleet, number, active) for number in active]  # raises before anything is made
    with logged_in(fleet, lost=left_out if fleet.spare else None) as remotes:
        plan, fleet, remotes = check(job, without_spares(fleet, left_out), remotes)
        say(describe(fleet, plan))
        yield plan, fleet, remotes, config


def without_spares(fleet: Fleet, left_out: Sequence[Unreachable]) -> Fleet:
    """Return the fleet without the spares that cannot be reached, and say so.

    Raises:
        Unreachable: a host that is not a spare cannot be reached.
    """
    active = {host.name for host in fleet.active}
    for problem in left_out:
        if problem.host in active:
            raise problem
        say(f"warning: the spare host {problem.host} is left out: {problem.what}")
    return fleet.without({problem.host for problem in left_out})


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
        here = {"folder": ".", "streamed": False, "terminal": None, "number": 0, "restarts": 0}
        watch.follow([{**job, **place(fleet, plan, node), **here} for node in range(len(remotes))])
        return watch.command_code()


def prepare(job: FleetJob, remotes: Sequence[Remote]) -> None:
    """Let hosts work in their folders, with this machine's package if the job asks for it.

    Raises:
        ConfigError: a folder does not exist. ClusterError: a host is lost.
    """
    enter_folders(remotes)
    if job.syncs_package:
        package = packed()
        on_each(remotes, lambda remote: remote.ask("take_code", SEND_S, **package))


def check(job: FleetJob, fleet: Fleet, remotes: Sequence[Remote]) -> tuple[Plan, Fleet, list[Remote]]:
    """Check the hosts, print warnings, and return where the hosts meet, and the hosts without unfit spares.

    Raises:
        ClusterError, ConfigError: the job would fail later.
    """
    prepare(job, remotes)
    findings, plan = job.inspect(fleet, remotes)
    if fleet.spare and faults_of(findings):
        remotes = without_unfit_spares(job, fleet, remotes)
        fleet = fleet.without({host.name for host in fleet.spare} - {remote.name for remote in remotes})
        findings, plan = job.inspect(fleet, remotes)
    for finding in findings:
        if finding.level == "warn":
            say(f"warning: {finding.where}: {finding.seen}")
    raise_faults(findings)
    return plan, fleet, list(remotes)


def without_unfit_spares(job: FleetJob, fleet: Fleet, remotes: Sequence[Remote]) -> list[Remote]:
    """Return the hosts that start, and each spare that brings no fault with it; name the others.

    Raises:
        ClusterError, ConfigError: a host that starts has a fault.
    """
    starting = remotes[: len(fleet.active)]
    raise_faults(job.inspect(fleet, starting)[0])
    kept = list(starting)
    for spare in remotes[len(starting) :]:
        if faults := faults_of(job.inspect(fleet, [*starting, spare])[0]):
            say(f"warning: the spare host {spare.name} is left out: {faults[0].seen}")
        else:
            kept.append(spare)
    return kept


def describe(fleet: Fleet, plan: Plan) -> str:
    """Return lines that name each host's processes and the address where the hosts meet."""
    rows = [
        f"  {host.name}: {host.processes} process{'es' if host.processes > 1 else ''} on {host.device}, "
        f"{endpoint}"
        for host, endpoint in zip(fleet.active, plan.endpoints, strict=False)
    ]
    rows += [f"  {host.name}: a spare" for host in fleet.spare]
    many = f"{len(fleet.active)} host{'s' if len(fleet.active) > 1 else ''}"
    ranks = f"{fleet.processes} process{'es' if fleet.processes > 1 else ''}"
    return "\n".join([f"fleet: {many}, {ranks}, meeting at {plan.endpoints[0].address}:{plan.port}", *rows])
