"""`yolofleet train` and `yolofleet tune`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from yolofleet.cli.commands import (
    DOWNLOAD,
    JSON,
    SchemaCommand,
    job_option,
    option,
    print_notes,
    text_on_stderr,
)
from yolofleet.cli.download import offer_download
from yolofleet.config.load import resolve_train, resolve_tune
from yolofleet.config.recipe import (
    DEFAULT_RECIPE,
    DEFAULT_SOURCE,
    FEW_IMAGES,
    for_network,
    is_free,
    with_default,
    with_references,
)
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig, group_of, step_images_of
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.data.datasets.built_in import built_in_of
from yolofleet.fleet.launch.schedulers.slurm import SlurmSettings
from yolofleet.runs.report.results import emit_results
from yolofleet.support.device_names import processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.place import place_from_environment
from yolofleet.support.text import echo, shown

if TYPE_CHECKING:
    from yolofleet.fleet.hosts.fleet import Fleet


def run(
    given: dict[str, Any],
    config_file: str,
    dry_run: bool,
    job: Sequence[str],
    download: bool,
    evolve: str | None,
    json_out: str,
) -> int:
    if evolve is not None:
        if job or dry_run:
            raise ConfigError(
                f"--evolve cannot be used with {'--slurm' if job else '--dry-run'}", hint="leave one out"
            )
        return run_tune({**given, "trials": evolve}, config_file, download, json_out)
    if json_out and (job or given.get("detach")):
        raise ConfigError(
            f"--json cannot be used with {'--slurm' if job else '--detach'}: this command does not wait for the results",
            hint="results.json in the run folder has them",
        )
    if job:
        if download:
            raise ConfigError(
                "--download cannot be used with --slurm", hint="yolofleet data download NAME first"
            )
        from yolofleet.cli.render import submit

        return submit(given, config_file, job, dry_run)
    config, recipe = resolve_train(given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    from yolofleet.fleet.launch.plan import (
        check_shares,
        counted_fleet,
        is_worker,
        plan_run,
        rehearse,
        start,
        with_gpus_counted,
    )

    if dry_run:
        fleet = counted_fleet(config)
        if fleet is None and not is_worker():
            config = with_gpus_counted(config)
        check_shares(config.value, fleet)
        echo(plan(config, recipe, fleet))
        rehearse(config, recipe)
        return 0
    if download or built_in_of(config.value.data):
        offer_download(config.value, ("train", "val"), agreed=download)
    with text_on_stderr(json_out):
        planned = plan_run(config, recipe)
        if config.value.detach:
            from yolofleet.fleet.launch.detached.attach import start_detached

            return start_detached(planned)
        code, folder = start(planned)
    return emit_results(code, folder.results_json, json_out)


def plan(config: Resolved[TrainConfig], recipe: Resolved[Recipe], fleet: Fleet | None = None) -> str:
    """Return the text of ``--dry-run``: all settings with sources, and the processes to start."""
    from yolofleet.families.table import FAMILIES

    config, recipe, warnings = _of_family(config, recipe)
    lines, families = [], FAMILIES.values()
    groups = dict.fromkeys(group_of(field) for field in TrainConfig.model_fields.values())
    for group in [*(g for g in groups if g != "execution"), "execution"]:
        names = [name for name, field in TrainConfig.model_fields.items() if group_of(field) == group]
        lines += [group, *_rows(config, names), ""]
    title = "hyperparameters"
    if DEFAULT_SOURCE in recipe.sources.values():
        others = [f"{family.name} {family.recipe}" for family in families if family.recipe != DEFAULT_RECIPE]
        title += f" (of {DEFAULT_RECIPE}; other families have another default: {', '.join(others)})"
    lines += [title, *_rows(recipe, list(Recipe.model_fields)), ""]
    c = config.value
    if c.batch < 0:
        lines += [
            "would run",
            f"  {_processes(config, fleet)}",
            "  a batch that fits into the memory of the devices",
        ]
        return "\n".join(lines)
    images, micro_batch = step_images_of(c.batch, c.nominal_batch), c.likely_micro_batch
    lines += [
        "would run",
        f"  {_processes(config, fleet)}",
        f"  steps of {images} images: {images // micro_batch} micro-batches of {micro_batch}",
    ]
    if c.weights and is_free(config, recipe):
        lines += [
            f"  but by the recipe {family.small_recipe}, if {c.weights} is a {family.name} network of other classes, and the "
            f"images are fewer than {FEW_IMAGES:,}"
            for family in families
            if family.small_recipe
        ]
    if idle := _idle_note(config, fleet):
        warnings.append(idle)
    lines += [f"  warning: {warning}" for warning in warnings]
    return "\n".join(lines)


def _of_family(
    config: Resolved[TrainConfig], recipe: Resolved[Recipe]
) -> tuple[Resolved[TrainConfig], Resolved[Recipe], list[str]]:
    """Return them with the default recipe of the built-in network that ``--model`` names, and warnings about another recipe."""
    from yolofleet.config.recipe_family import family_warnings
    from yolofleet.families.networks.description import describe
    from yolofleet.families.table import FAMILIES

    c = config.value
    if not c.model or c.weights or c.resume or c.recipe_class:
        return config, recipe, []
    try:
        described = describe(c.model)
    except ConfigError:  # the checks after this text say so
        return config, recipe, []
    family = FAMILIES[described.family]
    warnings = family_warnings(recipe, described)
    if family.recipe == DEFAULT_RECIPE:
        return config, recipe, warnings
    recipe = for_network(with_default(recipe, family.recipe), family, described)
    return with_references(config, recipe), recipe, warnings


def _idle_note(resolved: Resolved[TrainConfig], fleet: Fleet | None) -> str:
    """Return the note about devices without work; "" also where only torch could count the devices."""
    from yolofleet.training.parallel.partition import Partition

    c, place = resolved.value, place_from_environment(os.environ)
    counted = place.size if place.size > 1 else fleet.processes if fleet else processes_of(c.device)
    partition = Partition.parse("" if c.shares == "auto" else c.shares, counted)
    images = c.batch if c.sync_bn else step_images_of(c.batch, c.nominal_batch)
    return partition.idle_note(images, c.likely_micro_batch, c.batch)


def _rows(resolved: Resolved[Any], names: list[str]) -> list[str]:
    rows, width = [], max(map(len, TrainConfig.model_fields))
    for name in names:
        value = getattr(resolved.value, name)
        text = (
            " ".join(map(shown, value)) if isinstance(value, tuple) else shown("" if value is None else value)
        )
        rows.append(f"  {name:<{width}} {text:<24} {resolved.sources[name]}")
    return rows


def _processes(resolved: Resolved[TrainConfig], fleet: Fleet | None) -> str:
    config, place = resolved.value, place_from_environment(os.environ)
    if place.size > 1:
        return f"{place.size} processes, started by {place.source}"
    if fleet is not None:
        total = f"{fleet.processes} process{'es' if fleet.processes > 1 else ''}"
        width = max(len(host.name) for host in fleet.hosts)
        rows = [
            f"    {host.name:<{width}}  {fleet.ranks_text(node):<14}  {host.device}"
            for node, host in enumerate(fleet.hosts)
        ]
        return "\n".join([f"{total}, by ssh:", *rows])
    if config.device == "auto":
        return "one process, on the first CUDA device or else on the CPU"
    count = processes_of(config.device)
    if config.parallel == "dp":
        return f"one process with {count} device{'s' if count > 1 else ''}"
    return "one process" if count == 1 else f"{count} processes"


command = SchemaCommand(
    "train",
    TrainConfig,
    run,
    extra_options=[
        option(
            "--dry-run", "show every setting, its source, and what would run; start nothing", is_flag=True
        ),
        DOWNLOAD,
        JSON,
        job_option("--slurm", SlurmSettings, "submit the run as a SLURM batch job"),
        click.Option(["--evolve"], hidden=True),  # YOLOv5's name of `yolofleet tune --trials N`
    ],
    help="Train a detector. Name the model with --model, --cfg or --weights.",
    epilog="--recipe and --set change hyperparameters. The flags of YOLOv5's train.py work too.",
)


def run_tune(given: dict[str, Any], config_file: str, download: bool, json_out: str) -> int:
    config, recipe = resolve_tune(given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    offer_download(config.value, ("train", "val"), agreed=download)
    from yolofleet.measure.tune.search import tune

    with text_on_stderr(json_out):
        result = tune(config, recipe)
    return emit_results(0, result.folder / "results.json", json_out)


tune_command = SchemaCommand(
    "tune",
    TuneConfig,
    run_tune,
    spelled_as="train",
    extra_options=[DOWNLOAD, JSON],
    help="Search recipe values with a high fitness: train many trials, several at a time on the devices of one or more "
    "machines, and write the best recipe. Needs the package Optuna.",
    epilog="The other settings are those of `yolofleet train`; --epochs is the length of a trial.",
)
