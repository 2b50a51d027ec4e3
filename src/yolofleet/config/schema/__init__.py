"""Every setting of every command, declared once: name, type, default, unit and help.

``cli/`` generates the command line from these models. ``load.py`` merges the values, freezes and stores them.
``aliases.py`` has the flags of other programs. This package does not import torch.
"""

from yolofleet.config.schema.export import BenchConfig, ExportConfig
from yolofleet.config.schema.fields import (
    AUTO,
    Frozen,
    Natural,
    Optimizer,
    best_weights,
    flag_of,
    group_of,
    may_be_in_files,
    setting,
)
from yolofleet.config.schema.inference import PredictConfig, ValConfig
from yolofleet.config.schema.machine import DoctorConfig, SelftestConfig
from yolofleet.config.schema.measure import (
    BenchRun,
    BenchScalingConfig,
    BenchTrainConfig,
    PlanProbeConfig,
    ProbeRun,
)
from yolofleet.config.schema.plan import PlanConfig
from yolofleet.config.schema.recipe import Recipe
from yolofleet.config.schema.train import (
    MICRO_BATCHES,
    TARGET_MICRO_BATCH,
    RunSettings,
    TrainConfig,
    WorkloadSettings,
    default_micro_batch,
    divisors,
    step_images_of,
)
from yolofleet.config.schema.tune import TuneConfig

__all__ = [
    "AUTO",
    "MICRO_BATCHES",
    "TARGET_MICRO_BATCH",
    "BenchConfig",
    "BenchRun",
    "BenchScalingConfig",
    "BenchTrainConfig",
    "DoctorConfig",
    "ExportConfig",
    "Frozen",
    "Natural",
    "Optimizer",
    "PlanConfig",
    "PlanProbeConfig",
    "PredictConfig",
    "ProbeRun",
    "Recipe",
    "RunSettings",
    "SelftestConfig",
    "TrainConfig",
    "TuneConfig",
    "ValConfig",
    "WorkloadSettings",
    "best_weights",
    "default_micro_batch",
    "divisors",
    "flag_of",
    "group_of",
    "may_be_in_files",
    "setting",
    "step_images_of",
]
