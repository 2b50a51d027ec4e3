"""TensorBoard events of a run (extra: ``yolofleet[tensorboard]``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yolofleet.errors import ConfigError


class TensorboardLog:
    """Writes the numbers of ``results.csv`` as curves.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--tensorboard needs the package tensorboard, which is not installed",
                hint="pip install 'yolofleet[tensorboard]'",
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, float]) -> None:
        """Write a row of ``results.ResultsTable.write`` at the step ``epoch``."""
        for name, value in row.items():
            if name != "epoch" and math.isfinite(value):
                self._writer.add_scalar(name, value, int(row["epoch"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
