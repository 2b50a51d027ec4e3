"""The detached launcher: the launcher of a run with ``--detach``, which the standby launcher of its host starts (``standby.py``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yolofleet.config.load import Job, load_job
from yolofleet.errors import YolofleetError
from yolofleet.files.atomic import write_text
from yolofleet.hosts.fleet import Fleet
from yolofleet.hosts.lease import NOT_BEGUN
from yolofleet.launch.lease_renewal import LeaseLost, Supervision
from yolofleet.launch.plan import RunPlan
from yolofleet.launch.run_on_hosts import run_on_hosts
from yolofleet.text import echo


def plan_of(message: Mapping[str, Any]) -> RunPlan:
    """Return the plan of a standby launcher's message.

    Raises:
        ConfigError: its configuration is not valid.
    """
    fleet = Fleet.of_values(message["fleet"])
    run = message["supervision"]["order"]["run"]
    resumed, job = message["folder"] or run["resumed"], job_of(run["config"])
    folder = Path(relative(resumed)) if resumed else None
    supervision = Supervision.of_values(message["supervision"])
    return RunPlan(job.config, job.recipe, fleet, 1, folder, supervision)


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
    message = json.load(sys.stdin)
    try:
        return run_on_hosts(plan_of(message))[0]
    except YolofleetError as problem:
        echo(problem.render(), to=sys.stderr)
        takes_over = message["supervision"]["term"] > 1
        return NOT_BEGUN if takes_over and not isinstance(problem, LeaseLost) else problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
