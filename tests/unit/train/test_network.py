"""Start weights of another number of classes, layers that are frozen, and layers with rates of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import reference
from small_training import described

from yolofleet.config.recipe import parse_lr_factors
from yolofleet.config.schema import Recipe
from yolofleet.families.build import build_model
from yolofleet.families.darknet import weights_file as darknet
from yolofleet.families.networks.detector import Detector
from yolofleet.families.ppyoloe import pdparams_file as paddle
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.runs.report.console import NullConsole
from yolofleet.support.errors import ConfigError
from yolofleet.training.network import build_network, freeze, lr_factors

Writer = Callable[[Path, Weights], object]
HEADS = {
    "yolov5n": ["model.24.m.0", "model.24.m.1", "model.24.m.2"],
    "darknet-narrow": ["layers.15", "layers.22"],
    "ppyoloe-narrow": ["pred_cls"],
}


class Said(NullConsole):
    """Keeps what the console says."""

    def __init__(self) -> None:
        super().__init__(None)
        self.texts: list[str] = []

    def fact(self, text: str) -> None:
        self.texts.append(text)


def started_from(weights: Weights, classes: int) -> tuple[Detector, str]:
    said = Said()
    names = tuple(f"class {n}" for n in range(classes))
    model = build_network(weights.description, weights, names, 1, said)
    return model, "\n".join(said.texts)


@pytest.mark.parametrize(
    ("name", "file", "write"),
    [
        ("yolov5n", "start.safetensors", write_weights),
        ("darknet-narrow", "start.weights", darknet.write),
        ("ppyoloe-narrow", "start.pdparams", paddle.write),
    ],
)
def test_weights_for_other_classes_give_all_layers_but_the_outputs(
    name: str, file: str, write: Writer, tmp_path: Path
) -> None:
    first = build_model(described(name), 80)
    header = WeightsHeader.of(first, img=64)
    write(tmp_path / file, Weights(first.state_dict(), header))
    read = read_weights(tmp_path / file, first.description)
    model, said = started_from(read, 3)
    assert f"start weights of {read.description.name} for 80 classes, 3 here: " in said
    fresh = {key for key, t in model.state_dict().items() if t.shape != first.state_dict()[key].shape}
    fresh = {key for key in fresh if not key.endswith("anchors")}
    assert fresh and all(any(head in key for head in HEADS[name]) for key in fresh), fresh
    assert all(f"{key} (" in said for key in sorted(fresh)[:6])
    same = {key: t for key, t in first.named_parameters() if key not in fresh}
    assert all(torch.equal(t, dict(model.named_parameters())[key]) for key, t in same.items())
    total = int(said.split(" of ")[2].split()[0])
    assert f"{total - len(fresh)} of {total} tensors taken over" in said


def test_published_yolov5_weights_give_all_layers_but_the_outputs() -> None:
    _, said = started_from(read_weights(reference("weights/yolov5n.pt")), 3)
    assert (
        "yolov5n for 80 classes, 3 here: 285 of 291 tensors taken over; freshly initialised: model.24" in said
    )
    _, same = started_from(read_weights(reference("weights/yolov5n.pt")), 80)
    assert same.endswith("yolov5n: 291 of 291 tensors taken over")


def small() -> Detector:
    return build_model(described("yolov3-narrow"), 3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("*.bn.*", lambda name: ".bn." in name),
        (
            "backbone,*.m.?.bias",
            lambda name: int(name.split(".")[1]) < 13 or (name.endswith("bias") and ".m." in name),
        ),
        ("model.1[0-4].", lambda name: False),
        ("model.1[0-4].*", lambda name: name.split(".")[1] in ("10", "11", "12", "13", "14")),
        ("model.0.,model.2.", lambda name: name.split(".")[1] in ("0", "2")),
    ],
)
def test_patterns_prefixes_and_the_backbone_choose_layers(spec: str, expected: Callable[[str], bool]) -> None:
    model = small()
    wanted = [name for name, _ in model.named_parameters() if expected(name)]
    if not wanted:
        with pytest.raises(ConfigError, match="no layer"):
            freeze(model, spec)
        return
    assert freeze(model, spec) == wanted
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name not in wanted), name
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.training == (f"{name}.weight" not in wanted), name


def test_the_factors_of_all_parts_and_of_the_depth_are_multiplied() -> None:
    model = small()
    freeze(model, "model.0.")
    recipe = Recipe(lr_factors="backbone:0.1, *.bn.*:2", lr_layer_decay=0.5)
    factors = lr_factors(model, recipe)
    layers = len(model.freeze_groups())
    assert not [name for name in factors if name.startswith("model.0.")], "frozen"
    for name, factor in factors.items():
        layer = int(name.split(".")[1])
        expected = 0.5 ** (layers - 1 - layer) * (0.1 if layer < model.backbone_groups else 1)
        assert factor == pytest.approx(expected * (2 if ".bn." in name else 1)), name
    assert set(lr_factors(small(), Recipe()).values()) == {1.0}
    with pytest.raises(ConfigError, match=r"no trained parameter is part of model\.99"):
        lr_factors(model, Recipe(lr_factors="model.99:0.1"))
    with pytest.raises(ConfigError, match="no trained parameter"):
        lr_factors(model, Recipe(lr_factors="model.0.:0.1"), "command line")


def test_a_recipe_may_have_the_factor_of_a_frozen_part() -> None:
    model = build_model(described("dfine-n"), 3)
    freeze(model, "backbone")
    recipe = Recipe(lr_factors="backbone:0.1, decoder.:2")
    for source in ("recipe dfine", "recipe dfine for dfine-n", "runs/a/config.yaml:12"):
        factors = lr_factors(model, recipe, source)
        assert set(factors.values()) == {1.0, 2.0}
        assert not any(name.startswith("backbone") for name in factors)
        with pytest.raises(ConfigError, match="no trained parameter is part of nowhere"):
            lr_factors(model, Recipe(lr_factors="nowhere:0.1"), source)


@pytest.mark.parametrize(
    "text",
    ["backbone", "backbone:", "backbone:x", "backbone:0", "a:-1", "a:inf", "a:nan", ":1", "3:0.1", "a:1,a:2"],
)
def test_factors_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not PART:FACTOR"):
        parse_lr_factors(text)
    assert parse_lr_factors(" a.b:0.5 ,*.bn.*: 2,") == {"a.b": 0.5, "*.bn.*": 2.0}
