"""The options of a command that resumes a run. ``resume.py`` finds the run and merges its settings."""

from __future__ import annotations

from yolofleet.config.schema import RunSettings, ValConfig, flag_of, may_be_in_files, rules_of


def is_address(text: str) -> bool:
    """Return whether a value of ``--resume`` is an address in a store, and no path."""
    return "://" in text


def options_to_repeat(settings: RunSettings | ValConfig) -> list[str]:
    """Return the options that the command which resumes a run must repeat: no file may choose programs or servers."""
    options = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if rules_of(field).again and not may_be_in_files(field, value):
            for one in (value,) if isinstance(value, str) else value:
                options += [flag_of(name, field), one] if one else []
    return options
