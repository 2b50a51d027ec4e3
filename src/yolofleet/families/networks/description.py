"""Descriptions of networks as data: their formats, and how a user names one.

Descriptions come from built-in tables, users' files and headers of weights files. All are untrusted, and none is evaluated.
No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from yolofleet.families.family import MASKED, load
from yolofleet.families.networks.checked import known_names, short
from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError


class ModelDescription(Protocol):
    """A network without its number of classes, as a frozen value."""

    @property
    def family(self) -> str:
        """A key of ``families.table.FAMILIES``."""

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


PUBLISHED_CONFIGURATIONS = (".yaml", ".yml")  # a name of such a file may mean a built-in model
OTHER_TASKS = {"cls": "classes of whole images", "pose": "poses", "obb": "rotated boxes"}


def preset_names() -> list[str]:
    """Return the names of the built-in models of all families."""
    return [name for family in FAMILIES.values() for name in load(family.preset_names)()]


def pretrained_name(description: ModelDescription) -> str:
    """Return the name of published weights to train a network from; "" for a user's own.

    They are its own, those of the same network without masks, or the first of its family.
    """
    family = FAMILIES[description.family]
    names: list[str] = [] if family.published is dict else load(family.preset_names)()
    own = description.name.removesuffix(MASKED)
    return own if own in names else next(iter(names), "")


def preset(name: str) -> ModelDescription:
    """Return a built-in description by its name, or by its name in another project.

    Raises:
        ConfigError: the name is unknown; the hint has the nearest known one.
    """
    families = [family for family in FAMILIES.values() if family.preset]
    found = [(family, name) for family in families if name in load(family.preset_names)()]
    named = [(family, load(family.canonical)(name)) for family in families if family.canonical]
    for family, known in (*found, *named):
        if known is not None:
            description: ModelDescription = load(family.preset)(known)
            return description
    from yolofleet.config.words.unknown import instead_of  # errors alone need it

    if match := re.fullmatch(r"(.+)-(cls|pose|obb)", name):
        raise ConfigError(
            f"model {short(name)}: yolofleet trains networks for boxes and masks, and not for {OTHER_TASKS[match[2]]}",
            hint=f"--model {match[1]}"
            if match[1] in preset_names()
            else instead_of("model", name) or known_names(match[1], preset_names()),
        )
    if (boxes := name.removesuffix(MASKED)) != name and boxes in preset_names():
        raise ConfigError(
            f"model {short(name)}: {boxes} has no form with masks",
            hint=known_names(name, [known for known in preset_names() if known.endswith(MASKED)]),
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
    suffix = path.suffix.lower()
    files = [family.description_files for family in FAMILIES.values() if suffix in family.description_files]
    if files and (path.exists() or suffix not in PUBLISHED_CONFIGURATIONS):
        description: ModelDescription = load(files[0][suffix])(path)
        return description
    try:
        return preset(path.stem if files else name_or_file)
    except ConfigError:
        if not files:
            raise
        raise ConfigError(f"model description {name_or_file} does not exist", hint="check the path") from None


def description_from_dict(values: Any, *, source: str = "model description") -> ModelDescription:
    """Return the description from its ``to_dict``. Raise ConfigError, which names the wrong key and ``source``."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"a model description must be a mapping, not {type(values).__name__}", source=source
        )
    family = values.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"unknown model family {short(family)}",
            source=source,
            hint=f"known families: {', '.join(FAMILIES)}; --recipe-class FILE.py:CLASS adds one of your own",
        )
    description: ModelDescription = load(FAMILIES[family].from_dict)(values, source=source)
    return description
