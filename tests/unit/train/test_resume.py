"""Which differences between a checkpoint and the run that resumes it are allowed."""

from __future__ import annotations

import copy

import pytest

from yolofleet.config.schema import TrainConfig
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.runs.report.console import NullConsole
from yolofleet.support.errors import CheckpointError
from yolofleet.training.resume import check_resume

NOW = {
    "settings": {"micro_batch": 8},
    "recipe": Yolov5Hyperparameters().model_dump(mode="json"),
    "model": {"family": "yolov5"},
    "names": ["object"],
    "data": "digest",
    "kernels": {},
    "fleet": {"processes": 1, "device": "cpu", "host": "here"},
}


def test_a_hyperparameter_that_is_newer_than_the_checkpoint_has_its_default() -> None:
    then = copy.deepcopy(NOW)
    del then["recipe"]["mosaic9"]  # type: ignore[attr-defined]
    check_resume(then, NOW, TrainConfig(data="shapes"), NullConsole())
    used = copy.deepcopy(NOW)
    used["recipe"]["mosaic9"] = 0.5  # type: ignore[index]
    with pytest.raises(CheckpointError, match="with another recipe: mosaic9"):
        check_resume(then, used, TrainConfig(data="shapes"), NullConsole())


def test_a_checkpoint_of_an_earlier_version_has_hyperparameters_of_all_families() -> None:
    then = copy.deepcopy(NOW)
    then["recipe"] |= {"cls_gain": 1.0, "denoising": 100}  # type: ignore[operator]
    check_resume(then, NOW, TrainConfig(data="shapes"), NullConsole())


def test_a_checkpoint_of_images_that_a_device_augmented_goes_on() -> None:
    then = copy.deepcopy(NOW)
    then["settings"]["augment_on"] = "device"  # type: ignore[index]
    check_resume(then, NOW, TrainConfig(data="shapes"), NullConsole())


def test_only_an_exact_run_needs_the_same_kernels() -> None:
    then = {**NOW, "kernels": {"torch": "0"}}
    check_resume(then, NOW, TrainConfig(data="shapes", reduce="fast"), NullConsole())
    with pytest.raises(CheckpointError, match="equal bits here: torch was 0"):
        check_resume(then, NOW, TrainConfig(data="shapes", reduce="exact"), NullConsole())
