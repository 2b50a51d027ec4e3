"""The loggers, and their interface to a run. ``child.py`` runs each of them in a process of its own.

A new logger is a subclass of :class:`Logger` that is called NAMELogger, and a row in ``config/loggers.py``. The packages of
loggers are imported where they are used, because a run needs at most a few of them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.storage.atomic import write_bytes, write_json
from yolofleet.storage.foreign import read_foreign, read_foreign_text

MAX_ID_BYTES = 4 << 10
PROBE_BYTES = 64 << 10
MAX_PICTURE_BYTES = 64 << 20
MOST_CHARACTERS = 500  # characters of a parameter that servers of all versions accept


@dataclass(frozen=True)
class LoggedRun:
    """The run as a logger knows it."""

    folder: Path  # for the files of this logger, inside the run folder. The logger creates it
    # name, project: of the run: the names of its folder and of the folder above
    name: str
    project: str
    settings: Mapping[str, Any]  # by name, as numbers and text, without secrets
    server: str  # address of ``--log NAME=ADDRESS``; "" = write files, and send nothing
    resumed: bool  # the run continues from a checkpoint

    @property
    def _id_file(self) -> Path:
        return self.folder / "run-id.json"

    def known_id(self) -> str:
        """Return the identifier of this run in the store, if the run is resumed and has used the same server; else ""."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            if self.resumed:
                stored = json.loads(read_foreign_text(self._id_file, limit_bytes=MAX_ID_BYTES, follow=False))
                if stored["server"] == self.server and re.fullmatch(r"[\w-]{1,64}", stored["id"]):
                    return str(stored["id"])
        return ""

    def forget_id(self) -> None:
        """Remove the identifier of an earlier run in the same folder."""
        with suppress(OSError):
            self._id_file.unlink()

    def keep_id(self, identifier: str) -> None:
        """Store the identifier for a resumed run."""
        write_json(self._id_file, {"server": self.server, "id": identifier})

    def check_disk(self) -> None:
        """Write a file and delete it: packages that write in the background hide a full disk. Raises StorageError."""
        probe = self.folder / ".probe"
        write_bytes(probe, bytes(PROBE_BYTES))
        probe.unlink()


class Logger:
    """Base of loggers: a store outside of ``results.csv``. Every method may block or raise: the training does not wait.

    After an exception of ``__init__`` or :meth:`row`, the same method gets the same row again, before the next one.
    So ``__init__`` must be able to run twice.

    Args:
        run: see :class:`LoggedRun`.
    """

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        run.folder.mkdir(parents=True, exist_ok=True)

    def row(self, row: Mapping[str, float]) -> None:
        """Store a row of ``results.csv``; every value is finite.

        The row of an epoch comes again with more columns if its validation ends later, and after a resume or a
        rollback: it replaces the earlier row of this epoch.
        """
        raise NotImplementedError

    def picture(self, path: Path, epoch: int) -> None:
        """Store a picture of the last validation, a JPEG or PNG; its name is that of the file without suffix."""
        raise NotImplementedError

    def close(self, finished: bool) -> None:
        """Flush and close the store. Not called after a kill.

        Args:
            finished: False if the run was stopped or failed.
        """


class TensorboardLogger(Logger):
    """TensorBoard: event files in ``tensorboard/`` of the run folder (extra: ``tensorboard``).

    Writes curves with the package's own writer, which does not import torch.

    A resumed run adds a file. TensorBoard shows both files as one run, without the earlier rows of epochs that are trained again.
    """

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._writer: Any = None
        self._next_epoch = 0 if run.resumed else 1  # the first row of a resumed run replaces later ones

    def row(self, row: Mapping[str, float]) -> None:
        epoch, next_epoch, self._next_epoch = int(row["epoch"]), self._next_epoch, 0
        values = [{"tag": k, "simple_value": v} for k, v in row.items() if k != "epoch"]
        self._store(epoch, values, replaces=epoch != next_epoch)
        self._next_epoch = epoch + 1

    def picture(self, path: Path, epoch: int) -> None:
        encoded = read_foreign(path, limit_bytes=MAX_PICTURE_BYTES)
        image = {"encoded_image_string": encoded, "colorspace": 3}
        self._store(epoch, [{"tag": f"validation/{path.stem}", "image": image}])

    def _store(self, epoch: int, values: list[dict[str, Any]], *, replaces: bool = False) -> None:
        """Write an event; with ``replaces``, it replaces the rows of this epoch and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer, self._writer = self._writer or EventFileWriter(str(self.run.folder)), None
        now = time.time()
        if replaces:
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=now, step=epoch, session_log=start))
        writer.add_event(Event(wall_time=now, step=epoch, summary={"value": values}))
        writer.flush()
        self._writer = writer  # only now: one that fails once, on a full disk, does not recover

    def close(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger(Logger):
    """Weights & Biases: a folder for ``wandb sync`` in ``wandb/`` of the run folder, or a server (extra: ``wandb``).

    Stores rows and settings; neither code, git state, command line, console nor facts of the host.

    A resumed run goes on with the same identifier: on a server as one run, offline as a further folder.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # its maker would get reports of crashes
        # its log has a link to a file there, and a link out of the run folder would prevent a resume
        os.environ["WANDB_CACHE_DIR"] = str(run.folder / "cache")
        import wandb

        super().__init__(run)
        identifier = run.known_id() or secrets.token_hex(4)
        quiet: dict[str, Any] = {
            **{f"disable_{part}": True for part in ("code", "git", "job_creation")},
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


class MlflowLogger(Logger):
    """MLflow: the database ``mlflow/mlflow.db`` of the run folder, or a server (extra: ``mlflow``).

    Stores rows and settings with MLflow's client, one request for each row. A resumed run continues the same run."""

    def __init__(self, run: LoggedRun) -> None:
        os.environ |= {
            **{"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
            **{"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
        }
        from mlflow import MlflowClient
        from mlflow.entities import Param

        super().__init__(run)
        database = run.folder / "mlflow.db"
        if not (run.server or database.exists()):  # whole or not at all: MLflow cannot repair half a database
            new = database.with_name("new.db")
            new.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
            new.replace(database)
        self._client = MlflowClient(run.server or f"sqlite:///{database}")
        self._id = run.known_id()
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        artifacts = None if run.server else (run.folder / "artifacts").as_uri()
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifacts)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        run.keep_id(self._id)
        settings = [Param(k, str(v)[:MOST_CHARACTERS]) for k, v in run.settings.items() if v != ""]
        for first in range(0, len(settings), 100):  # MLflow's limit for a request
            self._client.log_batch(self._id, params=settings[first : first + 100])

    def row(self, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms, epoch = int(time.time() * 1000), int(row["epoch"])
        self._client.log_batch(
            self._id, [Metric(k, float(v), now_ms, epoch) for k, v in row.items() if k != "epoch"]
        )

    def picture(self, path: Path, epoch: int) -> None:
        self._client.log_artifact(self._id, str(path), f"validation/epoch_{epoch}")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "FAILED")
