"""`yolofleet lr-find`."""

from __future__ import annotations

from typing import Any, cast

from yolofleet.cli.bench import WITHOUT
from yolofleet.cli.commands import JSON, SchemaCommand, emit_results, say, text_on_stderr
from yolofleet.config.load import resolve_train
from yolofleet.config.schema import LrFindConfig
from yolofleet.errors import ConfigError

RECIPE = ("warmup_epochs=0",)  # all steps have the images of those after the warm-up


def run(given: dict[str, Any], config_file: str, json_out: str) -> int:
    given = {**given, "set": (*given.get("set", ()), *RECIPE)}
    config, recipe = resolve_train(given, config_file=config_file, model=LrFindConfig)
    value = cast(LrFindConfig, config.value)
    if value.highest <= value.lowest:
        raise ConfigError(
            f"--lowest {value.lowest:g} is not below --highest {value.highest:g}",
            source=config.sources["lowest"],
            hint="--lowest 1e-5 --highest 1",
        )
    say([*config.notes, *recipe.notes])
    from yolofleet.launch.plan import plan_run
    from yolofleet.launch.start import start

    with text_on_stderr(json_out):
        code, folder = start(plan_run(config, recipe))
    return emit_results(code, folder.results_json, json_out)


command = SchemaCommand(
    "lr-find",
    LrFindConfig,
    run,
    spelled_as="train",
    extra_options=[JSON],
    without=(WITHOUT - {"freeze"}) | {"epochs", "max_steps", "lr_schedule"},
    help="Train some steps with a growing learning rate, write the curve of the loss as lr_find.csv and lr_find.png, and "
    "suggest lr0. The weights are not kept.",
    epilog="The other settings are those of `yolofleet train`.",
)
