"""Every setting of every command, declared once: name, type, default, unit and help.

``cli/`` generates the command line from these models. ``load.py`` merges the values, freezes and stores them.
``words/`` has the flags of other programs. This package does not import torch.

The names below are those of a training and its validation, which every rank needs. The settings of other verbs are in
``measure.py`` and ``verbs.py``, and the ranks of a training do not import them.
"""

from yolofleet.config.schema.fields import AUTO as AUTO
from yolofleet.config.schema.fields import HEADINGS as HEADINGS
from yolofleet.config.schema.fields import MOST_LOADERS as MOST_LOADERS
from yolofleet.config.schema.fields import PREFETCH as PREFETCH
from yolofleet.config.schema.fields import Frozen as Frozen
from yolofleet.config.schema.fields import Natural as Natural
from yolofleet.config.schema.fields import Optimizer as Optimizer
from yolofleet.config.schema.fields import best_weights as best_weights
from yolofleet.config.schema.fields import choices_of as choices_of
from yolofleet.config.schema.fields import flag_of as flag_of
from yolofleet.config.schema.fields import group_of as group_of
from yolofleet.config.schema.fields import may_be_in_files as may_be_in_files
from yolofleet.config.schema.fields import rules_of as rules_of
from yolofleet.config.schema.fields import setting as setting
from yolofleet.config.schema.inference import ValConfig as ValConfig
from yolofleet.config.schema.recipe import GivenRecipe as GivenRecipe
from yolofleet.config.schema.recipe import Recipe as Recipe
from yolofleet.config.schema.recipe import closing_epoch as closing_epoch
from yolofleet.config.schema.train import MICRO_BATCHES as MICRO_BATCHES
from yolofleet.config.schema.train import TARGET_MICRO_BATCH as TARGET_MICRO_BATCH
from yolofleet.config.schema.train import RunSettings as RunSettings
from yolofleet.config.schema.train import TrainConfig as TrainConfig
from yolofleet.config.schema.train import WorkloadSettings as WorkloadSettings
from yolofleet.config.schema.train import default_micro_batch as default_micro_batch
from yolofleet.config.schema.train import divisors as divisors
from yolofleet.config.schema.train import step_images_of as step_images_of
