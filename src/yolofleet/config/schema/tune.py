"""Settings of ``yolofleet tune``."""

from __future__ import annotations

from typing import ClassVar, Literal

from yolofleet.config.schema.fields import Natural, setting
from yolofleet.config.schema.train import RunSettings


class TuneConfig(RunSettings):
    """Settings of ``yolofleet tune``: those of its trials, and of the search."""

    verb: ClassVar[str] = "tune"

    space: str = setting(
        "",
        "recipe values to search, with their ranges: a YAML file; default: the space of the model family",
        group="input",
    )
    trials: Natural = setting(
        30,
        "trials: trainings with recipe values of their own; the first has those of the recipe",
        group="length and batch size",
    )
    failures: Natural = setting(
        3, "end the study after N failed trials in a row", group="length and batch size"
    )
    generation: Natural = setting(
        8,
        "trials whose values are chosen together, from the results of earlier generations only; the devices do not change it",
        group="method",
    )
    prune: bool = setting(
        True,
        "stop a trial whose fitness is below the median of the trials of earlier generations in the same epoch",
        group="method",
    )
    asynchronous: bool = setting(
        False,
        "choose the values of a trial when a device is free, from all results; faster, but not reproducible",
        group="method",
        flag="--async",
    )
    devices_per_trial: Natural = setting(
        1,
        "devices of each trial; the number of devices of each host must be a multiple of N",
        group="execution",
    )
    # other defaults than those of a training
    reduce: Literal["fast", "fast16", "exact"] = setting(
        "exact",
        "sum of gradients; exact: the result of a trial does not depend on its devices; fast and fast16: as for train",
        group="execution",
    )
    resume: str = setting(
        "", "go on with a study: auto (the newest) or its folder", group="saved files", in_files=False
    )
    plots: bool = setting(
        False, "each trial writes report.html, curves and example images", group="reports and display"
    )
