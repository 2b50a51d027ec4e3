"""Descriptions of networks as data: their formats, and how a user names one.

Every format is a frozen value with ``family``, ``name``, ``to_dict`` and ``from_dict``. Descriptions come from built-in
tables, users' files and headers of weights files. All are untrusted, and none is evaluated. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.config.yaml_lines import read_yaml
from yolofleet.errors import ConfigError
from yolofleet.models import darknet_cfg, ppyoloe_config, rows
from yolofleet.models.checked import known_names, short
from yolofleet.models.darknet_cfg import DarknetDescription
from yolofleet.models.ppyoloe_config import PpyoloeDescription
from yolofleet.models.rows import RowDescription


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


ModelDescription = RowDescription | DarknetDescription | PpyoloeDescription | CustomDescription
FORMS: dict[str, type[ModelDescription]] = {  # by family
    "yolov5": RowDescription,
    "darknet": DarknetDescription,
    "ppyoloe": PpyoloeDescription,
    "custom": CustomDescription,
}
PRESETS = (rows, darknet_cfg, ppyoloe_config)  # modules with preset(name) and preset_names()
OTHER_TASKS = {"seg": "masks", "cls": "classes of whole images", "pose": "poses", "obb": "rotated boxes"}
MAX_FILE_BYTES = 100_000  # of a YAML description; yolov5x6.yaml has 2,000


def preset_names() -> list[str]:
    """Return the names of the built-in models of all families."""
    return [name for module in PRESETS for name in module.preset_names()]


def preset(name: str) -> ModelDescription:
    """Return a built-in description by its name, or a PP-YOLOE by PaddleDetection's name.

    Raises:
        ConfigError: the name is unknown; the hint has the nearest known one.
    """
    name = ppyoloe_config.canonical(name) or name
    for module in PRESETS:
        if name in module.preset_names():
            found: ModelDescription = module.preset(name)
            return found
    if match := re.fullmatch(r"(.+)-(seg|cls|pose|obb)", name):
        raise ConfigError(
            f"model {short(name)}: yolofleet trains detectors of boxes, and not {OTHER_TASKS[match[2]]}",
            hint=f"--model {match[1]}"
            if match[1] in preset_names()
            else known_names(match[1], preset_names()),
        )
    raise ConfigError(f"unknown model {short(name)}", hint=known_names(name, preset_names()))


def describe(name_or_file: str) -> ModelDescription:
    """Return the description of a built-in name, a YAML file in YOLOv5's format, or a Darknet ``.cfg``.

    Built-in names are ``yolov5n``, ``yolov3-tiny``, ``ppyoloe-s`` and so on. A missing file with the name of a published
    configuration (``yolov5s.yaml``, ``ppyoloe_crn_s_300e_coco.yml``) means the built-in model.

    Raises:
        ConfigError: the name is unknown, or the file is missing or not valid.
    """
    path = Path(name_or_file)
    if path.suffix.lower() == ".cfg":
        return darknet_cfg.read_cfg(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return preset(name_or_file)
    if path.exists():
        values = {key: located.value for key, located in read_yaml(path, limit_bytes=MAX_FILE_BYTES).items()}
        return rows.from_yolov5_mapping(values, name=path.stem[:200], source=str(path))
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
    if not isinstance(family, str) or family not in FORMS:
        raise ConfigError(
            f"unknown model family {short(family)}",
            source=source,
            hint=f"known families: {', '.join(FORMS)}",
        )
    return FORMS[family].from_dict(values, source=source)
