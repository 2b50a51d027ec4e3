"""Every setting of every command, declared once: name, type, default, unit and help.

``cli/`` generates the command line from these models. ``load.py`` merges the values, freezes and stores them.
``aliases.py`` has the flags of other programs. This package does not import torch.
"""

from yolofleet.config.schema.execution import ExecutionSettings
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
    BenchScalingConfig,
    BenchTrainConfig,
    PlanProbeConfig,
)
from yolofleet.config.schema.plan import PlanConfig
from yolofleet.config.schema.recipe import Recipe
from yolofleet.config.schema.train import TrainConfig
from yolofleet.config.schema.tune import TuneConfig

__all__ = [
    "AUTO",
    "BenchConfig",
    "BenchScalingConfig",
    "BenchTrainConfig",
    "DoctorConfig",
    "ExecutionSettings",
    "ExportConfig",
    "Frozen",
    "Natural",
    "Optimizer",
    "PlanConfig",
    "PlanProbeConfig",
    "PredictConfig",
    "Recipe",
    "SelftestConfig",
    "TrainConfig",
    "TuneConfig",
    "ValConfig",
    "best_weights",
    "flag_of",
    "group_of",
    "may_be_in_files",
    "setting",
]
