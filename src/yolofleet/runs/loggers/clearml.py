"""ClearML: a session for ``Task.import_offline_session`` in ``clearml/`` of the run folder, or a server (extra: ``clearml``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yolofleet.runs.loggers.logger import LoggedRun, Logger, check_archives


class ClearmlLogger(Logger):
    """Stores rows and settings; neither code, packages, console nor facts of the host.

    On a server, a resumed run continues the same task. Offline it writes a further session.
    """

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        os.chdir(run.folder)  # the package would store the git state of the working folder
        os.environ |= {
            **{"CLEARML_CACHE_DIR": str(run.folder), "CLEARML_OFFLINE_MODE": "0" if run.server else "1"},
            "CLEARML_LOG_ENVIRONMENT": "",
            **{"CLEARML_VCS_REPO_URL": "none", "CLEARML_VCS_COMMIT_ID": "none", "CLEARML_VCS_BRANCH": "none"},
            **({"CLEARML_API_HOST": run.server} if run.server else {"CLEARML_NO_DEFAULT_SERVER": "1"}),
        }
        from clearml import Task
        from clearml.utilities.check_updates import CheckPackageUpdates

        CheckPackageUpdates._package_version_checked = True  # its variable only hides the server's answer
        known = run.known_id() if run.server else ""
        self._task: Any = Task.init(
            project_name=os.environ.get("CLEARML_PROJECT", run.project),
            task_name=run.name,
            continue_last_task=known or False,
            reuse_last_task_id=False,
            output_uri=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        if known:
            self._task.set_initial_iteration(0)  # epochs count from the beginning of the run
        self._task.connect(dict(run.settings), name="settings")
        run.keep_id(self._task.id)

    def row(self, row: Mapping[str, float]) -> None:
        self.run.check_disk()
        logger, epoch = self._task.get_logger(), int(row["epoch"])
        for name, value in row.items():
            if name != "epoch":
                title, _, series = name.rpartition("/")
                logger.report_scalar(title or name, series, value, epoch)
        self._task.flush()  # waiting for its thread would take 5 s

    def picture(self, path: Path, epoch: int) -> None:
        self.run.check_disk()
        self._task.get_logger().report_image("validation", path.stem, epoch, local_path=str(path))

    def close(self, finished: bool) -> None:
        if not finished and self.run.server:
            self._task.mark_stopped(force=True)
        self._task.close()
        if not self.run.server:
            check_archives([self.run.folder / "offline" / f"{self._task.id}.zip"])
