"""Start a run that does not depend on the launcher: a standby launcher on each host (``standby.py``)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from yolofleet.config.job import dump_config
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.detached.attach import attach
from yolofleet.fleet.launch.lease_renewal import Order, appoint, named_in_full
from yolofleet.fleet.launch.machines import RunPlan
from yolofleet.fleet.launch.preflight import checked
from yolofleet.support.errors import ClusterError
from yolofleet.support.system.signals import stoppable
from yolofleet.support.text import inform

LOGINS_S = 60.0


def start_detached(plan: RunPlan) -> int:
    """Start a plan on its hosts, with its launcher on one of them. Return 0 when it has begun, else its exit code.

    Raises:
        YolofleetError: it cannot be started.
    """
    run = {"config": dump_config(plan.config, plan.recipe), "resumed": str(plan.resumed or "")}
    name = plan.resumed.name if plan.resumed is not None else plan.config.value.name
    job_name = f"{Path(name).name}-{secrets.token_hex(3)}"
    with stoppable(), checked(plan) as (_, fleet, remotes, _config):
        check_logins(remotes)
        fleet = replace(fleet, hosts=tuple(map(named_in_full, remotes)))
        order = Order(job_name, f"{plan.config.value.verb} {name}", "", fleet, run, "", begins=True)
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
            inform(f"warning: {what}, so it may not be able to take over the run: {why}")
