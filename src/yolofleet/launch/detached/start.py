"""Start a run that does not depend on the launcher: a deputy on each host (``deputy.py``)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from yolofleet.errors import ClusterError
from yolofleet.hosts.fleet import Fleet
from yolofleet.hosts.remote import Remote
from yolofleet.launch.detached.attach import attach
from yolofleet.launch.detached.order import Order, appoint, named_in_full
from yolofleet.launch.job_on_hosts import FleetJob, checked
from yolofleet.launch.watch import say
from yolofleet.system.signals import stoppable

LOGINS_S = 60.0


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
        fleet = replace(fleet, hosts=tuple(map(named_in_full, remotes)))
        order = Order(job_name, f"{job.verb} {name}", "", fleet, supervisor, run, "", begins=True)
        try:
            for host in reversed(fleet.hosts):  # the first one begins the run
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
