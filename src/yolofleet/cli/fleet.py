"""`yolofleet fleet`: look at several hosts, run something on all of them, and end it."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from yolofleet.cli.commands import Command
from yolofleet.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from yolofleet.launch.fleet import Fleet
    from yolofleet.launch.preflight import Plan
    from yolofleet.launch.remote import Remote, Unreachable

LINES_BYTES = 64 << 10  # of a log, that lines are taken from
FOLLOW_S = 1.0
HOSTS = [
    click.Option(["--hosts"], default="", metavar="TEXT", help="the machines, by ssh: a:8,b:4,c:0+2,d:cpu:2"),
    click.Option(
        ["--fleet", "fleet_file"], default="", metavar="FILE", help="the machines, from a YAML file"
    ),
]
Job = tuple["Remote", dict[str, Any]]


def named_fleet(hosts: str, fleet_file: str) -> Fleet:
    """What the options name; how many processes there are matters to none of these verbs but check and run."""
    from yolofleet.launch.fleet import load_fleet, parse_hosts

    if bool(hosts) == bool(fleet_file):
        raise ConfigError("which machines? one of --hosts and --fleet is needed", hint="--hosts a:8,b:4")
    return load_fleet(Path(fleet_file), "cpu") if fleet_file else parse_hosts(hosts, "cpu")


def check(hosts: str, fleet_file: str, data: str) -> int:
    from yolofleet.config.schema import TrainConfig
    from yolofleet.doctor.run import exit_code, tell
    from yolofleet.launch.preflight import enter_folders, inspect
    from yolofleet.launch.ssh import crew, describe

    fleet = named_fleet(hosts, fleet_file)
    with crew(fleet) as remotes:
        enter_folders(remotes)
        findings, plan = inspect(fleet, remotes, TrainConfig(data=data))
    tell(findings, sys.stdout)
    code = exit_code(findings)
    if not code:
        click.echo(describe(fleet, plan))
        click.echo(firewall_line(fleet, plan))
    return code


def firewall_line(fleet: Fleet, plan: Plan) -> str:
    """torch's store listens on all addresses, and it believes everybody."""
    members = ", ".join(spot.address for spot in plan.spots)
    return (
        f"while a run lasts, torch's store on {fleet.hosts[0].name} listens on all its networks (port {plan.port}); to keep "
        f"others out, there:\n  sudo nft add rule inet filter input tcp dport {plan.port} ip saddr != {{ {members} }} drop"
    )


def run(hosts: str, fleet_file: str, command: tuple[str, ...]) -> int:
    from yolofleet.launch.ssh import run_command

    return run_command(named_fleet(hosts, fleet_file), command)


def jobs_of(remotes: Sequence[Remote]) -> list[Job]:
    """The newest first, and each by its hosts in order."""
    from yolofleet.launch.preflight import on_each

    listed = on_each(remotes, lambda remote: list(remote.ask("list_jobs")))
    found = [(remote, job) for remote, jobs in zip(remotes, listed, strict=True) for job in jobs]
    began_s = {job["job"]: float(job["began_s"]) for _, job in found}
    return sorted(found, key=lambda entry: (-began_s[entry[1]["job"]], entry[1]["job"], entry[1]["node"]))


def with_jobs(hosts: str, fleet_file: str, work: Callable[[list[Job]], int]) -> int:
    """``work`` on the jobs of the hosts that can be reached; says which cannot."""
    from yolofleet.launch.ssh import crew

    lost: list[Unreachable] = []
    with crew(named_fleet(hosts, fleet_file), lost=lost) as remotes:
        code = work(jobs_of(remotes)) if remotes else 0
    for problem in lost:
        print(problem.render(), file=sys.stderr)
    return ClusterError.exit_code if lost else code


def ps(hosts: str, fleet_file: str, every: bool) -> int:
    def show(found: list[Job]) -> int:
        from yolofleet.report.console import duration

        rows = []
        for remote, job in found:
            if job["runs"] or every:
                first, count = job["ranks"]
                ranks = str(first) if count == 1 else f"{first}-{first + count - 1}"
                lasted_s = (job["ended_s"] or time.time() + remote.ahead_s) - job["began_s"]
                state = "runs" if job["runs"] else "lost" if job["code"] is None else f"exit {job['code']}"
                rows.append((job["job"], remote.name, ranks, state, duration(lasted_s), job["title"]))
        if rows:
            table = [("job", "host", "ranks", "state", "time", "what"), *rows]
            widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
            for row in table:
                click.echo(
                    "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                )
        else:
            click.echo("no jobs" if every else "no jobs run")
        return 0

    return with_jobs(hosts, fleet_file, show)


def stop(hosts: str, fleet_file: str, job: str, now: bool, grace_s: float) -> int:
    def end(found: list[Job]) -> int:
        from yolofleet.launch.preflight import on_each

        name = one_job([entry for entry in found if entry[1]["runs"]], job)
        if not name:
            click.echo(f"{job} does not run" if job else "no jobs run")
            return 0
        remotes = [remote for remote, record in found if record["job"] == name and record["runs"]]

        def ask(remote: Remote) -> dict[str, Any]:
            return dict(remote.ask("end_job", grace_s + 15, job=name, now=now, deadline_s=grace_s + 10))

        left = [
            remote.name
            for remote, answer in zip(remotes, on_each(remotes, ask), strict=True)
            if answer["left"]
        ]
        if left:
            raise ClusterError(
                f"{name} still runs on {', '.join(left)}",
                hint=f"yolofleet fleet stop {name} --now --hosts ...",
            )
        click.echo(f"{name} has ended on {', '.join(remote.name for remote in remotes)}")
        return 0

    return with_jobs(hosts, fleet_file, end)


def one_job(found: list[Job], asked: str) -> str:
    """The job that is meant; "" when there is none.

    Raises:
        ConfigError: there are several.
    """
    names = list(dict.fromkeys(record["job"] for _, record in found))
    if asked:
        return asked if asked in names else ""
    if len(names) > 1:
        raise ConfigError(
            f"which job? {', '.join(names)}", hint=f"yolofleet fleet stop {names[0]} --hosts ..."
        )
    return names[0] if names else ""


def logs(hosts: str, fleet_file: str, job: str, rank: int | None, lines: int, follow: bool) -> int:
    def show(found: list[Job]) -> int:
        name = job or (found[0][1]["job"] if found else "")
        parts = [(remote, record) for remote, record in found if record["job"] == name]
        if not parts:
            raise ConfigError(f"no job {name} is known there" if name else "no job is known there")
        files = [
            (remote, number, f"{record['folder']}/logs/rank-{number}.log", record)
            for remote, record in parts
            for number in range(record["ranks"][0], sum(record["ranks"]))
            if rank is None or rank == number
        ]
        if not files:
            raise ConfigError(f"job {name} has no rank {rank}")
        places = {}
        for remote, number, file, _ in files:
            text, places[file] = piece_of(remote, file, -LINES_BYTES)
            write(f"rank {number}: ", "".join(text.splitlines(keepends=True)[-lines:]), rank is None)
        going = follow
        while going:
            time.sleep(FOLLOW_S)
            for remote, number, file, _ in files:
                text, places[file] = piece_of(remote, file, places[file])
                write(f"rank {number}: ", text, rank is None)
            runs = {
                record["job"] for _, record in jobs_of([remote for remote, *_ in files]) if record["runs"]
            }
            going = name in runs
        return 0

    return with_jobs(hosts, fleet_file, show)


def piece_of(remote: Remote, file: str, offset: int) -> tuple[str, int]:
    """Text from ``offset`` on and where it ends; nothing where there is no file yet."""
    try:
        answer = remote.ask("read_piece", file=file, offset=offset)
    except ClusterError:
        return "", max(0, offset)
    data = base64.b64decode(answer["data"])
    return data.decode("utf-8", "replace"), int(answer["offset"]) + len(data)


def write(mark: str, text: str, marked: bool) -> None:
    for line in text.splitlines():
        click.echo(f"{mark}{line}" if marked else line)


JOB = click.Argument(["job"], default="")
check_command = Command(
    "check",
    params=[
        *HOSTS,
        click.Option(["--data"], default="", help="data set that every host must have"),
    ],
    callback=check,
    help="Log in to every host and look whether they can work together: software, clocks, data, and every way "
    "between them. `yolofleet doctor --hosts` takes longer and measures.",
)
run_command = Command(
    "run",
    params=[*HOSTS, click.Argument(["command"], nargs=-1, required=True)],
    callback=run,
    help="Run a command once on every host: `fleet run --hosts a:8,b:4 -- nvidia-smi`. `-- torchrun script.py` is one "
    "job of all their processes. When it fails on one host, or this command ends, all are ended.",
)
ps_command = Command(
    "ps",
    params=[*HOSTS, click.Option(["--all", "every"], is_flag=True, help="jobs that have ended, too")],
    callback=ps,
    help="What runs on the hosts, whoever of this user started it from where.",
)
stop_command = Command(
    "stop",
    params=[
        *HOSTS,
        JOB,
        click.Option(["--now"], is_flag=True, help="kill at once, without saving"),
        click.Option(
            ["--grace", "grace_s"], type=float, default=30.0, metavar="X", help="seconds to save  [30]"
        ),
    ],
    callback=stop,
    help="End JOB on all hosts: it saves its state first. Without JOB: the one that runs.",
)
logs_command = Command(
    "logs",
    params=[
        *HOSTS,
        JOB,
        click.Option(["--rank"], type=int, default=None, metavar="N", help="of this rank only"),
        click.Option(["--lines"], type=int, default=20, metavar="N", help="last lines of each  [20]"),
        click.Option(["--follow"], is_flag=True, help="go on until the job ends"),
    ],
    callback=logs,
    help="The last lines that every rank of JOB wrote. Without JOB: the newest.",
)
