"""`yolofleet train` and `yolofleet tune`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from yolofleet.config.decide import Decided, check_compiled, decide
from yolofleet.config.load import resolve_train, resolve_tune
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig, group_of, step_images_of
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.data.datasets.built_in import built_in_of
from yolofleet.fleet.launch.schedulers.table import SCHEDULERS
from yolofleet.runs.report.results import emit_results
from yolofleet.support.device_names import processes_of
from yolofleet.support.errors import ConfigError, YolofleetError
from yolofleet.support.place import place_from_environment
from yolofleet.support.text import echo, shown

if TYPE_CHECKING:
    from yolofleet.data.datasets.spec import DatasetSpec
    from yolofleet.families.networks.description import ModelDescription
    from yolofleet.fleet.hosts.fleet import Fleet


def run(
    given: dict[str, Any],
    config_file: str,
    dry_run: bool,
    download: bool,
    evolve: str | None,
    json_out: str,
    **jobs: Sequence[str],
) -> int:
    """Train, or submit the run to the scheduler whose option is in ``jobs``."""
    scheduler = next((name for name, job in jobs.items() if job), "")
    if evolve is not None:
        if scheduler or dry_run:
            raise ConfigError(
                f"--evolve cannot be used with --{scheduler or 'dry-run'}", hint="leave one out"
            )
        return run_tune({**given, "trials": evolve}, config_file, download, json_out)
    if json_out and (scheduler or given.get("detach")):
        raise ConfigError(
            f"--json cannot be used with --{scheduler or 'detach'}: this command does not wait for the results",
            hint="results.json in the run folder has them",
        )
    if scheduler:
        if download:
            raise ConfigError(
                f"--download cannot be used with --{scheduler}", hint="yolofleet data download NAME first"
            )
        from yolofleet.cli.render import submit

        return submit(scheduler, given, config_file, jobs[scheduler], dry_run)
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
        decided = decided_here(config, recipe)
        echo(plan(decided, fleet))
        rehearse(config, recipe)
        problem, instead = _idle(decided.config, fleet)
        if problem and decided.few_images:
            echo(f"  warning: {problem}; {instead}")
        elif problem:
            raise ConfigError(problem, hint=instead)
        return 0
    if download or built_in_of(config.value.data):
        offer_download(config.value, ("train", "val"), agreed=download)
    with text_on_stderr(json_out):
        planned = plan_run(config, recipe)
        if config.value.detach:
            from yolofleet.fleet.launch.detached.attach import attach, begin

            return attach(*begin(planned), until_begun=True)
        code, folder = start(planned)
    return emit_results(code, folder.results_json, json_out)


def plan(decided: Decided, fleet: Fleet | None = None) -> str:
    """Return the text of ``--dry-run``: all settings with sources, and the processes to start."""
    config, recipe, c = decided.config, decided.recipe, decided.config.value
    lines = []
    groups = dict.fromkeys(group_of(field) for field in TrainConfig.model_fields.values())
    for group in [*(g for g in groups if g != "execution"), "execution"]:
        names = [name for name, field in TrainConfig.model_fields.items() if group_of(field) == group]
        lines += [group, *_rows(config, names), ""]
    lines += [
        *("hyperparameters", *_rows(recipe, list(recipe.sources)), ""),
        *("would run", f"  {_processes(config, fleet)}"),
    ]
    if c.batch < 0:
        lines.append("  a batch that fits into the memory of the devices")
    else:
        images, micro_batch = step_images_of(c.batch, c.nominal_batch), c.likely_micro_batch
        lines.append(f"  steps of {images} images: {images // micro_batch} micro-batches of {micro_batch}")
    return "\n".join(lines + [f"  {note}" for note in decided.notes])


def decided_here(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> Decided:
    """Return what the run decides, as far as the files of this machine show it. It writes and downloads nothing.

    It imports torch only to read weights and for ``--recipe-class``, whose code it loads.

    Raises:
        ConfigError: the batch does not fit the training images, or that code cannot be loaded.
    """
    from yolofleet.data.datasets.sources import load_dataset
    from yolofleet.families.networks.description import describe
    from yolofleet.families.table import FAMILIES

    c = config.value
    if c.resume:
        check_compiled(config, recipe)
        return Decided(config, recipe)
    own, dataset = None, load_dataset
    if c.recipe_class:
        from yolofleet.families.recipe_class import load_recipe_class

        recipe_class = load_recipe_class(c.recipe_class)
        own, dataset = recipe_class.description, recipe_class.dataset
    unknown = (
        "what the run decides about its recipe and its batch depends on files that this machine does not have"
    )
    try:
        images, names = _training_set(c, dataset)
    except YolofleetError:  # the rehearsal says why
        images, names = sys.maxsize, None
    described: ModelDescription | None = own
    new_classes = False
    try:
        if c.weights:
            from yolofleet.families.weights.catalogue import resolve_weights
            from yolofleet.training.network import description_and_weights

            if resolve_weights(c.weights, download=False).is_file():
                described, weights = description_and_weights(c, None, own)
                assert weights is not None
                new_classes = names is not None and {*weights.header.names} != {*names}
        elif c.cfg or c.model:
            described = describe(c.cfg or c.model)
    except YolofleetError:
        pass
    if described is None:
        return Decided(config, recipe, (f"note: {unknown}",))
    family = FAMILIES[described.family]
    decided = decide(config, recipe, family, described, images, new_classes=new_classes)
    notes = [f"note: {note}" for note in decided.notes]
    notes += [f"warning: {warning}" for warning in decided.warnings]
    if names is None:
        notes.append(f"note: {unknown}")
    return replace(decided, notes=tuple(notes))


def _training_set(c: TrainConfig, dataset: Callable[[str], DatasetSpec]) -> tuple[int, Sequence[str]]:
    """Return the number of training images, and the classes. The run may find some images unreadable."""
    from yolofleet.data.datasets.sources import generated_images

    names: Sequence[str] = ()
    counted = generated_images(c.data)
    if counted is None:
        spec = dataset(c.data)
        counted, names = sum(len(reader.images) for reader in spec.readers("train")), spec.names
    elif c.weights:  # nothing else depends on the names, and their module loads OpenCV
        from yolofleet.data.datasets.shapes import NAMES as names
    return max(round(counted * c.fraction), 1), names


def _idle(resolved: Resolved[TrainConfig], fleet: Fleet | None) -> tuple[str, str]:
    """Return how many devices would get no work, and what to change; "" also where only torch could count the devices."""
    from yolofleet.training.parallel.partition import Partition

    c, place = resolved.value, place_from_environment(os.environ)
    if c.resume or c.batch < 0:
        return "", ""
    counted = place.size if place.size > 1 else fleet.processes if fleet else processes_of(c.device)
    partition = Partition.parse("" if c.shares == "auto" else c.shares, counted)
    images = c.batch if c.sync_bn else step_images_of(c.batch, c.nominal_batch)
    return partition.idle(images, c.likely_micro_batch, c.batch)


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
        *(
            job_option(name, f"submit the run as {row.file}")
            for name, row in SCHEDULERS.items()
            if row.submits
        ),
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
