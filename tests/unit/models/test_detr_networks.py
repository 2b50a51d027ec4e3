"""The networks of RT-DETRv2 and D-FINE: descriptions, initial values, denoising queries, sampling, folding and export."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from walks import chosen

from yolofleet.families.build import build_model, outline
from yolofleet.families.dfine.decoder import bin_values, moved
from yolofleet.families.dfine.description import PRESETS as DFINE
from yolofleet.families.networks.description import description_from_dict, preset
from yolofleet.families.networks.detector import fuse
from yolofleet.families.rtdetr.attention import DeformableAttention, _sampled, _sampled_by_grid
from yolofleet.families.rtdetr.blocks import FrozenNorm
from yolofleet.families.rtdetr.decoder import anchors_of
from yolofleet.families.rtdetr.description import PRESETS as RTDETR
from yolofleet.inference.export.graph import ExportGraph, quiet
from yolofleet.support.errors import ConfigError
from yolofleet.training.network import freeze

CLASSES, QUERIES = 5, 12
NARROW: dict[str, Any] = {
    "width": 16,
    "feedforward": 24,
    "decoder_width": 16,
    "decoder_feedforward": 24,
    "layers": 3,
    "queries": QUERIES,
}
RESNET: dict[str, Any] = {"stage_widths": (8, 8, 8, 16), "stage_blocks": (1, 1, 2, 1), **NARROW}
HGNET: dict[str, Any] = {
    "stem": (8, 8),
    "inner_widths": (4, 4, 8, 8),
    "outer_widths": (8, 16, 16, 24),
    "stage_layers": 2,
    **NARROW,
}
SMALL: dict[str, Any] = {
    "rtdetrv2-r18": replace(RTDETR["rtdetrv2-r18"], **RESNET),
    "rtdetrv2-r50m": replace(RTDETR["rtdetrv2-r50m"], **RESNET | {"used_layers": 2}),
    "dfine-n": replace(DFINE["dfine-n"], **HGNET),
    "dfine-l": replace(DFINE["dfine-l"], stage_blocks=(1, 1, 2, 1), **HGNET | {"used_layers": 3}),
}
NAMES = [
    *(f"rtdetrv2-{size}" for size in ("r18", "r34", "r50m", "r50", "r101")),
    *(f"dfine-{size}" for size in "nsmlx"),
]
every_network = pytest.mark.parametrize("name", SMALL)


@torch.no_grad()
def lively(name):
    """A network without the zeros and constants of the start."""
    model, generator = build_model(SMALL[name], CLASSES), torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, FrozenNorm)):
            for key, low, high in (("running_mean", -0.2, 0.2), ("running_var", 0.5, 1.5)):
                getattr(module, key).uniform_(low, high, generator=generator)
            module.weight.uniform_(0.5, 1.5, generator=generator)
            module.bias.uniform_(-0.5, 0.5, generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.uniform_(-0.3, 0.3, generator=generator)
            module.bias.uniform_(-0.3, 0.3, generator=generator)
    for parameter_name, parameter in model.named_parameters():
        if ".lab." in parameter_name:
            parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def images(n, height, width, seed=0):
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


def noise(groups, seed=0):
    """Targets with a denoising query for each number of ``groups``, [N][D]."""
    groups, rng = np.asarray(groups, np.int64), np.random.default_rng(seed)
    return SimpleNamespace(
        noisy_boxes=rng.uniform(0.1, 0.9, (*groups.shape, 4)).astype(np.float32),
        noisy_classes=np.where(groups < 0, CLASSES, rng.integers(0, CLASSES, groups.shape)),
        noise_group=groups,
    )


# -- descriptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_description_survives_json(name):
    description = preset(name)
    assert description_from_dict(json.loads(json.dumps(description.to_dict()))) == description


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("dfine-n", {"width": 100}, "width is 100, expected a multiple of 8"),
        ("dfine-n", {"width": 12.5}, "width is 12.5, expected a whole number"),
        ("dfine-n", {"width": True}, "width is True, expected a number in 8..4096"),
        ("dfine-n", {"is_frozen": 1}, "is_frozen is 1, expected true or false"),
        ("dfine-n", {"points": [6]}, r"points is \[6\], expected a list of 2 or 3 numbers"),
        ("rtdetrv2-r18", {"points": [6, 6]}, r"points is \[6, 6\], expected a list of 3 numbers"),
        ("rtdetrv2-r18", {"stage_widths": "wide"}, "stage_widths is 'wide', expected a list of 4 numbers"),
        (
            "rtdetrv2-r18",
            {"stage_blocks": [1, 1, 1, 999]},
            "stage_blocks is 999, expected a number in 1..200",
        ),
        ("rtdetrv2-r18", {"used_layers": 4}, "used_layers is 4, more than layers, 3"),
        ("rtdetrv2-r18", {"stem": [8, 8]}, "unknown key 'stem'"),
    ],
)
def test_a_wrong_description_is_an_error_that_names_the_key(name, change, words):
    with pytest.raises(ConfigError, match=words):
        description_from_dict(preset(name).to_dict() | change)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("rtdetrv2_r18vd_120e_coco", "rtdetrv2-r18"),
        ("rtdetrv2_r50vd_m_7x_coco", "rtdetrv2-r50m"),
        ("rtdetrv2_r50vd_6x_coco", "rtdetrv2-r50"),
        ("PekingU/rtdetr_v2_r101vd", "rtdetrv2-r101"),
        ("dfine_hgnetv2_n_coco", "dfine-n"),
        ("dfine_x_coco", "dfine-x"),
        ("ustc-community/dfine-small-coco", "dfine-s"),
        ("D-FINE-L", "dfine-l"),
    ],
)
def test_names_of_other_projects_mean_the_same_network(theirs, ours):
    assert preset(theirs) == preset(ours)


# version 1, discrete sampling, weights for other classes, and a size that does not exist
@pytest.mark.parametrize(
    "name", ["rtdetr_r18vd", "rtdetrv2_r18vd_dsp_3x_coco", "dfine_s_obj365", "rtdetrv2_r18vd_m"]
)
def test_names_of_other_networks_are_unknown(name):
    with pytest.raises(ConfigError, match="unknown model"):
        preset(name)


# -- initial values --------------------------------------------------------------------------------------------------


@every_network
def test_initial_values_depend_on_the_seed_alone_and_none_is_left_out(name):
    first = build_model(SMALL[name], CLASSES, seed=3).state_dict()
    second = outline(SMALL[name], CLASSES).to_empty(device="cpu")
    for tensor in second.state_dict().values():
        tensor.fill_(7 if tensor.dtype == torch.int64 else torch.nan)
    second.initialise(torch.Generator().manual_seed(3))
    assert all(torch.equal(first[n], t) for n, t in second.state_dict().items())
    other = build_model(SMALL[name], CLASSES, seed=4).state_dict()
    assert not torch.equal(
        first["encoder.input_proj.0.conv.weight"], other["encoder.input_proj.0.conv.weight"]
    )


@every_network
def test_at_the_start_boxes_are_anchors_and_classes_are_unlikely(name):
    model = build_model(SMALL[name], CLASSES).train()
    boxes, logits, _, layer_boxes, layer_logits, first, _ = model(images(2, 64, 96))[:7]
    anchors = anchors_of([(64 // s, 96 // s) for s in model.strides], torch.device("cpu"))[0].sigmoid()
    assert all((box - anchors[0]).abs().amax(1).min() < 1e-6 for box in first.flatten(0, 1))
    torch.testing.assert_close(layer_boxes, first[:, None].expand_as(layer_boxes), rtol=0, atol=1e-5)
    assert 0.002 < layer_logits.sigmoid().median() < 0.05
    assert torch.equal(boxes, layer_boxes[:, -1]) and torch.equal(logits, layer_logits[:, -1])


def test_initial_sampling_points_lie_on_a_ray_for_each_head():
    model: Any = build_model(SMALL["dfine-n"], CLASSES)
    attention = model.decoder.decoder.layers[0].cross_attn
    offsets = attention.sampling_offsets.bias.view(8, 12, 2)  # 6 points on each of 2 levels
    expected = torch.tensor([[n, 0.0] for n in (1, 2, 3, 4, 5, 6)] * 2)
    torch.testing.assert_close(offsets[0], expected)
    torch.testing.assert_close(offsets[1], expected[:, :1].expand(-1, 2), rtol=0, atol=1e-5)  # 45 degrees
    assert not attention.sampling_offsets.weight.any()


# -- forward passes --------------------------------------------------------------------------------------------------


@every_network
def test_shapes_follow_the_contract_and_every_parameter_gets_a_gradient(name):
    model, n, d = lively(name).train(), 2, 4
    layers, pre, bins = 3, int(name.startswith("dfine")), 4 * 33
    raws = model(images(n, 96, 64), noise([[0, 0, 1, 1]] * n))
    expected = [
        *((n, QUERIES, 4), (n, QUERIES, CLASSES), (n, 4)),
        *((n, layers + pre, QUERIES, 4), (n, layers + pre, QUERIES, CLASSES)),
        *((n, QUERIES, 4), (n, QUERIES, CLASSES)),
        *((n, layers + pre, d, 4), (n, layers + pre, d, CLASSES)),
    ]
    if pre:
        expected += [(n, layers, k, values) for k in (QUERIES, d) for values in (bins, 4)]
    assert [tuple(raw.shape) for raw in raws] == expected
    assert raws.sides.tolist() == [[64, 96, 64, 96]] * n
    generator = torch.Generator().manual_seed(0)
    sum(
        (raw * torch.rand(raw.shape, generator=generator)).sum() for raw in raws if raw.requires_grad
    ).backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter_name.endswith("lab.bias"):
            assert parameter.grad.any(), parameter_name
        # the next norm takes most of these shifts out again: only rounding is left
        elif parameter.requires_grad:
            assert parameter.grad is not None, parameter_name


@every_network
@pytest.mark.parametrize("groups", [None, [[], []]], ids=["without targets", "without labels"])
def test_a_pass_without_labels_is_an_ordinary_one(name, groups):
    model = lively(name).train()
    raws = model(images(2, 64, 64), None if groups is None else noise(groups))
    assert all(raw.shape[2] == 0 for field, raw in raws._asdict().items() if field.startswith("noisy"))
    sum(raw.sum() for raw in raws).backward()
    gradients = [p.grad for n, p in model.named_parameters() if p.requires_grad and "denoising" not in n]
    assert all(gradient.isfinite().all() for gradient in gradients)


@every_network
def test_a_pass_without_images_has_results_and_gradients(name):
    model = lively(name).train()
    raws = model(images(0, 64, 64), noise(np.zeros((0, 3))))
    assert all(len(raw) == 0 for raw in raws)
    sum(raw.sum() for raw in raws).backward()


@every_network
def test_images_of_any_size_have_as_many_queries_as_cells(name):
    model = lively(name).eval()
    for height, width in ((32, 32), (32, 128), (160, 96)):
        raws = model(images(1, height, width))
        cells = sum(height // stride * width // stride for stride in model.strides)
        assert raws.boxes.shape == (1, min(QUERIES, cells), 4) and model.decode(raws).rows.isfinite().all()


@every_network
def test_an_image_does_not_depend_on_the_labels_of_others(name):
    """Padding, and the denoising queries of other groups, are seen by nobody."""
    model, x = lively(name).eval(), images(2, 64, 64)
    alone, both = noise([[0, 0, 1, 1]]), noise([[0, 0, 1, 1, -1, -1], [0, 0, 0, 1, 1, 1]], seed=5)
    for key in ("noisy_boxes", "noisy_classes"):
        getattr(both, key)[0, :4] = getattr(alone, key)[0]
    one, two, none = model(x[:1], alone), model(x, both), model(x[:1], noise([[]]))
    for number, (field, raw) in enumerate(one._asdict().items()):
        of_noise = field.startswith("noisy")
        same = two[number][:1, :, :4] if of_noise else two[number][:1]
        torch.testing.assert_close(same, raw, rtol=0, atol=1e-5)
        if not of_noise:
            torch.testing.assert_close(none[number], raw, rtol=0, atol=1e-5)
    changed = noise([[0, 0, 1, 1]])
    changed.noisy_boxes[0, 0] += 0.05
    moved_raw = (model(x[:1], changed).noisy_boxes - one.noisy_boxes).abs().amax((0, 1, 3))
    assert (moved_raw[:2] > 1e-6).all() and (moved_raw[2:] < 1e-6).all()


@every_network
def test_boxes_stay_float32_in_mixed_precision(name):
    model = lively(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        raws = model(images(2, 64, 64), noise([[0, 0, 1, 1]] * 2))
    floats = [raw for field, raw in raws._asdict().items() if not field.endswith("logits")]
    assert all(raw.dtype == torch.float32 and raw.isfinite().all() for raw in floats)
    assert all(raw.isfinite().all() for raw in raws)
    sum(raw.float().sum() for raw in raws).backward()


@every_network
def test_the_backbone_can_be_frozen_and_its_groups_cover_it(name):
    model = lively(name)
    groups = model.freeze_groups()
    assert all(n.startswith(tuple(groups)) for n, _ in model.named_parameters())
    assert all(model.get_submodule(group[:-1]) is not None for group in groups)
    assert set(freeze(model, "backbone")) == {
        n for n, _ in model.named_parameters() if n.startswith("backbone.")
    }


# -- parts -----------------------------------------------------------------------------------------------------------


def test_both_forms_of_sampling_have_the_same_values_and_gradients():
    generator = torch.Generator().manual_seed(0)
    levels = [(6, 8, 3), (3, 4, 2)]
    values = torch.randn(2, 60, 8, 4, generator=generator, requires_grad=True)
    places = (torch.rand(2, 5, 8, 5, 2, generator=generator) * 1.6 - 0.3).requires_grad_()
    shares = torch.rand(2, 5, 8, 5, generator=generator).requires_grad_()
    found = []
    for sample in (_sampled, _sampled_by_grid):
        result = sample(values, places, shares, levels)
        factors = torch.linspace(-1, 1, result.numel()).view_as(result)
        found.append([result, *torch.autograd.grad((result * factors).sum(), [values, places, shares])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_places_that_are_no_numbers_read_no_memory_outside_the_map():
    for bad in (torch.nan, torch.inf, -torch.inf, 1e30):
        place = torch.full((1, 1, 8, 1, 2), bad)
        result = _sampled(torch.ones(1, 6, 8, 2), place, torch.ones(1, 1, 8, 1), [(2, 3, 1)])
        assert not result.isfinite().all() or not result.any()


def test_bins_grow_on_both_sides_of_the_middle():
    bins = bin_values(torch.tensor([0.5]), torch.tensor([4.0]))
    assert len(bins) == 33 and bins[16] == 0
    torch.testing.assert_close(bins, -bins.flip(0))
    # (0.5 x 4 + 1) ** (2 n / 30) - 1 for n = 1 .. 15; the last one is 2 (0.5 x 4)
    torch.testing.assert_close(bins[[17, 31, 32]], torch.tensor([3 ** (1 / 15) - 1, 2.0, 4.0]))


def test_distances_move_edges_outwards():
    box = torch.tensor([0.5, 0.5, 0.2, 0.4])
    torch.testing.assert_close(moved(box, torch.zeros(4), torch.tensor(4.0)), box)
    # the left edge by 1 x 0.2 / 4, the bottom edge by 2 x 0.4 / 4
    out = moved(box, torch.tensor([1.0, 0, 0, 2]), torch.tensor(4.0))
    torch.testing.assert_close(out, torch.tensor([0.475, 0.6, 0.25, 0.6]))


# -- folding and export ----------------------------------------------------------------------------------------------


@every_network
def test_a_folded_network_has_the_same_predictions_without_norms_and_training_parts(name):
    model, x = lively(name).eval(), images(2, 64, 96)
    folded: Any = fuse(model)
    with torch.no_grad():
        torch.testing.assert_close(
            folded.decode(folded(x)).rows, model.decode(model(x)).rows, rtol=1e-4, atol=1e-3
        )
    assert not any(isinstance(module, (nn.BatchNorm2d, FrozenNorm)) for module in folded.modules())
    used = SMALL[name].used_layers
    assert len(folded.decoder.decoder.layers) == used
    assert sum(n.startswith("decoder.dec_score_head.") for n, _ in folded.named_parameters()) == 2
    assert sum(".lqe_layers." in n for n, _ in folded.named_parameters()) == (
        4 if name.startswith("dfine") else 0
    )
    again: Any = fuse(folded)
    assert len(again.decoder.decoder.layers) == used  # folding again changes nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_traced_graph_accepts_other_sizes(name):
    graph, x, y = ExportGraph(lively(name)), images(2, 64, 96), images(3, 128, 64)
    with quiet():
        traced = torch.jit.trace(graph, x, check_trace=False)
        torch.testing.assert_close(traced(y), graph(y))
        exported = torch.export.export(graph, (x,))
        torch.testing.assert_close(exported.module()(x), graph(x))
        plain: Any = graph.network
        for module in plain.modules():
            if isinstance(module, DeformableAttention):
                module.is_exported = False
        torch.testing.assert_close(traced(x), plain.decode(plain(x)).rows, rtol=1e-4, atol=1e-3)


@every_network
def test_a_graph_in_16_bits_has_boxes_in_32(name):
    graph = ExportGraph(lively(name), half=True)
    with quiet():
        found = graph(images(1, 64, 64))
    assert found.dtype == torch.float32 and found.isfinite().all()


@pytest.mark.parametrize("name", chosen(SMALL, "dfine-l"))
@pytest.mark.parametrize(
    "varies", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fixed", "variable"]
)
def test_onnx_files_have_the_same_predictions(name, varies):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra yolofleet[onnx] is not installed")
    pytest.importorskip("onnx", reason="the extra yolofleet[onnx] is not installed")
    graph, x = ExportGraph(lively(name)), images(2, 64, 96)
    axes = {"images": {0: "n", 2: "h", 3: "w"}, "decoded": {0: "n", 1: "rows"}} if varies else None
    stream: Any = io.BytesIO()
    with quiet():
        torch.onnx.export(
            torch.jit.trace(graph, x, check_trace=False) if varies else graph,
            (x,),
            stream,
            input_names=["images"],
            output_names=["decoded"],
            opset_version=17,
            dynamo=False,
            dynamic_axes=axes,
        )
    session = onnxruntime.InferenceSession(stream.getvalue())
    for given in (x, images(3, 128, 64)) if varies else (x,):
        with quiet():
            expected = graph(given).numpy()
        np.testing.assert_allclose(session.run(None, {"images": given.numpy()})[0], expected, 1e-4, 1e-3)
