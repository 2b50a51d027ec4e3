"""`yolofleet predict`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import SchemaCommand, say
from yolofleet.config.load import resolve_predict
from yolofleet.config.schema import PredictConfig


def run(given: dict[str, Any], config_file: str) -> int:
    config = resolve_predict(given, config_file=config_file)
    say(config.notes)
    from yolofleet.extend.recipe_class import load_recipe_class
    from yolofleet.predict.run import predict_command

    load_recipe_class(config.value.recipe_class)
    return predict_command(config.value)


command = SchemaCommand("predict", PredictConfig, run, help="Detect objects in images and videos.")
