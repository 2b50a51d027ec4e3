"""Read hyperparameters of the user: recipe files, YOLOv5's hyp files and ``--set``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from yolofleet.config.resolve import COMMAND_LINE, Sourced
from yolofleet.storage.yaml_lines import read_scalar, read_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

# Keys of YOLOv5's hyp files that yolofleet does not have. A key without effect gives a note; a value that would have an
# effect is an error.
WITHOUT_EFFECT = {"iou_t": "YOLOv5 does not read it either; anchor_t decides which labels match"}
ONLY_ZERO = {"anchors": "anchors come from the model description"}
RENAMED = {"giou": "box"}


def read_recipe_file(path: Path, notes: list[str]) -> dict[str, Sourced]:
    """Return the hyperparameters of a recipe file, or of a hyp file of YOLOv5; add to ``notes`` what has no effect.

    Raises:
        ConfigError: the file cannot be read, or has a value that would have an effect which yolofleet does not have.
    """
    found, values = dict[str, Sourced](), read_yaml(path)
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


def overridden(overrides: Iterable[str | Sourced]) -> dict[str, Sourced]:
    """Return the values of ``--set``. Raise ConfigError if a text is not key=value."""
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
        parsed: Any = read_scalar(value, source)
        found[key] = Sourced(parsed, source)
    return found
