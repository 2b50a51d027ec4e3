"""The detached launcher: the launcher of a run with ``--detach``, which the standby launcher of its host starts (``standby.py``)."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from yolofleet.config.stored.job import Job, load_job
from yolofleet.fleet.hosts.lease import NOT_BEGUN
from yolofleet.fleet.launch.lease_renewal import SUPERVISION, LeaseLost, Supervision
from yolofleet.fleet.launch.machines import RunPlan
from yolofleet.fleet.launch.run_on_hosts import run_on_hosts
from yolofleet.storage.atomic import write_text
from yolofleet.support.errors import YolofleetError
from yolofleet.support.text import echo


def plan_of(supervision: Supervision) -> RunPlan:
    """Return the plan of a standby launcher's message. Raise ConfigError if its configuration is not valid."""
    run = supervision.order.run
    resumed, job = supervision.folder or run["resumed"], job_of(run["config"])
    folder = Path(relative(resumed)) if resumed else None
    return RunPlan(job.config, job.recipe, supervision.fleet, 1, folder, supervision)


def job_of(text: str) -> Job:
    """Return the configuration that ``dump_config`` wrote."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        write_text(file, text)
        return load_job(file)


def relative(folder: str) -> str:
    """Return a folder as seen from the working folder, which may have another path on other hosts."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def main() -> int:
    supervision = SUPERVISION.validate_json(sys.stdin.read())
    try:
        return run_on_hosts(plan_of(supervision))[0]
    except YolofleetError as problem:
        echo(problem.render(), to=sys.stderr)
        return NOT_BEGUN if supervision.term > 1 and not isinstance(problem, LeaseLost) else problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
