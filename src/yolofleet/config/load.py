"""Build the settings of a command from defaults, configuration file and command line; write and read ``config.yaml``.

The command line overrides the file, and the file overrides the defaults. A resumed run starts from its own
``config.yaml`` instead of the defaults (``stored/resume.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from yolofleet.config.checks import (
    check_bench,
    check_clashes,
    check_doctor,
    check_export,
    check_predict,
    check_sides,
    check_train,
    check_val,
)
from yolofleet.config.decide import with_references
from yolofleet.config.recipe import load_recipe
from yolofleet.config.resolve import (
    COMMAND_LINE,
    DEFAULT,
    Layer,
    Resolved,
    Sourced,
    layer_of,
    resolve,
    training_of,
)
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig, WorkloadSettings, flag_of, may_be_in_files
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.schema.verbs import (
    BenchConfig,
    DoctorConfig,
    ExportConfig,
    PredictConfig,
    SelftestConfig,
)
from yolofleet.config.stored.job import RECIPE, load_config_yaml, load_job, read_file
from yolofleet.config.stored.resume import continue_run, find_run
from yolofleet.config.words.earlier import in_todays_words, of_validation
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

T = TypeVar("T", bound=BaseModel)
Work = TypeVar("Work", bound=WorkloadSettings)


def resolve_train(
    given: Mapping[str, Any], *, config_file: str = "", source: str = COMMAND_LINE
) -> tuple[Resolved[TrainConfig], Resolved[Recipe]]:
    """Return the checked settings and hyperparameters of a training run.

    Args:
        given: values that the user set, by name, as text or parsed.
        config_file: a YAML file with any settings, and hyperparameters under that key; "" for none.
        source: source of ``given``, for messages.

    Raises:
        ConfigError: a setting is unknown, invalid or contradicts another; it names the source.
    """
    config, recipe = _merged(TrainConfig, given, config_file, source)
    if config.value.resume:
        found = find_run(config.value, is_named=config.is_given("name"))
        if found is not None:
            stored = load_config_yaml(found.folder / "config.yaml")
            config, recipe = continue_run(found, stored, (config, recipe))
        else:
            address = config.value.checkpoint_to.removesuffix("/")
            note = (
                f"nothing to resume in {address or config.value.project or 'runs/train'}: starting a new run"
            )
            # a state may come to the address before this run begins: from a machine that was lost
            config, _ = _merged(TrainConfig, {**given, "resume": address}, config_file, source)
            config = replace(config, notes=(*config.notes, note))
    check_train(config, recipe)
    return config, recipe


def resolve_workload(
    model: type[Work], given: Mapping[str, Any], *, config_file: str = "", source: str = COMMAND_LINE
) -> tuple[Resolved[Work], Resolved[Recipe]]:
    """Return the checked settings of a verb that measures, predicts or repeats a training; see :func:`resolve_train`.

    A configuration file may have settings of a training that the verb does not have.
    """
    config, recipe = _merged(model, given, config_file, source)
    has_count = bool(getattr(config.value, "images", 0))  # of plan, in place of a data set
    check_train(training_of(config, TrainConfig), recipe, needs_data=not has_count)
    if config.value.batch < 0:
        raise ConfigError(
            f"--batch auto is not available in {model.verb}: its figures would depend on the memory of the devices",
            source=config.sources["batch"],
            hint="--batch 16, or the number that yolofleet train --batch auto prints",
        )
    return config, recipe


def _merged(
    model: type[Work], given: Mapping[str, Any], config_file: str, source: str
) -> tuple[Resolved[Work], Resolved[Recipe]]:
    """Return the settings and the hyperparameters of file and command line, before the checks of their combinations."""
    command, _, notes_of_call = in_todays_words(layer_of(given, source))
    file, hyperparameters, notes = _files("train", model, config_file)
    for name, depends_on in model.derived_defaults.items():
        if name in file and file[name].source == DEFAULT and command.keys() & set(depends_on):
            del file[name]
    changes = [layer["set"] for layer in (file, command) if "set" in layer]
    layers: list[Layer] = [file, command]
    if len(changes) > 1:  # both are applied, so both are kept; resolve refuses what is no list
        wrong = next((entry for entry in changes if not isinstance(entry.value, (list, tuple))), None)
        layers.append({"set": wrong or Sourced([text for entry in changes for text in entry.value], source)})
    config = resolve(model, layers, (*notes, *notes_of_call))
    recipe = load_recipe(
        getattr(config.value, "recipe", ""),
        [Sourced(text, origin) for texts, origin in changes for text in texts],
        hyperparameters=None if "recipe" in command else hyperparameters,
        own_code=bool(getattr(config.value, "recipe_class", "")),
    )
    return with_references(config, recipe), recipe


def resolve_tune(
    given: Mapping[str, Any], *, config_file: str = "", source: str = COMMAND_LINE
) -> tuple[Resolved[TuneConfig], Resolved[Recipe]]:
    """Return the checked settings of a study, and the recipe that its trials change; see :func:`resolve_train`.

    With ``resume`` they are those of the study in that folder, and ``resume`` is the folder.
    """
    if not given.get("resume"):
        config, recipe = resolve_workload(TuneConfig, given, config_file=config_file, source=source)
        check_clashes(config)
        return config, recipe
    if config_file:
        raise ConfigError(
            f"--resume and --config {config_file} both choose the settings of the study",
            hint="leave out --config",
        )
    from yolofleet.config.loggers import check_loggers
    from yolofleet.config.stored.resume_study import continue_study, find_study

    command, _, notes = in_todays_words(layer_of(given, source))
    asked = resolve(TuneConfig, [command], notes)
    folder = find_study(asked.value)
    stored = load_job(folder / "config.yaml")
    if stored.verb != "tune" or stored.recipe is None:
        raise ConfigError(f"{folder} is the folder of {stored.verb}, not of tune", source="--resume")
    config = continue_study(folder, stored.config, asked)
    check_loggers(config)
    check_clashes(config)
    return config, stored.recipe


def without_recipe(
    verb: str,
    model: type[T],
    check: Callable[[Resolved[T]], Resolved[T] | None],
    given: Mapping[str, Any],
    *,
    config_file: str = "",
    source: str = COMMAND_LINE,
) -> Resolved[T]:
    """Return the checked settings of a verb without a recipe; see :func:`resolve_train`."""
    file, _, notes = _files(verb, model, config_file)
    config = resolve(model, [file, layer_of(given, source)], notes)
    return check(config) or config


resolve_val = partial(without_recipe, "val", ValConfig, check_val)
resolve_predict = partial(without_recipe, "predict", PredictConfig, check_predict)
resolve_selftest = partial(without_recipe, "selftest", SelftestConfig, lambda _: None)
resolve_export = partial(without_recipe, "export", ExportConfig, check_export)
resolve_bench = partial(without_recipe, "bench", BenchConfig, check_bench)
resolve_doctor = partial(without_recipe, "doctor", DoctorConfig, check_doctor)


def predict_config(base: PredictConfig | None = None, **settings: Any) -> PredictConfig:
    """Return ``base``, or the defaults, with changes by name; ``agnostic`` is ``agnostic_nms``. Raises ConfigError."""
    if "agnostic" in settings:
        settings["agnostic_nms"] = settings.pop("agnostic")
    changes = resolve(PredictConfig, [layer_of(settings, "the call")])
    check_sides(changes)
    return (base or PredictConfig()).model_copy(
        update={name: getattr(changes.value, name) for name in settings}
    )


def _files(
    verb: str, model: type[BaseModel], config_file: str
) -> tuple[dict[str, Sourced], Layer | None, tuple[str, ...]]:
    """Return the layer of ``--config``, its hyperparameters if it has any, and notes about ignored settings.

    Raises:
        ConfigError: the file belongs to another command, or has a setting that only the command line may set.
    """
    if not config_file:
        return {}, None, ()
    stored_verb, settings, hyperparameters = read_file(Path(config_file))
    notes: tuple[str, ...] = ()
    if stored_verb not in (None, verb):
        raise ConfigError(
            f"{config_file} is the configuration of {stored_verb}, not of {verb}",
            hint=f"yolofleet {stored_verb}",
        )
    if hyperparameters is not None and verb != "train":
        raise ConfigError(f"{RECIPE} are for train only", source=config_file, hint="remove that section")
    if verb == "train":
        is_stored = stored_verb is not None
        settings, of_recipe, notes = in_todays_words(settings, is_stored=is_stored)
        if of_recipe:  # as the user's change of whichever recipe the command names
            source = next(iter(of_recipe.values())).source
            had = settings["set"].value if "set" in settings else ()
            texts = [f"{name}={entry.value}" for name, entry in of_recipe.items()]
            settings = {**settings, "set": Sourced([*had, *texts], source)}
    elif verb == "val" and stored_verb is not None:
        settings = of_validation(settings)
    kept = dict[str, Sourced]()
    for name, entry in settings.items():
        field = model.model_fields.get(name)
        if field is None:
            if verb != "train" or name not in TrainConfig.model_fields:
                kept[name] = entry  # unknown: resolve refuses it
        elif may_be_in_files(field, entry.value):
            kept[name] = entry
        elif stored_verb is None:  # written by hand, not by dump_config
            raise ConfigError(
                f"{name}: cannot be set in a file",
                source=entry.source,
                hint=f"remove the line, and use {flag_of(name, field)} on the command line",
            )
        # A config.yaml of a run: ``--config`` with it starts a new run on this machine.
        elif name != "resume" and entry.value not in (None, [], field.default):
            flag = flag_of(name, field)
            notes += (f"{name}: {shown(entry.value)} in {config_file} is ignored; use {flag}",)
    return kept, hyperparameters, notes
