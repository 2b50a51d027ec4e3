"""Descriptions of networks as data: their formats, and how a user names one.

Descriptions come from built-in tables, users' files and headers of weights files. All are untrusted, and none is evaluated.
A process imports a format only if it reads a description in it. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from yolofleet.config.words import instead_of
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.errors import ConfigError
from yolofleet.models.checked import known_names, short


class ModelDescription(Protocol):
    """A network without its number of classes, as a frozen value."""

    @property
    def family(self) -> str:
        """A key of ``families.FAMILIES``."""

    @property
    def name(self) -> str: ...

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; :func:`description_from_dict` reads them."""


@runtime_checkable
class AnchorDescription(ModelDescription, Protocol):
    """The description of a network with anchors."""

    @property
    def anchors_px(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """[L][A] (width, height) pixels."""

    def with_anchors(self, anchors_px: Sequence[Sequence[Sequence[float]]]) -> AnchorDescription:
        """Return the same network with other anchors [L][A][2], pixels."""


@dataclass(frozen=True)
class CustomDescription:
    """The name of a network that a user's ``TrainingRecipe`` builds; the description cannot build it."""

    name: str
    family: str = "custom"

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, "name": self.name}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> CustomDescription:
        """Check and return the description.

        Raises:
            ConfigError: the name is not one of a class.
        """
        name = values.get("name")
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 200:
            raise ConfigError(f"name must be the name of a class, not {short(name)}", source=source)
        return cls(name)


FORMATS = {  # by family: the module of its descriptions, with preset(name) and preset_names(), and their class
    "yolov5": ("yolofleet.families.yolov5.presets", "RowDescription"),
    "darknet": ("yolofleet.families.darknet.cfg", "DarknetDescription"),
    "ppyoloe": ("yolofleet.families.ppyoloe.description", "PpyoloeDescription"),
}
OTHER_TASKS = {"seg": "masks", "cls": "classes of whole images", "pose": "poses", "obb": "rotated boxes"}
MAX_FILE_BYTES = 100_000  # of a YAML description; yolov5x6.yaml has 2,000


def preset_names() -> list[str]:
    """Return the names of the built-in models of all families."""
    return [name for module, _ in FORMATS.values() for name in import_module(module).preset_names()]


def pretrained_name(description: ModelDescription) -> str:
    """Return the name of published weights to train a network from: its own, or the first of its family; "" for a user's own."""
    format = FORMATS.get(description.family)
    names: list[str] = import_module(format[0]).preset_names() if format else []
    return description.name if description.name in names else next(iter(names), "")


def preset(name: str) -> ModelDescription:
    """Return a built-in description by its name, or a PP-YOLOE by PaddleDetection's name.

    Raises:
        ConfigError: the name is unknown; the hint has the nearest known one.
    """
    for module_name, _ in FORMATS.values():
        module = import_module(module_name)
        if name in module.preset_names():
            found: ModelDescription = module.preset(name)
            return found
    from yolofleet.families.ppyoloe import description as ppyoloe_config  # names of PaddleDetection

    if (known := ppyoloe_config.canonical(name)) is not None:
        return ppyoloe_config.preset(known)
    if match := re.fullmatch(r"(.+)-(seg|cls|pose|obb)", name):
        raise ConfigError(
            f"model {short(name)}: yolofleet trains detectors of boxes, and not {OTHER_TASKS[match[2]]}",
            hint=f"--model {match[1]}"
            if match[1] in preset_names()
            else instead_of("model", name) or known_names(match[1], preset_names()),
        )
    hint = instead_of("model", name) or known_names(name, preset_names())
    raise ConfigError(f"unknown model {short(name)}", hint=hint)


def describe(name_or_file: str) -> ModelDescription:
    """Return the description of a built-in name, a YAML file in YOLOv5's format, or a Darknet ``.cfg``.

    Built-in names are ``yolov5n``, ``yolov3-tiny``, ``ppyoloe-s`` and so on. A missing file with the name of a published
    configuration (``yolov5s.yaml``, ``ppyoloe_crn_s_300e_coco.yml``) means the built-in model.

    Raises:
        ConfigError: the name is unknown, or the file is missing or not valid.
    """
    path = Path(name_or_file)
    if path.suffix.lower() == ".cfg":
        from yolofleet.families.darknet.cfg import read_cfg

        return read_cfg(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return preset(name_or_file)
    if path.exists():
        from yolofleet.families.yolov5.rows import from_yolov5_mapping

        values = {key: located.value for key, located in read_yaml(path, limit_bytes=MAX_FILE_BYTES).items()}
        return from_yolov5_mapping(values, name=path.stem[:200], source=str(path))
    try:
        return preset(path.stem)
    except ConfigError:
        raise ConfigError(f"model description {name_or_file} does not exist", hint="check the path") from None


def description_from_dict(values: Any, *, source: str = "model description") -> ModelDescription:
    """Return the description from the result of its ``to_dict``, after checks.

    Raises:
        ConfigError: names the wrong key and ``source``.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"a model description must be a mapping, not {type(values).__name__}", source=source
        )
    family = values.get("family")
    families = [*FORMATS, CustomDescription.family]
    if family not in families:
        raise ConfigError(
            f"unknown model family {short(family)}",
            source=source,
            hint=f"known families: {', '.join(families)}",
        )
    if family == CustomDescription.family:
        return CustomDescription.from_dict(values, source=source)
    module, name = FORMATS[family]
    description: ModelDescription = getattr(import_module(module), name).from_dict(values, source=source)
    return description
