"""Run a job on several hosts: check them, start torchrun's agent on each, follow it, and end everything everywhere.

The job ends when the launcher ends for any reason, even by SIGKILL. If a process or a host fails, the job continues
with the rest (``attempts.py``). One loop reads the messages of all hosts (``watch.py``). The console shows rank 0, and
this machine keeps the logs of all ranks.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence

from yolofleet.config.resources import RunResources
from yolofleet.errors import ConfigError, DataError, Stopped
from yolofleet.hosts.fleet import Fleet
from yolofleet.hosts.lease import LEASE_LOST
from yolofleet.hosts.login import logged_in
from yolofleet.launch.attempts import HostAttempts, host_fields
from yolofleet.launch.folders import Folders
from yolofleet.launch.live import live_copy
from yolofleet.launch.preflight import FleetJob, checked, enter_folders, inspect
from yolofleet.launch.watch import Watch
from yolofleet.report.folder import RunFolder
from yolofleet.system.signals import stoppable
from yolofleet.text import inform

USER_ERRORS = (ConfigError.exit_code, DataError.exit_code, Stopped.exit_code)


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
        with HostAttempts(job, fleet, remotes, plan, folders, resume) as attempts:
            try:
                if can_resume:
                    folders.begin(config, remotes, is_resumed=job.is_resumed)
                saved = None  # from here on, only the hosts know whether there are states
                with live_copy(folders, lambda: attempts.remotes):
                    watch = attempts.run()
                saved = folders.has_states(attempts.remotes)
                code = watch.explain("" if saved is False else resume)
                if attempts.renewal is not None and attempts.renewal.why_lost:
                    inform(attempts.renewal.why_lost)
                    code = LEASE_LOST
            finally:
                discard = saved is False and code in (None, *USER_ERRORS)
                folders.fetch(attempts.remotes, saved=saved, discard=discard, config=config)
    return code, folders.here


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
                inform(f"warning: {finding.where}: {finding.seen}")
        watch = Watch(fleet, remotes, lambda *_: None, plain=True)
        title = shlex.join(command)
        job = {"id": f"run-{secrets.token_hex(3)}", "title": title, "command": list(command), "text": ""}
        fields = {"folder": ".", "streamed": False, "terminal": None, "number": 0, "restarts": 0}
        watch.follow(
            [{**job, **host_fields(fleet, plan, node_rank), **fields} for node_rank in range(len(remotes))]
        )
        return watch.command_code()
