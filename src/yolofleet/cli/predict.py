"""`yolofleet predict`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import SchemaCommand, print_notes
from yolofleet.config.load import resolve_predict
from yolofleet.config.schema import PredictConfig


def run(options: dict[str, Any], config_file: str) -> int:
    config = resolve_predict(options, config_file=config_file)
    print_notes(config.notes)
    from yolofleet.predict.run import predict_command

    return predict_command(config.value)


command = SchemaCommand("predict", PredictConfig, run, help="Detect objects in images and videos.")
