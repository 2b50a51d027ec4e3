"""Every hyperparameter and every setting of a training does something: it changes the weights, the files or what is printed.

A new setting fails ``test_every_setting_is_walked`` until a line below says what it changes, or which test shows that.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import called, working_in
from small_files import TINY, TINY_YAML
from walks import sampled

from yolofleet.cli import main
from yolofleet.cli.api import Model
from yolofleet.config.load import resolve_train
from yolofleet.config.recipe import load_recipe, recipe_of
from yolofleet.config.schema import TrainConfig, flag_of
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.table import FAMILIES
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.fleet.launch.plan import plan_run, start
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.support.errors import ConfigError

TESTS = Path(__file__).resolve().parents[1]
WEIGHTS = "weights"  # what changes: the weights, the names of the files, or a text that is printed
FILES = "files"
RESULTS = "results.csv"
BASE: dict[str, Any] = {
    "data": "set", "cfg": str(TINY), "img": 64, "batch": 4, "nominal_batch": 4, "micro_batch": 2, "epochs": 2,
    "device": "cpu", "threads": 1, "workers": 0, "val_period": 2, "plots": False, "save_every": "0",
}  # fmt: skip

# hyperparameter -> another value, and the settings with which it counts
PPYOLOE = {"cfg": "", "model": "ppyoloe-s"}
DFINE = {"cfg": "", "model": "dfine-toy", "recipe_class": "small_detr.py:Small"}
DFINE_SEG = DFINE | {"model": "dfine-toy-seg", "data": "polygons"}
BY_STEP = {"set": ("rates=step", "warmup_epochs=0.5")}
RECIPE: dict[str, tuple[str, dict[str, Any]]] = {
    "lr0": ("0.5", {}),
    "lrf": ("0.5", {}),
    "momentum": ("0.5", {}),
    "nesterov": ("false", {}),
    "weight_decay": ("0.05", {}),
    "decay_biases": ("true", {"set": ("weight_decay=0.5",)}),
    "rates": ("step", {}),
    "horizon": ("2", BY_STEP),
    "reference_epochs": ("1", BY_STEP),
    "flat_fraction": ("1", BY_STEP),
    "warmup_epochs": ("200", {}),
    "warmup_steps": ("2", BY_STEP),
    "warmup_momentum": ("0.1", {}),
    "warmup_bias_lr": ("0.5", {}),
    "lr_factors": ("backbone:0.5", {}),
    "lr_layer_decay": ("0.5", {}),
    "clip_norm": ("0.01", {}),
    "ema_decay": ("0.5", {}),
    "ema_rule": ("threshold", {}),
    "ema_tau": ("2", {}),
    "reference_batch": ("16", {"lr_scale": "linear"}),
    "reference_optimizer": ("AdamW", {}),
    "box": ("9", {}),
    "cls": ("9", {}),
    "cls_pw": ("9", {}),
    "obj": ("9", {}),
    "obj_pw": ("9", {}),
    "anchor_t": ("1.5", {"autoanchor": False}),
    "fl_gamma": ("2", {}),
    "label_smoothing": ("0.5", {}),
    "cls_gain": ("9", PPYOLOE),
    "iou_gain": ("9", PPYOLOE),
    "dfl_gain": ("9", PPYOLOE),
    "assigner_switch": ("0", PPYOLOE),
    "l1_gain": ("9", DFINE),
    "giou_gain": ("9", DFINE),
    "class_loss": ("mal", DFINE),
    "class_gamma": ("1", DFINE),
    "denoising": ("0", DFINE),
    "label_noise": ("1", DFINE),
    "box_noise": ("0.5", DFINE),
    "fgl_gain": ("9", DFINE),
    "ddf_gain": ("9", DFINE),
    "mask_gain": ("9", DFINE_SEG),
    "dice_gain": ("9", DFINE_SEG),
    "repeat_threshold": ("1", {"sampler": "repeat-factor", "data": "rare"}),
    "size_low": ("0.5", {}),
    "size_high": ("2", {}),
    "hsv_h": ("0.5", {}),
    "hsv_s": ("0.1", {}),
    "hsv_v": ("0.1", {}),
    "degrees": ("90", {}),
    "translate": ("0.5", {}),
    "scale": ("0.1", {}),
    "shear": ("45", {}),
    "perspective": ("0.001", {}),
    "flipud": ("1", {}),
    "fliplr": ("1", {}),
    "mosaic": ("0", {}),
    "mosaic9": ("1", {}),
    "mixup": ("1", {}),
    "close_mosaic": ("1", {}),
    "close_augment": ("1", {}),
    "copy_paste": ("1", {"data": "polygons"}),
    "cutout": ("1", {}),
    "albumentations": ("[ToGray p=1]", {}),
}
REFUSED_FIELDS = {"autobalance": "true"}  # of YOLOv5's files; any other value than the default is an error

# setting -> another value, what it changes, and the settings with which it counts
SETTINGS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "data": ("thin", WEIGHTS, {}),
    "model": ("yolov5n", WEIGHTS, {"cfg": "", "model": "yolov3-tiny"}),
    "cfg": ("other.yaml", WEIGHTS, {}),
    "weights": ("start.safetensors", WEIGHTS, {}),
    "img": (96, WEIGHTS, {}),
    "fraction": (0.5, WEIGHTS, {}),
    "batch": (2, WEIGHTS, {}),
    "nominal_batch": (8, WEIGHTS, {"set": ("warmup_epochs=0",)}),
    "micro_batch": (4, WEIGHTS, {}),
    "seed": (1, WEIGHTS, {}),
    "recipe": ("scratch-high", WEIGHTS, {}),
    "set": (("lr0=0.5",), WEIGHTS, {}),
    "single_cls": (True, WEIGHTS, {}),
    "optimizer": ("AdamW", WEIGHTS, {}),
    "recipe_class": ("mine.py:Doubled", WEIGHTS, {}),
    "callbacks": (("mine.py:Printed",), "my callback", {}),
    "sampler": ("balanced", WEIGHTS, {}),
    "rect": (True, WEIGHTS, {}),
    "freeze": ("3", WEIGHTS, {}),
    "autoanchor": (False, WEIGHTS, {"data": "thin"}),
    "sync_bn": (True, WEIGHTS, {}),
    "precision": ("bf16", WEIGHTS, {}),
    "reduce": ("exact", WEIGHTS, {}),
    "cache": ("jpeg", WEIGHTS, {}),
    "lr_schedule": ("constant", WEIGHTS, {}),
    "lr_scale": ("linear", WEIGHTS, {}),
    "epochs": (3, WEIGHTS, {}),
    "max_steps": (1, WEIGHTS, {}),
    "minutes": (0.0001, WEIGHTS, {"epochs": 30}),
    "patience": (1, WEIGHTS, {"epochs": 6, "val_period": 1, "set": ("lr0=1e-9", "warmup_bias_lr=0")}),
    "workers": (1, "1 processes", {}),
    "val_period": (1, RESULTS, {}),
    "parallel": ("dp", "2 devices", {"device": "cpu:2"}),
    "shares": ("2,1", "2,1", {"device": "cpu:2", "parallel": "dp"}),
    "project": ("elsewhere", FILES, {}),
    "name": ("other", FILES, {}),
    "save_every": ("1steps", FILES, {"keep_last": 9}),
    "keep_last": (1, FILES, {"save_every": "1epochs"}),
    "log": ("tensorboard", FILES, {}),
    "stage": ("staged", "staged 4 train images", {}),
}
# settings that need several processes, a failure, a GPU or a store, or that change only the speed -> a test that uses each
ELSEWHERE = {
    # processes and hosts
    "device": "multiprocess/test_training.py",
    "hosts": "cluster/test_fleet.py",
    "fleet": "cluster/test_fleet.py",
    "sync_code": "cluster/test_fleet.py",
    "detach": "cluster/test_detached.py",
    "timeout_s": "multiprocess/test_watchdog.py",
    "stall_s": "multiprocess/test_watchdog.py",
    "restarts": "multiprocess/test_going_on_here.py",
    "preempt_notice": "multiprocess/test_stop.py",
    "checkpoint_copies": "multiprocess/test_copies.py",
    # speed and memory, which change no result
    "threads": "unit/parallel/test_process.py",
    "deterministic": "unit/test_devices.py",
    "plots": "multiprocess/test_training.py",
    "val_batch": "unit/launch/test_preflight.py",
    "val_overlap": "unit/train/test_overlap.py",
    "passes": "unit/rank/test_cuda_graphs.py",
    "checkpoint_activations": "unit/train/test_passes.py",
    # GPUs
    "micro_batches_per_pass": "unit/train/test_passes.py",
    # stores
    "checkpoint_to": "multiprocess/test_stored_runs.py",
    # a second start
    "resume": "e2e/test_options.py",
    "allow": "unit/rank/test_same_data.py",
    "exist_ok": "e2e/test_used_folder.py",
    # failures
    "on_nan": "multiprocess/test_nan.py",
    "quiet": "e2e/test_quiet_and_json.py",
}
WITHOUT_TEST = {  # what they call has a test
    "min_devices": "counted in LaunchAttempts._are_enough, which needs hosts that are lost"
}
MINE = """
from yolofleet import Callback, TrainingRecipe


class Doubled(TrainingRecipe):
    def loss(self, model, recipe, img):
        return super().loss(model, recipe.model_copy(update={"box": 2 * recipe.box}), img)


class Printed(Callback):
    def start(self, run):
        print("my callback")
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets, start weights, a second network and code, which settings name."""
    root = tmp_path_factory.mktemp("settings")
    for name in ("set", "thin", "rare", "polygons"):
        make_shapes(root / name, images=4, val_images=2, img=64, seed=0)
    for file in (root / "thin").rglob("labels/**/*.txt"):
        rows = [line.split() for line in file.read_text().splitlines()]
        file.write_text(
            "".join(f"{c} {x} {y} 0.05 {0.03 + 0.01 * n}\n" for n, (c, x, y, _, _) in enumerate(rows))
        )
    for number, file in enumerate(sorted((root / "rare").rglob("labels/**/*.txt"))):
        file.write_text(f"{0 if number else 1} 0.5 0.5 0.4 0.4\n")
    for file in (root / "polygons").rglob("labels/**/*.txt"):
        rows = [line.split() for line in file.read_text().splitlines()]
        file.write_text("".join(f"{row[0]} {outline(*map(float, row[1:]))}\n" for row in rows))
    (root / "other.yaml").write_text(TINY_YAML.replace("0.125", "0.25"))
    (root / "mine.py").write_text(MINE)
    shutil.copy(TESTS / "detr_family" / "small_detr.py", root)
    model = build_model(describe(str(TINY)), 4, seed=7)
    write_weights(root / "start.safetensors", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    return root


def outline(x: float, y: float, w: float, h: float) -> str:
    left, top, right, bottom = x - w / 2, y - h / 2, x + w / 2, y + h / 2
    return f"{left} {top} {right} {top} {right} {bottom} {left} {bottom}"


@dataclass(frozen=True)
class Outcome:
    """What a user gets from a run."""

    weights: str
    files: frozenset[str]
    results: str
    printed: str


class Runs:
    """Trainings in this process, each in a folder of its own; one with the same settings is not repeated."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self._done: dict[str, Outcome] = {}
        self._begun = 0

    def __call__(self, settings: Mapping[str, Any]) -> Outcome:
        key = repr(sorted(settings.items()))
        if key not in self._done:
            self._done[key] = self._run(settings)
        return self._done[key]

    def _run(self, settings: Mapping[str, Any]) -> Outcome:
        self._begun += 1
        here = self.folder / str(self._begun)
        here.mkdir()
        for path in self.root.iterdir():
            (here / path.name).symlink_to(path)
        words = ["train"]
        for name, value in settings.items():
            flag = flag_of(name, TrainConfig.model_fields[name])
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                values = value if isinstance(value, tuple) else [value]
                words += [word for one in values if one != "" for word in (flag, str(one))]
        with working_in(here, YOLOFLEET_CACHE=str(self.root / "cache")):
            done = called(*words)
        assert done.code == 0, done.err
        run = next(path.parent for path in here.rglob("results.json"))
        rows = csv.DictReader((run / "results.csv").read_text().splitlines())
        timed = ("seconds", "images_per_s", "share", "memory")
        results = [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in rows]
        return Outcome(
            json.loads((run / "results.json").read_text())["weights_sha256"],
            frozenset(
                re.sub(r"events.out.*", "events", str(path.relative_to(here)))
                for path in here.rglob("*")
                if path.is_file() and "set" not in path.relative_to(here).parts
            ),
            repr(results),
            done.out + done.err,
        )


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(root, tmp_path_factory.mktemp("runs"))


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(RECIPE, 4))
def test_each_hyperparameter_changes_the_weights(name: str, runs: Runs) -> None:
    if name == "albumentations":
        pytest.importorskip("albumentations")
    value, context = RECIPE[name]
    base = BASE | context
    there = base | {"set": (*base.get("set", ()), f"{name}={value}")}
    assert runs(there).weights != runs(base).weights


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(SETTINGS, 3))
def test_each_setting_changes_the_weights_the_files_or_the_screen(name: str, runs: Runs) -> None:
    value, changes, context = SETTINGS[name]
    base = BASE | context
    before, after = runs(base), runs(base | {name: value})
    if changes == WEIGHTS:
        assert after.weights != before.weights
    elif changes == FILES:
        assert after.files != before.files
    elif changes == RESULTS:
        assert after.results != before.results
    else:
        assert changes in after.printed and changes not in before.printed


@pytest.mark.long
def test_the_same_settings_give_the_same_outcome(root: Path, runs: Runs, tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    first, second = runs(BASE), Runs(root, tmp_path)(BASE)
    assert (first.weights, first.files, first.results) == (second.weights, second.files, second.results)


def test_every_setting_is_walked() -> None:
    walked = {**dict.fromkeys(RECIPE, ""), **REFUSED_FIELDS}
    assert walked.keys() == {name for f in FAMILIES.values() for name in f.hyperparameters.model_fields}
    tables = [*SETTINGS, *ELSEWHERE, *WITHOUT_TEST]
    assert set(tables) == TrainConfig.model_fields.keys() and len(set(tables)) == len(tables)
    for name, file in ELSEWHERE.items():
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(name.replace("_", "[_.-]"), text), (name, file)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cfg": "", "model": "ppyoloe-s", "set": ("box=0.05",)}, "box belongs to yolov5 and darknet"),
        ({"set": ("cls_gain=2",)}, "cls_gain belongs to ppyoloe"),
        ({"cfg": "", "model": "darknet-yolov3-tiny", "set": ("dfl_gain=2",)}, "dfl_gain belongs to ppyoloe"),
        ({"cfg": "", "model": "ppyoloe-s", "recipe": "file.yaml"}, "obj belongs to yolov5 and darknet"),
        ({"cfg": "", "model": "ppyoloe-s", "recipe": "scratch-high"}, "cls belongs to yolov5 and darknet"),
        ({"cfg": "", "model": "ppyoloe-s", "config": "config.yaml"}, "obj belongs to yolov5 and darknet"),
    ],
)
def test_hyperparameters_of_another_family_are_refused(
    settings: dict[str, Any], said: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text("lr0: 0.01\nbox: 0.05\nobj: 3.0\n")
    (tmp_path / "config.yaml").write_text("hyperparameters:\n  obj: 3.0\n")
    given = BASE | {"data": str(root / "set")} | settings
    config_file = given.pop("config", "")
    with pytest.raises(ConfigError, match=said) as caught:
        started(given, config_file)
    assert "has: " in str(caught.value.hint)
    assert not list(tmp_path.rglob("results.json"))


def test_python_refuses_them_too(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = BASE | {"data": str(root / "set"), "set": ("cls_gain=2",)}
    with pytest.raises(ConfigError, match="cls_gain belongs to ppyoloe"):
        Model(given.pop("cfg")).train(**given)


def test_a_recipe_that_a_study_writes_is_accepted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier versions list all hyperparameters; those of other families have their defaults."""
    monkeypatch.chdir(tmp_path)
    of_others = {"box": 0.05, "autobalance": False, "class_loss": "vfl"}
    recipe = recipe_of(load_recipe(), FAMILIES["ppyoloe"], None).value.model_dump(mode="json")
    (tmp_path / "best.yaml").write_text(write_yaml(recipe | of_others))
    words = ["train", "--data", str(root / "set"), "--model", "ppyoloe-s", "--recipe", "best.yaml"]
    done = called(*words, "--device", "cpu", "--dry-run")  # decides as the run does: test_finetune_recipe.py
    assert done.code == 0 and "assigner_switch" in done.out, done.err
    (tmp_path / "best.yaml").write_text(write_yaml(recipe | of_others | {"box": 1}))
    assert "box belongs to yolov5 and darknet" in called(*words, "--device", "cpu", "--dry-run").err


def test_a_space_of_another_family_is_refused_before_the_study(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text("cls_gain: [0.5, 2.0]\n")
    words = ["tune", "--data", str(root / "set"), "--cfg", str(TINY), "--img", "64", "--device", "cpu"]
    assert main([*words, "--batch", "4", "--space", "space.yaml", "--trials", "1", "--epochs", "1"]) == 2
    assert "cls_gain belongs to ppyoloe" in capsys.readouterr().err


def test_a_hyperparameter_without_effect_is_said_in_a_run(runs: Runs) -> None:
    said = runs(BASE | {"set": ("ema_rule=threshold", "ema_tau=5")}).printed
    assert said.count("ema_tau 5.0 has no effect: only ema_rule=ramp uses it") == 1


def started(given: Mapping[str, Any], config_file: str = "") -> int:
    config, recipe = resolve_train(given, config_file=config_file)
    return start(plan_run(config, recipe))[0]
