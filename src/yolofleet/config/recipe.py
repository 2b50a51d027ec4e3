"""Read hyperparameters from built-in recipes, recipe files, YOLOv5's hyp files and ``--set``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, Layer, Resolved, Sourced, resolve
from yolofleet.config.schema import Recipe, WorkloadSettings
from yolofleet.config.schema.train import default_micro_batch
from yolofleet.config.words import instead_of
from yolofleet.config.yaml_lines import Located, read_scalar, read_yaml
from yolofleet.families.family import Family, load
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

DEFAULT_RECIPE = "scratch-low"
DEFAULT_SOURCE = f"recipe {DEFAULT_RECIPE} (default)"  # of its values if the user named no recipe
Workload = TypeVar("Workload", bound=WorkloadSettings)
FEW_IMAGES = 1000  # of a training set: with fewer, a family may have another recipe to start from weights
# setting -> the field of a recipe that names its value for lr0, and the settings that decide it
REFERENCES = {
    "nominal_batch": ("reference_batch", ("nominal_batch",)),
    "optimizer": ("reference_optimizer", ("optimizer", "optimizer_class")),
}
YOLOV5_FOLDERS = ("", ".", "data", "data/hyps")

# Keys of YOLOv5's hyp files that yolofleet does not have. A key without effect gives a note; a value that would have an
# effect is an error.
WITHOUT_EFFECT = {"iou_t": "YOLOv5 does not read it either; anchor_t decides which labels match"}
ONLY_ZERO = {"anchors": "anchors come from the model description"}
RENAMED = {"giou": "box"}

# Classes of albumentations 2.0 that change pixels, move none, and whose parameters are plain values.
TRANSFORMS = (
    "AdditiveNoise", "AdvancedBlur", "AutoContrast", "Blur", "CLAHE", "ChannelDropout", "ChannelShuffle",
    "ChromaticAberration", "ColorJitter", "Defocus", "Downscale", "Emboss", "Equalize", "GaussNoise", "GaussianBlur",
    "GlassBlur", "HueSaturationValue", "ISONoise", "Illumination", "ImageCompression", "InvertImg", "MedianBlur",
    "MotionBlur", "MultiplicativeNoise", "PlanckianJitter", "PlasmaBrightnessContrast", "PlasmaShadow", "Posterize",
    "RGBShift", "RandomBrightnessContrast", "RandomFog", "RandomGamma", "RandomGravel", "RandomRain", "RandomShadow",
    "RandomSnow", "RandomSunFlare", "RandomToneCurve", "RingingOvershoot", "SaltAndPepper", "Sharpen", "ShotNoise",
    "Solarize", "Spatter", "Superpixels", "ToGray", "ToSepia", "UnsharpMask", "ZoomBlur",
)  # fmt: skip


def family_files(kind: str) -> dict[str, Path]:
    """Return the YAML files of the model families in their folders ``kind`` (recipes, spaces), by name."""
    families = Path(__file__).resolve().parents[1] / "families"
    return {file.stem: file for file in families.glob(f"*/{kind}/*.yaml")}


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(family_files("recipes"))


def load_recipe(
    name_or_path: str = "", overrides: Iterable[str | Sourced] = (), *, hyperparameters: Layer | None = None
) -> Resolved[Recipe]:
    """Return the hyperparameters. Each source overrides those before it: defaults, recipe, ``hyperparameters``, ``overrides``.

    Args:
        name_or_path: a built-in name, a file, or the name of a YOLOv5 hyp file; "" means ``scratch-low``.
        overrides: texts ``key=value``.
        hyperparameters: section of a configuration file.

    Raises:
        ConfigError: the recipe or a key is unknown, or a value is out of range.
    """
    notes: list[str] = []
    layers: list[Layer] = []
    if hyperparameters is None or set(hyperparameters) < set(Recipe.model_fields):
        layer = _read(name_or_path or DEFAULT_RECIPE, notes)
        layers.append(
            layer if name_or_path else {key: Sourced(e.value, DEFAULT_SOURCE) for key, e in layer.items()}
        )
    layers.append(hyperparameters or {})
    layers.append(_overrides(overrides))
    return resolve(Recipe, layers, notes)


def parse_lr_factors(text: str, source: str = "") -> dict[str, float]:
    """Return part -> factor from ``PART:FACTOR, PART:FACTOR, ...``.

    Raises:
        ConfigError: an entry has another form, or a part comes twice.
    """
    factors: dict[str, float] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        part, _, number = (word.strip() for word in entry.rpartition(":"))
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not part or part.isdigit() or part in factors or not 0 < factor < math.inf:
            raise ConfigError(
                f"lr_factors: {shown(entry)} is not PART:FACTOR, with a factor above 0 and each part once",
                source=source or None,
                hint="such as backbone:0.1,model.24.:2; a part is backbone, or a prefix or pattern of parameter names. "
                "--freeze stops layers",
            )
        factors[part] = factor
    return factors


def transform_of(text: str) -> tuple[str, dict[str, Any]]:
    """Return class and parameters of an entry of ``albumentations``, such as ``Blur blur_limit=[3,5] p=0.1``.

    Raises:
        ConfigError: the class is not in ``TRANSFORMS``, or a parameter is not name=value.
    """
    name, *pairs = text.split() or [""]
    if name not in TRANSFORMS:
        raise ConfigError(
            f"albumentations: {shown(name)} is not a transform that a recipe may have",
            hint=did_you_mean(name, TRANSFORMS) or f"one of {', '.join(TRANSFORMS)}",
        )
    parameters = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        parsed = read_scalar(value, f"albumentations: {text}") if key.isidentifier() and value else None
        parts = parsed if isinstance(parsed, list) else [parsed]
        if not equals or not all(isinstance(part, (bool, int, float, str)) for part in parts):
            raise ConfigError(
                f"albumentations: {shown(pair)} in {shown(text)} is not a parameter",
                hint="write name=value without spaces, such as Blur blur_limit=[3,5] p=0.1",
            )
        parameters[key] = tuple(parts) if isinstance(parsed, list) else parsed
    return name, parameters


def with_default(recipe: Resolved[Recipe], name: str) -> Resolved[Recipe]:
    """Return the user's values over the default recipe ``name`` of a model family.

    Return ``recipe`` itself if the user named a recipe or a file has all values. This is a separate step, because the
    family is known only after the weights are read.
    """
    chosen = {
        key: Sourced(getattr(recipe.value, key), source)
        for key, source in recipe.sources.items()
        if source not in (DEFAULT, DEFAULT_SOURCE)
    }
    if any(source.startswith("recipe ") for _, source in chosen.values()):
        return recipe
    return resolve(Recipe, [_read(name, []), chosen], recipe.notes)


def for_network(recipe: Resolved[Recipe], family: Family, network: Any) -> Resolved[Recipe]:
    """Return the recipe with the values that its family has for the network of a description.

    A value that a user set stays.
    """
    if not family.network_values:
        return recipe
    values, sources = {}, dict(recipe.sources)
    for name in recipe_names():
        source = f"recipe {name}"
        if source in recipe.sources.values():
            found = load(family.network_values)(name, network)
            values.update({key: value for key, value in found.items() if recipe.sources[key] == source})
            sources.update(dict.fromkeys(values, f"{source} for {network.name}"))
    return replace(recipe, value=recipe.value.model_copy(update=values), sources=sources)


def is_free(config: Resolved[Workload], recipe: Resolved[Recipe]) -> bool:
    """Return whether the user chose neither a recipe nor what a recipe's learning rate depends on."""
    asked = (name for _, names in REFERENCES.values() for name in names if name in config.sources)
    return (
        DEFAULT_SOURCE in recipe.sources.values()
        and recipe.sources["lr0"] in (DEFAULT, DEFAULT_SOURCE)
        and not any(map(config.is_given, asked))
    )


def with_references(config: Resolved[Workload], recipe: Resolved[Recipe]) -> Resolved[Workload]:
    """Return the settings with the images of a step and the optimizer that the recipe names, where the user named none."""
    changed: dict[str, Any] = {}
    sources = dict(config.sources)
    for setting, (field, names) in REFERENCES.items():
        source = recipe.sources[field]
        is_named = any(config.is_given(name) for name in names if name in sources)
        if setting in sources and not is_named and source not in (DEFAULT, DEFAULT_SOURCE):
            changed[setting], sources[setting] = getattr(recipe.value, field), source
    batch, nominal = config.value.batch, changed.get("nominal_batch", 0)
    if 0 < nominal < batch and not config.is_given("batch"):
        batch = changed["batch"] = nominal
        sources["batch"] = sources["nominal_batch"]
    if nominal and not config.is_given("micro_batch") and batch > 0:
        changed["micro_batch"] = default_micro_batch(batch, nominal)
    return replace(config, value=config.value.model_copy(update=changed), sources=sources)


def is_listed(source: str) -> bool:
    """Return whether a hyperparameter comes from a built-in recipe or a line of a file, which may list all of them."""
    return source.startswith("recipe ") or re.search(r":\d+$", source) is not None


def given_fields(recipe: Resolved[Recipe]) -> dict[str, str]:
    """Return the source of each hyperparameter that the user set, by name.

    Those of a list with the value of the schema do not count.
    """
    return {
        name: source
        for name, source in recipe.sources.items()
        if source not in (DEFAULT, DEFAULT_SOURCE)
        and (getattr(recipe.value, name) != Recipe.model_fields[name].default or not is_listed(source))
    }


def _read(name_or_path: str, notes: list[str]) -> dict[str, Sourced]:
    builtin, path = _builtin_name(name_or_path), Path(name_or_path)
    if builtin is not None:
        values = read_yaml(family_files("recipes")[builtin])
        return {key: Sourced(e.value, f"recipe {builtin}") for key, e in values.items()}
    if not _is_file(name_or_path):
        near = did_you_mean(name_or_path, recipe_names())
        raise ConfigError(
            f"recipe {shown(name_or_path)} is neither built in nor a file",
            hint=f"{near + ' ' if near else ''}built in: {', '.join(recipe_names())}",
        )
    return _without_obsolete(read_yaml(path), path, notes)


def _builtin_name(name_or_path: str) -> str | None:
    """Return ``scratch-low`` for that name, and for ``hyp.scratch-low.yaml`` if there is no such file; else None."""
    names = recipe_names()
    if name_or_path in names:
        return name_or_path
    path = PurePosixPath(name_or_path.replace("\\", "/"))
    name = path.name.removeprefix("hyp.").removesuffix(".yaml")
    if path.suffix == ".yaml" and name in names and str(path.parent) in YOLOV5_FOLDERS:
        return None if _is_file(name_or_path) else name
    return None


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  (Path.is_file raises if a name is too long)


def _without_obsolete(values: Mapping[str, Located], path: Path, notes: list[str]) -> dict[str, Sourced]:
    found: dict[str, Sourced] = {}
    for key, (value, line) in values.items():
        source = f"{path}:{line}"
        if key in WITHOUT_EFFECT:
            notes.append(f"{key} has no effect ({source}): {WITHOUT_EFFECT[key]}")
        elif key in ONLY_ZERO:
            if value:
                raise ConfigError(
                    f"{key}: {shown(value)} is not available: {ONLY_ZERO[key]}",
                    source=source,
                    hint="set it to 0, or remove the line",
                )
            notes.append(f"{key}: 0 has no effect ({source})")
        elif key in RENAMED:
            new = RENAMED[key]
            if new in values:
                raise ConfigError(
                    f"{key} is the old name of {new}, but {new} is also set", source=source, hint="remove one"
                )
            notes.append(f"{key} is now {new} ({source})")
            found[new] = Sourced(value, source)
        else:
            found[key] = Sourced(value, source)
    return found


def _overrides(overrides: Iterable[str | Sourced]) -> dict[str, Sourced]:
    found: dict[str, Sourced] = {}
    for entry in overrides:
        text, source = entry if isinstance(entry, Sourced) else (entry, COMMAND_LINE)
        key, equals, value = str(text).partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ConfigError(
                f"--set {shown(text)} is not key=value",
                source=source,
                hint="expected key=value, such as --set lr0=0.02",
            )
        if key not in Recipe.model_fields:
            raise ConfigError(
                f"--set {shown(text)}: the recipe has no {shown(key)}",
                source=source,
                hint=instead_of("setting", key)
                or did_you_mean(key, Recipe.model_fields)
                or f"it has {', '.join(Recipe.model_fields)}",
            )
        parsed: Any = read_scalar(value, source)
        found[key] = Sourced(parsed, source)
    return found
