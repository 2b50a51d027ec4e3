"""The attempts of a user's torchrun: find the run that its agents have started before."""

from __future__ import annotations

import glob
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.files.foreign import read_foreign_text
from yolofleet.parallel.place import RUN_ID
from yolofleet.parallel.world import World
from yolofleet.report.folder import RunFolder
from yolofleet.system.proc import started_at

MOST_MARK_BYTES = 1 << 24


def joined_attempt(
    world: World, settings: TrainConfig | ValConfig, given: RunFolder | None
) -> tuple[RunFolder | None, str]:
    """Return the folder of the run that a user's torchrun goes on with, and this attempt's mark; set ``world.restarts``.

    An agent that has started ranks of the run before starts ranks again after a failure, or because a machine has joined or
    left, which torchrun counts as no restart. An earlier torchrun's run is never continued, whatever its name and settings,
    nor is one of these very processes, whose script trains twice.

    Collective: every rank.
    """
    mine = f"agent {torchrun_agent()}", f"rank {_process(os.getpid())}", world.restarts
    agents, ranks, counts = map(set, zip(*world.gather(mine), strict=True))
    project, found = settings.project or Path("runs") / settings.verb, ""
    folders = [given.path] if given else project.glob(f"{glob.escape(settings.name)}*")
    for folder in sorted(folders, key=lambda path: (len(path.name), path)) if world.local_rank == 0 else ():
        before, number = set[str](), "" if given else str(folder.relative_to(project))[len(settings.name) :]
        with suppress(OSError, ValueError):
            mark = RunFolder(folder).torchrun_agents
            before = {*read_foreign_text(mark, limit_bytes=MOST_MARK_BYTES, follow=False).splitlines()}
        if before & agents and not before & ranks and re.fullmatch(r"\d*", number):
            found = str(folder)
            break
    path = next(filter(None, world.gather(found)), "")
    world.restarts = max(1, *counts) if path else 0
    made = given or (RunFolder(Path(path), is_of_run=bool(found)) if path else None)
    return made, "\n".join(sorted(agents | ranks))


def torchrun_agent() -> str:
    """Return a text that identifies the user's torchrun agent above this process, or ""."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", RUN_ID)
    return "" if run_id == RUN_ID else f"{run_id!r} {_process(os.getppid())}"


def _process(pid: int) -> str:
    return f"{platform.node()} {pid} {started_at(pid)}"
