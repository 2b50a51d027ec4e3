"""`yolofleet export`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_export
from yolofleet.config.schema import ExportConfig


def run(given: dict[str, Any], config_file: str) -> int:
    config = resolve_export(given, config_file=config_file)
    from yolofleet.export.run import export_command

    return export_command(config.value)


command = SchemaCommand(
    "export",
    ExportConfig,
    run,
    help="Write a network as a file for another runtime, and compare what that runtime computes with the network. "
    "A file that differs by more than rounding is removed, and the exit code is 5.",
    epilog="predict, val and bench take the file as --weights. Formats and their limits: docs/export.md.",
)
