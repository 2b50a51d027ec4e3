"""Words of other trainers: each row of the table answers on the command line, in a file and in Python."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from commands import Outcome, called

import yolofleet
from yolofleet import Model
from yolofleet.config.load import resolve_predict
from yolofleet.config.schema import TrainConfig
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.config.words.aliases import rewrite
from yolofleet.config.words.earlier import EARLIER
from yolofleet.config.words.spellings import SPELLINGS
from yolofleet.config.words.unknown import WORDS, instead_of
from yolofleet.families.build import build_model
from yolofleet.families.family import load
from yolofleet.families.networks.description import describe
from yolofleet.families.table import BUILT_IN, FAMILIES
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.inference.predict.predictor import Predictor, class_numbers
from yolofleet.inference.predict.sources import Source
from yolofleet.support.errors import ConfigError, DataError


def text_of(found: Outcome) -> str:
    return found.out + found.err


@pytest.mark.parametrize("pattern", WORDS["setting"])
def test_a_setting_of_another_trainer_names_ours(pattern: str, tmp_path: Path) -> None:
    hint = WORDS["setting"][pattern]
    for word in re.sub(r"\(([^)]*)\)\?", "", pattern).split("|"):
        name = word.replace("-", "_")
        assert (name in TrainConfig.model_fields) == (name == "single_cls")
        if name == "single_cls" or name in EARLIER:  # a word that only some verbs lack
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
        assert found.code in (2, 3)
        assert "yolofleet has YOLOv5, YOLOv3, PP-YOLOE, RT-DETRv2, D-FINE and RF-DETR" in text_of(found)
        assert ("--weights dfine-n --model dfine-n-seg" in text_of(found)) == ("seg" in name)


def test_deim_is_a_family_and_a_recipe() -> None:
    found = called("train", "--data", "shapes", "--model", "deim_r18vd_120e_coco", "--dry-run")
    assert found.code == 2 and "--model rtdetrv2-r18 --recipe deim" in text_of(found)
    found = called("train", "--data", "shapes", "--model", "deim_hgnetv2_s_coco", "--dry-run")
    assert found.code == 0 and "recipe deim" in text_of(found)


def test_no_model_of_ours_is_taken_for_another_family() -> None:
    names = [name for family in BUILT_IN for name in load(FAMILIES[family].preset_names)()]
    assert "dfine-n" in names and not [name for name in names if instead_of("model", name)]


def test_commands_of_other_tasks_say_that_there_are_only_boxes_and_masks() -> None:
    found = text_of(called("pose", "train", "data=x.yaml", "model=yolov5n-pose"))
    assert "only finds boxes and masks: yolofleet train --data x.yaml --model yolov5n\n" in found
    found = text_of(called("segment", "train", "data=x.yaml", "model=yolov5n-seg", "mask_ratio=4"))
    assert "  try  : yolofleet train --data x.yaml --model yolov5n-seg --mask-ratio 4\n" in found
    found = text_of(called("segment", "val", "model=yolo11n-seg.pt", "data=x.yaml"))
    assert "yolofleet val --weights yolo11n-seg.pt --data x.yaml" in found and "other families" in found
    found = text_of(called("detect", "train", "data=x.yaml", "model=yolov8n.pt", "imgsz=64"))
    assert "yolofleet train --data x.yaml --weights yolov8n.pt" in found and "--model yolov5n" in found
    assert "no tracking" in text_of(called("track", "source=x"))


@cache
def predictor() -> Predictor:
    return Predictor(build_model(describe("yolov5n"), 1), PredictConfig(img=64, device="cpu"))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"threshold": 0.5}, "conf=0.4"),
        ({"confidence": 0.5}, "conf=0.4"),
        ({"conf_thres": 0.5}, "conf=0.4"),
        ({"score_threshold": 0.5}, "conf=0.4"),
        ({"iou_threshold": 0.5}, "iou=0.6"),
        ({"stream": True}, "Model(weights).stream(source)"),
        ({"verbose": False}, "--quiet"),
        ({"imgsz": 64}, "img: --img"),
    ],
)
def test_settings_of_other_trainers_name_ours_in_python(setting: dict, named: str) -> None:
    for call in (
        lambda: resolve_predict({"weights": "a.pt", "source": "b.jpg", **setting}, source="test"),
        lambda: predictor().predict("b.jpg", **setting),
    ):
        with pytest.raises(ConfigError) as problem:
            call()
        assert named in str(problem.value.hint)


@pytest.mark.parametrize("how", ["resume=True {model}", "{model} resume=true", "resume {model}"])
def test_resume_with_a_model_resumes_the_run_of_that_file(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, flags = Path("A"), {"--resume": True, "--model": True, "--weights": True, "--epochs": True}
    file = run / "weights" / "last.safetensors"
    words = [*how.format(model=f"model={file}").split(), "epochs=5"]
    assert rewrite("train", words, flags).argv == [f"--resume={file}", "--epochs=5"]
    found = called("train", *words)
    assert found.code == 2 and f"--resume {file} does not exist" in text_of(found)
    file.parent.mkdir(parents=True)
    file.touch()
    (run / "config.yaml").touch()
    assert f"{run} has no checkpoint" in text_of(called("train", *words)), "the run of the file, and no other"
    assert rewrite("train", ["model=yolov5n.pt", "resume=False"], flags).argv == ["--weights=yolov5n.pt"]
    named = rewrite("train", ["--name", "resume", "model=a.pt"], {**flags, "--name": True}).argv
    assert named == ["--name=resume", "--weights=a.pt"], "a value of another flag"


def test_resume_true_in_python_resumes_the_run_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "A" / "weights" / "last.safetensors"
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(ConfigError, match="A is not a run folder"):
        Model(file).train(resume=True)


def test_a_wrong_path_of_a_data_set_names_the_right_one_before_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("raccoon", "other"):
        Path(name).mkdir()
        Path(name, "data.yaml").touch()
    monkeypatch.setattr("yolofleet.fleet.launch.plan.check_machine", None)  # it comes later, as torch does
    found = called("train", "--data", "rakoon/data.yaml", "--model", "yolov5n")
    assert found.code == 2 and "did you mean raccoon/data.yaml?" in found.err
    found = called("train", "--data", "racoon", "--model", "yolov5n")
    assert found.code == 2 and "did you mean raccoon?" in found.err
    for name, words in (("a.mp4", "ffmpeg -i"), ("train.txt", "train: LIST.txt")):
        Path(name).touch()
        found = called("train", "--data", name, "--model", "yolov5n")
        assert found.code == 2 and words in found.err


def test_classes_take_commas_and_names_with_commas() -> None:
    names = ("owl", "hawk, red", "crow")
    assert class_numbers(["0,2"], names) == [0, 2]
    assert class_numbers(["owl, crow"], names) == [0, 2]
    assert class_numbers(["hawk, red", 2], names) == [1, 2]
    with pytest.raises(ConfigError, match="class 7 does not exist"):
        class_numbers(["0,7"], names)


def test_a_list_of_streams_and_two_runs_are_told_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "list.streams").write_text("rtsp://a/1\nrtsp://b/1\n")
    with pytest.raises(DataError) as problem:
        Source(str(tmp_path / "list.streams"))
    assert "list of streams" in problem.value.what and "--source rtsp://" in str(problem.value.hint)
    found = called("report", "A", "B b", "--out", "x.html")
    assert "yolofleet report compare A 'B b' --out x.html" in text_of(found)


def test_the_package_lists_its_names() -> None:
    assert {"Model", "load_model", "Callback"} <= set(dir(yolofleet)) and "os" not in dir(yolofleet)


def test_a_model_has_names_and_facts_and_is_called(tmp_path: Path) -> None:
    made = build_model(describe("yolov5n"), 2)
    made.names = ("owl", "crow")
    path = tmp_path / "best.safetensors"
    write_weights(path, Weights(made.state_dict(), WeightsHeader.of(made, img=64)))
    model = Model(path)
    assert model.names == ("owl", "crow")
    assert model.info()["names"] == ["owl", "crow"] and model.info()["img_px"] == 64
    (result,) = model(np.zeros((32, 32, 3), np.uint8), device="cpu")
    assert np.array_equal(result.plot(), result.draw()) and "0, 0" not in repr(result.frame)
    with pytest.raises(ConfigError, match="no weights"):
        _ = Model("yolov5n").names
