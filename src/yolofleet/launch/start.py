"""Execute a plan: on hosts, in processes of this machine, or in this process. Imports torch only for the last."""

from __future__ import annotations

import os

from yolofleet.config.load import dump_config
from yolofleet.config.resume import options_to_repeat
from yolofleet.errors import ConfigError, DataError, Stopped
from yolofleet.files.atomic import write_text
from yolofleet.hosts.torchrun import OPENMP_WAITS, JobSpec
from yolofleet.launch.plan import RunPlan
from yolofleet.report.folder import RunFolder
from yolofleet.system.signals import stoppable


@stoppable()
def start(plan: RunPlan) -> tuple[int, RunFolder]:
    """Execute ``plan`` to its end.

    Returns:
        The exit code of the started processes (they print the reason if it is not 0), and the folder of the run.
    Raises:
        YolofleetError: a run in this process failed, or the processes could not start.
    """
    if plan.fleet is not None:
        from yolofleet.launch.run_on_hosts import run_on_hosts

        return run_on_hosts(plan)
    if plan.processes > 1:
        folder = plan.folder()
        return _run_processes(plan, folder), folder
    os.environ.update(OPENMP_WAITS | os.environ)  # before torch is imported
    from yolofleet.rank.worker import run

    return 0, run(plan.config, plan.recipe, RunFolder(plan.resumed) if plan.resumed else None)


def _run_processes(plan: RunPlan, folder: RunFolder) -> int:
    from yolofleet.launch.local import run_agent
    from yolofleet.launch.machines import restart_rules

    code = None
    try:
        write_text(folder.job, dump_config(plan.config, plan.recipe))
        options = tuple(options_to_repeat(plan.config.value))
        job = JobSpec(folder.path.resolve(), plan.processes, resume_options=options)
        code = run_agent(job, restart_rules(plan.config.value))
    finally:
        if code in (None, ConfigError.exit_code, DataError.exit_code, Stopped.exit_code):
            folder.discard_unless_used()
    return code
