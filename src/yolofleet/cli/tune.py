"""`yolofleet tune`."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import DOWNLOAD, JSON, SchemaCommand, print_notes, text_on_stderr
from yolofleet.cli.download import offer_download
from yolofleet.config.load import resolve_tune
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.runs.report.results import emit_results


def run(given: dict[str, Any], config_file: str, download: bool, json_out: str) -> int:
    config, recipe = resolve_tune(given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    offer_download(config.value, ("train", "val"), agreed=download)
    from yolofleet.measure.tune.search import tune

    with text_on_stderr(json_out):
        result = tune(config, recipe)
    return emit_results(0, result.folder / "results.json", json_out)


command = SchemaCommand(
    "tune",
    TuneConfig,
    run,
    spelled_as="train",
    extra_options=[DOWNLOAD, JSON],
    help="Search recipe values with a high fitness: train many trials, several at a time on the devices of one or more "
    "machines, and write the best recipe. Needs the package Optuna.",
    epilog="The other settings are those of `yolofleet train`; --epochs is the length of a trial.",
)
