"""Words of other trainers: each row of the table answers on the command line, in a file and in Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Outcome, called

from yolofleet import Model
from yolofleet.config.schema import TrainConfig
from yolofleet.config.spellings import SPELLINGS
from yolofleet.config.words import WORDS, instead_of
from yolofleet.families.family import load
from yolofleet.families.table import BUILT_IN, FAMILIES
from yolofleet.support.errors import ConfigError


def text_of(found: Outcome) -> str:
    return found.out + found.err


@pytest.mark.parametrize("pattern", WORDS["setting"])
def test_a_setting_of_another_trainer_names_ours(pattern: str, tmp_path: Path) -> None:
    hint = WORDS["setting"][pattern]
    for word in pattern.split("|"):
        name = word.replace("-", "_")
        assert (name in TrainConfig.model_fields) == (name == "single_cls")
        if name in TrainConfig.model_fields:  # a word that only some verbs lack
            continue
        (tmp_path / "c.yaml").write_text(f"{name}: 3\n")
        assert hint in text_of(called("train", "--config", tmp_path / "c.yaml"))
        with pytest.raises(ConfigError) as problem:
            Model("yolov5n").train(**{name: 3})
        assert problem.value.hint == hint
        said = text_of(called("train", f"--{word}", "3"))
        assert (hint in said) == (f"--{word}" not in SPELLINGS["train"])  # which train translates


def test_the_flags_of_newcomers(tmp_path: Path) -> None:
    assert "--set lr0=0.01" in text_of(called("train", "--set", "lr=0.1"))
    assert "--set lr0=0.01" in text_of(called("train", "lr=0.1"))
    assert "--slurm nodes=2,gpus=4" in text_of(called("render", "slurm", "--nodes", "2"))
    assert "treats all classes as one" in text_of(called("data", "convert", "x", "--single-cls"))


@pytest.mark.parametrize(
    "name",
    ["yolov8n", "yolo11n.pt", "yolov9c", "yolo12s-seg", "yolov10b.pt", "rtdetr-l", "yolox_s", "YOLO26n"],
)
def test_models_of_other_families_are_named_as_such(name: str) -> None:
    for flag in ("--model", "--weights"):
        found = called("train", "--data", "shapes", flag, name, "--dry-run")
        assert found.code in (
            2,
            3,
        ) and "yolofleet has YOLOv5, YOLOv3, PP-YOLOE, RT-DETRv2 and D-FINE" in text_of(found)


def test_deim_is_a_family_and_a_recipe() -> None:
    found = called("train", "--data", "shapes", "--model", "deim_r18vd_120e_coco", "--dry-run")
    assert found.code == 2 and "--model rtdetrv2-r18 --recipe deim" in text_of(found)
    found = called("train", "--data", "shapes", "--model", "deim_hgnetv2_s_coco", "--dry-run")
    assert found.code == 0 and "recipe deim" in text_of(found)


def test_no_model_of_ours_is_taken_for_another_family() -> None:
    names = [name for family in BUILT_IN for name in load(FAMILIES[family].preset_names)()]
    assert "dfine-n" in names and not [name for name in names if instead_of("model", name)]


def test_commands_of_other_tasks_say_that_there_are_only_boxes() -> None:
    found = text_of(called("segment", "train", "data=x.yaml", "model=yolov5n-seg"))
    assert "only detects boxes: yolofleet train --data x.yaml --model yolov5n\n" in found
    found = text_of(called("detect", "train", "data=x.yaml", "model=yolov8n.pt", "imgsz=64"))
    assert "yolofleet train --data x.yaml --weights yolov8n.pt" in found and "--model yolov5n" in found
    assert "no tracking" in text_of(called("track", "source=x"))
