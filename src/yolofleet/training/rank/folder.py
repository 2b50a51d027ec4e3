"""The folder of a run: rank 0 creates it, all ranks get its path, and one rank on each of several disks writes to it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig
from yolofleet.config.stored.job import dump_config
from yolofleet.runs.report.console import Console, NullConsole
from yolofleet.runs.report.folder import COMMAND_ID, COMMAND_TERM, Owner, RunFolder, new_folder
from yolofleet.storage.atomic import exclusive, remove_leftovers, storage_error, write_text
from yolofleet.support.errors import ClusterError, ConfigError, StorageError, YolofleetError
from yolofleet.support.place import RUN_ID
from yolofleet.support.text import inform
from yolofleet.training.parallel.world import World

MARK = ".disk-"  # begins the name of the file by which ranks find out whether they share a disk

LOCK_WAIT_S = 20.0


def shared_folder(
    world: World, settings: TrainConfig | ValConfig, given: RunFolder | None, lock: ExitStack
) -> RunFolder:
    """Return the run's folder, which the launcher or rank 0 creates. Collective: every rank.

    Args:
        given: the launcher's folder; None: rank 0 creates one.
        lock: rank 0 holds the folder's lock until this stack closes.
    Raises:
        ConfigError: another process uses the folder.
    """
    made, attempt, problem = given, "", None
    if os.environ.get("TORCHELASTIC_RUN_ID", RUN_ID) != RUN_ID:
        # only under a torchrun of the user
        from yolofleet.training.rank.users_torchrun_restarts import joined_attempt

        made, attempt = joined_attempt(world, settings, given)
    if world.is_main:
        try:
            made = made or new_folder(settings)
            if note := lock.enter_context(_locked(made, world, attempt)):
                inform(note, to=sys.stderr if settings.json_out == "-" else sys.stdout)
        except YolofleetError as error:
            problem = error
    path = world.broadcast_bytes(os.fsencode(made.path) if made and not problem else b"")
    if problem is not None:
        raise problem
    if not path:
        raise ClusterError("rank 0 could not use the run's folder", hint="see the error that rank 0 reports")
    return replace(made or RunFolder(Path(os.fsdecode(path))), attempt=attempt)


def open_console(settings: TrainConfig | ValConfig, world: World, folder: RunFolder) -> NullConsole:
    """Open the console of this rank, and return it: that of rank 0 prints, the others only write their log."""
    stream = sys.stderr if settings.json_out == "-" else None  # standard output has only the JSON then
    world.console = (
        Console(folder.log(0), stream=stream, quiet=settings.quiet, fleet=lambda: world.activity.ranks())
        if world.is_main
        else NullConsole(folder.log(world.rank))
    )
    return world.console


def _locked(folder: RunFolder, world: World, attempt: str) -> AbstractContextManager[str]:
    """Return the lock of the folder; ``attempt`` as in RunFolder. Ranks of the attempt before may still be ending."""
    run, number = os.environ.get(COMMAND_ID, ""), [int(os.environ.get(COMMAND_TERM, "0")), world.restarts]
    # under torchrun's agent of a user or of SLURM, which starts the steps of a job one after another
    if attempt and not run:
        job, starts = os.environ.get("SLURM_JOB_ID", ""), ("SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        run = f"SLURM job {job}" if job else attempt.partition("\n")[0]
        number = [int(os.environ.get(name, "0")) for name in starts] if job else number
    return folder.locked(LOCK_WAIT_S if world.restarts else 0.0, Owner(run, number))


def file_writers(
    world: World, folder: RunFolder, copies: int, lock: ExitStack, warn: Callable[[str], None] = inform
) -> list[int]:
    """Return the ranks that write the run's files. Create the sub-folders on their disks, and remove leftovers there.

    They are rank 0 and, on further machines, one rank for each other disk under the folder's path. A rank whose disk
    refuses is left out. Every rank holds the whole state, so a copy costs no communication.

    Args:
        copies: the number of disks wanted.
        lock: a further writer holds its folder's lock until this stack closes; rank 0 has its own.
        warn: of rank 0, told of a disk that refuses a copy.
    Collective: every rank.

    Raises:
        ConfigError: another process uses the folder on one of the disks. StorageError: the disk of rank 0 refuses.
    """
    if world.local_size == world.size:
        if world.is_main:
            _remove_marks(folder, "")
            folder.make_tree()
            _remove_leftovers(folder)
        return [0]
    mark = folder.path / f"{MARK}{world.broadcast_bytes(secrets.token_hex(8).encode()).decode()}"
    _remove_marks(folder, mark.name)
    writers = [0]
    problem: YolofleetError | None = None
    while True:
        if world.rank == writers[-1]:
            try:
                folder.make_tree()
                if not world.is_main:
                    lock.enter_context(_locked(folder, world, folder.attempt))
                _remove_leftovers(folder)
                mark.touch()
            except OSError as error:
                problem = storage_error(error, mark)
            except (StorageError, ConfigError) as error:
                problem = error
        world.barrier()
        answer = b"free" if world.local_rank == 0 and not mark.exists() else b""
        if problem is not None:
            answer = b"used" if isinstance(problem, ConfigError) else f"refused {problem.what}".encode()
        answers = world.all_gather_bytes(answer)
        if b"used" in answers:
            problem = problem or ClusterError(f"rank {answers.index(b'used')} could not use the run's folder")
            break
        if answers[0].startswith(b"refused"):
            break
        if answers[writers[-1]].startswith(b"refused"):
            refusal = answers[refused := writers.pop()].decode().partition(" ")[2]
            if world.is_main:
                warn(f"rank {refused} keeps no copy of the run: {refusal}")
        free = [rank for rank, answer in enumerate(answers) if answer == b"free"]
        if not free or len(writers) >= copies:
            break
        writers.append(free[0])
    with suppress(OSError):
        # no writer has this disk: only a killed process had its lock
        if world.local_rank == 0 and not mark.exists():
            with exclusive(folder.path / ".lock"):
                pass
        mark.unlink()
    if problem is not None and (world.is_main or not isinstance(problem, StorageError)):
        raise problem
    return writers


def _remove_marks(folder: RunFolder, but: str) -> None:
    """Remove the marks that a crash has left in the folder, except that of this start."""
    with suppress(OSError):
        for left in folder.path.glob(f"{MARK}*"):
            if left.name != but:
                left.unlink()


def _remove_leftovers(folder: RunFolder) -> None:
    """Remove incomplete files of rank 0, whose process was killed or has lost the lock, which this process holds."""
    for path in (folder.path, folder.checkpoints, folder.weights, folder.plots):
        remove_leftovers(path)


def write_config(folder: RunFolder, config: Resolved[Any], recipe: Resolved[Recipe] | None = None) -> None:
    """Write ``config.yaml``, and under a user's torchrun the mark by which later ranks find the folder."""
    write_text(folder.config, dump_config(config, recipe))
    if folder.attempt:
        write_text(folder.torchrun_agents, folder.attempt)
