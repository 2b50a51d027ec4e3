"""Weights of RT-DETRv2 and D-FINE: the authors' ``.pth`` layouts, and folders that transformers has written or reads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from conditioning import compare
from of_transformers import INSTALLED, each_result, transformers
from safetensors.torch import load_file, save_file
from test_detr_parity import CLASSES, SMALL, images, ours, ours_by_formula, renamed, with_weights_of
from walks import sampled

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import preset
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.hugging_face import hub_name, published_name
from yolofleet.families.rtdetr.weights_files import write_folder
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.value import Weights, WeightsHeader
from yolofleet.runs.report.console import NullConsole
from yolofleet.support.errors import CheckpointError
from yolofleet.training.network import build_network

FAMILIES = {"dfine": "dfine-n", "rtdetr": "rtdetrv2-r18"}


def equal_values(read, model):
    expected = {n: t for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    assert read.tensors.keys() == expected.keys()
    assert all(torch.equal(read.tensors[name], t) for name, t in expected.items())


def shapes_in(folder):
    return {name: list(t.shape) for name, t in load_file(folder / "model.safetensors").items()}


def folders_of_transformers(name, tmp_path):
    """Yield our network, and a folder as transformers writes it with our values; a second one that it writes now."""
    model = ours(name)

    def ask():
        reference = with_weights_of(model)
        reference.config.id2label = {i: f"kind {i}" for i in range(CLASSES)}
        reference.save_pretrained(asked := Path(mkdtemp(dir=tmp_path)))
        return {"config": json.loads((asked / "config.json").read_text()), "shapes": shapes_in(asked)}

    for result in each_result(f"folder-{name}", ask):
        folder = Path(mkdtemp(dir=tmp_path))
        (folder / "config.json").write_text(json.dumps(result["config"]))
        constants = {key: torch.zeros(shape) for key, shape in result["shapes"].items()}
        tensors = constants | {key: t.clone() for key, t in renamed(model, result["shapes"]).items()}
        assert {key: list(t.shape) for key, t in tensors.items()} == result["shapes"]
        save_file(tensors, folder / "model.safetensors")
        yield model, folder


def check_in_transformers(model, folder):
    """Let transformers read the folder, and compare boxes; only if it is installed."""
    if not INSTALLED:
        return
    kind = "DFine" if model.description.layout == "dfine" else "RTDetrV2"
    reference, loading = getattr(transformers(), f"{kind}ForObjectDetection").from_pretrained(
        folder, output_loading_info=True
    )
    missing = loading["missing_keys"]
    assert not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert all(key.endswith("num_batches_tracked") for key in missing), missing
    assert reference.config.id2label[2] == model.names[2]
    assert len(reference.model.decoder.layers) == model.description.used_layers
    processor = transformers().AutoImageProcessor.from_pretrained(folder)
    assert processor.size["height"] == 64 and not processor.do_normalize
    x = images(96, 128)
    model.eval(), reference.eval()
    with torch.no_grad():
        raws, expected = model(x), reference(pixel_values=x)
    compare(raws.boxes, expected.pred_boxes, atol=1e-4, name="boxes")
    compare(raws.logits, expected.logits, atol=5e-3, name="logits")


# -- the authors' files ----------------------------------------------------------------------------------


def checkpoint(state):
    """What the authors' training writes beside the weights."""
    schedule = {"milestones": Counter([1000]), "gamma": 0.1, "last_epoch": 3}
    extra = {"anchors": torch.full((1, 4, 4), torch.inf), "valid_mask": torch.ones(1, 4, 1, dtype=torch.bool)}
    state = {**state, **{f"decoder.{name}": t for name, t in extra.items()}}
    state["decoder.decoder.layers.0.cross_attn.num_points_scale"] = torch.ones(12)
    if "decoder.up" in state:
        state |= {f"decoder.decoder.{name}": state[f"decoder.{name}"] for name in ("up", "reg_scale")}
    return state, {
        "date": "2026-01-01",
        "last_epoch": 3,
        "lr_scheduler": schedule,
        "optimizer": {"state": {}},
    }


@pytest.mark.parametrize(
    ("layout", "name"), sampled(product(["average", "model", "state", "parallel"], FAMILIES.values()), 3)
)
def test_the_authors_layouts_are_read(name, layout, tmp_path):
    model = build_model(preset(name), 80, seed=1)
    state, more = checkpoint(model.state_dict())
    other = {key: torch.zeros_like(t) for key, t in state.items()}
    contents = {
        "average": {"model": other, "ema": {"module": state, "updates": 7, "warmups": 1000}, **more},
        "model": {"model": state, **more},
        "state": state,
        "parallel": {"model": {f"module.{key}": t for key, t in state.items()}},
    }
    torch.save(contents[layout], tmp_path / "a.pth")
    read = read_weights(tmp_path / "a.pth")
    equal_values(read, model)
    assert read.description == preset(name) and read.header.nc == 80
    assert read.header.names[:2] == ("person", "bicycle") and read.header.names[79] == "toothbrush"
    assert read.header.trained_px is None


def test_files_for_other_classes_have_numbers_as_names(tmp_path):
    for classes in (365, 366):
        torch.save({"model": build_model(preset("dfine-n"), classes).state_dict()}, tmp_path / "a.pth")
        header = read_weights(tmp_path / "a.pth").header
        assert (header.nc, header.names[364]) == (classes, "364")


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: {k: t for k, t in s.items() if "gateway" not in k}, "gateway.gate.weight is missing"),
    (lambda s: {k: t[:8] if "linear1" in k else t for k, t in s.items()}, r"is \(8, .* instead of"),
    (lambda s: {**s, "decoder.enc_score_head.bias": torch.zeros(2, 2)}, "no class predictions"),
    (lambda s: {**s, "decoder.enc_score_head.bias": torch.zeros(80, dtype=torch.int64)}, "expected real numbers"),
    (lambda s: {**s, "decoder.reg_scale": torch.tensor([torch.nan])}, "decoder.reg_scale is not finite"),
])  # fmt: skip
def test_files_of_other_networks_are_refused(change, message, tmp_path):
    torch.save(change(build_model(preset("dfine-n"), 80).state_dict()), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=message):
        read_weights(tmp_path / "a.pth")


# -- other classes ---------------------------------------------------------------------------------------


class Said(NullConsole):
    """Keeps what the console says."""

    def __init__(self):
        super().__init__(None)
        self.texts = []

    def fact(self, text):
        self.texts.append(text)

    note = fact


def start(name, of_weights, of_data):
    model = build_model(preset(name), len(of_weights), seed=1)
    model.names = of_weights
    weights = Weights(model.state_dict(), WeightsHeader.of(model, img=64))
    said = Said()
    return model, build_network(preset(name), weights, of_data, 2, said), "\n".join(said.texts)


@pytest.mark.parametrize("name", FAMILIES.values())
def test_the_tensors_of_other_classes_are_new_and_named(name):
    first, model, said = start(name, ("cat", "dog", "bird"), ("cat", "dog", "bird", "cow"))
    before, after = first.state_dict(), model.state_dict()
    fresh = [key for key, t in after.items() if t.shape != before[key].shape]
    heads = ("decoder.denoising_class_embed", "decoder.enc_score_head", "decoder.dec_score_head")
    assert len(fresh) == 1 + 2 * 4 and all(key.startswith(heads) for key in fresh)
    assert f"{preset(name).name} for 3 classes, 4 here: " in said
    assert all(f"{key} (" in said for key in fresh[:6])
    assert all(torch.equal(t, before[key]) for key, t in after.items() if key not in fresh)


@pytest.mark.parametrize("name", FAMILIES.values())
def test_classes_in_another_order_are_mapped_by_name(name):
    first, model, said = start(name, ("cat", "dog", "bird"), ("bird", "cat", "dog"))
    before, after = first.state_dict(), model.state_dict()
    assert "mapped by name" in said
    for key in ("enc_score_head.weight", "enc_score_head.bias", "dec_score_head.2.bias"):
        assert torch.equal(after[f"decoder.{key}"], before[f"decoder.{key}"][[2, 0, 1]])
    embedding = "decoder.denoising_class_embed.weight"  # its last row is that of padding
    assert torch.equal(after[embedding], before[embedding][[2, 0, 1, 3]])


# -- folders of transformers -----------------------------------------------------------------------------


# test_detr_parity.py compares predictions of networks with these values


@pytest.mark.parametrize("name", FAMILIES.values())
def test_a_folder_of_transformers_is_read(name, tmp_path):
    for model, folder in folders_of_transformers(name, tmp_path):
        (folder / "preprocessor_config.json").write_text('{"size": {"height": 128, "width": 128}}')
        read = read_weights(resolve_weights(str(folder)))
        assert read.header.names == tuple(f"kind {i}" for i in range(CLASSES))
        assert read.header.trained_px == 128
        assert read.description == SMALL[name]
        equal_values(read, model)


@pytest.mark.parametrize("name", sampled(FAMILIES.values(), 2))
def test_a_lone_file_of_transformers_is_recognised(name, tmp_path):
    for model, folder in folders_of_transformers(name, tmp_path):
        tensors = load_file(folder / "model.safetensors")
        heads = {
            key.removeprefix("model.decoder."): t.clone()
            for key, t in tensors.items()
            if ".class_embed" in key
        }
        save_file(tensors | heads, folder / "twice.safetensors")  # older versions write both names
        (folder / "config.json").unlink()
        for file in ("model.safetensors", "twice.safetensors"):
            read = read_weights(folder / file)
            assert read.description == preset(name)  # a file states no number of queries
            equal_values(read, model)
        save_file(tensors | {key: t + 1 for key, t in heads.items()}, folder / "two.safetensors")
        with pytest.raises(CheckpointError, match="do not belong together"):
            read_weights(folder / "two.safetensors")


@pytest.mark.parametrize("name", ["dfine", "frozen dfine", "rtdetr", "frozen rtdetr", "dfine-n"])
def test_a_folder_of_ours_is_as_transformers_writes_it(name, tmp_path):
    for model, theirs in folders_of_transformers(name, tmp_path):
        model.names = tuple(f"kind {i}" for i in range(CLASSES))
        folder = theirs / "a folder"
        write_folder(folder, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
        assert shapes_in(folder) == shapes_in(theirs)
        config, expected = (json.loads((f / "config.json").read_text()) for f in (folder, theirs))
        expected["label2id"] = {label: i for i, label in enumerate(model.names)}
        for values, wanted in (
            (config, expected),
            (config.pop("backbone_config"), expected.pop("backbone_config")),
        ):
            named = values.keys() & wanted.keys()
            assert len(named) >= 10
            for key in named:  # a number stands for equal ones of all levels
                assert values[key] == wanted[key] or [values[key]] * len(model.strides) == wanted[key], key
        read = read_weights(resolve_weights(str(folder)))
        equal_values(read, model)
        assert read.description == SMALL[name] and read.header.img == 64
    check_in_transformers(model, folder)


def test_layers_that_no_prediction_needs_are_left_out(tmp_path):
    description = replace(SMALL["frozen rtdetr"], layers=3, used_layers=2)
    model = ours_by_formula(description, CLASSES)
    folder = Path(mkdtemp(dir=tmp_path)) / "out"
    write_folder(folder, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    for _, theirs in folders_of_transformers("frozen rtdetr", tmp_path):
        assert shapes_in(folder) == shapes_in(theirs)
    check_in_transformers(model, folder)


@pytest.mark.parametrize(
    "name", ["dfine-s", "dfine-l", "dfine-n", "rtdetrv2-r18", "rtdetrv2-r50m", "rtdetrv2-r101"]
)
def test_names_on_the_hub_lead_back_to_ours(name):
    description = preset(name)
    assert isinstance(description, DetrDescription)
    family = description.family
    for key in build_model(replace(description, queries=8), 3).state_dict():
        theirs = hub_name(key, family).replace(".in_proj_", ".q_proj.")
        assert key.endswith("num_batches_tracked") or published_name(theirs, family) == key


# -- a stranger's config.json -----------------------------------------------------------------------------


HOSTILE = {
    "not JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "a long number": '{"decoder_layers": ' + "9" * 10_000 + "}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("folder") / "made"
    model = build_model(SMALL["dfine"], CLASSES)
    write_folder(made, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    return made


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_config_is_refused(folder, text, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not a JSON object"):
        read_weights(resolve_weights(str(tmp_path)))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("model_type", "detr", "model_type is 'detr', expected 'd_fine'"),
    ("model_type", "rt_detr_v2", "expected 'd_fine'"),
    ("decoder_method", "discrete", "decoder_method is 'discrete', expected 'default'"),
    ("activation_function", "gelu", "activation_function is 'gelu'"),
    ("decoder_layers", 10**9, "decoder_layers is 1000000000, expected 3"),
    ("num_queries", [1], "num_queries is"),
    ("num_queries", 10**9, "num_queries is"),
    ("decoder_n_points", {"a": 1}, "decoder_n_points is something of type dict"),
    ("feat_strides", [4, 8, 16], "feat_strides is"),
    ("backbone_config", {"stem_channels": 3}, "stem_channels is 3"),
    ("backbone_config", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("yolofleet", {"family": "x"}, "unknown model family 'x'"),
    ("yolofleet", {"family": "dfine", "layers": 10**9}, "layers is 1000000000|is missing"),
    ("yolofleet", {"width": 4096}, "tensors do not fit"),
    ("yolofleet", {"layers": True}, "layers is True"),
    ("yolofleet", [], "must be a mapping"),
])  # fmt: skip
def test_a_config_of_another_network_is_refused(folder, key, value, message, tmp_path):
    values = json.loads((folder / "config.json").read_text())
    if isinstance(value, dict) and isinstance(values[key], dict):
        value = values[key] | value
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        read_weights(resolve_weights(str(tmp_path)))


@pytest.mark.parametrize("names", [None, {}, {"0": 1}, {"zero": "a"}, "names", {str(10**9): "a"}])
def test_names_of_the_wrong_kind_become_numbers(folder, names, tmp_path):
    values = json.loads((folder / "config.json").read_text()) | {"id2label": names}
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_weights(resolve_weights(str(tmp_path))).header.names == tuple("0123456")


def test_normalised_images_are_refused(folder, tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"do_normalize": true, "image_mean": [0.5, 0.5, 0.5]}'
    )
    with pytest.raises(CheckpointError, match="do_normalize"):
        read_weights(resolve_weights(str(tmp_path)))


def test_a_large_config_is_refused(folder, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_weights(resolve_weights(str(tmp_path)))
