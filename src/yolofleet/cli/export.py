"""`yolofleet export`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_export
from yolofleet.config.schema import ExportConfig


def run(options: dict[str, Any], config_file: str) -> int:
    config = resolve_export(options, config_file=config_file)
    from yolofleet.export.exporter import export_command

    return export_command(config.value)


command = SchemaCommand(
    "export",
    ExportConfig,
    run,
    help="Write a network as a file for another runtime. If the runtime is installed, run the file and compare its output "
    "with that of the network. If they differ by more than rounding, delete the file and end with exit code 5.",
    epilog="predict, val and bench accept the file as --weights. docs/export.md describes the formats and their limits.",
)
