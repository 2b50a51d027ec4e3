"""Names, sizes and outputs of the networks against numbers of YOLOv5 v7.0."""

import json

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from formula import fill_by_formula, formula_image
from label_rows import shapes_of
from reference import parity

from yolofleet.data.geometry.shapes import LARGEST_ASPECT, SMALLEST_AREA_LEFT, SMALLEST_SIDE_PX
from yolofleet.families.build import build_model, outline
from yolofleet.families.networks.cost import gflops
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import fuse
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.families.yolov5.network import RowNetwork
from yolofleet.families.yolov5.presets import preset_names
from yolofleet.families.yolov5.rows import RowDescription, rounded_width
from yolofleet.training.optimiser import build_optimizer

FACTS = json.loads(parity("yolov5_model/facts.json").read_text())
SIZES = list(FACTS["models"])
FAST = ("yolov5n", "yolov5s", "yolov5n6")
COLUMNS = [0, 1, 2, 3, 4, *range(5, 85, 5)]  # kept ones of decoded outputs; of their rows every 7th


@pytest.fixture(scope="module")
def outputs():
    with np.load(parity("yolov5_model/formula_io.npz")) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("name", SIZES)
def test_counts_strides_and_anchors_are_the_originals(name):
    facts = FACTS["models"][name]
    description = describe(name)
    model = outline(description, 80)
    assert isinstance(description, RowDescription) and isinstance(model, RowNetwork)
    assert sum(p.numel() for p in model.parameters()) == facts["params"]
    assert sum(t.numel() for t in model.state_dict().values()) == facts["params_with_buffers"]
    assert len(model.state_dict()) == facts["state_dict_len"]
    assert [sum(p.numel() for p in layer.parameters()) for layer in model.model] == facts["layer_params"]
    assert list(model.strides) == facts["strides"]
    assert np.array_equal(description.anchors_px, facts["anchors_px"])
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == facts["bn_layers"]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}
    inputs = {i for layer, inputs in enumerate(model._inputs) for i in inputs if i != layer - 1}
    assert inputs | {len(model.model) - 2} == set(facts["save_indices"])  # Detect names its last input too
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == facts["conv2d_layers"]
    compare(gflops(model), facts["gflops_640_thop_unfused"], rtol=1e-12)
    fused = fuse(model)
    assert sum(p.numel() for p in fused.parameters()) == facts["params_fused"]
    compare(gflops(fused), facts["gflops_640_thop_fused"], rtol=1e-12)


@pytest.mark.parametrize("name", SIZES)
def test_rows_and_multiples_are_the_originals(name):
    facts, description = FACTS["models"][name], describe(name)
    assert isinstance(description, RowDescription)
    assert description.depth_multiple == facts["depth_multiple"]
    assert description.width_multiple == facts["width_multiple"]
    rows = [row.to_list() for row in description.rows]
    assert [[inputs, module.removeprefix("nn.")] for inputs, _, module, _ in rows] == facts["rows"]


@pytest.mark.parametrize("name", list(FACTS["state_dict"]))
def test_tensor_names_and_shapes_are_the_originals(name):
    model = outline(describe(name), 80)
    assert {n: list(t.shape) for n, t in model.state_dict().items()} == FACTS["state_dict"][name]
    assert list(model.state_dict()) == list(FACTS["state_dict"][name])


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SIZES])
def test_outputs_are_the_originals(name, outputs):
    facts = FACTS["models"][name]
    model = build_model(describe(name), 80).eval()
    assert isinstance(model, RowNetwork)
    assert np.array_equal(model.detect.anchors.numpy(), np.float32(facts["anchors_buffer_grid_units"]))
    fill_by_formula(model, facts["formula"]["gain"])
    height, width = facts["formula"]["input_hw"]
    images = perturbed(formula_image(height, width, facts["formula"]["seed"]))
    perturbed(model)
    for layout in (torch.contiguous_format, torch.channels_last):
        with torch.no_grad():
            model.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks memory_format
            raws = model(images.to(memory_format=layout))
            decoded = model.decode(raws).rows
        for level, raw in enumerate(raws):
            expected = outputs[f"{name}.raw{level}.every7"]
            compare(raw.reshape(-1)[::7], expected, atol=2e-3, rms=3e-4)  # perturbations move 3e-4
        rows, expected = decoded[:, ::7, COLUMNS], outputs[f"{name}.decoded_rows"]
        compare(rows[..., :4], expected[..., :4], rtol=2e-4, atol=0.05)  # px, boxes of up to 1479 px
        compare(rows[..., 4:], expected[..., 4:], atol=5e-4)  # probabilities


def test_folding_batch_norm_changes_rounding_only():
    facts = FACTS["models"]["yolov5n"]
    model = build_model(describe("yolov5n"), 80).eval()
    fill_by_formula(model, facts["formula"]["gain"])
    fused = fuse(perturbed(model))
    assert sum(p.numel() for p in fused.parameters()) == facts["params_fused"]
    compare(gflops(fused), facts["gflops_640_thop_fused"], rtol=1e-12)
    images = perturbed(formula_image(128, 96, 7))
    with torch.no_grad():
        plain, folded = model.decode(model(images)).rows, fused.decode(fused(images)).rows
    change = folded - plain
    compare(change[..., :4], torch.zeros_like(change[..., :4]), atol=0.05)  # of boxes up to 1479 pixels
    compare(change[..., 4:], torch.zeros_like(change[..., 4:]), atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_training_step_is_the_originals(layout):
    """Forward in training mode, loss, gradient of every parameter, clipping, first SGD update."""
    facts = json.loads(parity("yolov5_model/train_step.json").read_text())
    with np.load(parity("yolov5_model/train_step.npz")) as file:
        numbers = {name: file[name] for name in file.files}
    model = build_model(describe("yolov5n"), 3).to(memory_format=layout).train()  # type: ignore[call-overload]  # torch's stub lacks memory_format
    fill_by_formula(model, facts["gain"])
    perturbed(model)
    recipe = Yolov5Hyperparameters()
    loss = Yolov5Loss(anchors_px=model.anchors_px, strides=model.strides, nc=3, recipe=recipe, img=640)
    raws = model(perturbed(torch.from_numpy(numbers["input_u8"]).float() / 255).to(memory_format=layout))
    for level, raw in enumerate(raws):
        compare(raw, numbers[f"train_raw{level}"], atol=2e-3, rms=3e-4)  # batch norm of 24 places amplifies
    for name, total in facts["running_stat_sum_after_forward"].items():
        compare(model.state_dict()[name].sum(), total, rtol=1e-4, atol=1e-4, name=name)

    targets = loss.match(shapes_of(numbers["targets"]), 2, (128, 96))
    means = loss.gains * loss.sums(raws, targets) / torch.as_tensor(targets.counts).clamp(min=1)
    compare(means.view(3, 3).sum(1), facts["items_box_obj_cls"], rtol=1e-4)
    total = 2 * means.sum()
    compare(total, facts["loss"], rtol=1e-4)
    total.backward()

    parameters = dict(model.named_parameters())
    assert set(parameters) == set(facts["grad_l2_before_clip"])
    for name, norm in facts["grad_l2_before_clip"].items():
        compare(parameters[name].grad.norm(), norm, rtol=1e-3, atol=1e-4, name=name)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip_norm)
    compare(norm, facts["total_grad_norm_before_clip"], rtol=3e-4)
    build_optimizer(model, "SGD", recipe, recipe.weight_decay).step()
    for key in numbers:
        kind, _, name = key.partition(".")
        if kind == "clipped_grad_first16":
            found, near = parameters[name].grad, {"atol": 2.5e-4}
        elif kind == "param_after_step_first16":
            # perturbations move the weights themselves by 1e-6 of their values
            found, near = parameters[name].detach(), {"rtol": 4e-6, "atol": 3e-6}
        else:
            continue
        compare(found.contiguous().view(-1)[:16], numbers[key], **near, name=key)


@pytest.mark.parametrize("name", ["yolov5n", "yolov5s"])
def test_detect_starts_at_the_originals_priors(name):
    model, other = build_model(describe(name), 80), build_model(describe(name), 80)
    assert isinstance(model, RowNetwork)
    for conv, (box, obj, cls) in zip(model.detect.m, FACTS["detect_bias_prior_nc80"], strict=True):
        assert isinstance(conv, torch.nn.Conv2d) and conv.bias is not None
        width = conv.in_channels  # priors are added to what is uniform within 1 / sqrt(inputs)
        bias = perturbed(conv.bias.detach()).view(3, 85)
        for values, prior in ((bias[:, :4], box), (bias[:, 4], obj), (bias[:, 5:], cls)):
            compare(values, torch.full_like(values, prior), atol=width**-0.5 + 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("channels", "rounded"), FACTS["make_divisible"])
def test_channels_round_up_to_eights(channels, rounded):
    assert rounded_width(channels) == rounded


def test_boxes_too_small_to_learn_are_the_originals():
    assert FACTS["box_candidates_defaults"] == (
        f"wh_thr={SMALLEST_SIDE_PX:g} ar_thr={LARGEST_ASPECT:g} area_thr={SMALLEST_AREA_LEFT:g}"
    )


def test_names_cover_both_pyramids():
    assert preset_names()[:5] == ["yolov5n", "yolov5s", "yolov5m", "yolov5l", "yolov5x"]
    assert [f"{n}6" for n in preset_names()[:5]] == preset_names()[5:10]
