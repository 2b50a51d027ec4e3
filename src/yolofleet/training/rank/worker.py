"""One process of a run: join the process group, train or validate, and close the group.

For one device, or under a torchrun of the user, :func:`run` runs in the caller's process. Our own launcher starts
``yolofleet.training.rank.worker FOLDER JOB RESTARTS`` once per device.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.config.stored.job import load_job, verb_of
from yolofleet.config.stored.resume_options import options_to_repeat
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import open_append, write_text
from yolofleet.support import devices
from yolofleet.support.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    DeviceError,
    NumericsError,
    Stopped,
    StorageError,
    YolofleetError,
    refused_path,
)
from yolofleet.support.place import place_from_environment
from yolofleet.support.system.children import die_with_parent, name_process
from yolofleet.support.system.signals import stoppable
from yolofleet.support.text import announce, echo, inform, set_quiet
from yolofleet.training.parallel.activity import Activity
from yolofleet.training.parallel.process import lent_process, prepare_process
from yolofleet.training.parallel.stall import PeerFailed
from yolofleet.training.parallel.users_torchrun_errors import AFTER_CAUSE_S, is_told
from yolofleet.training.parallel.watchdog import Watchdog
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.folder import shared_folder
from yolofleet.training.rank.memory_probe import out_of_memory

# by ``verb_of`` the settings: what does one rank's part; a rank imports only that
WORK = {
    "train": "yolofleet.training.rank.train:train",
    "val": "yolofleet.training.rank.val:validate",
    "bench train": "yolofleet.measure.bench:measure",
    "plan probe": "yolofleet.measure.probe:probe",
}


def show(error: YolofleetError) -> None:
    """Print an error on standard error, unless another process of this machine has printed it."""
    if not is_told(error):
        announce(f"\n{error.render()}")


def show_failure(problem: BaseException) -> int:
    """Print why this process fails; return its exit code."""
    problem = refused_path(problem) or problem
    if isinstance(problem, YolofleetError):
        show(problem)
        return problem.exit_code
    echo("".join(traceback.format_exception(problem)), to=sys.stderr)
    return 128 + signal.SIGINT if isinstance(problem, KeyboardInterrupt) else 1


@lent_process()
def run(
    config: Resolved[TrainConfig] | Resolved[ValConfig],
    recipe: Resolved[Recipe] | None = None,
    folder: RunFolder | None = None,
    on_stall: Callable[[YolofleetError], None] = show,
    on_failure: Callable[[BaseException], int] = show_failure,
    restarts: int = 0,
) -> RunFolder:
    """Run one rank of a run; return the folder of the run.

    Args:
        recipe: of a training run; None for a validation.
        folder: of the run, if the launcher or an earlier run created it; None: rank 0 creates it.
        on_stall: gets the report if ranks hang; then the process ends.
        on_failure: reports an exception and returns the exit code, if the process must end at once because it cannot
            close its collectives (``World.ends_by_exit``).
        restarts: attempts of our launcher before this one, which a failure or a joining host ended.
    """
    activity, place = Activity(), place_from_environment(os.environ)
    place = replace(place, restarts=place.restarts + restarts)
    try:
        with activity.doing("device"):
            device = prepare_process(config.value, place)
    except ConfigError as problem:
        problem.source = problem.source or config.sources["device"]
        raise
    with devices.selected(device):  # a notebook goes on with its own current device
        with activity.doing("connecting"):
            world = World.join(place, device, config.value.timeout_s, activity)
        if world.is_main and (idle := devices.unused_note(config.value.device, world.size)):
            inform(f"note: {idle}")
        try:
            used = _run(config, recipe, folder, world, on_stall)
        except BaseException as problem:
            if world.ends_by_exit:
                exit_code = on_failure(problem)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(exit_code)
            world.close(failed=True)
            raise
        world.close()
        return used


def _run(
    config: Resolved[TrainConfig] | Resolved[ValConfig],
    recipe: Resolved[Recipe] | None,
    folder: RunFolder | None,
    world: World,
    on_stall: Callable[[YolofleetError], None],
) -> RunFolder:
    """Do the work of :func:`run` among the ranks of ``world``."""
    settings, run_folder = config.value, folder
    try:
        with stoppable(), ExitStack() as lock:
            run_folder = shared_folder(world, settings, folder, lock)
            run_folder = replace(run_folder, resume_options=tuple(options_to_repeat(settings)))
            clock = world.activity.clock = Clock() if recipe is not None else None
            with Watchdog(
                world,
                stall_s=settings.stall_s,
                timeout_s=settings.timeout_s,
                log=run_folder.log(world.rank),
                checkpoints=run_folder.checkpoints,
                resume=run_folder.resume_command if recipe is not None else "",
                say=on_stall,
                status=run_folder.ranks if world.is_main else None,
            ):
                try:
                    world.connect()
                except ClusterError:  # no training has started, so the folder is of no use
                    run_folder.discard_unless_used()
                    raise
                module, function = WORK[verb_of(settings)].split(":")
                with world.activity.doing("imports"):
                    work = getattr(import_module(module), function)
                work(config, recipe, world, clock, run_folder)
    except (ConfigError, DataError, CheckpointError, StorageError, Stopped, OSError, KeyboardInterrupt):
        if run_folder:
            run_folder.discard_unless_used()
        raise
    except (RuntimeError, MemoryError) as problem:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        of_these = f", CUDA_VISIBLE_DEVICES={visible}" if visible else ""
        where = f"GPU {world.device.index or 0} of {world.host} (rank {world.rank}{of_these})"
        if (failed := DeviceError.told_by(str(problem), where)) is not None:
            raise failed from None
        if "no kernel image is available" in str(problem):
            raise ConfigError(
                f"this build of torch has no kernels for {where}",
                source=str(problem).splitlines()[0],
                hint="install the build of torch that pytorch.org/get-started names for it; yolofleet doctor lists those of "
                "this build",
            ) from None
        if not devices.is_out_of_memory(problem):
            raise
        if run_folder:
            run_folder.discard_unless_used()
        raise out_of_memory(problem, settings, world.device) from None
    return run_folder


# -- process of our launcher ---------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run ``yolofleet.training.rank.worker FOLDER JOB RESTARTS``; write the reason of a failure into FOLDER/logs."""
    die_with_parent()
    folder = RunFolder(Path(argv[0]))
    rank = int(os.environ.get("RANK", "0"))
    name_process(f"yolofleet-{rank}")
    faulthandler.enable(os.dup(2))  # the stack of a crash goes into the agent's log, which the launcher reads
    if rank:  # rank 0 prints; other ranks write to their log
        with open_append(folder.log(rank)) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)

    def write_failure(message: str, exit_code: int, **more: Any) -> int:
        failure = {"message": message, "exit_code": exit_code, **more}
        failure |= {"rank": rank, "host": platform.node(), "time": time.time()}
        try:
            write_text(folder.failure(rank), json.dumps(failure))
        except (StorageError, ClusterError):  # another attempt may have taken over the folder
            echo(message)
        return exit_code

    def on_stall(error: YolofleetError) -> None:
        write_failure(error.render(), error.exit_code, of_all=True, secondary=isinstance(error, PeerFailed))

    def is_secondary(problem: BaseException) -> bool:
        # The end of another rank usually causes a ClusterError. All ranks raise the same NumericsError, and rank 0 has
        # waited for the state that it was writing, which its message names.
        return isinstance(problem, ClusterError) or (rank > 0 and isinstance(problem, NumericsError))

    def report(problem: BaseException) -> int:
        problem = refused_path(problem) or problem
        if isinstance(problem, YolofleetError):
            leaves = isinstance(problem, DeviceError) or (
                isinstance(problem, Stopped) and problem.machine_goes
            )
            return write_failure(
                problem.render(), problem.exit_code, secondary=is_secondary(problem), leaves=leaves
            )
        if isinstance(problem, KeyboardInterrupt):
            return write_failure("interrupted", 128 + signal.SIGINT)
        text = "".join(traceback.format_exception(problem))
        echo(text, to=sys.stderr)
        return write_failure("this is a bug in yolofleet:\n" + text, 1)

    def on_failure(problem: BaseException) -> int:
        code = report(problem)
        if is_secondary(problem):
            # torchrun's agent looks every 0.1 s and reports one of the processes that have ended since. A rank that lost
            # another one must end later than that one, or the report hides the cause.
            time.sleep(AFTER_CAUSE_S)
        return code

    try:
        job = load_job(Path(argv[1]))
        set_quiet(job.config.value.quiet)
        run(job.config, job.recipe, folder, on_stall, on_failure, int(argv[2]))
        return 0
    except (Exception, KeyboardInterrupt) as problem:
        return on_failure(problem)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
