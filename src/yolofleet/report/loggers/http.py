"""HTTP: each row as a POST request with a JSON object, to a server of your own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from yolofleet.files.request import open_url
from yolofleet.report.loggers.logger import Logger

TOKEN = "YOLOFLEET_LOG_TOKEN"  # environment variable: its value is sent as a bearer token
TIMEOUT_S = 10.0


class HttpLogger(Logger):
    """Sends ``{"run": name, "project": name, "row": {...}}``; a resumed run continues with its next row."""

    def row(self, row: Mapping[str, float]) -> None:
        token = os.environ.get(TOKEN)
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        body = {"run": self.run.name, "project": self.run.project, "row": dict(row)}
        open_url(self.run.server, headers, TIMEOUT_S, body=json.dumps(body).encode()).close()
