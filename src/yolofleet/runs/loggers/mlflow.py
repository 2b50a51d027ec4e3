"""MLflow: the database ``mlflow/mlflow.db`` of the run folder, or a server (extra: ``mlflow``)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from yolofleet.runs.loggers.logger import LoggedRun, Logger

MOST_CHARACTERS = 500  # characters of a parameter that servers of all versions accept


class MlflowLogger(Logger):
    """Stores rows and settings with MLflow's client, one request for each row. A resumed run continues the same run."""

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
