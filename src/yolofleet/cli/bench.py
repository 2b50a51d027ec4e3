"""`yolofleet bench`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_bench
from yolofleet.config.schema import BenchConfig


def run(given: dict[str, Any], config_file: str) -> int:
    config = resolve_bench(given, config_file=config_file)
    from yolofleet.predict.bench import bench_command

    return bench_command(config.value)


command = SchemaCommand(
    "bench",
    BenchConfig,
    run,
    help="Measure the speed of weights or of an exported file on this machine: median milliseconds of each stage, and "
    "images per second.",
)
