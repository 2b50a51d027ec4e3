"""Restarts by a torchrun that the user started: find the run that its agents have started before."""

from __future__ import annotations

import glob
import os
import platform
import re
import secrets
from contextlib import suppress
from pathlib import Path

from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.system.proc import started_at
from yolofleet.training.parallel.world import World

MOST_MARK_BYTES = 1 << 24


def joined_attempt(
    world: World, settings: TrainConfig | ValConfig, given: RunFolder | None
) -> tuple[RunFolder | None, str]:
    """Return the folder of the run that a user's torchrun goes on with, and this attempt's mark; set ``world.restarts``.

    It goes on if one of its agents has started ranks of the run before: torchrun does not count it as a restart when a
    machine joins or leaves. It never goes on with the run of an earlier torchrun, nor with one of these very processes, whose
    script trains twice. The mark names the run, the agents and the ranks. Collective: every rank.
    """
    agent = f"agent {os.environ['TORCHELASTIC_RUN_ID']!r} {_process(os.getppid())}"
    mine = agent, f"rank {_process(os.getpid())}", world.restarts
    agents, ranks, counts = map(set, zip(*world.gather(mine), strict=True))
    usual = (settings.project or Path("runs") / settings.verb) / settings.name
    folders = [given.path] if given else usual.parent.glob(f"{glob.escape(usual.name)}*")
    found, run = "", f"run {secrets.token_hex(8)}"
    for folder in sorted(folders, key=lambda path: (len(path.name), path)) if world.local_rank == 0 else ():
        before, number = [""], "" if given else folder.name[len(usual.name) :]
        with suppress(OSError, ValueError):
            mark = RunFolder(folder).torchrun_agents
            before = read_foreign_text(mark, limit_bytes=MOST_MARK_BYTES, follow=False).splitlines()
        if agents.intersection(before) and ranks.isdisjoint(before) and re.fullmatch(r"\d*", number):
            found, run = str(folder), before[0]
            break
    every = world.gather([found, run])
    path, run = next(((path, run) for path, run in every if path), every[0])
    world.restarts = max(1, *counts) if path else 0
    made = given or (RunFolder(Path(path), is_of_run=bool(found)) if path else None)
    return made, "\n".join([run, *sorted(agents | ranks)])


def _process(pid: int) -> str:
    return f"{platform.node()} {pid} {started_at(pid)}"
