"""Settings of ``yolofleet tune``."""

from __future__ import annotations

from typing import ClassVar, Literal

from yolofleet.config.schema.fields import (
    Natural,
    display_setting,
    execution_setting,
    input_setting,
    length_setting,
    method_setting,
    saved_setting,
)
from yolofleet.config.schema.train import RunSettings


class TuneConfig(RunSettings):
    """Settings of ``yolofleet tune``: those of its trials, and of the search."""

    verb: ClassVar[str] = "tune"

    space: str = input_setting(
        "", "recipe values to search, with their ranges: a YAML file; default: the space of the model family"
    )
    trials: Natural = length_setting(
        30, "trials: trainings with recipe values of their own; the first has those of the recipe"
    )
    failures: Natural = length_setting(3, "end the study after N failed trials in a row")
    generation: Natural = method_setting(
        8,
        "trials whose values are chosen together, from the results of earlier generations only; the devices do not change it",
    )
    prune: bool = method_setting(
        True,
        "stop a trial whose fitness is below the median of the trials of earlier generations in the same epoch",
    )
    asynchronous: bool = method_setting(
        False,
        "choose the values of a trial when a device is free, from all results; faster, but not reproducible",
        flag="--async",
    )
    devices_per_trial: Natural = execution_setting(
        1, "devices of each trial; the number of devices of each host must be a multiple of N"
    )
    # other defaults than those of a training
    reduce: Literal["fast", "fast16", "exact"] = execution_setting(
        "exact",
        "sum of gradients; exact: the result of a trial does not depend on its devices; fast and fast16: as for train",
    )
    resume: str = saved_setting("", "go on with a study: auto (the newest) or its folder", in_files=False)
    plots: bool = display_setting(False, "each trial writes report.html, curves and example images")
