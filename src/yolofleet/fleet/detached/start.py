"""Start a run that does not depend on the launcher: a deputy on each host (``deputy.py``)."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from yolofleet.errors import ClusterError
from yolofleet.fleet.description import Fleet, Host
from yolofleet.fleet.detached.attach import attach
from yolofleet.fleet.detached.deputy import READY, Order
from yolofleet.fleet.hosts.remote import Remote, argv_on
from yolofleet.fleet.launch.on_hosts import FleetJob, checked
from yolofleet.fleet.launch.watch import say
from yolofleet.system.signals import stoppable

LOGINS_S = 60.0
START_S = 60.0


def start_detached(job: FleetJob, fleet: Fleet, name: str, supervisor: str, run: Mapping[str, Any]) -> int:
    """Start a run, and return when it has begun: 0, or its exit code.

    Args:
        name: of the job.
        supervisor, run: see :class:`Order`.
    Raises:
        YolofleetError: it cannot be started.
    """
    job_name = f"{Path(name).name}-{secrets.token_hex(3)}"
    with stoppable(), checked(job, fleet) as (_, fleet, remotes, _config):
        check_logins(remotes)
        folders = [str(remote.ask("enter", folder=".")) for remote in remotes]
        hosts = [  # as every host must see them: not "as on this machine"
            replace(host, folder=folder, python=host.python or sys.executable)
            for host, folder in zip(fleet.hosts, folders, strict=True)
        ]
        fleet = replace(fleet, hosts=tuple(hosts))
        orders = [
            Order(job_name, f"{job.verb} {name}", host.name, fleet, supervisor, run, folder)
            for host, folder in zip(fleet.hosts, folders, strict=True)
        ]
        try:
            for host, order in reversed(
                list(zip(fleet.hosts, orders, strict=True))
            ):  # the first one begins the run
                appoint(host, order)
        except BaseException:
            for remote in remotes:
                with suppress(ClusterError):
                    remote.ask("end_lease", job=job_name, code=ClusterError.exit_code)
            raise
    return attach(fleet, job_name, until_begun=True)


def check_logins(remotes: Sequence[Remote]) -> None:
    """Let the hosts log in to each other. Warn of those that cannot take over.

    Raises:
        ClusterError: the first host, which supervises at first, cannot.
    """
    names = [remote.name for remote in remotes]
    for remote in remotes:  # one after another: sshd refuses many logins at once
        for name, words in remote.ask("refused_logins", LOGINS_S, hosts=names).items():
            why = (words.strip().splitlines() or ["no reason was given"])[-1]
            what = f"{remote.name} cannot log in to {name}"
            if remote is remotes[0]:
                raise ClusterError(
                    f"--detach: {what}",
                    source=why,
                    hint=f"on {remote.name}, `ssh {name} true` must work without a prompt",
                )
            say(f"warning: {what}, so it may not be able to take over the run: {why}")


def appoint(host: Host, order: Order) -> None:
    """Start the deputy of a host.

    Raises:
        ClusterError: it does not start.
    """
    argv = argv_on(host, "yolofleet.fleet.detached.deputy")
    try:
        done = subprocess.run(
            argv, input=json.dumps(asdict(order)).encode(), capture_output=True, timeout=START_S
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ClusterError(f"{host.name}: the deputy of this run does not start: {problem}") from None
    if done.returncode or READY.encode() not in done.stdout.splitlines():
        words = done.stderr.decode("utf-8", "replace").strip()
        raise ClusterError(f"{host.name}: the deputy of this run does not start", source=words or None)
