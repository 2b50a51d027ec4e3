"""PP-YOLOE descriptions and networks: checked values, starting state, one pass forward and back."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import fuse
from yolofleet.families.ppyoloe.description import (
    IMAGENET,
    PpyoloeDescription,
    canonical,
    preset,
    preset_names,
)
from yolofleet.families.ppyoloe.network import centres_cells, distances_cells
from yolofleet.support.errors import ConfigError

TINY = replace(preset("ppyoloe-s"), name="tiny", width_multiple=0.125)


def seeing(model):
    """A fresh network whose predictions depend on the image."""
    with torch.no_grad():
        for conv in (*model.yolo_head.pred_cls, *model.yolo_head.pred_reg):
            conv.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("name", preset_names())
def test_a_description_survives_json(name):
    description = preset(name)
    assert PpyoloeDescription.from_dict(json.loads(json.dumps(description.to_dict()))) == description
    assert description.plus == ("plus" in name)
    assert description.normalise == (None if description.plus else IMAGENET)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("ppyoloe-s", "ppyoloe-s"),
        ("ppyoloe_crn_s_300e_coco", "ppyoloe-s"),
        ("ppyoloe_crn_l_36e_coco", "ppyoloe-l"),
        ("ppyoloe_plus_s", "ppyoloe-plus-s"),
        ("ppyoloe_plus_crn_x_80e_coco", "ppyoloe-plus-x"),
        ("PP-YOLOE+_m", "ppyoloe-plus-m"),
        ("pp-yoloe-x", "ppyoloe-x"),
        ("ppyoloe", None),
        ("ppyoloe-xl", None),
        ("ppyoloe-s\n", None),
        ("yolov5s", None),
    ],
)
def test_spellings(spelling, name):
    assert canonical(spelling) == name
    if name:
        assert describe(spelling).name == name


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": 5}, "name must be"),
        ({"name": "x" * 201}, "name must be"),
        ({"depth_multiple": 1e9}, "depth_multiple is 1000000000.0, expected a number in 0.01..10"),
        ({"width_multiple": 0}, "width_multiple is 0"),
        ({"width_multiple": float("nan")}, "width_multiple is nan"),
        ({"width_multiple": True}, "width_multiple is True"),
        ({"plus": 1}, "plus is 1"),
        ({"plus": "yes"}, "plus is 'yes'"),
        ({"normalise": [0.5, 0.5]}, "normalise must be a mapping"),
        ({"normalise": {"mean": [0, 0, 0]}}, "key std is missing"),
        ({"normalise": {"mean": [0, 0], "std": [1, 1, 1]}}, "normalise.mean is [0, 0]"),
        ({"normalise": {"mean": [0, 0, 0], "std": [1, 1, 0]}}, "normalise.std is 0"),
        ({"normalise": {"mean": [0, 0, float("inf")], "std": [1, 1, 1]}}, "normalise.mean is inf"),
        ({"width_multiply": 1}, "unknown key 'width_multiply'"),
    ],
)
def test_a_wrong_description_names_key_and_source(change, word):
    with pytest.raises(ConfigError) as problem:
        PpyoloeDescription.from_dict({**TINY.to_dict(), **change}, source="w.safetensors")
    assert word in str(problem.value)
    assert "w.safetensors" in str(problem.value)


@pytest.mark.parametrize("values", [None, [], "ppyoloe-s"])
def test_a_description_is_a_mapping(values):
    with pytest.raises(ConfigError, match="must be a mapping"):
        PpyoloeDescription.from_dict(values)


def test_a_fresh_network_predicts_the_priors_everywhere():
    model = build_model(TINY, 3, seed=1).eval()
    decoded = model.decode(model(torch.rand(2, 3, 64, 96))).rows
    assert decoded.shape == (2, 2 * 3 + 4 * 6 + 8 * 12, 5 + 3)
    assert torch.allclose(decoded[..., 5:], torch.tensor(0.01))
    first = decoded[0, 0, :5]  # the corner cell of stride 32: a distance of 8 cells to all sides
    assert torch.allclose(first, torch.tensor([16.0, 16.0, 512.0, 512.0, 1.0]))
    last = decoded[0, -1, :4]  # of stride 8
    assert torch.allclose(last, torch.tensor([92.0, 60.0, 128.0, 128.0]))


def test_starting_weights_depend_on_the_seed_alone():
    first, second, other = (build_model(TINY, 3, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["backbone.stem.conv1.conv.weight"], other["backbone.stem.conv1.conv.weight"])
    weight = first["neck.fpn_stages.0.0.conv1.conv.weight"]
    assert weight.std() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.1)


def test_images_are_normalised_as_described():
    model = seeing(build_model(TINY, 3, seed=1)).eval()
    plain = seeing(build_model(replace(TINY, normalise=None), 3, seed=1)).eval()
    images = torch.rand(1, 3, 64, 64)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET.mean, IMAGENET.std))
    expected = plain((images - mean) / std)
    for raw, wanted in zip(model(images), expected, strict=True):
        assert torch.allclose(raw, wanted, atol=1e-5)
    assert not torch.allclose(expected[0], plain(images)[0], atol=1e-5)


@pytest.mark.parametrize("plus", [False, True])
def test_one_image_trains_every_parameter(plus):
    model = seeing(build_model(replace(TINY, plus=plus), 3)).to(memory_format=torch.channels_last).train()
    raws = model(torch.rand(1, 3, 64, 64).to(memory_format=torch.channels_last))
    for raw in raws:
        assert raw.flatten(1, 2).data_ptr() == raw.data_ptr()  # a view
    sum(raw.square().sum() for raw in raws).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_freezing_groups_cover_the_network_once():
    model = build_model(TINY, 3)
    groups = model.freeze_groups()
    for name, _ in model.named_parameters():
        assert sum(name.startswith(group) for group in groups) == 1
    assert all(group.startswith("backbone.") for group in groups[: model.backbone_groups])
    assert groups[model.backbone_groups :] == ["neck.", "yolo_head."]


def test_a_folded_network_is_folded_once_and_keeps_the_first():
    model = seeing(build_model(replace(TINY, plus=True), 3)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fused = fuse(fuse(model))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    images = torch.rand(1, 3, 64, 64)
    for raw, again in zip(model(images), fused(images), strict=True):
        assert torch.allclose(raw, again, atol=1e-4)


def test_places_and_distances():
    assert centres_cells(2, 3).tolist() == [
        [0.5, 0.5],
        [1.5, 0.5],
        [2.5, 0.5],
        [0.5, 1.5],
        [1.5, 1.5],
        [2.5, 1.5],
    ]
    bins = torch.full((1, 4, 17), -100.0)
    for side, places in enumerate(((3,), (0,), (16,), (4, 5))):
        bins[0, side, list(places)] = 0.0
    assert torch.allclose(distances_cells(bins.flatten(1)), torch.tensor([[3.0, 0.0, 16.0, 4.5]]))
    assert distances_cells(bins.flatten(1).bfloat16()).dtype == torch.float32
