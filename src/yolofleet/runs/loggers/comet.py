"""Comet: an archive for ``comet upload`` in ``comet/`` of the run folder, or a server (extra: ``comet``)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from yolofleet.runs.loggers.logger import LoggedRun, Logger, check_archives


class CometLogger(Logger):
    """Stores rows and settings; neither code, git state, console nor facts of the host.

    A resumed run continues the same experiment: on a server directly, offline with a further archive.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ |= {
            **{"COMET_DISABLE_AUTO_LOGGING": "1", "COMET_INTERNAL_SENTRY_DSN": ""},
            "COMET_LOGGING_CONSOLE": "critical",
            **({"COMET_URL_OVERRIDE": run.server} if run.server else {}),
        }
        import comet_ml

        super().__init__(run)
        self._archives = set(run.folder.glob("*.zip"))
        known = run.known_id()
        identifier = known or secrets.token_hex(16)
        off = [
            "code",
            "graph",
            "git_metadata",
            "git_patch",
            "env_details",
            "env_gpu",
            "env_host",
            "env_cpu",
            "env_network",
            "env_disk",
        ]
        self._experiment = comet_ml.start(
            project_name=os.environ.get("COMET_PROJECT_NAME", run.project),
            experiment_key=identifier,
            mode="get" if known else "create",
            online=bool(run.server),
            experiment_config=comet_ml.ExperimentConfig(
                name=run.name,
                offline_directory=str(run.folder),
                parse_args=False,
                auto_output_logging="",
                auto_param_logging=False,
                auto_metric_logging=False,
                auto_log_co2=False,
                display_summary_level=0,
                **{f"log_{part}": False for part in off},
            ),
        )
        self._experiment.log_parameters(dict(run.settings))
        run.keep_id(identifier)

    def row(self, row: Mapping[str, float]) -> None:
        self.run.check_disk()
        epoch = int(row["epoch"])
        self._experiment.log_metrics({k: v for k, v in row.items() if k != "epoch"}, step=epoch, epoch=epoch)

    def picture(self, path: Path, epoch: int) -> None:
        self.run.check_disk()
        self._experiment.log_image(str(path), name=f"validation/{path.stem}", step=epoch)

    def close(self, finished: bool) -> None:
        self._experiment.log_other("finished", finished)
        self._experiment.end()
        if not self.run.server:
            check_archives(set(self.run.folder.glob("*.zip")) - self._archives)
