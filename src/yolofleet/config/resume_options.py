"""The options of a command that resumes a run. ``resume.py`` finds the run and merges its settings."""

from __future__ import annotations

from yolofleet.config.schema import RunSettings, TrainConfig, ValConfig, flag_of

VALIDATION = ("val_period", "val_batch")  # settings that decide its figures
CODE = ("recipe_class", "optimizer_class", "callbacks")
COPIES = ("checkpoint_to", "results_to")
REPEATED = ("preempt_notice", *CODE, "log_server", *COPIES)  # options of a resume, if the run has them


def is_address(text: str) -> bool:
    """Return whether a value of ``--resume`` is an address in a store, and no path."""
    return "://" in text


def options_to_repeat(settings: RunSettings | ValConfig) -> list[str]:
    """Return the options that the command which resumes a run must repeat: no file may choose programs or servers."""
    options = []
    for name in REPEATED:
        value = getattr(settings, name, ())
        for one in (value,) if isinstance(value, str) else value:
            options += [flag_of(name, TrainConfig.model_fields[name]), one] if one else []
    return options
