"""Prometheus: ``prometheus/metrics.prom`` of the run folder, for node_exporter's textfile collector."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from yolofleet.files.atomic import write_text
from yolofleet.report.loggers.logger import Logger


class PrometheusLogger(Logger):
    """Replaces the file after each epoch, so that a reader sees a whole row.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats/
    """

    def row(self, row: Mapping[str, float]) -> None:
        run = self.run.name.encode("utf-8", "replace").decode()
        run = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines = {}  # by metric: a file that repeats one is not valid
        for name, value in {**row, "written_at_seconds": round(time.time(), 3)}.items():
            metric = "yolofleet_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            lines[metric] = f'# TYPE {metric} gauge\n{metric}{{run="{run}"}} {value!r}\n'
        write_text(self.run.folder / "metrics.prom", "".join(lines.values()))
