"""RF-DETR: the authors' layouts of files, DINOv2's weights as a start, names of classes, refused files and names."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import description_from_dict, preset
from yolofleet.families.rfdetr import description as described
from yolofleet.families.rfdetr.backbone import cubic, linear, resized
from yolofleet.families.rfdetr.description import PRESETS, canonical, recipe_values
from yolofleet.families.rfdetr.weights_files import authors_name
from yolofleet.families.weights.catalogue import find_or_download
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.runs.report.console import NullConsole
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.training.network import build_network, description_and_weights

TINY: dict[str, Any] = {
    "blocks": 2,
    "taps": (1, 2),
    "backbone_width": 16,
    "backbone_heads": 2,
    "decoder_width": 16,
}
TINY |= {"decoder_feedforward": 16, "queries": 4, "groups": 2}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in networks of small width."""
    for name, network in PRESETS.items():
        width: dict[str, Any] = {"mask_width": 16} if network.mask_width else {}
        monkeypatch.setitem(described.PRESETS, name, replace(network, **TINY, **width))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors with the authors' names, an attention's in three parts."""
    found = {}
    for name, t in model.state_dict().items():
        theirs = authors_name(name)
        if ".query." in theirs:
            for part, third in zip(("query", "key", "value"), t.chunk(3), strict=True):
                found[theirs.replace(".query.", f".{part}.")] = third.clone()
        else:
            found[theirs] = t[:, :, None, None] if name == "masks.mix.weight" else t
    return found


def equal_values(read: Weights, model: nn.Module) -> None:
    assert read.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(read.tensors[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize("layout", ["model", "average", "state", "lightning", "safetensors"])
def test_the_authors_layouts_are_read(layout: str, tiny: None, tmp_path):
    model = build_model(preset("rfdetr-s-seg"), 3, seed=1)
    state = {**state_of(model), "_kp_active_mask": torch.zeros(0, 0, dtype=torch.bool)}
    other = {key: torch.zeros_like(t) for key, t in state.items()}
    args = argparse.Namespace(class_names=["cat", "dog"], num_windows=2)
    contents: dict[str, Any] = {
        "model": {"model": state, "args": args, "optimizer": {"state": {}}},
        "average": {"model": other, "ema_model": state, "args": vars(args)},
        "state": state,
        "lightning": {
            "state_dict": {f"model.{k}": t for k, t in state.items()},
            "hyper_parameters": vars(args),
        },
    }
    path = tmp_path / ("a.safetensors" if layout == "safetensors" else "a.pth")
    if layout == "safetensors":
        save_file({key: t.clone() for key, t in state_of(model).items()}, path)
    else:
        torch.save(contents[layout], path)
    read = read_weights(path)
    assert read.description == PRESETS["rfdetr-s-seg"] and read.header.trained_px == 384
    if layout in ("state", "safetensors"):  # without names
        assert read.header.names == ("0", "1", "2")
        equal_values(read, model)
        return
    assert read.header.names == ("cat", "dog")  # the last row is that of the background
    for name, t in model.state_dict().items():
        expected = t[:2] if "class_embed" in name else t
        assert torch.equal(read.tensors[name], expected), name


@pytest.mark.parametrize(("count", "first"), [(3, 1), (2, 0), (None, 0)])
def test_the_row_of_no_class_is_the_first_one_of_old_versions(
    count: int | None, first: int, tiny: None, tmp_path
):
    """rfdetr before 1.6 used COCO's identifiers, from 1, and counted row 0 as a class; later versions number from 0."""
    model = build_model(preset("rfdetr-n"), 3, seed=1)
    args = argparse.Namespace(class_names=["cat", "dog"], num_windows=2, num_classes=count)
    torch.save({"model": state_of(model), "args": args}, tmp_path / "a.pth")
    read = read_weights(tmp_path / "a.pth")
    name = "decoder.class_embed.weight"
    assert torch.equal(read.tensors[name], model.state_dict()[name][first : first + 2])
    assert read.header.names == ("cat", "dog") and ("names" in read.header.assumed) == (count is None)


def test_the_heads_of_coco_keep_the_rows_of_its_80_classes(tiny: None, tmp_path):
    model = build_model(preset("rfdetr-n"), 91, seed=1)
    torch.save({"model": state_of(model), "args": argparse.Namespace(class_names=[])}, tmp_path / "a.pth")
    read = read_weights(tmp_path / "a.pth")
    assert (read.header.nc, read.header.names[0], read.header.names[79]) == (80, "person", "toothbrush")
    before = model.state_dict()
    for ours, theirs in ((0, 1), (79, 90), (11, 13)):  # person, toothbrush, stop sign
        for name in ("decoder.class_embed.bias", "decoder.enc_out_class_embed.1.weight"):
            assert torch.equal(read.tensors[name][ours], before[name][theirs])
    assert "80 classes are kept" in read.header.assumed["names"]


POSITIONS = "backbone.0.encoder.encoder.embeddings.position_embeddings"


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("refpoint_embed.weight", (), "parts of it are missing"),
        ("refpoint_embed.weight", (1 << 27, 0), "parts of it are missing"),
        (POSITIONS, (1, 1 << 30, 0), "parts of it are missing"),
        ("class_embed.weight", (), "fits none of the models"),
    ],
)
def test_tensors_of_impossible_shapes_are_refused(name: str, shape: Any, says: str, tiny: None, tmp_path):
    state = state_of(build_model(preset("rfdetr-n"), 2, seed=1)) | {name: torch.zeros(shape)}
    torch.save({"model": state}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=says):
        read_weights(tmp_path / "a.pth")


def test_names_that_are_too_many_become_numbers_with_a_note(tiny: None, tmp_path):
    state = state_of(build_model(preset("rfdetr-n"), 2, seed=1))
    torch.save({"model": state, "args": argparse.Namespace(class_names=["a", "b", "c"])}, tmp_path / "a.pth")
    read = read_weights(tmp_path / "a.pth")
    assert read.header.names == ("0", "1") and "3 names for 2 classes" in read.header.assumed["names"]


def test_a_file_for_another_image_size_has_its_positions(tiny: None, tmp_path):
    network = replace(PRESETS["rfdetr-n-seg"], positions=32)
    model = build_model(network, 2, seed=1)
    args = argparse.Namespace(num_windows=1)
    torch.save({"model": state_of(model), "args": args}, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth").description == replace(network, name="rfdetr-s-seg")
    with pytest.raises(CheckpointError, match="fits none of the models"):
        state = {k: t for k, t in state_of(model).items() if "projector.stages.0.0.cv2" not in k}
        torch.save({"model": state}, tmp_path / "b.pth")
        read_weights(tmp_path / "b.pth")


def meta_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """The backbone's tensors with the names of DINOv2's own file, positions of another grid and patches of 14 px."""
    found = {}
    rules = {
        "embeddings.": "",
        "layers.": "blocks.",
        ".attention.in_proj_": ".attn.qkv.",
        "projection.": "patch_embed.proj.",
    }
    rules |= {".attention.out_proj.": ".attn.proj.", ".linear1.": ".mlp.fc1.", ".linear2.": ".mlp.fc2."}
    rules |= {".scale1": ".ls1.gamma", ".scale2": ".ls2.gamma", "position_embeddings": "pos_embed"}
    for name, t in model.state_dict().items():
        if name.startswith("backbone."):
            theirs = name.removeprefix("backbone.")
            for ours, other in rules.items():
                theirs = theirs.replace(ours, other)
            found[theirs] = t
    return found


@pytest.mark.parametrize("form", ["meta", "transformers"])
def test_the_weights_of_dinov2_start_a_training(form: str, tiny: None, tmp_path):
    other = build_model(replace(PRESETS["rfdetr-n"], positions=5, patch=14), 2, seed=1)
    if form == "meta":
        torch.save(meta_names(other), tmp_path / "dinov2.pth")
        path = tmp_path / "dinov2.pth"
    else:
        vit = "backbone.0.encoder.encoder."
        state = {k.removeprefix(vit): t.clone() for k, t in state_of(other).items() if k.startswith(vit)}
        save_file(state, path := tmp_path / "dinov2.safetensors")
    config: Any = argparse.Namespace(cfg="", model="rfdetr-s", weights=str(path), recipe_class="")
    network, weights = description_and_weights(config, None)
    assert weights is not None and "backbone of RF-DETR alone" in str(weights.header.extra["partial"])
    model = build_network(network, weights, ("cat",), 0, NullConsole(None))
    before, after = other.state_dict(), model.state_dict()
    for name in (n for n in after if n.startswith("backbone.")):
        if after[name].shape == before[name].shape:
            assert torch.equal(after[name], before[name]), name
    grid = before["backbone.embeddings.position_embeddings"][:, 1:].view(1, 5, 5, 16).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(grid, (32, 32), mode="bicubic", antialias=True, align_corners=False)
    found = after["backbone.embeddings.position_embeddings"][:, 1:].view(1, 32, 32, 16).permute(0, 3, 1, 2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    patch = nn.functional.interpolate(
        before["backbone.embeddings.projection.weight"],
        (16, 16),
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    torch.testing.assert_close(
        after["backbone.embeddings.projection.weight"], patch * (14 / 16) ** 2, atol=1e-6, rtol=0
    )


def test_classes_in_another_order_are_mapped_by_name(tiny: None, tmp_path):
    first = build_model(preset("rfdetr-n"), 3, seed=1)
    first.names = ("cat", "dog", "bird")
    write_weights(tmp_path / "a.safetensors", Weights(first.state_dict(), WeightsHeader.of(first, img=64)))
    read = read_weights(tmp_path / "a.safetensors")
    model = build_network(preset("rfdetr-n"), read, ("bird", "cat", "dog"), 2, NullConsole(None))
    before, after = first.state_dict(), model.state_dict()
    for name in before:
        order = [2, 0, 1] if "class_embed" in name else slice(None)
        assert torch.equal(after[name], before[name][order]), name


def test_other_numbers_of_classes_have_new_heads_alone(tiny: None):
    first = build_model(preset("rfdetr-n"), 3, seed=1)
    weights = Weights(first.state_dict(), WeightsHeader.of(first, img=64))
    model = build_network(preset("rfdetr-n"), weights, ("a", "b", "c", "d"), 2, NullConsole(None))
    fresh = [name for name, t in model.state_dict().items() if t.shape != first.state_dict()[name].shape]
    assert len(fresh) == 2 * (1 + 2) and all("class_embed" in name for name in fresh)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *(("rf-detr-nano", "rfdetr-n"), ("RFDETRLarge", "rfdetr-l"), ("Roboflow/rf-detr-medium", "rfdetr-m")),
        *(
            ("rf-detr-seg-small", "rfdetr-s-seg"),
            ("RFDETRSegNano", "rfdetr-n-seg"),
            ("rf-detr-large-2026", "rfdetr-l"),
        ),
        *(("rfdetr_n", "rfdetr-n"), ("rtdetrv2-r18", None), ("yolov5n", None)),
    ],
)
def test_names_of_the_authors_are_known(name, known):
    assert canonical(name) == known


@pytest.mark.parametrize(
    "name",
    [
        "rf-detr-xlarge",
        "rfdetr-2xl",
        "RFDETRXXLarge",
        "rf-detr-seg-xlarge",
        "RFDETRBase",
        "rfdetr-seg-preview",
    ],
)
def test_sizes_that_are_not_here_are_refused_with_the_reason(name):
    for problem, wanted in ((ConfigError, preset), (CheckpointError, find_or_download)):
        with pytest.raises(problem) as found:
            wanted(name)
        assert "networks are rfdetr-n s m l" in found.value.hint and "licence PML 1.0" in found.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": 6}, "patch is 6, expected a multiple of 4"),
        ({"taps": [3, 3]}, "taps is"),
        ({"taps": [13]}, "taps is"),
        ({"decoder_width": 40}, "expected a multiple of 16"),
        ({"mask_width": 128}, "mask_width is 128, expected 0 or 256"),
        ({"windows": 1.5}, "whole number"),
        ({"queries": "x"}, "queries is"),
    ],
)
def test_wrong_descriptions_are_refused(change, message):
    values = PRESETS["rfdetr-n"].to_dict()
    assert description_from_dict(values) == PRESETS["rfdetr-n"]
    with pytest.raises(ConfigError, match=message):
        description_from_dict(values | change)


@pytest.mark.parametrize(("before", "after"), [(4, 9), (9, 4), (5, 5), (37, 24)])
def test_maps_are_resampled_as_torch_does(before, after):
    x = torch.rand(2, before, before + 1, 3, generator=torch.Generator().manual_seed(0))
    for kernel, mode in ((cubic, "bicubic"), (linear, "bilinear")):
        found = resized(x, after, after + 2, kernel).permute(0, 3, 1, 2)
        expected = nn.functional.interpolate(
            x.permute(0, 3, 1, 2), (after, after + 2), mode=mode, antialias=True, align_corners=False
        )
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_rates_of_the_backbone_fall_as_the_authors_do():
    """1.5e-4 x 0.8^(13 - i) x 0.7^2 for block i, two powers more for the first tokens, and 0.7 for the decoder's layers."""
    values = recipe_values("rfdetr", PRESETS["rfdetr-n"])
    factors = {part: float(f) for part, f in (entry.split(":") for entry in values["lr_factors"].split(", "))}
    assert factors["backbone"] * factors["backbone.layers.11."] == pytest.approx(
        1.5 * 0.49 * 0.8**2, rel=1e-5
    )
    assert factors["backbone"] * factors["backbone.embeddings."] == pytest.approx(
        1.5 * 0.49 * 0.8**14, rel=1e-5
    )
    assert factors["decoder.layers."] == 0.7
    assert 384 * values["size_low"] == pytest.approx(224, abs=0.1)  # (12 - 5) x 32
    assert 384 * values["size_high"] == pytest.approx(544, abs=0.1)
    assert recipe_values("deim", PRESETS["rfdetr-n"]) == {}
