"""The table of model families, by name. ``recipe_class.py`` adds those of users. No torch here."""

from __future__ import annotations

from importlib import import_module

from yolofleet.families.family import Family, WeightsFile

BUILT_IN = ("yolov5", "darknet", "ppyoloe", "rtdetr", "dfine", "deim", "custom")
FAMILIES: dict[str, Family] = {name: import_module(f"yolofleet.families.{name}").FAMILY for name in BUILT_IN}


def weights_files(kind: str = "") -> list[WeightsFile]:
    """Return the formats of other projects that the families read: those of ``kind``, or all."""
    files = [file for family in FAMILIES.values() for file in family.weights_files]
    return [file for file in files if kind in ("", file.kind)]
