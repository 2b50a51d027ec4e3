"""Read hyperparameters from built-in recipes, recipe files, YOLOv5's hyp files and ``--set``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from yolofleet.config.recipe_of_run import DEFAULT_RECIPE, DEFAULT_SOURCE, built_in_recipe, recipe_names
from yolofleet.config.resolve import COMMAND_LINE, Layer, Resolved, Sourced, resolve
from yolofleet.config.schema import Recipe
from yolofleet.config.words import instead_of
from yolofleet.config.yaml_lines import Located, read_scalar, read_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

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


def _read(name_or_path: str, notes: list[str]) -> dict[str, Sourced]:
    builtin, path = _builtin_name(name_or_path), Path(name_or_path)
    if builtin is not None:
        return built_in_recipe(builtin)
    if not _is_file(name_or_path):
        raise ConfigError(
            f"recipe {shown(name_or_path)} is neither built in nor a file",
            hint=did_you_mean(name_or_path, recipe_names()) or f"built in: {', '.join(recipe_names())}",
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
