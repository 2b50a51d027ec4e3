"""The file ``config.yaml`` of a run: write it, and read it. No checks of combinations: ``load.py`` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from yolofleet import __version__
from yolofleet.config.recipe import given_recipe, is_hyperparameter
from yolofleet.config.resolve import DEFAULT, Layer, Resolved, Sourced, resolve
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.config.words.earlier import in_todays_words, of_validation
from yolofleet.storage.yaml_lines import Located, read_yaml, write_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

# verb -> MODULE:NAME of its settings below ``yolofleet.config.schema``; a process imports only those of its own verb
MODELS = {
    "train": "train:TrainConfig",
    "bench train": "measure:BenchRun",
    "plan probe": "measure:ProbeRun",
    "tune": "measure:TuneConfig",
    "val": "inference:ValConfig",
    "predict": "verbs:PredictConfig",
}
VERB, RECIPE, SOURCES = "verb", "hyperparameters", "sources"  # keys of a file beside the settings
HEADER = (
    f"# yolofleet {__version__}: every setting of a run; `--config` with this file repeats it.\n"
    f"# `{SOURCES}` says where the values came from that are not defaults.\n"
)


@dataclass(frozen=True)
class Job:
    """The content of a ``config.yaml``; ``recipe`` is None unless the command trains, and has no family's types."""

    verb: str
    config: Resolved[Any]
    recipe: Resolved[Recipe] | None


def model_of(verb: str) -> type[BaseModel]:
    """Return the class of the settings of a verb of ``MODELS``."""
    module, name = MODELS[verb].split(":")
    model: type[BaseModel] = getattr(import_module(f"yolofleet.config.schema.{module}"), name)
    return model


def verb_of(settings: BaseModel) -> str:
    """Return the verb of ``MODELS`` whose settings these are, without importing those of other verbs."""
    kind = type(settings)
    named = f"{kind.__module__}:{kind.__qualname__}".removeprefix("yolofleet.config.schema.")
    return next(verb for verb, model in MODELS.items() if model == named)


def dump_config(config: Resolved[Any], recipe: Resolved[Recipe] | None = None) -> str:
    """Return the text of ``config.yaml``; :func:`load_job` returns equal values and sources."""
    values: dict[str, Any] = {VERB: verb_of(config.value), **config.value.model_dump(mode="json")}
    sources: dict[str, Any] = _not_default(config)
    if recipe is not None:
        values[RECIPE] = recipe.value.model_dump(mode="json")
        # of a family of the user, only the source says that nobody has added a key to the file
        own = {name: source for name, source in recipe.sources.items() if not is_hyperparameter(name)}
        sources[RECIPE] = {**_not_default(recipe), **own}
    return HEADER + write_yaml({**values, SOURCES: sources})


def load_job(path: Path, *, follow: bool = True) -> Job:
    """Read a file that :func:`dump_config` wrote.

    Args:
        follow: False: a symbolic link is an error.
    Raises:
        ConfigError: the file is missing, or is not a valid ``config.yaml``.
    """
    verb, settings, hyperparameters = read_file(path, verbatim=True, follow=follow)
    if verb is None:
        raise ConfigError(f"{path} has no {VERB}", hint=f"expected {VERB}: one of {', '.join(MODELS)}")
    model, notes = model_of(verb), tuple[str, ...]()
    if hyperparameters is None:
        kept = of_validation(settings) if verb == "val" else settings
        return Job(verb, resolve(model, [kept]), None)
    settings, of_recipe, notes = in_todays_words(settings, is_stored=True)
    config = resolve(model, [settings], notes)
    own_code = bool(getattr(config.value, "recipe_class", ""))
    return Job(verb, config, given_recipe([{**hyperparameters, **of_recipe}], own_code=own_code))


def load_config_yaml(path: Path) -> tuple[Resolved[TrainConfig], Resolved[Recipe]]:
    """Return settings and hyperparameters from the ``config.yaml`` of a training run; see :func:`load_job`."""
    job = load_job(path)
    if job.verb != "train" or job.recipe is None:
        raise ConfigError(
            f"{path} is not the configuration of a training run", hint="name the folder of a training run"
        )
    return job.config, job.recipe


def _not_default(resolved: Resolved[Any]) -> dict[str, str]:
    return {name: source for name, source in resolved.sources.items() if source != DEFAULT}


def read_file(
    path: Path, *, verbatim: bool = False, follow: bool = True
) -> tuple[str | None, Layer, Layer | None]:
    """Return command (None: not in the file), settings, and hyperparameters (None: not in the file).

    The source of a value is its line, or with ``verbatim`` the text in the file's section ``sources``. A value that this
    section does not name was a default, and keeps that source even if the default has changed since. So does a hyperparameter
    of a recipe, because a network of another family is to be warned of the recipe.
    """
    values = read_yaml(path, follow=follow)
    verb = values.pop(VERB, None)
    if verb is not None and str(verb.value) not in MODELS:
        raise ConfigError(
            f"{VERB}: {shown(verb.value)} is not one of {', '.join(MODELS)}", source=f"{path}:{verb.line}"
        )
    sources = _section(values, SOURCES, path)
    hyperparameters = _section(values, RECIPE, path)
    recipe_sources = None if sources is None else _section(sources, RECIPE, path)

    verbs = MODELS if verb is None else [str(verb.value)]
    known = {name for one in verbs for name in model_of(one).model_fields}

    def layer(found: Mapping[str, Located], stored: Mapping[str, Located] | None) -> dict[str, Sourced]:
        result = {}
        for name, (value, line) in found.items():
            source = f"{path}:{line}"
            # a user added all others
            if stored is not None and (name in stored or name in known or is_hyperparameter(name)):
                stored_source = str(stored[name].value) if name in stored else DEFAULT
                is_of_recipe = found is hyperparameters and stored_source.startswith("recipe ")
                source = stored_source if verbatim or stored_source == DEFAULT or is_of_recipe else source
            result[name] = Sourced(value, source)
        return result

    recipe = None if hyperparameters is None else layer(hyperparameters, recipe_sources)
    return None if verb is None else str(verb.value), layer(values, sources), recipe


def _section(values: dict[str, Located], name: str, path: Path) -> dict[str, Located] | None:
    """Remove the key ``name`` from ``values`` and return its mapping; None without the key."""
    if name not in values:
        return None
    value, line = values.pop(name)
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {shown(value)} is not a mapping", source=f"{path}:{line}")
    return value
