"""One rule for the size of the images: each verb, the Python interface and the hub take that of the weights."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest
import safetensors.torch
from small_weights import saved, untrained

from yolofleet.cli import main
from yolofleet.cli.api import Model, load_model
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.families.weights.reader import load_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.families.weights.value import write_weights
from yolofleet.inference.export.runtime import image_size, open_networks
from yolofleet.support.errors import ConfigError

PX = 96
TRAINED = f"image size  {PX} px, of the weights"
NOTE = f"image size 64 px, but the weights were trained at {PX} px"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Weights that were trained at 96 px, a data set, and a picture that is larger than that."""
    root = tmp_path_factory.mktemp("sizes")
    make_shapes(root / "set", images=2, val_images=3, img=128, seed=0)
    model = untrained(("circle", "square", "triangle", "star"))
    for name, px in (("w", PX), ("small", 64)):
        saved(model, root / f"{name}.safetensors", px)
    safetensors.torch.save_file(dict(model.state_dict()), root / "foreign.safetensors")
    cv2.imwrite(str(root / "a.png"), np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8))
    return root


@pytest.fixture(scope="module")
def exported(given):
    """(file of one size, file of any size)."""
    model = Model(given / "w.safetensors")
    (fixed,) = model.export(format="torchscript", out=given / "fixed.torchscript")
    (dynamic,) = model.export(format="torchscript", out=given / "any.torchscript", dynamic="both")
    return fixed.file, dynamic.file


def words(verb, root, weights, *more):
    own = {
        "val": ["--data", root / "set/data.yaml", "--workers", "0", "--no-plots", "--batch", "4"],
        "predict": ["--source", root / "a.png", "--conf", "0.001", "--save-json"],
        "bench": ["--passes", "1"],
        "export": ["--format", "torchscript", "--out", root / "again.torchscript"],
    }[verb]
    place = ["--device", "cpu", "--threads", "1"] if verb != "export" else []
    return list(map(str, [verb, "--weights", root / weights, *place, *own, *more]))


@pytest.mark.parametrize("verb", ["val", "predict", "bench", "export"])
def test_each_verb_takes_the_size_of_the_weights_and_prints_its_source(
    verb, given, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(words(verb, given, "w.safetensors")) == 0
    said = capsys.readouterr().out
    assert " ".join(TRAINED.split()) in " ".join(said.split()) and "trained at" not in said
    assert main(words(verb, given, "w.safetensors", "--img", "64")) == 0
    said = capsys.readouterr()
    assert NOTE in said.out + said.err and "64 px, as set" in said.out
    if verb != "export":  # which takes seconds
        assert main(words(verb, given, "foreign.safetensors", "--img", "64")) == 0
        assert "trained at" not in capsys.readouterr().out


@pytest.mark.parametrize(("verb", "file"), [("val", "predictions.json"), ("predict", "predictions.json")])
def test_the_boxes_without_a_size_are_those_of_the_size_of_the_weights(
    verb, file, given, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = []
    for number, more in enumerate([(), ("--img", str(PX)), ("--img", "640")]):
        out = ["--save-json", "--project", "out", "--name", str(number)]
        assert main(words(verb, given, "w.safetensors", *out, *more)) == 0
        found.append(json.loads((tmp_path / "out" / str(number) / file).read_text()))
    assert found[0] == found[1] != found[2]


def test_weights_that_state_no_size_have_640_and_say_so(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words("predict", given, "foreign.safetensors")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "640 px, the default, because the weights do not state the size of their training" in said
    # also after they have been written in our own format
    weights = load_weights(str(given / "foreign.safetensors"))
    write_weights(tmp_path / "ours.safetensors", weights)
    again = load_weights(str(tmp_path / "ours.safetensors"))
    assert again.header.img == 640 and model_from_weights(again).trained_px is None


def test_an_ensemble_of_several_sizes_takes_the_largest_and_says_so(given):
    files = [str(given / "w.safetensors"), str(given / "small.safetensors")]
    size = image_size(open_networks(files))
    assert size.px == PX and "of the weights, the largest of 64 and 96" in size.text
    assert size.note.endswith("trained at 64 and 96 px")


@pytest.mark.parametrize("verb", ["val", "predict", "bench"])
def test_an_exported_file_of_one_size_refuses_every_other_one(
    verb, given, exported, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    fixed, dynamic = exported
    for px in ("640", "64"):
        assert main(words(verb, given, fixed.name, "--img", px)) == 2
        assert "takes images of 96 x 96 px" in capsys.readouterr().err
    assert main(words(verb, given, fixed.name, "--img", str(PX))) == 0
    assert "fixed in the exported file" in capsys.readouterr().out
    assert main(words(verb, given, dynamic.name)) == 0
    assert " ".join(TRAINED.split()) in " ".join(capsys.readouterr().out.split())


def test_python_and_the_hub_take_the_size_of_the_weights_too(given, exported, tmp_path, monkeypatch, capsys):
    from yolofleet.cli.hub import HubModel

    monkeypatch.chdir(tmp_path)
    weights, data = given / "w.safetensors", str(given / "set/data.yaml")
    settings = {"data": data, "device": "cpu", "workers": 0, "plots": False, "threads": 1}
    assert Model(weights).val(**settings).metrics == Model(weights).val(**settings, img=PX).metrics
    assert load_model(weights, device="cpu").img == PX
    assert Model(weights).bench(device="cpu", passes=1).figures["height_px"] == PX
    hub = HubModel(weights, "cpu")
    hub.conf = 0.001
    assert len(hub(str(given / "a.png"))) == 1
    assert hub._predictor is not None and hub._predictor[1].img == PX
    assert "trained at" not in capsys.readouterr().err
    hub(str(given / "a.png"), size=64)
    load_model(weights, device="cpu", img=64)
    assert capsys.readouterr().err.count(NOTE) == 2
    with pytest.raises(ConfigError, match="takes images of 96 x 96 px"):
        load_model(exported[0], img=640)


def test_sizes_that_no_image_can_have_are_refused(given, capsys):
    for px, said in (("31", "below 32 pixels"), ("1000000000", "above")):
        for verb in ("val", "predict", "bench"):
            assert main(words(verb, given, "w.safetensors", "--img", px)) == 2
            assert said in capsys.readouterr().err
