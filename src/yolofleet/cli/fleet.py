"""`yolofleet fleet`: check hosts, run commands on them, list and stop jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from yolofleet.cli.commands import JSON, option, print_notes, verb
from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.doctor.findings import exit_code, print_findings
from yolofleet.fleet.hosts.fleet import HERE, Fleet, named_fleet, parse_hosts
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.detached.attach import attach as attach_to_run
from yolofleet.fleet.launch.jobs_on_hosts import (
    Job,
    Log,
    each,
    jobs_of,
    local_status,
    logged_job,
    print_errors,
    remote_status,
    running_job,
    with_jobs,
)
from yolofleet.fleet.launch.preflight import describe, examine_fleet, firewall_line
from yolofleet.fleet.launch.run_on_hosts import run_command as run_on_hosts
from yolofleet.fleet.resources import resources_of
from yolofleet.runs.report.fleet_screen import FOLLOW_S, show_status
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.terminal import duration
from yolofleet.support.text import echo, quoted, shown

TAKEN_S = 30.0  # longest wait until a launcher accepts a new host
KILLING_S = 10.0  # that a host has after its grace, to end everything
EVERY_LINE = -1
HOSTS = [
    option("--hosts", "hosts, by ssh: a:8,b:4,c:0+2,d:cpu:2", metavar="TEXT"),
    option("--fleet", "hosts, from a YAML file", name="fleet_file", metavar="FILE"),
]


class LineCount(click.IntRange):
    """A number of lines, or ``all``."""

    name = "number of lines"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return EVERY_LINE if value == "all" else super().convert(value, param, ctx)


JOB = click.Argument(["job"], default="")


def asked_fleet(hosts: str | None, fleet_file: str | None, *, here: bool = False) -> Fleet:
    """Return the fleet of ``--hosts`` or ``--fleet``. Only check and run use the number of processes.

    Args:
        here: without both, return this machine.
    """
    fleet = named_fleet(HERE if here and hosts is fleet_file is None else hosts, fleet_file, "cpu")
    if fleet is None:
        raise ConfigError("no hosts: expected --hosts or --fleet", hint="--hosts a:8,b:4")
    return fleet


def typed(hosts: str | None, fleet_file: str | None) -> str:
    """Return ``--hosts`` or ``--fleet`` as typed, for a suggested command."""
    return f"--fleet {quoted(fleet_file)}" if fleet_file else f"--hosts {quoted(hosts or HERE)}"


@verb(
    "check",
    *HOSTS,
    option("--data", "data set that every host must have", default=""),
    help="Check that hosts can work together, as `yolofleet doctor --hosts HOSTS --quick`, and show where they meet.",
)
def check_command(hosts: str | None, fleet_file: str | None, data: str) -> int:
    fleet = asked_fleet(hosts, fleet_file)
    findings, meeting = examine_fleet(fleet, resources_of(TrainConfig(data=data)), quick=True)
    print_findings(findings, sys.stdout)
    code = exit_code(findings)
    if not code:
        echo(describe(fleet, meeting))
        echo(firewall_line(fleet, meeting))
    return code


@verb(
    "run",
    *HOSTS,
    click.Argument(["command"], nargs=-1, required=True),
    help="Run a command once on every host: `fleet run --hosts a:8,b:4 -- nvidia-smi`. `-- torchrun script.py` starts one "
    "torchrun job over all hosts. If the command fails on one host, or this launcher ends, it ends on all hosts.",
)
def run_command(hosts: str | None, fleet_file: str | None, command: tuple[str, ...]) -> int:
    return run_on_hosts(asked_fleet(hosts, fleet_file), command, resources_of(TrainConfig()))


@verb(
    "ps",
    *HOSTS,
    option("--all", "also list jobs that have ended", name="every", is_flag=True),
    help="List your jobs on the hosts, also those that you started from another machine. Without hosts: on this machine.",
)
def ps_command(hosts: str | None, fleet_file: str | None, every: bool) -> int:
    def show(found: list[Job]) -> int:
        rows = []
        for remote, job in found:
            if job.runs or every:
                first, count = job.ranks
                ranks = "-" if not count else str(first) if count == 1 else f"{first}-{first + count - 1}"
                lasted_s = (job.ended_s or time.time() + remote.ahead_s) - job.began_s
                state = "lost" if job.code is None else f"exit {job.code}"
                state = ("runs" if count else "waits") if job.runs else state
                rows.append((job.job, remote.name, ranks, state, duration(lasted_s), shown(job.title)))
        if rows:
            table = [("job", "host", "ranks", "state", "time", "what"), *rows]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for row in table:
                echo("  ".join(map(str.ljust, row, widths)).rstrip())
        else:
            echo("no jobs" if every else "no jobs run")
        return 0

    return with_jobs(asked_fleet(hosts, fleet_file, here=True), show)


@verb(
    "stop",
    *HOSTS,
    JOB,
    option("--now", "kill the processes at once, without saving", is_flag=True),
    option(
        "--grace",
        "seconds to wait for the end of the job  [grace_s of the fleet file + 10, by default 40]",
        name="grace_s",
        type=click.IntRange(0, 3600),
        metavar="N",
    ),
    help="Stop JOB on all hosts (default: this machine); it saves a checkpoint first. Without JOB, stop the only running job. "
    "JOB is the name of the job, its first letters, or the name of its run.",
)
def stop_command(hosts: str | None, fleet_file: str | None, job: str, now: bool, grace_s: int | None) -> int:
    where, fleet = typed(hosts, fleet_file), asked_fleet(hosts, fleet_file, here=True)
    deadline_s = fleet.grace_s + KILLING_S if grace_s is None else grace_s

    def end(found: list[Job]) -> int:
        running = [entry for entry in found if entry[1].runs]
        if not job and not running:
            echo("no jobs run")
            return 0
        name = running_job(running, job, hint=f"yolofleet fleet stop NAME {where}")

        answers, lost = each(
            (remote for remote, record in running if record.job == name),
            lambda remote: remote.ask("end_job", deadline_s + 10, job=name, now=now, deadline_s=deadline_s),
        )
        print_errors(lost.values())
        left = [remote.name for remote, answer in answers.items() if answer.left]
        if left:
            raise ClusterError(
                f"{name} still runs on {', '.join(left)}",
                hint=f"yolofleet fleet stop {quoted(name)} --now {where}",
            )
        if answers:
            echo(f"{name} has ended on {', '.join(remote.name for remote in answers)}")
        return ClusterError.exit_code if lost else 0

    return with_jobs(fleet, end)


@verb(
    "logs",
    *HOSTS,
    JOB,
    option("--rank", "show only this rank", type=int, metavar="N"),
    option(
        "--lines", "number of last lines of each rank to show", type=LineCount(0), default=20, metavar="N|all"
    ),
    option("--follow", "show new lines until the job ends or you press Ctrl-C", is_flag=True),
    help="Show the last lines of the log of every rank of JOB. Without JOB, show the newest run. Without hosts: on this machine.",
)
def logs_command(
    hosts: str | None, fleet_file: str | None, job: str, rank: int | None, lines: int, follow: bool
) -> int:
    def show(found: list[Job]) -> int:
        found = [entry for entry in found if entry[1].ranks[1]]  # a detached run that waits has no processes
        name = logged_job(found, job)
        parts = [(remote, record) for remote, record in found if record.job == name]
        ranks = {
            number: Log(remote, f"{record.folder}/logs/rank-{number}.log")
            for remote, record in parts
            for number in range(record.ranks[0], sum(record.ranks))
        }
        if rank is not None and rank not in ranks:
            raise ConfigError(f"job {name} has no rank {rank} there", hint=f"--rank 0 to {max(ranks)}")
        wanted = {number: log for number, log in ranks.items() if rank in (None, number)}

        lost: set[Remote] = set()

        def on_all(work: Callable[[int, Log], bool]) -> bool:
            """Call ``work`` for each log; return whether any call returned True. Print and skip lost hosts."""
            found = False
            for number, log in wanted.items():
                try:
                    found = (log.remote not in lost and work(number, log)) or found
                except ClusterError as problem:
                    lost.add(log.remote)
                    print_errors([problem])
            return found

        def write(number: int, log: Log, *, to_end: bool) -> bool:
            came = False
            for text in log.lines(to_end=to_end):
                echo(f"rank {number}: " * (rank is None) + text.decode("utf-8", "replace"))
                came = True
            return came

        is_cut = lines != EVERY_LINE and on_all(lambda _, log: log.skip_to_last(lines))
        came = on_all(partial(write, to_end=not follow))
        if is_cut and lines:
            print_notes(["earlier lines are left out: --lines N or --lines all shows them"])
        elif not (came or follow or lost) and lines:
            print_notes([f"{name} has written nothing yet"])
        going = follow
        while going:
            time.sleep(FOLLOW_S)
            known, silent = jobs_of(log.remote for log in wanted.values() if log.remote not in lost)
            lost |= silent.keys()
            print_errors(silent.values())
            # Query the state before reading the logs, so the last lines of an ended job are not missed.
            going = any(record.job == name and record.runs for _, record in known)
            on_all(partial(write, to_end=not going))
        return ClusterError.exit_code if lost else 0

    return with_jobs(asked_fleet(hosts, fleet_file, here=True), show)


@verb(
    "status",
    *HOSTS,
    click.Argument(["run"], default=""),
    option("--watch", "draw again until the run ends or you press Ctrl-C", is_flag=True),
    JSON,
    help="Show what every rank of a run does: phase, images per second, share of its time in which it waits for others, memory, "
    "temperature if the driver reports it. RUN is a run folder on this machine or, with --hosts, the name of a job.",
)
def status_command(hosts: str | None, fleet_file: str | None, run: str, watch: bool, json_out: str) -> int:
    if not (hosts or fleet_file):
        if not run:
            raise ConfigError(
                "no run: expected the folder of a run on this machine, or --hosts of a job",
                hint="yolofleet fleet status runs/train/exp, or --hosts a:8,b:4",
            )
        file = RunFolder(Path(run)).ranks
        if not Path(run).is_dir():
            raise ConfigError(f"there is no run folder {shown(run)}", hint="--hosts names the hosts of a job")
        return show_status(lambda: local_status(file), Path(run).resolve().name, watch, json_out)

    def show(found: list[Job]) -> int:
        running = [entry for entry in found if entry[1].runs and entry[1].folder and entry[1].ranks[1]]
        name = running_job(running, run, hint=f"yolofleet fleet status NAME {typed(hosts, fleet_file)}")
        parts = [entry for entry in running if entry[1].job == name]
        remote, record = min(parts, key=lambda entry: entry[1].ranks)  # the host of rank 0
        file = f"{record.folder}/logs/ranks.json"
        return show_status(lambda: remote_status(remote, file), name, watch, json_out)

    return with_jobs(asked_fleet(hosts, fleet_file), show)


@verb(
    "attach",
    *HOSTS,
    JOB,
    help="Show a run that was started with --detach, from any machine that reaches its hosts, and copy its results here when "
    "it ends. JOB is its name or its first letters; without JOB, the only one that runs. Without hosts: on this machine, where JOB "
    "may be its folder. Ctrl-C does not stop the run.",
)
def attach_command(hosts: str | None, fleet_file: str | None, job: str) -> int:
    return attach_to_run(asked_fleet(hosts, fleet_file, here=True), job)


@verb(
    "add",
    click.Argument(["host"], metavar="HOST"),
    *HOSTS,
    option("--job", "the run, if several run there", default="", metavar="NAME"),
    help="Add HOST (as in --hosts: d:8) to a training that runs on --hosts. It loads torch while the others train; then they "
    "save after their step, and all go on together.",
)
def add_command(hosts: str | None, fleet_file: str | None, host: str, job: str) -> int:
    hosts_to_add = parse_hosts(host, source="HOST").hosts
    devices = [one.device if one.device.startswith("cpu") else f"+{one.device}" for one in hosts_to_add]
    added = [f"{one.name}:{text.replace(',', '+')}" for one, text in zip(hosts_to_add, devices, strict=True)]

    def note(found: list[Job]) -> int:
        running = [entry for entry in found if entry[1].runs and entry[1].folder and entry[1].ranks[1]]
        name = running_job(running, job, hint="--job NAME")
        remote = next(remote for remote, record in running if record.job == name)
        if not all(remote.ask("add_host", job=name, host=text) for text in added):
            raise ClusterError(f"{name} does not run on {remote.name} any longer")
        gives_up_at_s = time.monotonic() + TAKEN_S
        while remote.ask("has_added", job=name):
            if time.monotonic() > gives_up_at_s:
                raise ClusterError(
                    f"the launcher of {name} did not accept the host within {TAKEN_S:.0f} s",
                    hint="only a training that continues after failures accepts hosts (--restarts)",
                )
            time.sleep(FOLLOW_S)
        echo(f"the launcher of {name} logs in to {host} now, and says whether it takes part")
        return 0

    return with_jobs(asked_fleet(hosts, fleet_file), note)
