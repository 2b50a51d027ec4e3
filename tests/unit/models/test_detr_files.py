"""Files of D-FINE's networks: which activation they have, whose class names, and what the program says that it assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from walks import sampled

from yolofleet import Model, load_model
from yolofleet.config.schema.verbs import ExportConfig
from yolofleet.families.build import build_model
from yolofleet.families.deim.description import PRESETS as DEIM
from yolofleet.families.dfine.description import PRESETS as DFINE
from yolofleet.families.networks.class_names import match_names
from yolofleet.families.networks.description import description_from_dict, preset
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.families.rtdetr.blocks import Mlp
from yolofleet.families.rtdetr.decoder import DecoderLayer
from yolofleet.families.rtdetr.description import PRESETS as RTDETR
from yolofleet.families.rtdetr.description import to_train
from yolofleet.families.rtdetr.weights_files import write_folder
from yolofleet.families.weights.reader import load_weights, read_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.inference.export.exporter import metadata_of
from yolofleet.inference.export.runtime import image_size
from yolofleet.support.errors import CheckpointError

TOY: dict[str, Any] = {
    "stem": (8, 8),
    "inner_widths": (4, 8, 8, 8),
    "outer_widths": (8, 16, 16, 16),
    "stage_layers": 1,
    **dict.fromkeys(("width", "feedforward", "decoder_width", "decoder_feedforward"), 16),
    **dict.fromkeys(("layers", "used_layers"), 2),
    "queries": 12,
}


@torch.no_grad()
def lively(name: str, classes: int = 3, **changes: Any) -> Detector:
    """A small network whose linear layers all matter, as after a training."""
    model = build_model(replace(preset(name), **TOY | changes), classes).eval()  # type: ignore[type-var]
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.uniform_(-0.5, 0.5, generator=generator)
            module.bias.uniform_(-0.5, 0.5, generator=generator)
    return model


def images(side: int = 64) -> torch.Tensor:
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))


def by_hand(activation: str, x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x)) if activation == "silu" else (x + x.abs()) / 2


# -- DEIM's activation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "activation"), [("dfine-n", "relu"), ("deim-n", "silu")])
def test_each_linear_layer_of_the_decoder_gets_the_activation_of_the_network(name, activation):
    """Feed-forward layers, heads, query positions and the estimate of quality; compared with the formula."""
    model, seen = lively(name), dict[nn.Module, tuple[torch.Tensor, torch.Tensor]]()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, given, out: seen.update({m: (given[0], out)}))
    with torch.no_grad():
        model(images())
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for module in model.decoder.modules():  # type: ignore[union-attr]
        if isinstance(module, Mlp):
            pairs += zip(module.layers[:-1], module.layers[1:], strict=True)
        elif isinstance(module, DecoderLayer):
            pairs.append((module.linear1, module.linear2))
    compared = [(before, after) for before, after in pairs if before in seen]
    assert len(compared) >= 12
    for before, after in compared:
        torch.testing.assert_close(seen[after][0], by_hand(activation, seen[before][1]))


def test_the_activation_is_part_of_a_description_and_stays_in_files_and_folded_networks(tmp_path):
    model = lively("deim-n")
    assert description_from_dict(json.loads(json.dumps(model.description.to_dict()))) == model.description
    write_weights(tmp_path / "a.safetensors", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    again = model_from_weights(load_weights(str(tmp_path / "a.safetensors")))
    other = lively("dfine-n")
    with torch.no_grad():
        expected, found, folded = (one(images())[1] for one in (model, again, fuse(again)))
        wrong = other(images())[1]
    assert torch.equal(found, expected) and torch.allclose(folded, expected, atol=1e-4)
    assert not torch.allclose(wrong, expected, atol=0.1), "the same weights with ReLU"


@pytest.mark.parametrize(
    ("file", "cfg", "read_as", "said"),
    sampled([
        ("deim_dfine_hgnetv2_n_coco_160e.pth", "", "deim-n", ""),
        ("DEIM-n.pth", "", "deim-n", ""),
        ("dfine_n_coco.pth", "", "dfine-n", ""),
        ("D-FINE.pth", "", "dfine-n", ""),
        ("best_stg2.pth", "", "dfine-n", "--cfg deim-n"),
        ("deim_outputs/best_stg2.pth", "", "deim-n", "--cfg dfine-n"),
        ("dfine_hgnetv2_n_custom/last.pth", "", "dfine-n", ""),
        ("best_stg2.pth", "deim-n", "deim-n", ""),
        ("deim.pth", "dfine-n", "dfine-n", ""),
        ("deim/model.safetensors", "", "deim-n", "--cfg dfine-n"),
    ], 3),
)  # fmt: skip
def test_a_file_with_the_parts_of_dfine_says_by_whom_it_was_trained_or_the_program_says_what_it_assumed(
    file, cfg, read_as, said, tmp_path
):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    state = build_model(preset("dfine-n"), 3).state_dict()
    if path.suffix == ".pth":
        torch.save({"model": state}, path)
    else:
        from safetensors.torch import save_file

        save_file(state, path)
    weights = read_weights(path, preset(cfg) if cfg else None)
    assert weights.description == preset(read_as)
    assert said in weights.header.assumed.get("activation", "")
    assert bool(weights.header.assumed) == bool(said)
    model = model_from_weights(weights)
    assert said in image_size(model).note, "predict, val, export and bench print it"
    write_weights(tmp_path / "b.safetensors", weights)
    assert read_weights(tmp_path / "b.safetensors").header.assumed == weights.header.assumed


def test_no_folder_for_transformers_is_written_for_deim(tmp_path):
    model = lively("deim-n")
    with pytest.raises(CheckpointError, match="transformers has no deim-n: its heads have ReLU"):
        write_folder(tmp_path / "hf", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("size", "nsmlx")
def test_deims_networks_have_the_shapes_of_dfine_and_no_constant_norms(size):
    deim, dfine = DEIM[f"deim-{size}"], DFINE[f"dfine-{size}"]
    assert deim.to_dict() == dfine.to_dict() | {"family": "deim", "name": f"deim-{size}", "is_frozen": False}
    assert preset(f"deim_dfine_hgnetv2_{size}_coco_160e") == preset(f"deim_hgnetv2_{size}_coco") == deim


# -- class names -----------------------------------------------------------------------------------------


def test_names_that_the_file_does_not_have_are_said_and_match_every_data_set(tmp_path):
    torch.save({"model": build_model(preset("dfine-n"), 80).state_dict()}, tmp_path / "dfine_own.pth")
    weights = read_weights(tmp_path / "dfine_own.pth")
    assert weights.header.names[0] == "person" and "names of COCO" in weights.header.assumed["names"]
    model = model_from_weights(weights)
    assert "names of COCO" in image_size(model).note
    own = [f"part {n}" for n in range(80)]
    assert match_names(model.names, own, assumed="names" in model.assumed).text == ""
    assert match_names(model.names, own).pairs, "names that a file has are compared"
    turned = tuple(reversed(model.names))
    assert match_names(model.names, turned, assumed=True).columns == tuple(range(79, -1, -1)), "it is COCO"
    metadata = metadata_of(model, ExportConfig(), (64, 64))
    again = ExportMetadata.from_json(metadata.to_json(), source="a file")
    assert again.assumed == model.assumed, "exported files too"


def test_too_many_or_too_few_names_in_a_folder_of_transformers_are_said(tmp_path):
    model = lively("dfine-n")
    write_folder(tmp_path / "hf", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    for count, names in ((2, ("0", "1", "2")), (4, ("class 0", "class 1", "class 2"))):
        config["id2label"] = {str(n): f"class {n}" for n in range(count)}
        (tmp_path / "hf/config.json").write_text(json.dumps(config))
        header = read_weights(tmp_path / "hf/model.safetensors").header
        assert header.names == names
        assert f"id2label of config.json has {count} names for 3 classes" in header.assumed["names"]


# -- folders of transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dfine-n", "dfine-l"])
def test_a_folder_for_transformers_asks_for_no_more_queries_than_cells_and_has_all_tensors(
    name, tmp_path, capsys
):
    model = lively(name, queries=300, stage_blocks=(1, 1, 1, 1))
    write_folder(tmp_path / "hf", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    cells = sum((64 // stride) ** 2 for stride in model.strides)
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_queries"] == cells
    assert f"num_queries is {cells} instead of 300" in capsys.readouterr().err
    again = read_weights(tmp_path / "hf/model.safetensors")
    with torch.no_grad():
        for one, other in zip(model(images()), model_from_weights(again)(images()), strict=True):
            assert torch.equal(one, other)
    from safetensors.torch import load_file

    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    counted = [
        key for key in load_file(tmp_path / "hf/model.safetensors") if key.endswith("num_batches_tracked")
    ]
    assert len(counted) == norms, "transformers prints a table of missing tensors otherwise"
    write_folder(tmp_path / "large", Weights(model.state_dict(), WeightsHeader.of(model, img=640)))
    assert json.loads((tmp_path / "large/config.json").read_text())["num_queries"] == 300


def test_python_reads_the_folders_that_the_command_line_reads(tmp_path):
    model = lively("dfine-n")
    weights = Weights(model.state_dict(), WeightsHeader.of(model, img=64))
    write_folder(tmp_path / "hf", weights)
    (tmp_path / "run/weights").mkdir(parents=True)
    write_weights(tmp_path / "run/weights/last.safetensors", weights)
    picture = (images()[0].permute(1, 2, 0) * 255).byte().numpy()
    tables = [
        found.predict(picture, conf=0.0).table()
        for folder in ("hf", "run")
        for found in (load_model(tmp_path / folder), Model(tmp_path / folder))
    ]
    assert len(tables[0]) and all(table == tables[0] for table in tables)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text("{}")
    (tmp_path / "old/pytorch_model.bin").write_bytes(b"PK")
    for read in (load_model, Model):
        with pytest.raises(CheckpointError, match="neither of a run nor of transformers"):
            read(tmp_path)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, but no model") as caught:
            read(tmp_path / "old")
        assert "from_pretrained" in (caught.value.hint or "")


# -- training from scratch -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RTDETR, *DFINE, *DEIM])
def test_norms_and_stem_of_a_backbone_are_constant_only_if_it_was_trained(name):
    network = preset(name)
    tensors = ["backbone.stem.conv.weight", "decoder.up"]
    trained, note = to_train(network, tensors)  # type: ignore[arg-type]
    assert not trained.is_frozen and bool(note) == network.is_frozen  # type: ignore[attr-defined]
    assert replace(trained, is_frozen=network.is_frozen) == network  # type: ignore[attr-defined]
    assert to_train(network, ["decoder.enc_score_head.bias"]) == (network, ""), "new classes"  # type: ignore[arg-type]


# -- files of other projects -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says", "way"),
    [
        (
            {"pytorch-lightning_version": "2.4", "state_dict": {"model.conv.weight": 1}},
            "PyTorch Lightning",
            "state_dict alone",
        ),
        ({"model.22.dfl.conv.weight": 1}, "YOLOv8, YOLO11", "D-FINE"),
        ({"meta": {}, "state_dict": {"bbox_head.cls.weight": 1}}, "MMDetection", "readable are"),
        ({"model.enc_score_head.bias": 1, "model.x": 1}, "transformers' without", "save_pretrained"),
    ],
)
def test_a_file_of_another_project_is_called_by_its_name(content, says, way, tmp_path):
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return torch.zeros(2) if value == 1 else value

    torch.save(filled(content), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=says) as caught:
        read_weights(tmp_path / "a.pth")
    assert way in (caught.value.hint or "") and "--cfg" not in (caught.value.hint or "")
