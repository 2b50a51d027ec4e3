"""Weights & Biases: a folder for ``wandb sync`` in ``wandb/`` of the run folder, or a server (extra: ``wandb``)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yolofleet.runs.loggers.logger import LoggedRun, Logger


class WandbLogger(Logger):
    """Stores rows and settings; neither code, git state, command line, console nor facts of the host.

    A resumed run goes on with the same identifier: on a server as one run, offline as a further folder.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # its maker would get reports of crashes
        # its log has a link to a file there, and a link out of the run folder would prevent a resume
        os.environ["WANDB_CACHE_DIR"] = str(run.folder / "cache")
        import wandb

        super().__init__(run)
        identifier = run.known_id() or secrets.token_hex(4)
        off = ("code", "git", "job_creation")
        quiet: dict[str, Any] = {
            **{f"disable_{part}": True for part in off},
            **{f"x_disable_{part}": True for part in ("meta", "stats", "machine_info")},
            **{"console": "off", "silent": True, "save_code": False, "x_save_requirements": False},
            **{"host": "", "init_timeout": 10.0},
        }
        if run.server:
            quiet["base_url"] = run.server
        self._run = wandb.init(
            dir=str(run.folder.parent),
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            id=identifier,
            resume="allow" if run.server else None,
            mode="online" if run.server else "offline",
            config=dict(run.settings),
            settings=wandb.Settings(**quiet),
        )
        self._run.define_metric("*", step_metric="epoch")  # W&B's own steps cannot be repeated
        run.keep_id(identifier)

    def row(self, row: Mapping[str, float]) -> None:
        self.run.check_disk()
        self._run.log(dict(row))

    def picture(self, path: Path, epoch: int) -> None:
        import wandb

        self.run.check_disk()
        self._run.log({f"validation/{path.stem}": wandb.Image(str(path)), "epoch": epoch})

    def close(self, finished: bool) -> None:
        import wandb

        self._run.finish(exit_code=0 if finished else 1)
        wandb.teardown()
