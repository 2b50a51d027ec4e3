"""`yolofleet val`, `predict` and `export`: what is done with weights."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import DOWNLOAD, SchemaCommand, print_notes
from yolofleet.cli.download import offer_download
from yolofleet.config.load import resolve_export, resolve_predict, resolve_val
from yolofleet.config.schema import ValConfig
from yolofleet.config.schema.verbs import ExportConfig, PredictConfig


def run_val(given: dict[str, Any], config_file: str, download: bool) -> int:
    config = resolve_val(given, config_file=config_file)
    print_notes(config.notes)
    from yolofleet.fleet.launch.plan import plan_run, start

    offer_download(config.value, (config.value.split,), agreed=download)
    return start(plan_run(config))[0]


val = SchemaCommand(
    "val",
    ValConfig,
    run_val,
    extra_options=[DOWNLOAD],
    help="Measure the accuracy of weights on a data set with the COCO metrics.",
)


def run_predict(options: dict[str, Any], config_file: str) -> int:
    config = resolve_predict(options, config_file=config_file)
    print_notes(config.notes)
    from yolofleet.inference.predict.run import predict_command

    return predict_command(config.value)


predict = SchemaCommand("predict", PredictConfig, run_predict, help="Detect objects in images and videos.")


def run_export(options: dict[str, Any], config_file: str) -> int:
    config = resolve_export(options, config_file=config_file)
    from yolofleet.inference.export.exporter import export_command

    return export_command(config.value)


export = SchemaCommand(
    "export",
    ExportConfig,
    run_export,
    help="Write a network as a file for another runtime. If the runtime is installed, run the file and compare its output "
    "with that of the network. If they differ by more than rounding, delete the file and end with exit code 5.",
    epilog="predict, val and bench accept the file as --weights. docs/inference.md describes the formats and their limits.",
)
