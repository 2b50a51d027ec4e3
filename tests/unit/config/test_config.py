"""Settings: layers, sources, checks, recipes, config.yaml and resume."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from pydantic import BaseModel

from yolofleet import Model
from yolofleet.cli.train import decided_here
from yolofleet.config.decide import decide
from yolofleet.config.load import resolve_predict, resolve_train, resolve_val
from yolofleet.config.recipe import family_warnings, load_recipe, parse_lr_factors, recipe_names, recipe_of
from yolofleet.config.resolve import layer_of, resolve
from yolofleet.config.schema import TrainConfig, ValConfig, divisors, may_be_in_files
from yolofleet.config.schema.measure import (
    BenchScalingConfig,
    BenchStartConfig,
    PlanConfig,
    PlanProbeConfig,
    TuneConfig,
)
from yolofleet.config.schema.verbs import (
    BenchConfig,
    DoctorConfig,
    ExportConfig,
    PredictConfig,
    SelftestConfig,
)
from yolofleet.config.stored.job import dump_config, load_config_yaml, load_job
from yolofleet.families.custom import CustomDescription
from yolofleet.families.networks.description import describe
from yolofleet.families.table import FAMILIES
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.storage.yaml_lines import read_scalar, read_yaml, write_yaml
from yolofleet.support.errors import ConfigError, Stopped

MINIMAL = {"data": "d.yaml", "model": "yolov5n"}


def train(**given):
    return resolve_train({**MINIMAL, **given})


@pytest.fixture
def written(tmp_path):
    """Writes a file whose name has a space, a quote and non-ASCII letters."""

    def write(text, name="ä 'b.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


# -- layers and sources


def test_later_layers_win_and_every_value_knows_its_source(written):
    file = written("epochs: 5\nbatch: 8\n")
    config, recipe = resolve_train({**MINIMAL, "batch": "32"}, config_file=str(file))
    assert (config.value.epochs, config.value.batch, config.value.seed) == (5, 32, 0)
    assert config.sources["epochs"] == f"{file}:1"
    assert config.sources["batch"] == "command line"
    assert config.sources["seed"] == "default"
    assert recipe.sources["lr0"] == "recipe scratch-low (default)"
    assert set(config.sources) == set(TrainConfig.model_fields)
    assert config.is_given("epochs") and not config.is_given("seed")


def test_a_resolved_configuration_cannot_be_changed():
    config, _ = train()
    with pytest.raises(Exception, match="frozen"):
        config.value.epochs = 3


def test_numbers_in_a_file_may_be_text_settings(written):
    config, _ = resolve_train(MINIMAL, config_file=str(written("device: 0\nfreeze: 10\nname: 5\n")))
    assert (config.value.device, config.value.freeze, config.value.name) == ("0", "10", "5")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"epochs": "abc"}, "--epochs abc is not a whole number"),
        ({"epochs": "0"}, "--epochs 0 is below 1"),
        ({"epochs": "1.5"}, "--epochs 1.5 is not a whole number"),
        ({"epochs": "9" * 12}, "is larger than 2147483647"),
        ({"epochs": "9" * 5000}, "is not a whole number"),
        ({"epochs": True}, "--epochs true is not a whole number"),
        ({"epochs": None}, "--epochs null is not a whole number"),
        ({"epochs": [1, 2]}, "--epochs a list of 2 is not a whole number"),
        ({"epochs": {"a": 1}}, "--epochs a mapping of 1 is not a whole number"),
        ({"stall_s": "nan"}, "--stall-s nan is not a finite number"),
        ({"save_every": "nan"}, "--save-every nan has nan, which is no whole number"),
        ({"optimizer": "adam"}, "did you mean Adam?"),
        ({"optimizer": "Adagrad"}, "is not one of SGD, Adam, AdamW"),
        ({"device": "gpu"}, "--device gpu is not of this form"),
        ({"device": "0,"}, "expected: auto (the first GPU, else the CPU), all"),
        ({"device": "3-1"}, "--device 3-1 has a range from a higher to a lower number: write 1-3"),
        ({"device": "cpu:0"}, "--device cpu:0"),
        ({"plots": "maybe"}, "--plots maybe is not true or false"),
        ({"set": "lr0=1"}, "--set lr0=1 is not a list of strings"),
        ({"img": "16"}, "allowed: at least 32"),
        ({"epochs": "x", "batch": "y"}, "also wrong: epochs"),
        ({"epoch": "3"}, "did you mean epochs?"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_would_do(given, says):
    with pytest.raises(ConfigError) as caught:
        train(**given)
    assert says in caught.value.render()
    assert caught.value.source == "command line"
    assert len(caught.value.what) < 400


NEGATIVE = {("batch", "-1"), ("micro_batch", "-1"), ("workers", "-1")}  # -1: measured, or by the cores


@pytest.mark.parametrize("value", ["-1", "-80", "-0.5", "nan", "inf", "1e300", "9" * 30])
def test_no_number_is_negative_infinite_or_absurd(value):
    models: list[type[BaseModel]] = [TrainConfig, TuneConfig, PlanConfig, PlanProbeConfig, BenchStartConfig]
    models += [BenchScalingConfig, BenchConfig, ValConfig, PredictConfig, ExportConfig]
    models += [DoctorConfig, SelftestConfig]
    if not 1e9 < float(value) < float("inf"):  # a run reports hyperparameters that are too large itself
        models += [family.hyperparameters for family in FAMILIES.values()]
    taken = set()
    for model in models:
        for name, field in model.model_fields.items():
            if field.annotation in (int, float):
                try:
                    resolve(model, [layer_of({name: value}, "command line")])
                    taken.add((name, value))
                except ConfigError as error:
                    assert value[:20] in error.what or "larger" in error.what or "18 digits" in error.what
    assert taken == {pair for pair in NEGATIVE if pair[1] == value}


def test_a_share_of_the_memory_is_read_again_from_a_stored_run(written):
    config, recipe = train(batch="0.8")
    assert load_job(written(dump_config(config, recipe))).config.value.batch == config.value.batch == -80
    with pytest.raises(ConfigError, match="--batch -80 is below 1"):
        train(batch=-80)


def test_an_unknown_key_of_a_file_is_named_with_its_line(written):
    file = written("epochs: 3\n\nbacth: 8\n")
    with pytest.raises(ConfigError) as caught:
        resolve_train(MINIMAL, config_file=str(file))
    assert caught.value.source == f"{file}:3"
    assert caught.value.hint == "did you mean batch?"


# -- YAML


def test_scalars_are_read_as_yaml_1_2(written):
    text = (
        "a: 1e-3\nb: on\nc: 2020-01-01\nd: 010\ne: ~\nf: .inf\ng: '1e-3'\nh: 1:30\ni: [1, x]\nj: TRUE\nk:\n"
    )
    found = {key: entry.value for key, entry in read_yaml(written(text)).items()}
    assert found == {
        "a": 0.001, "b": "on", "c": "2020-01-01", "d": 10, "e": None, "f": float("inf"), "g": "1e-3", "h": "1:30",
        "i": [1, "x"], "j": True, "k": None,
    }  # fmt: skip
    assert [entry.line for entry in read_yaml(written(text)).values()] == list(range(1, 12))
    assert read_scalar("1e-3", "x") == 0.001 and read_scalar("", "x") == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "a is set twice, in lines 1 and 3"),
        ("a: [1\n", "not YAML"),
        ("a: &x [1]\nb: *x\n", "aliases (*name) are not supported"),
        ("- 1\n- 2\n", "does not hold `key: value` lines"),
        ("word", "does not hold `key: value` lines"),
        ("a: !!python/object/apply:os.system [ls]\nb: !!python/name:os.system x\n", "with tag"),
        ("a: !!timestamp nonsense\n", "with tag"),
        ("a: !!int x\n", "cannot be read"),
        ("? [a]\n: 1\n", "a key must be a plain word"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("a: \x00", "not YAML"),
        ("a: 1\n" * 300_000, "the limit is 1.0 MiB"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_with_a_reason(written, text, says):
    with pytest.raises(ConfigError) as caught:
        read_yaml(written(text))
    assert says in caught.value.render()


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin").write_bytes(b"a: \xe4\n")
    for path, says in (
        (tmp_path, "cannot be read"),
        (tmp_path / "latin", "UTF-8"),
        (tmp_path / "no", "not exist"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_yaml(path)
        assert says in caught.value.render()


def test_what_is_written_reads_back_equal(written):
    words = ["on", "1e3", "1.", ".5", "-0", "null", "~", "", " ", "a: b", "# x", "ä\n'\"", "0x10", "yes", "2020-01-01",
             "*x", "&x", "!t", "- a", "@", "é\u2028x", "\ttab", "a\udcffb", "1_000", "+1e-3", "=", "<<", "1:30", "\U0001f600"]  # fmt: skip
    draw = random.Random(1)
    values: dict[str, object] = {f"word{i}": word for i, word in enumerate(words)}
    values |= {f"float{i}": draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300) for i in range(200)}
    values |= {"int": -3, "true": True, "none": None, "list": words, "empty": [], "tiny": 5e-324, "big": 1e16}
    found = {key: entry.value for key, entry in read_yaml(written(write_yaml(values))).items()}
    assert found == values
    assert all(type(found[key]) is type(values[key]) for key in values)


# -- recipes


def recipe_for(model, given):
    described = describe(model)
    return recipe_of(given, FAMILIES[described.family], described)


# What YOLOv5 publishes of its three recipes, where they differ from scratch-low.
PUBLISHED = {
    "scratch-low": Yolov5Hyperparameters(),
    "scratch-med": Yolov5Hyperparameters(lrf=0.1, cls=0.3, obj=0.7, scale=0.9, mixup=0.1),
    "scratch-high": Yolov5Hyperparameters(lrf=0.1, cls=0.3, obj=0.7, scale=0.9, mixup=0.1, copy_paste=0.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_recipes_are_yolov5s(name):
    assert recipe_for("yolov5n", load_recipe(name)).value == PUBLISHED[name]


def test_every_built_in_recipe_loads():
    assert {*PUBLISHED, "demo"} <= set(recipe_names())
    for name in recipe_names():
        assert f"recipe {name}" in load_recipe(name).sources.values()


@pytest.mark.parametrize(
    "spelled", ["hyp.scratch-med.yaml", "data/hyps/hyp.scratch-med.yaml", "scratch-med.yaml"]
)
def test_yolov5s_hyp_file_names_mean_the_built_in_ones(spelled):
    assert load_recipe(spelled).value.mixup == 0.1


YOLOV5_HYP = """# as YOLOv5 ships it
lr0: 0.01  # initial learning rate
lrf: 0.1
iou_t: 0.20  # IoU training threshold
anchor_t: 4.0
# anchors: 3
copy_paste: 0.1
fl_gamma: 0.0
mixup: 0.2
"""


def test_a_yolov5_hyp_file_is_read_and_what_has_no_effect_is_said_once(written):
    file = written(YOLOV5_HYP)
    recipe = recipe_for("yolov5n", load_recipe(str(file)))
    assert (recipe.value.lrf, recipe.value.mixup, recipe.value.box) == (0.1, 0.2, 0.05)
    assert recipe.sources["mixup"] == f"{file}:9" and recipe.sources["box"] == "recipe scratch-low"
    assert [note.split()[0] for note in recipe.notes] == ["iou_t"] and recipe.value.copy_paste == 0.1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("anchors: 3\n", "anchors come from the model"),
        ("giou: 0.05\nbox: 0.05\n", "giou is the old name of box"),
        ("lr_0: 0.1\n", "did you mean lr0?"),
        ("lr0: -1\n", "lr0: -1 is not above 0"),
        ("flipud: 2\n", "allowed: at least 0, at most 1"),
        ("lr0: fast\n", "lr0: fast is not a finite number"),
        ("lr0: .inf\n", "lr0: inf is not a finite number"),
    ],
)
def test_a_recipe_file_that_cannot_be_used_is_refused_with_its_line(written, text, says):
    file = written(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(file))
    assert says in caught.value.render() and f"{file}:1" in caught.value.render()


def test_an_old_name_is_taken_for_the_new_one(written):
    recipe = load_recipe(str(written("giou: 0.07\n")))
    assert dict(recipe.value)["box"] == 0.07 and "giou is now box" in recipe.notes[0]


@pytest.mark.parametrize(
    ("recipe", "model", "says"),
    [
        ("scratch-low", "dfine-n", "recipe scratch-low was made for the family yolov5"),
        ("data/hyps/hyp.scratch-med.yaml", "ppyoloe-s", "recipe scratch-med was made for the family yolov5"),
        ("finetune", "rtdetrv2-r18", "without --recipe, rtdetrv2-r18 takes rtdetr"),
        ("dfine", "yolov5n", "recipe dfine was made for the family dfine"),
        ("dfine-few", "rtdetrv2-r18", "recipe dfine-few was made for the family dfine"),
        ("rtdetr", "dfine-n", "recipe rtdetr was made for the family rtdetr"),
        (
            "ppyoloe-300e",
            "darknet-yolov3-tiny",
            "of the family darknet; without --recipe, darknet-yolov3-tiny takes scratch-low",
        ),
        ("FILE", "dfine-n", "hyp.yaml has anchor_t, fl_gamma, which dfine does not have"),
        ("FILE", "yolov3-tiny", ""),
        ("finetune", "darknet-yolov3", ""),
        ("deim", "rtdetrv2-r50", ""),
        ("deim", "dfine-s", ""),
        ("dfine-few", "deim-s", ""),
        ("ppyoloe-300e", "ppyoloe-plus-s", ""),
        ("", "dfine-n", ""),
    ],
)
def test_a_recipe_of_another_family_gives_a_warning(recipe, model, says, written):
    given = load_recipe(str(written(YOLOV5_HYP, "hyp.yaml")) if recipe == "FILE" else recipe)
    described = describe(model)
    found = family_warnings(given, FAMILIES[described.family], described)
    assert says in "".join(found) and len(found) == bool(says)
    # nothing is known of a user's network
    assert not family_warnings(given, FAMILIES["custom"], CustomDescription("Tiny"))


@pytest.mark.parametrize(
    ("first", "given", "second", "says"),
    [
        ("dfine-n", {}, "dfine-n", ""),
        ("dfine-n", {}, "yolov5n", "recipe dfine was made for the family dfine"),
        ("yolov5n", {"recipe": "finetune"}, "dfine-n", "recipe finetune was made for the family yolov5"),
        ("rtdetrv2-r18", {}, "dfine-n", "recipe rtdetr was made for the family rtdetr"),
    ],
)
def test_the_file_of_a_run_keeps_its_recipe_and_warns_of_another_family(first, given, second, says, written):
    def decided(model, run):
        described = describe(model)
        return decide(run[0], run[1], FAMILIES[described.family], described, 5000)

    then = decided(first, train(model=first, **given))
    file = written(dump_config(then.config, then.recipe))
    now = decided(second, resolve_train({"model": second}, config_file=str(file)))
    assert says in "".join(now.warnings) and len(now.warnings) == bool(says)
    assert (now.recipe.value.lr0, now.recipe.value.momentum) == (
        then.recipe.value.lr0,
        then.recipe.value.momentum,
    )
    assert (now.recipe.value == then.recipe.value) == (first == second)


def test_single_values_override_the_recipe():
    _, recipe = train(recipe="scratch-med", set=["lr0=2e-2", "mixup = 0", "label-smoothing=0.1"])
    value = recipe.value
    assert (value.lr0, value.mixup, value.label_smoothing, value.scale) == (0.02, 0.0, 0.1, 0.9)
    assert recipe.sources["lr0"] == "command line" and recipe.sources["scale"] == "recipe scratch-med"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"set": ["lr1=3"]}, "did you mean lrf?"),
        ({"set": ["lr0"]}, "is not key=value"),
        ({"set": ["=3"]}, "is not key=value"),
        ({"set": ["lr0=0"]}, "--set lr0=0 is not above 0"),
        ({"set": ["lr0=[1]"]}, "is not a finite number"),
        ({"set": ["lr0={a: 1}"]}, "is not a finite number"),
        ({"set": ["lr0=*x"]}, "not YAML"),
        ({"set": ["autobalance=true"]}, "its balance would depend on the fleet"),
        ({"set": ["mosaic=0", "mosaic9=0.5"]}, "is a fraction of the mosaics"),
        ({"recipe": "scratch-lo"}, "did you mean scratch-low?"),
        (
            {"recipe": "deim-few", "model": "rtdetrv2-r18"},
            "did you mean dfine-few? built in: deim, demo, dfine,",
        ),
        ({"recipe": "no/such.yaml"}, "built in: deim, demo, dfine, dfine-few, finetune, ppyoloe-300e"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused(given, says):
    with pytest.raises(ConfigError) as caught:
        train(**given)
    assert says in caught.value.render()


# -- combinations


def test_a_micro_batch_that_does_not_divide_offers_those_that_do(written):
    file = written("micro_batch: 16\n")
    with pytest.raises(ConfigError) as caught:
        resolve_train({**MINIMAL, "batch": "40"}, config_file=str(file))
    assert caught.value.what == "--micro-batch 16 does not divide --batch 40 (remainder 8)"
    assert caught.value.source == f"--micro-batch {file}:1, --batch command line"
    assert caught.value.hint == "--batch 48, or --micro-batch 8, 10 or 20"  # 20, 10 and 8 are nearest to 16


@pytest.mark.parametrize(
    ("batch", "nominal", "micro"),
    [
        (16, 64, 8),  # steps of 64 images, an eighth is 8
        (32, 64, 8),
        (64, 64, 8),
        (128, 64, 16),  # steps of 128 images
        (17, 64, 17),  # steps of 68: 8.5 is wished, 17 is the only divisor in 4..32
        (40, 64, 10),  # 64 / 40 rounds to 2 batches: steps of 80
        (100, 64, 10),  # 12.5 is wished: 10 is 1.25 away, 20 is 1.6
        (256, 64, 16),  # bounded: 32 is wished
        (16, 16, 8),  # bounded: 2 is wished
        (44, 64, 11),  # 44 images (64 / 44 rounds to 1): 8 is wished; 11 is 1.375 away, 4 is 2
        (34, 64, 17),  # not 2, as once
        (62, 64, 31),
        (6, 64, 6),
        (148, 64, 4),  # 4 x 37: a micro-batch of 37 is never the default
        (128, 512, 16),
        (120, 60, 15),  # 15 exactly
        (36, 36, 9),  # 8 is wished: 9 is 1.125 away, 6 is 1.33
        (4, 64, 4),
    ],
)
def test_the_default_micro_batch_is_the_divisor_nearest_to_an_eighth_of_a_step(batch, nominal, micro):
    assert train(batch=batch, nominal_batch=nominal)[0].value.micro_batch == micro
    assert micro in divisors(batch)


def test_a_stored_run_keeps_its_default_micro_batch_unless_the_batch_changes(written):
    config, recipe = train(batch=16)
    stored = dump_config(config, recipe)
    file = written(stored.replace("micro_batch: 8", "micro_batch: 4"))  # of another version
    assert load_job(file).config.value.micro_batch == 4
    assert resolve_train({}, config_file=str(file))[0].value.micro_batch == 4
    assert resolve_train({"batch": "44"}, config_file=str(file))[0].value.micro_batch == 11
    file.write_text(stored.replace("micro_batch: 8", "micro_batch: 0"))  # of an old version
    assert load_job(file).config.value.micro_batch == 8


@pytest.mark.parametrize(
    ("batch", "hint"),
    [
        (37, "--batch 36 or 38, or choose --micro-batch: 1 or 37"),
        (74, "--batch 72 or 75, or choose --micro-batch: 1, 2, 37 or 74"),
        (2, "--batch 4, or choose --micro-batch: 1 or 2"),
        (1, "--batch 4, or choose --micro-batch: 1"),
    ],
)
def test_a_batch_without_a_default_micro_batch_is_refused_with_the_nearest_batches(batch, hint):
    with pytest.raises(ConfigError) as caught:
        train(batch=batch)
    assert (
        caught.value.what
        == f"--batch {batch} cannot be cut into micro-batches of 4 to 32 images: none of these divides it"
    )
    assert (caught.value.source, caught.value.hint) == ("--batch command line", hint)
    assert train(batch=batch, micro_batch=batch)[0].value.micro_batch == batch


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": ""}, "--data is missing"),
        ({"model": ""}, "no model: expected one of --weights, --model and --cfg"),
        ({"cfg": "a.yaml"}, "--model yolov5n and --cfg a.yaml are mutually exclusive"),
        ({"sync_bn": True, "reduce": "exact"}, "leave out --sync-bn and raise --micro-batch"),
        ({"precision": "fp16", "device": "cpu:2"}, "CPUs do not compute in fp16"),
        ({"sampler": "weights", "val_period": 0}, "it follows the accuracy in validations"),
        ({"rect": True, "sync_bn": True}, "need images of one shape"),
        ({"rect": True, "set": ["mosaic=0.5"]}, "rectangular training shows no mosaics"),
        ({"rect": True, "micro_batches_per_pass": 2}, "each micro-batch has its own shape"),
        (
            {"passes": "compiled", "reduce": "exact"},
            "--passes compiled and --reduce exact are mutually exclusive",
        ),
        ({"passes": "compiled", "rect": True}, "each image size would be compiled"),
        ({"passes": "compiled", "sync_bn": True}, "cannot wait for other ranks"),
        ({"passes": "compiled", "parallel": "dp"}, "does not run in several threads"),
        (
            {"passes": "compiled", "batch": "auto"},
            "--passes compiled and --batch auto are mutually exclusive",
        ),
        ({"sampler": "weight"}, "is not one of none, weights, balanced, repeat-factor"),
        ({"fraction": "1.5"}, "--fraction 1.5 is above 1"),
        ({"set": ["albumentations=[Lambda]"]}, "Lambda is not a transform"),
        ({"set": ["albumentations=Blur"]}, "is not a list of strings"),
        ({"precision": "tf32", "device": "cpu"}, "CPUs do not compute in tf32"),
        ({"patience": 10, "val_period": 0}, "early stopping needs validation"),
        (
            {"preempt_notice": "notice 'a"},
            "--preempt-notice notice 'a cannot be split into words: No closing quotation",
        ),
        ({"preempt_notice": " "}, "has no words"),
    ],
)
def test_settings_that_cannot_stand_together_are_refused(given, says):
    with pytest.raises(ConfigError) as caught:
        train(**given)
    assert says in caught.value.render()


@pytest.mark.parametrize(
    "given",
    [
        {"weights": "yolov5s.pt", "model": ""},
        {"weights": "yolov5s.pt", "model": "", "cfg": "yolov5m.yaml"},
        {"weights": "yolov5s.pt"},
        {"weights": ""},
        {"val_period": 0},
        {"precision": "bf16", "device": "cpu"},
        {"precision": "fp16"},
    ],
)
def test_settings_that_can_stand_together_pass(given):
    train(**given)


@pytest.mark.parametrize(
    ("resolver", "given", "says"),
    [
        (resolve_val, {"data": "d"}, "--weights is missing"),
        (resolve_val, {"weights": "w"}, "--data is missing"),
        (resolve_predict, {"weights": "w"}, "--source is missing"),
        (resolve_predict, {"weights": "w", "source": "a", "workers": "2"}, "--workers 2: prediction has no loader"),
    ],
)  # fmt: skip
def test_val_and_predict_are_checked_too(resolver, given, says):
    with pytest.raises(ConfigError) as caught:
        resolver(given)
    assert says in caught.value.render()


@pytest.mark.parametrize(
    ("resolver", "given", "note"),
    [
        (resolve_val, {"data": "d", "save_conf": True}, "--save-conf has no effect without --save-txt"),
        (resolve_val, {"data": "d", "precision": "fp16", "device": "cpu"}, "--precision fp16 has no effect on a CPU"),
        (resolve_predict, {"source": "s", "txt_format": "voc"}, "--txt-format voc has no effect without --save-txt"),
    ],
)  # fmt: skip
def test_what_cannot_apply_and_harms_nothing_is_a_note(resolver, given, note):
    config = resolver({"weights": "w", **given})
    assert len(config.notes) == 1 and config.notes[0].startswith(note)
    assert config.value.precision == ("fp32" if "precision" in given else "auto")
    assert resolver({"weights": "w", **given, "save_txt": True, "device": "0"}).notes == ()


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        ({"optimizer": "Sophia"}, "--optimizer Sophia is not one of SGD, Adam, AdamW", "--optimizer SGD"),
        ({"set": ("nosuch=1",)}, "the recipe has no nosuch", "it has lr0, lrf, momentum"),
        ({"set": ("anchor_t=0",)}, "--set anchor_t=0 is", "allowed: "),
    ],
)
def test_the_hint_of_a_wrong_value_can_be_typed(given, says, hint):
    with pytest.raises(ConfigError) as caught:
        train(**given)
    assert says in caught.value.what and hint in str(caught.value.hint)


# -- config.yaml


def test_config_yaml_reads_back_exactly(tmp_path, written):
    file = written("epochs: 5\nhyperparameters:\n  lr0: 1e-3\n")
    given = {**MINIMAL, "name": "1e5", "project": tmp_path / "ü x", "set": ["mixup=0.1"], "freeze": "0"}
    config, recipe = resolve_train(given, config_file=str(file))
    stored = tmp_path / "config.yaml"
    stored.write_text(dump_config(config, recipe), encoding="utf-8")
    assert load_config_yaml(stored) == (config, recipe)  # values and sources
    assert recipe.sources["lr0"] == f"{file}:3" and recipe.value.lr0 == 0.001


@pytest.mark.parametrize("resolver", [resolve_val, resolve_predict])
def test_the_configuration_of_other_verbs_reads_back_too(tmp_path, resolver):
    given = (
        {"weights": "w.pt", "data": "d"} if resolver is resolve_val else {"weights": "w.pt", "source": "s"}
    )
    config = resolver(given)
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    job = load_job(tmp_path / "config.yaml")
    assert (job.config, job.recipe) == (config, None)
    assert job.verb == ("val" if resolver is resolve_val else "predict")


def test_a_run_repeats_from_its_config_yaml(tmp_path):
    config, recipe = train(batch=32, set=["lr0=0.02"], recipe="scratch-med", patience=100)
    stored = tmp_path / "config.yaml"
    stored.write_text(dump_config(config, recipe), encoding="utf-8")
    again, recipe_again = resolve_train({}, config_file=str(stored))
    assert (again.value, recipe_again.value) == (config.value, recipe.value)
    assert again.is_given("batch") and not again.is_given("epochs")  # a default stays one

    other, recipe_other = resolve_train({"set": ["mosaic=0"], "epochs": "7"}, config_file=str(stored))
    assert other.value == config.value.model_copy(update={"epochs": 7, "set": ("lr0=0.02", "mosaic=0")})
    assert recipe_other.value == recipe.value.model_copy(update={"mosaic": 0.0})

    _, fresh = resolve_train({"recipe": "scratch-high"}, config_file=str(stored))
    assert fresh.value.lr0 == 0.02 and fresh.sources["mixup"] == "recipe scratch-high"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("verb: val\nepochs: 3\n", "is the configuration of val, not of train"),
        ("verb: sing\n", "is not one of train, bench train, plan probe, tune, val, predict"),
        ("hyperparameters: 3\n", "hyperparameters: 3 is not a mapping"),
        ("hyperparameters:\n  lr: 3\n", "the recipe has no lr"),
        ("sources: []\n", "is not a mapping"),
    ],
)
def test_a_configuration_file_that_does_not_fit_is_refused(written, text, says):
    with pytest.raises(ConfigError) as caught:
        resolve_train(MINIMAL, config_file=str(written(text)))
    assert says in caught.value.render()


def test_a_file_chooses_no_web_server_and_no_disk_but_may_name_a_bucket(written):
    model = {"model": "yolov5n"}
    for data, says in (("https://internal/set", "a web server"), ("file:///usr/share/", "file://")):
        with pytest.raises(ConfigError, match=f"must not choose .*{says}"):
            resolve_train(model, config_file=str(written(f"data: {data}\n")))
        assert resolve_train({**model, "data": data})[0].value.data == data
    config, _ = resolve_train(model, config_file=str(written("data: s3://bucket/set\n")))
    assert config.value.data == "s3://bucket/set"
    for data in ("s3://key:hush@bucket/set", "s3://bucket/set?token=hush"):
        with pytest.raises(ConfigError, match="credentials belong") as refused:
            resolve_train({**model, "data": data})
        assert "hush" not in refused.value.render()


@pytest.mark.parametrize("data", ["https://internal/set", "file:///usr/share/"])
def test_a_resumed_run_chooses_no_web_server_and_no_disk(run, data):
    folder = run(data=data)
    with pytest.raises(ConfigError, match="a file must not choose"):
        resolve_train({"resume": str(folder)})
    assert resolve_train({"resume": str(folder), "data": data})[0].value.data


def test_hyperparameters_are_refused_where_nothing_is_trained(written):
    with pytest.raises(ConfigError, match="are for train only"):
        resolve_val({"weights": "w", "data": "d"}, config_file=str(written("hyperparameters: {lr0: 1}\n")))


def test_a_random_configuration_survives_the_round_trip(tmp_path):
    draw = random.Random(7)
    for model, verb in ((TrainConfig, "train"), (ValConfig, "val"), (PredictConfig, "predict")):
        for _ in range(20):
            values: dict[str, str | bool] = {}
            for name, field in model.model_fields.items():
                if field.annotation is str and name not in ("device", "on_nan"):
                    values[name] = "".join(
                        draw.choices("aé'\"#:&*!|>%@` \\{}[],-0123.e", k=draw.randint(0, 8))
                    )
                elif field.annotation is bool:
                    values[name] = draw.random() < 0.5
            config = resolve(model, [layer_of(values, "a  # odd: source"), layer_of({"img": 64}, "é")])
            stored = tmp_path / "config.yaml"
            stored.write_text(dump_config(config), encoding="utf-8")
            assert load_job(stored).config == config and load_job(stored).verb == verb


# -- resume


@pytest.fixture
def run(tmp_path):
    """Makes a run folder as training leaves it behind."""

    def make(name="exp", *, checkpoint=True, age_s=0, **given):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints").mkdir(parents=True)
        config, recipe = train(**{"project": str(tmp_path / "runs"), "name": name, **given})
        (folder / "config.yaml").write_text(dump_config(config, recipe), encoding="utf-8")
        if checkpoint:
            file = folder / "checkpoints" / "step-00000010.safetensors"
            file.touch()
            os.utime(file, (1e9 - age_s, 1e9 - age_s))
        return folder

    return make


def test_resume_takes_everything_from_the_run(run):
    folder = run(batch=32, set=["lr0=0.02"], epochs=7)
    config, recipe = resolve_train({"resume": str(folder)})
    assert (config.value.batch, config.value.epochs, recipe.value.lr0) == (32, 7, 0.02)
    assert config.value.resume == str(folder) and config.sources["batch"] == "first start of the run"
    assert recipe.sources["lr0"] == "first start of the run" and config.sources["resume"] == "command line"
    assert config.notes == ()


def test_a_resume_in_python_names_no_network_but_the_code_of_its_user(run, monkeypatch):
    given = []

    def train(settings, source):
        given.append(settings)
        raise Stopped("before the training")

    monkeypatch.setattr("yolofleet.cli.api._train", train)
    folder = run()
    for code, network in (({}, {}), ({"recipe_class": "mine.py:Mine"},) * 2):
        with pytest.raises(Stopped):
            Model("yolov5n", **code).train(resume=folder)
        assert given.pop() == {"resume": folder, **network}


def test_resume_auto_takes_the_newest_run_that_has_a_checkpoint(run, tmp_path):
    run("old", age_s=100)
    newest = run("exp2", age_s=1)
    run("exp3", checkpoint=False)
    run("other", age_s=50)
    project = str(tmp_path / "runs")
    assert resolve_train({"resume": "auto", "project": project})[0].value.resume == str(newest)
    named = resolve_train({"resume": "auto", "project": project, "name": "other"})[0].value
    assert named.resume == str(tmp_path / "runs" / "other")


def test_the_command_that_started_a_run_resumes_it_unchanged(run, tmp_path):
    folder = run(batch=32, set=["lr0=0.02"], weights="yolov5n.pt")
    command = {
        **MINIMAL,
        "batch": "32",
        "set": ["lr0=0.02"],
        "weights": "yolov5n.pt",
        "project": str(tmp_path / "runs"),
    }
    config, _ = resolve_train({**command, "resume": "auto"})
    assert config.value.resume == str(folder) and config.notes == ()


def test_a_batch_that_the_images_limited_may_be_typed_again_at_a_resume(run):
    folder = run(batch=8)
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("batch: command line", "batch: 8 training images"))
    for start in range(2):
        config, recipe = resolve_train({"resume": str(folder), "batch": "16"})
        assert config.value.batch == 8 and config.sources["batch"] == "8 training images", start
        file.write_text(dump_config(config, recipe), encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot change it"):
        resolve_train({"resume": str(folder), "batch": "4"})


LINE_ONLY = {"exist_ok": True, "hosts": "a:1", "fleet": "f.yaml", "sync_code": True, "allow": ("linked-folders",), "preempt_notice": "a b",
             "min_devices": 3, "detach": True, "recipe_class": "m:C", "callbacks": ("m:C",), "quiet": True, "checkpoint_to": "s3://b/run"}  # fmt: skip


def test_settings_of_the_command_line_alone_apply_to_a_resumed_run(run):
    names = {name for name, field in TrainConfig.model_fields.items() if not may_be_in_files(field)}
    assert names == {*LINE_ONLY, "resume"}
    folder = run(exist_ok=True, allow=["linked-folders"])
    resumed = resolve_train({"resume": str(folder)})[0].value
    assert all(getattr(resumed, name) == TrainConfig.model_fields[name].default for name in LINE_ONLY)
    for name, value in LINE_ONLY.items():
        more = {"sync_code": {"hosts": "a:1"}}.get(name, {})
        config, _ = resolve_train({"resume": str(folder), name: value, **more})
        assert (getattr(config.value, name), config.sources[name]) == (value, "command line")


def test_a_resumed_run_that_cannot_get_another_folder_says_so(run, tmp_path):
    folder = run()
    place = {"name": "exp", "project": str(tmp_path / "runs")}
    assert resolve_train({"resume": str(folder), **place})[0].notes == ()
    notes = resolve_train({"resume": str(folder), "name": "b", "project": str(tmp_path)})[0].notes
    assert [note.split(":")[0] for note in notes] == ["--name is ignored", "--project is ignored"]


def test_resume_on_another_fleet_changes_only_where_it_runs(run):
    folder = run(batch=32)
    config, _ = resolve_train({"resume": str(folder), "device": "cpu:3", "workers": "2", "reduce": "exact"})
    assert (config.value.device, config.value.workers, config.value.reduce) == ("cpu:3", 2, "exact")
    assert [note.split(" ", 1)[1] for note in config.notes] == [
        "changes from auto to cpu:3",
        "changes from -1 to 2",
        "changes from fast to exact",
    ]


@pytest.mark.parametrize(
    ("stored", "given", "note"),
    [
        ({"log": ("mlflow",)}, {"tensorboard": True}, "--log changes from mlflow to tensorboard"),
        ({"log": ("mlflow",)}, {"log": ("mlflow",)}, ""),
        ({"save_every": ("10min",)}, {"save_steps": 5}, "--save-every changes from 10min to 5steps"),
        ({}, {"save_every": ("5steps", "1epochs")}, "--save-every changes from none to 5steps 1epochs"),
        ({"keep_last": 3}, {"keep_last": 4}, "--keep-last changes from 3 to 4"),
        ({"plots": False}, {"plots": True}, "--plots changes from false to true"),
    ],
)
def test_each_change_of_a_setting_at_a_resume_gives_a_note(run, stored, given, note):
    notes = resolve_train({"resume": str(run(**stored)), **given})[0].notes
    assert [text for text in notes if " is now " not in text] == [note] * bool(note)


def test_a_dry_run_of_a_resume_refuses_to_compile_several_image_sizes(run):
    folder = run(set=["size_low=0.5"])
    with pytest.raises(ConfigError, match="each image size would be compiled"):
        decided_here(*resolve_train({"resume": str(folder), "passes": "compiled"}))


def test_a_longer_run_and_another_place_of_the_data_are_allowed_and_said(run):
    config, _ = resolve_train({"resume": str(run(epochs=7)), "epochs": "9", "data": "e.yaml"})
    assert (config.value.epochs, config.value.data) == (9, "e.yaml")
    assert config.notes == ("--data changes from d.yaml to e.yaml", "--epochs changes from 7 to 9")


def test_a_run_with_a_default_micro_batch_may_be_told_the_one_that_its_version_had(run):
    config, _ = resolve_train({"resume": str(run(batch=32)), "micro_batch": "16"})
    assert config.value.micro_batch == 16
    with pytest.raises(ConfigError, match="--micro-batch 8 differs from the run's 4"):
        resolve_train({"resume": str(run("second", batch=32, micro_batch=4)), "micro_batch": "8"})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": "16"}, "--batch 16 differs from the run's 32"),
        ({"seed": "1"}, "--seed 1 differs from the run's 0"),
        ({"set": ["lr0=0.5"]}, "lr0 0.5 differs from the run's 0.02"),
        ({"recipe": "scratch-high"}, "lr0 0.01 differs from the run's 0.02"),
    ],
)
def test_what_the_result_depends_on_cannot_change_when_resuming(run, given, says):
    folder = run(batch=32, set=["lr0=0.02"], recipe="scratch-med")
    with pytest.raises(ConfigError) as caught:
        resolve_train({"resume": str(folder), **given})
    assert says in caught.value.render() and "--weights" in str(caught.value.hint)


def test_a_cache_that_changes_pixels_stays_with_the_run(run):
    config, _ = resolve_train({"resume": str(run()), "cache": "disk", "stage": "/local"})
    assert config.value.cache == "disk" and config.value.stage == Path("/local")
    with pytest.raises(ConfigError, match="--cache jpeg differs from the run's auto"):
        resolve_train({"resume": str(run("second")), "cache": "jpeg"})
    with pytest.raises(ConfigError, match="--cache ram differs from the run's jpeg"):
        resolve_train({"resume": str(run("third", cache="jpeg")), "cache": "ram"})


def test_resume_names_a_run_a_checkpoint_or_as_in_yolov5_its_weights(run):
    folder = run()
    (folder / "weights").mkdir()
    (folder / "weights" / "last.safetensors").touch()
    state = folder / "checkpoints" / "step-00000010.safetensors"
    assert resolve_train({"resume": str(state)})[0].value.resume == str(state)
    assert resolve_train({"resume": str(folder / "weights" / "last.safetensors")})[0].value.resume == str(
        folder
    )


def test_resume_auto_without_a_run_starts_one_only_when_told_what(tmp_path):
    config, _ = train(resume="auto", project=str(tmp_path))
    assert config.value.resume == "" and "starting a new run" in config.notes[0]
    with pytest.raises(ConfigError, match="no run with a checkpoint"):
        resolve_train({"resume": "auto", "project": str(tmp_path)})


def test_resume_of_something_else_is_refused(run, tmp_path):
    (tmp_path / "last.pt").touch()
    empty = run("empty", checkpoint=False)
    for resume, says in (
        (tmp_path / "last.pt", "is not a run folder"),
        (tmp_path / "none", "does not exist"),
        (empty, "has no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=says):
            resolve_train({"resume": str(resume)})


def test_a_family_brings_its_own_recipe_unless_one_was_named():
    chosen = recipe_for("ppyoloe-s", load_recipe("", ["lr0=0.3"])).value
    assert (chosen.lr0, chosen.momentum, chosen.assigner_switch) == (0.3, 0.9, 1 / 3)
    named = load_recipe("scratch-low")
    assert recipe_for("ppyoloe-s", named).value.momentum == named.value.momentum


@pytest.mark.parametrize(
    ("network", "recipe", "rate", "backbone", "weight_decay"),
    [
        ("dfine-n", "dfine", 8e-4, 0.5, 1e-4),
        ("dfine-s", "dfine", 2e-4, 0.5, 1e-4),
        ("dfine-m", "dfine", 2e-4, 0.1, 1e-4),
        ("dfine-l", "dfine", 2.5e-4, 0.05, 1.25e-4),
        ("dfine-x", "dfine", 2.5e-4, 0.01, 1.25e-4),
        ("dfine-s", "deim", 4e-4, 0.5, 1e-4),
        ("dfine-l", "deim", 5e-4, 0.05, 1.25e-4),
        ("rtdetrv2-r18", "rtdetr", 1e-4, 1, 1e-4),
        ("rtdetrv2-r34", "rtdetr", 1e-4, 0.5, 1e-4),
        ("rtdetrv2-r50", "rtdetr", 1e-4, 0.1, 1e-4),
        ("rtdetrv2-r101", "rtdetr", 1e-4, 0.01, 1e-4),
        ("rtdetrv2-r50", "deim", 2e-4, 0.1, 1e-4),
    ],
)
def test_a_recipe_has_the_published_rates_of_each_size(
    network: str, recipe: str, rate: float, backbone: float, weight_decay: float
) -> None:
    named = recipe_for(network, load_recipe(recipe))
    value = named.value
    assert (value.lr0, parse_lr_factors(value.lr_factors)["backbone"], value.weight_decay) == (
        rate,
        backbone,
        weight_decay,
    )
    type(value).model_validate(value.model_dump())
    mine = recipe_for(network, load_recipe(recipe, ["lr0=0.3", "size_low=0.9"]))
    assert (mine.value.lr0, mine.value.size_low) == (0.3, 0.9), "what a user set stays"
    assert recipe_for(network, mine).value == mine.value
    other = recipe_for(network, load_recipe("scratch-low")).value
    assert other == type(other)(), "a recipe of another family"


@pytest.mark.parametrize(
    ("network", "recipe", "rate", "step", "flat"),
    [
        ("dfine-n", "dfine", 8e-4, 128, 1.0),
        ("dfine-n", "deim", 8e-4, 128, 1.0),
        ("deim-n", "deim", 8e-4, 128, 1.0),
        ("dfine-n", "dfine-few", 2e-4, 8, 0.0),
        ("deim-n", "dfine-few", 2e-4, 8, 0.0),
        ("dfine-s", "dfine", 2e-4, 32, 1.0),
        ("deim-s", "deim", 4e-4, 32, 0.5),
        ("deim-l", "deim", 5e-4, 32, 0.5),
        ("deim-s", "dfine-few", 2e-4, 8, 0.0),
        ("rtdetrv2-r50", "rtdetr", 1e-4, 16, 1.0),
    ],
)
def test_a_rate_belongs_to_the_images_of_a_step_that_its_authors_chose_it_for(
    network: str, recipe: str, rate: float, step: int, flat: float
) -> None:
    """The smallest D-FINE has steps of 128 images, and DEIM keeps its rate constant."""
    value = recipe_for(network, load_recipe(recipe)).value
    assert (value.lr0, value.reference_batch, value.flat_fraction) == (rate, step, flat)


def test_an_unknown_setting_of_the_python_interface_names_the_help_of_its_verb():
    with pytest.raises(ConfigError) as caught:
        resolve_train({"data": "d", "model": "yolov5n", "bogus": 1}, source="Model.train(...)")
    assert caught.value.hint == "yolofleet train --help lists the settings"
