"""The networks of masks of RT-DETR and D-FINE: descriptions, boxes as without masks, shapes, folding, weights of boxes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from walks import sampled

from yolofleet.data.geometry.boxes import DecodedMasks
from yolofleet.families.build import build_model, outline
from yolofleet.families.dfine.description import PRESETS as DFINE
from yolofleet.families.networks.cost import gflops
from yolofleet.families.networks.description import description_from_dict, preset, pretrained_name
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.families.networks.index_limit import images_within_index
from yolofleet.families.rtdetr.description import PRESETS as RTDETR
from yolofleet.families.rtdetr.description import recipe_values
from yolofleet.families.rtdetr.masks import Enlarge
from yolofleet.families.rtdetr.weights_files import write_folder
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.transfer import model_from_weights, transfer
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.inference.export.graph import ExportGraph, quiet
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.training.network import freeze

CLASSES, QUERIES, WIDTH = 5, 12, 16
NARROW: dict[str, Any] = {
    **{"width": 16, "feedforward": 24, "decoder_width": 24, "decoder_feedforward": 24},
    **{"layers": 3, "queries": QUERIES},
}
RESNET: dict[str, Any] = {"stage_widths": (8, 8, 8, 16), "stage_blocks": (1, 1, 2, 1), **NARROW}
HGNET: dict[str, Any] = {
    **{"stem": (8, 8), "inner_widths": (4, 4, 8, 8), "outer_widths": (8, 12, 16, 24), "stage_layers": 2},
    **NARROW,
}
SMALL: dict[str, Any] = {
    "rtdetrv2-r18": replace(RTDETR["rtdetrv2-r18"], **RESNET),
    "rtdetrv2-r50m": replace(RTDETR["rtdetrv2-r50m"], **RESNET | {"used_layers": 2}),
    "dfine-n": replace(DFINE["dfine-n"], **HGNET | {"decoder_width": 16}),
    "dfine-l": replace(DFINE["dfine-l"], stage_blocks=(1, 1, 2, 1), **HGNET | {"used_layers": 3}),
}
SEGMENTED = [name for presets in (DFINE, RTDETR) for name in presets if name.endswith("-seg")]
every_network = pytest.mark.parametrize("name", SMALL)


def built(name: str, mask_width: int = WIDTH, seed: int = 0) -> Any:
    """A network in whose queries the masks differ; those without masks have equal values."""
    model: Any = build_model(replace(SMALL[name], mask_width=0), CLASSES, seed=seed)
    with torch.no_grad():
        for name_, parameter in model.named_parameters():
            if parameter.dim() == 2 and name_.startswith("decoder."):
                parameter.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(len(name_)))
        if mask_width:
            masked: Any = build_model(replace(SMALL[name], mask_width=mask_width), CLASSES, seed=seed)
            masked.load_state_dict(model.state_dict(), strict=False)
            return masked
    return model


def images(n: int, height: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


def noise(n: int, queries: int) -> Any:
    rng = np.random.default_rng(0)
    return SimpleNamespace(
        noisy_boxes=rng.uniform(0.1, 0.9, (n, queries, 4)).astype(np.float32),
        noisy_classes=rng.integers(0, CLASSES, (n, queries)),
        noise_group=np.zeros((n, queries), np.int64),
    )


# -- descriptions ----------------------------------------------------------------------------------------------------


def test_all_networks_of_both_families_have_one_with_masks_and_those_of_boxes_stay() -> None:
    assert [
        *(f"dfine-{size}-seg" for size in "nsmlx"),
        *(f"rtdetrv2-{size}-seg" for size in ("r18", "r34", "r50m", "r50", "r101")),
    ] == SEGMENTED
    for name in SEGMENTED:
        description: Any = preset(name)
        assert description_from_dict(json.loads(json.dumps(description.to_dict()))) == description
        boxes: Any = preset(name.removesuffix("-seg"))
        assert replace(description, name=boxes.name, mask_width=0) == boxes
        assert "mask_width" not in boxes.to_dict(), "files of boxes stay as they were"
        assert outline(description, 2).task == "masks" and outline(boxes, 2).task == "boxes"
        assert pretrained_name(description) == boxes.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_width": 100}, "mask_width is 100, expected a multiple of 8"),
        ({"mask_width": -8}, "mask_width is -8, expected a number in 0..1024"),
        ({"mask_width": "wide"}, "mask_width is 'wide', expected a number"),
    ],
)
def test_a_wrong_width_is_an_error_that_names_it(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        description_from_dict(preset("dfine-n-seg").to_dict() | change)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("dfine_hgnetv2_n_coco-seg", "dfine-n-seg"),
        ("D-FINE-L-seg", "dfine-l-seg"),
        ("rtdetrv2_r50vd_m-seg", "rtdetrv2-r50m-seg"),
        ("rtdetrv2_r18vd_seg", "rtdetrv2-r18-seg"),
    ],
)
def test_names_of_other_projects_may_have_masks(theirs: str, ours: str) -> None:
    assert preset(theirs) == preset(ours)


@pytest.mark.parametrize("recipe", ["dfine", "dfine-few", "rtdetr", "rtdetr-few", "deim"])
def test_recipes_are_those_of_boxes(recipe: str) -> None:
    for name in SEGMENTED:
        masked: Any = preset(name)
        boxes: Any = preset(name.removesuffix("-seg"))
        assert recipe_values(recipe, masked) == recipe_values(recipe, boxes)


def test_the_head_is_small() -> None:
    """Blocks 3 x 18,048, MLP 131,968, two linear layers 33,024 and 1 as in RF-DETR; the map's projection 32,896 comes to it."""
    for name, more in (("dfine-n", 252_033), ("dfine-s", 284_929)):
        boxes, masked = (outline(preset(one), 80) for one in (name, f"{name}-seg"))
        count = [sum(p.numel() for p in model.parameters()) for model in (boxes, masked)]
        assert count[1] - count[0] == more
        assert 2 < gflops(masked) - gflops(boxes) < 4


# -- forward passes --------------------------------------------------------------------------------------------------


def test_enlarging_is_bilinear_and_has_gradients() -> None:
    x = images(2, 5, 7).requires_grad_()
    own = torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    factor = images(2, 10, 14, seed=1)
    expected = torch.autograd.grad((own * factor).sum(), x)[0]
    found = Enlarge()(x)
    torch.testing.assert_close(found, own, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad((found * factor).sum(), x)[0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(Enlarge().for_export(-1e30)(x), own)
    assert found.is_contiguous(memory_format=torch.channels_last)


@every_network
def test_the_boxes_are_those_of_the_network_without_masks(name: str) -> None:
    boxes, masked = built(name, 0), built(name)
    for targets in (None, noise(2, 4)):
        plain, with_masks = (model.train()(images(2), targets) for model in (boxes, masked))
        assert type(with_masks.found) is type(plain)
        assert all(map(torch.equal, plain, with_masks.found))
    with torch.no_grad():
        plain, with_masks = (model.eval()(images(2)) for model in (boxes, masked))
    assert all(map(torch.equal, plain, with_masks[:3]))
    assert torch.equal(boxes.decode(plain).rows, masked.decode(with_masks).decoded)


@every_network
def test_shapes_follow_the_contract_and_every_parameter_gets_a_gradient(name: str) -> None:
    model, d = built(name).train(), 4
    raws = model(images(2), noise(2, d))
    assert raws.coefficients.shape == (2, 3, d + QUERIES, WIDTH + 1)
    assert [tuple(maps.shape) for maps in raws.prototypes] == [(2, WIDTH, 16, 24)] * 3
    parts = [raws.coefficients, *raws.prototypes]
    sum((part * torch.rand_like(part)).sum() for part in parts).backward()
    for parameter_name, parameter in model.masks.named_parameters():
        assert parameter.grad.any(), parameter_name
    assert model.backbone.get_parameter("stages.1.blocks.0.aggregation.1.conv.weight" if "dfine" in name
        else "res_layers.1.blocks.0.branch2a.conv.weight").grad.any()  # fmt: skip
    assert model.decoder.decoder.layers[0].linear1.weight.grad.any()


@every_network
def test_a_prediction_has_the_masks_of_the_last_used_layer(name: str) -> None:
    model = built(name).eval()
    used = model.description.used_layers
    with torch.no_grad():
        whole, last = model(images(2), noise(2, 0)), model(images(2))
        decoded = model.decode(last)
    torch.testing.assert_close(last.coefficients, whole.coefficients[:, used - 1])
    torch.testing.assert_close(last.prototypes, whole.prototypes[used - 1])
    assert isinstance(decoded, DecodedMasks)
    assert decoded.coefficients.shape == (2, QUERIES, WIDTH + 1)
    assert decoded.prototypes.shape == (2, WIDTH + 1, 16, 24) and decoded.prototypes[:, -1].eq(1).all()
    assert all(part.dtype == torch.float32 for part in decoded)


@torch.no_grad()
def test_the_head_computes_the_formula_of_the_original() -> None:
    model = built("dfine-s" if "dfine-s" in SMALL else "dfine-l").eval()
    head, raws = model.masks, model(images(1), noise(1, 0))
    maps, states = model.image_part(images(1)), []
    for layer in model.decoder.decoder.layers:
        layer.register_forward_hook(lambda _m, _i, out: states.append(out))
    model(images(1), noise(1, 0))
    x = F.interpolate(head.project(maps[0]), scale_factor=2, mode="bilinear", align_corners=False)
    for i, (block, state) in enumerate(zip(head.blocks, states, strict=True)):
        x = block(x)
        q = head.queries(state)
        vectors = head.vectors(q + head.linear2(F.gelu(head.linear1(head.norm(q)))))
        mixed = head.mix(x.permute(0, 2, 3, 1))  # the convolution of the map
        expected = torch.einsum("nqd,nhwd->nqhw", vectors, mixed) + head.bias
        own = torch.einsum("nqd,ndhw->nqhw", raws.coefficients[:, i, :, :-1], raws.prototypes[i])
        torch.testing.assert_close(
            own + raws.coefficients[:, i, :, -1:, None], expected, rtol=1e-4, atol=1e-4
        )


def test_an_encoder_without_a_map_of_stride_8_leaves_that_of_the_backbone() -> None:
    model = built("dfine-n").eval()
    maps = model.image_part(images(1))
    assert [tuple(m.shape[1:]) for m in maps] == [(12, 8, 12), (16, 4, 6), (16, 2, 3)]
    assert torch.equal(maps[0], model.backbone(images(1))[0])
    raws, again = model(images(1)), model(images(1), None, maps)
    assert all(map(torch.equal, raws, again))
    choices = list(model.choices(images(1)))
    assert len(choices) == len(list(model.decoder.tied(maps))) and isinstance(choices[0], DecodedMasks)


@every_network
def test_the_gradient_of_one_image_does_not_depend_on_the_memory_format(name: str) -> None:
    """Strides of a single image have made torch's batch normalisation return wrong gradients."""
    found = []
    for batch in (images(1), images(1).contiguous(memory_format=torch.channels_last)):
        model = built(name).train()
        raws = model(batch, noise(1, 2))
        generator = torch.Generator().manual_seed(0)
        parts = [raws.coefficients, *raws.prototypes]
        sum((part * torch.rand(part.shape, generator=generator)).sum() for part in parts).backward()
        found.append([p.grad for p in model.parameters()])
    for first, second in zip(*found, strict=True):
        if first is not None:
            assert (first - second).norm() < 0.01 * first.norm() + 0.01


@every_network
def test_passes_without_images_or_labels_have_gradients(name: str) -> None:
    for n in (0, 2):
        raws = built(name).train()(images(n), noise(n, 0))
        assert raws.coefficients.shape[2] == QUERIES
        (raws.coefficients.sum() + sum(maps.sum() for maps in raws.prototypes)).backward()


@every_network
def test_masks_in_mixed_precision_are_near(name: str) -> None:
    model = built(name).eval()
    with torch.no_grad():
        whole = model.decode(model(images(1)))
        with torch.autocast("cpu", torch.bfloat16):
            half = model.decode(model(images(1), None, model.image_part(images(1).float())))
    assert all(part.dtype == torch.float32 and part.isfinite().all() for part in half)
    assert (half.prototypes - whole.prototypes).abs().mean() < 0.1


def test_the_head_is_the_last_group_of_freeze() -> None:
    model = built("dfine-n")
    assert model.freeze_groups()[-2:] == ["decoder.", "masks."]
    frozen = freeze(model, str(len(model.freeze_groups()) - 1))
    left = {name for name, _ in model.named_parameters()} - set(frozen)
    assert left == {name for name, _ in model.named_parameters() if name.startswith("masks.")}


def test_the_index_limit_knows_the_largest_map() -> None:
    assert images_within_index(built("dfine-n").eval(), 64) < 2**31


# -- folding, export, weights ----------------------------------------------------------------------------------------


@every_network
def test_folded_networks_find_the_same_masks_without_blocks_that_only_the_training_needs(name: str) -> None:
    model = built(name).eval()
    folded: Any = fuse(model)
    with torch.no_grad():
        expected, found = (one.decode(one(images(2))) for one in (model, folded))
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert len(folded.masks.blocks) == model.description.used_layers


@pytest.mark.parametrize("name", sampled(SMALL, 3))
def test_a_traced_graph_returns_the_three_parts_for_other_sizes(name: str) -> None:
    graph = ExportGraph(built(name))
    with quiet():
        traced = torch.jit.trace(graph, images(1), check_trace=False)
        expected, found = graph(images(2, 96, 64)), traced(images(2, 96, 64))  # type: ignore[no-untyped-call]
    assert [tuple(part.shape) for part in found] == [
        (2, QUERIES, 5 + CLASSES),
        (2, QUERIES, WIDTH + 1),
        (2, WIDTH + 1, 24, 16),
    ]
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def weights_of(model: Detector) -> Weights:
    return Weights(model.state_dict(), WeightsHeader.of(model, img=64))


@pytest.mark.parametrize("name", sampled(SMALL, 3))
def test_weights_of_boxes_start_a_network_of_masks_and_the_other_way_round(name: str, tmp_path: Path) -> None:
    boxes, masked = built(name, 0, seed=1), built(name, seed=2)
    write_weights(tmp_path / "boxes.safetensors", weights_of(boxes))
    report = transfer(masked, read_weights(tmp_path / "boxes.safetensors"))
    assert {one.split(".")[0] for one, _ in report.skipped} == {"masks"}
    with torch.no_grad():
        assert torch.equal(masked.eval()(images(1)).boxes, boxes.eval()(images(1)).boxes)
    write_weights(tmp_path / "masks.safetensors", weights_of(masked))
    again = model_from_weights(read_weights(tmp_path / "masks.safetensors"))
    assert again.task == "masks" and again.description == masked.description
    with torch.no_grad():
        assert all(map(torch.equal, again(images(1)), masked(images(1))))
    assert transfer(built(name, 0), read_weights(tmp_path / "masks.safetensors")).skipped == ()


def test_no_folder_for_transformers_is_written_with_masks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers has no dfine-n"):
        write_folder(tmp_path / "folder", weights_of(built("dfine-n")))
    assert not (tmp_path / "folder").exists()


@every_network
def test_initial_values_depend_on_the_seed_alone_and_none_is_left_out(name: str) -> None:
    description = replace(SMALL[name], mask_width=WIDTH)
    first = build_model(description, CLASSES, seed=3).state_dict()
    second = outline(description, CLASSES).to_empty(device="cpu")
    for tensor in second.state_dict().values():
        tensor.fill_(7 if tensor.dtype == torch.int64 else torch.nan)
    second.initialise(torch.Generator().manual_seed(3))
    assert all(torch.equal(first[n], t) for n, t in second.state_dict().items())
