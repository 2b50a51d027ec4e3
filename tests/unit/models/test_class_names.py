"""Class names of weights and of a data set: in another order, different, missing, or only numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_training import described
from walks import sampled

from yolofleet.cli import main
from yolofleet.cli.api import Model
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.families.build import build_model
from yolofleet.families.networks.class_names import match_names
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.runs.report.console import NullConsole
from yolofleet.training.network import build_network

NAMES = ("circle", "square", "triangle", "star")
ORDER = ("square", "star", "circle", "triangle")
PX = 64


@pytest.mark.parametrize(
    ("of_weights", "of_data", "columns", "pairs"),
    [
        (NAMES, NAMES, None, ()),
        (NAMES, ORDER, (1, 3, 0, 2), ()),
        # other spellings of one name
        (("Traffic_Light", "car"), ("traffic light", "Car"), None, ()),
        (("Traffic_Light", "car"), ("CAR", "traffic-light"), (1, 0), ()),
        (("Car", "car"), ("car", "Car"), (1, 0), ()),
        # common names first, then the others in their order
        (NAMES, ("person", "car", "triangle", "star"), None, (("circle", "person"), ("square", "car"))),
        (("a", "b", "c", "x"), ("b", "y", "c", "a"), (1, 3, 2, 0), (("x", "y"),)),
        (("a", "b"), ("x", "y"), None, (("a", "x"), ("b", "y"))),
        (("a", "a", "b"), ("a", "b", "a"), None, (("a", "b"), ("b", "a"))),
        # no names: nothing to compare
        (("0", "1"), ("a", "b"), None, ()),
        (("a", "b"), ("class1", "class2"), None, ()),
        (("class_0", "class_1"), ("a", "b"), None, ()),
        (("ship",), ("object",), None, ()),
        # digits that are real names
        (("1", "0"), ("0", "1"), (1, 0), ()),
    ],
)
def test_classes_are_matched_by_name_and_the_rest_in_order(of_weights, of_data, columns, pairs):
    match = match_names(of_weights, of_data)
    assert (match.columns, match.pairs) == (columns, pairs)
    assert bool(match.text) == bool(columns or pairs)


def test_a_name_from_a_file_cannot_write_to_the_screen():
    assert "\x1b" not in match_names(("\x1b[31mred", "b"), ("b", "c")).text


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Weights, and data sets with the same images whose classes have other names, or other numbers."""
    root = tmp_path_factory.mktemp("names")
    make_shapes(root / "set", images=4, val_images=4, img=PX, seed=0)
    cfg = Path(__file__).resolve().parents[2] / "tiny.yaml"
    torch.manual_seed(0)
    model = build_model(described(str(cfg)), 4)
    model.names = NAMES
    write_weights(root / "w.safetensors", Weights(model.state_dict(), WeightsHeader.of(model, img=PX)))
    unnamed = build_model(described(str(cfg)), 4)
    write_weights(
        root / "unnamed.safetensors", Weights(model.state_dict(), WeightsHeader.of(unnamed, img=PX))
    )
    renumbered(root / "set", root / "sorted", ORDER)
    texts = {"some": "person, car, triangle, star", "none": "person, car, dog, cat"}
    for name, names in texts.items():
        text = (root / "set/data.yaml").read_text().replace("names:", f"names: [{names}]\nold:")
        (root / "set" / f"{name}.yaml").write_text(text)
    return root


def renumbered(old, new, names):
    """Write the same images and labels, with the classes in the order ``names``."""
    make_shapes(new, images=4, val_images=4, img=PX, seed=0)
    number = {str(NAMES.index(name)): str(n) for n, name in enumerate(names)}
    for file in new.rglob("labels/**/*.txt"):
        rows = [line.split() for line in file.read_text().splitlines()]
        file.write_text("".join(" ".join([number[row[0]], *row[1:]]) + "\n" for row in rows))
    (new / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(names)}]\n")


def words(root, data, *more, weights="w.safetensors"):
    own = ["val", "--weights", root / weights, "--data", root / data, "--device", "cpu", "--workers", "0"]
    return list(map(str, [*own, *more]))


def results(folder):
    found = json.loads((folder / "predictions.json").read_text())
    return json.loads((folder / "results.json").read_text()), found


@pytest.mark.parametrize("kind", sampled(["w.safetensors", "ensemble", "w.torchscript"], 3))
def test_val_maps_classes_by_name_and_every_file_has_the_right_names(
    kind, given, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    more = ["--save-json", "--save-txt", "--conf", "0.0001", "--max-det", "20", "--project", "out"]
    if kind == "ensemble":
        more += ["--weights", given / "w.safetensors", "--merge", "wbf"]
    if kind == "w.torchscript":
        Model(given / "w.safetensors").export(format="torchscript", out=given / kind, dynamic="both")
    weights = kind if kind != "ensemble" else "w.safetensors"
    assert main(words(given, "set/data.yaml", "--name", "a", *more, weights=weights)) == 0
    assert "order" not in capsys.readouterr().out
    assert main(words(given, "sorted/data.yaml", "--name", "b", *more, weights=weights)) == 0
    assert "mapped by name: the classes have another order: 0: circle / square" in capsys.readouterr().out

    (first, of_first), (second, of_second) = results(tmp_path / "out/a"), results(tmp_path / "out/b")
    assert first["per_class"] == {name: second["per_class"][name] for name in NAMES}

    def named(boxes, names):
        rounded = [(b["image_id"], names[b["category_id"]], round(b["score"], 6)) for b in boxes]
        return sorted(rounded)

    assert named(of_first, NAMES) == named(of_second, ORDER) and of_first
    figures = [json.loads((tmp_path / "out" / n / "report.json").read_text()) for n in "ab"]
    place = [ORDER.index(name) for name in NAMES] + [4]
    matrices = [np.array(f["confusion"]["matrix"]) for f in figures]
    assert (matrices[1][np.ix_(place, place)] == matrices[0]).all()


def test_other_names_are_a_warning_and_an_error_if_none_agrees(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words(given, "set/some.yaml", "--no-plots")) == 0
    said = capsys.readouterr()
    assert "2 of 4 classes have two names: circle / person, square / car" in said.out + said.err
    assert main(words(given, "set/none.yaml", "--no-plots")) == 2
    said = capsys.readouterr().err
    assert "no class of" in said and "circle / person" in said and "Traceback" not in said
    assert main(words(given, "set/none.yaml", "--no-plots", "--single-cls")) == 0
    assert main(words(given, "set/none.yaml", "--no-plots", weights="unnamed.safetensors")) == 0
    said = capsys.readouterr()
    assert "two names" not in said.out + said.err


class Said(NullConsole):
    def __init__(self):
        super().__init__()
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    fact = warn = note


@pytest.mark.parametrize("family", ["yolov5-narrow", "darknet-narrow", "ppyoloe-narrow"])
def test_a_training_starts_with_the_row_of_each_class_by_its_name(family):
    torch.manual_seed(1)
    trained = build_model(described(family), 4, seed=3)
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    trained.names = NAMES
    weights = Weights(trained.state_dict(), WeightsHeader.of(trained, img=PX))
    console = Said()
    started = build_network(described(family), weights, ORDER, 0, console)
    assert any("mapped by name" in line and "0: circle / square" in line for line in console.lines)
    images = torch.rand(1, 3, PX, PX)
    with torch.inference_mode():
        then, now = (one.eval().decode(one(images)).rows for one in (trained, started))
    columns = [*range(5), *(5 + NAMES.index(name) for name in ORDER)]
    assert torch.equal(then[..., columns], now) and started.names == ORDER


def test_fine_tuning_says_which_classes_have_other_names(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["--img", PX, "--epochs", 1, "--max-steps", 1, "--batch", 4, "--no-plots", "--device", "cpu"]
    settings += ["--threads", 1]
    for data, said in (
        ("sorted/data.yaml", "start weights: mapped by name"),
        ("set/none.yaml", "4 of 4 classes have two names: circle / person"),
    ):
        own = ["train", "--weights", given / "w.safetensors", "--data", given / data, "--workers", 0]
        assert main(list(map(str, [*own, *settings]))) == 0
        assert said in capsys.readouterr().out


def test_a_run_cannot_go_on_with_its_classes_in_another_order(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.yaml"
    text = f"path: {given / 'set'}\ntrain: images/train\nval: images/val\nnames: [circle, square, triangle, star]\n"
    data.write_text(text)
    cfg = Path(__file__).resolve().parents[2] / "tiny.yaml"
    own = ["train", "--cfg", cfg, "--data", data, "--img", PX, "--batch", 4, "--device", "cpu", "--no-plots"]
    own += [
        "--threads",
        1,
        "--workers",
        0,
        "--epochs",
        2,
        "--max-steps",
        1,
        *("--project", "out", "--name", "run"),
    ]
    assert main(list(map(str, own))) == 0
    data.write_text(text.replace("circle", "other").replace("square", "circle").replace("other", "square"))
    capsys.readouterr()
    assert main(["train", "--resume", "out/run", "--max-steps", "2"]) != 0
    said = capsys.readouterr().err
    assert "for other classes: the classes have another order: 0: circle / square" in said
