"""`yolofleet val`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import DOWNLOAD, SchemaCommand, print_notes
from yolofleet.cli.download import offer_download
from yolofleet.config.load import resolve_val
from yolofleet.config.schema import ValConfig


def run(given: dict[str, Any], config_file: str, download: bool) -> int:
    config = resolve_val(given, config_file=config_file)
    print_notes(config.notes)
    from yolofleet.launch.plan import plan_run, start

    offer_download(config.value, (config.value.split,), agreed=download)
    return start(plan_run(config))[0]


command = SchemaCommand(
    "val",
    ValConfig,
    run,
    extra_options=[DOWNLOAD],
    help="Measure the accuracy of weights on a data set with the COCO metrics.",
)
