"""Names, sizes, outputs and suppression of PP-YOLOE against numbers that PaddleDetection produced."""

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from conditioning import compare, paired, perturbed
from reference import parity
from torch import nn

from yolofleet.data.geometry.boxes import Decoded, cxcywh_from_xyxy, xyxy_from_cxcywh
from yolofleet.data.geometry.nms import detections
from yolofleet.families.networks.blocks import RepVgg
from yolofleet.families.networks.detector import fuse
from yolofleet.families.ppyoloe.description import preset
from yolofleet.families.ppyoloe.network import PpyoloeNetwork, distances_cells
from yolofleet.families.ppyoloe.pdparams_file import PROJECTION, paddle_name

FACTS = json.loads(parity("ppyoloe_model/facts.json").read_text())
MODELS = list(FACTS["models"])
SMALL = ("ppyoloe_s", "ppyoloe_plus_s")


@pytest.fixture(scope="module")
def outputs():
    with np.load(parity("ppyoloe_model/outputs.npz")) as file:
        return {name: file[name] for name in file.files}


def outline(name):
    with torch.device("meta"):
        return PpyoloeNetwork(preset(name), 80)


@torch.no_grad()
def by_formula(name, gain):
    """A network whose weights are a function of their names, so that none need to be stored; its images are not
    normalised, as those of the recordings were not."""
    with torch.device("meta"):
        model = PpyoloeNetwork(replace(preset(name), normalise=None), 80)
    model = model.to_empty(device="cpu")
    for ours, tensor in model.state_dict().items():
        name, shape = paddle_name(ours), tuple(tensor.shape)
        r = np.random.RandomState(zlib.crc32(name.encode()))
        if name.endswith("num_batches_tracked"):
            values = np.zeros(())
        elif name.endswith(".alpha"):
            values = 0.5 + 0.5 * np.float32(0.5 + r.random_sample(shape))
        elif tensor.dim() == 4:
            values = r.standard_normal(shape) * np.sqrt(gain / np.prod(shape[1:]))
        elif name.endswith((".bn.weight", "._variance")):
            values = 0.5 + r.random_sample(shape)
        elif name.endswith((".bn.bias", "._mean")):
            values = 0.2 * r.standard_normal(shape)
        else:
            values = 0.5 * r.standard_normal(shape)
        tensor.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    return model.eval()


def by_formula_mild(name):
    """Smaller predictions, for what is decoded and suppressed."""
    model = by_formula(name, 2.0)
    with torch.no_grad():
        for cls, reg in zip(model.yolo_head.pred_cls, model.yolo_head.pred_reg, strict=True):
            cls.weight *= 0.1
            cls.bias -= 3
            reg.weight *= 0.25
    return model


def formula_images(n, height, width, seed):
    """[N, 3, H, W] in 0..1: flat 8 x 8 cells plus noise."""
    r = np.random.RandomState(seed)
    cells = r.randint(0, 200, (n, 3, height // 8, width // 8)).repeat(8, 2).repeat(8, 3)
    return torch.from_numpy((cells + r.randint(0, 56, (n, 3, height, width))).astype(np.float32)) / 255


def numbers(model):
    """How many values the state has, as Paddle counts: no counters, but the fixed projection."""
    return sum(t.numel() for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")) + 17


@pytest.mark.parametrize("name", MODELS)
def test_counts_and_channels_are_the_originals(name):
    facts, model = FACTS["models"][name], outline(name)
    assert (model.description.depth_multiple, model.description.width_multiple) == (
        facts["depth_mult"],
        facts["width_mult"],
    )
    assert preset(facts["config"]) == model.description
    assert sum(p.numel() for p in model.parameters()) == facts["numel_trainable"]
    assert numbers(model) == facts["numel_trainable"] + facts["numel_bn_running"] + 17
    for part, count in facts["by_part"].items():  # with running statistics
        # counters are no vectors
        there = sum(t.numel() for t in getattr(model, part).state_dict().values() if t.dim())
        assert there + 17 * (part == "yolo_head") == count
    assert model.backbone.out_channels == facts["out_channels_backbone"]
    assert model.neck.out_channels == facts["out_channels_neck"]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.eps for m in norms} == set(facts["bn_eps"])
    assert {m.momentum and round(1 - m.momentum, 6) for m in norms} == set(facts["bn_momentum"])


@pytest.mark.parametrize("name", SMALL)
def test_tensor_names_and_shapes_are_the_originals(name):
    state = outline(name).state_dict()
    ours = {paddle_name(n): list(t.shape) for n, t in state.items() if not n.endswith("num_batches_tracked")}
    expected = dict(FACTS["state_dict"][name])
    assert expected.pop(PROJECTION) == [1, 17, 1, 1]
    assert ours == expected
    assert list(ours) == list(expected)


@pytest.mark.parametrize(
    "name", [n if n.endswith(("_s", "_m")) else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_outputs_are_the_originals(name, outputs):
    model = perturbed(by_formula(name, FACTS["models"][name]["gain"]))
    with torch.no_grad():
        raws = model(perturbed(formula_images(1, 128, 96, 7)))
    assert [tuple(r.shape) for r in raws] == [
        (1, 128 // s, 96 // s, n) for s in (32, 16, 8) for n in (80, 68)
    ]
    scores = torch.cat([r.flatten(1, 2) for r in raws[::2]], 1).sigmoid().transpose(1, 2)  # [N, C, K]
    ltrb = torch.cat([distances_cells(r.flatten(1, 2)) for r in raws[1::2]], 1)
    # The formula's weights of m and plus-m amplify relative changes of 1e-6 to 3e-4 cells, those of s and l to 2e-5.
    factor = 8 if name.endswith("_m") else 1
    compare(scores.reshape(-1)[::7], outputs[f"{name}.scores.every7"], atol=factor * 1e-4, rms=4e-5)
    compare(ltrb[0], outputs[f"{name}.ltrb"], atol=factor * 3e-4, rms=3e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", ["s", "plus_s"])
def test_features_boxes_and_kept_boxes_are_the_originals(size, layout, outputs):
    expected = {name.removeprefix(f"e2e.{size}."): v for name, v in outputs.items() if f"e2e.{size}." in name}
    model = perturbed(by_formula_mild(f"ppyoloe_{size}")).to(memory_format=layout)
    images = perturbed(formula_images(2, 128, 160, 7)).to(memory_format=layout)
    with torch.no_grad():
        fine, _, coarse = model.backbone(images)
        neck = model.neck(model.backbone(images))
        decoded = model.decode(model(images))
    maps = {"backbone_s8": fine, "backbone_s32": coarse, "neck_s8": neck[2], "neck_s32": neck[0]}
    for name, found in maps.items():  # channels 0, 2, 4, 6 of the first image
        compare(found[0, :8:2], expected[name], atol=2e-4 * np.abs(expected[name]).max())
    scores = decoded.probabilities.transpose(1, 2)[:, :, ::3]
    compare(scores.reshape(-1)[::5], expected["scores.every5"], atol=1e-4)
    assert (decoded.objectness == 1).all()
    boxes = xyxy_from_cxcywh(decoded.boxes).numpy()
    compare(boxes, expected["boxes"], atol=0.03)  # of up to 556 pixels; perturbations move 0.007

    found, _ = detections(decoded, conf=0.01, iou=0.7, max_det=300, multi_label=True)
    compare([len(rows) for rows in found], expected["nms_num"])
    y, x = FACTS["e2e"][size]["scale_factor_yx"]  # their boxes are in pixels of the original image
    first = 0
    for rows in found:
        ours = (rows / torch.tensor([x, y, x, y, 1, 1])).numpy()
        theirs = expected["nms"][first : first + len(rows)]
        compare(nearest(ours, theirs), theirs, atol=0.05)
        first += len(rows)


@pytest.mark.parametrize("size", ["s", "plus_s"])
def test_folding_changes_rounding_only(size):
    # in float32, rounding hides what folding changes
    model = perturbed(by_formula_mild(f"ppyoloe_{size}")).double()
    fused = fuse(model)
    assert not [m for m in fused.modules() if isinstance(m, nn.BatchNorm2d)]
    images = perturbed(formula_images(2, 128, 160, 7)).double()
    with torch.no_grad():
        plain, folded = model(images), fused(images)
    for before, after in zip(plain, folded, strict=True):
        compare(after - before, torch.zeros_like(before), atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_folded_blocks_have_as_many_numbers_as_the_originals(name):
    facts, model = FACTS["models"][name], by_formula(name, 1.0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, RepVgg):  # what they fold; they keep the factors
                module.fold()
    assert numbers(model) + facts["use_alpha_tensors"] == facts["numel_deploy"]


def nearest(ours, theirs):
    """Return our rows x1, y1, x2, y2, score, class as class, score, x1, y1, x2, y2 in the order of theirs."""
    return paired(ours[:, [5, 4, 0, 1, 2, 3]], theirs)


@pytest.mark.parametrize("case", list(FACTS["multiclass_nms"]))
def test_suppression_is_theirs(case):
    """score_threshold is conf, nms_threshold iou, keep_top_k max_det; their nms_top_k (candidates of a class) has no
    counterpart, and changes nothing here."""
    options = FACTS["multiclass_nms"][case]
    with np.load(parity("ppyoloe_model/nms.npz")) as file:
        boxes, scores = (torch.from_numpy(perturbed(file[name])) for name in ("bboxes", "scores"))
        expected, counts = file[f"{case}.out_cls_score_xyxy"], file[f"{case}.num"]
    decoded = Decoded.of(cxcywh_from_xyxy(boxes), scores.transpose(1, 2))
    found, _ = detections(
        decoded,
        conf=options["score_threshold"],
        iou=options["nms_threshold"],
        max_det=options["keep_top_k"],
        multi_label=True,
    )
    compare([len(rows) for rows in found], counts)
    for rows, theirs in zip(found, np.split(expected, [counts[0]]), strict=True):
        compare(nearest(rows.numpy(), theirs), theirs, rtol=2e-5, atol=2e-5)


def test_batch_normalisation_is_theirs_but_for_the_variance_of_a_sample():
    """Paddle averages variances with divisor n, torch with n - 1; n = 8 here, and thousands in training."""
    with np.load(parity("ppyoloe_model/batchnorm.npz")) as file:
        x, y, mean, var = (torch.from_numpy(file[name]) for name in ("x", "y", "mean", "var"))
    x = perturbed(x)
    norm = outline("ppyoloe_s").backbone.stem.conv1.bn
    layer = nn.BatchNorm2d(3, eps=norm.eps, momentum=norm.momentum)
    with torch.no_grad():
        compare(layer(x), y, atol=2e-5)
    assert layer.running_var is not None
    compare(layer.running_mean, mean, atol=5e-6)
    theirs = 0.9 + (layer.running_var - 0.9) * 7 / 8
    compare(theirs, var, atol=5e-6)


@pytest.mark.parametrize("size", ["s", "plus_s"])
def test_statistics_after_one_training_pass_are_the_originals(size):
    """(sum, largest magnitude) of the running means and variances of all 78 layers."""
    model = perturbed(by_formula_mild(f"ppyoloe_{size}")).train()
    before = {n: t.double().clone() for n, t in model.state_dict().items()}
    counts = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda _, inputs, __, name=name: counts.update({name: inputs[0][:, 0].numel()})
            )
    with torch.no_grad():
        model(perturbed(formula_images(2, 128, 160, 7)))
    after = {paddle_name(n): (n, t.double()) for n, t in model.state_dict().items()}
    assert len(FACTS["bn_after"][size]) == 2 * len(counts) == 156
    for name, (total, largest) in FACTS["bn_after"][size].items():
        ours, t = after[name]
        if ours.endswith("running_var"):
            n, old = counts[ours.removesuffix(".running_var")], 0.9 * before[ours]
            t = old + (t - old) * (n - 1) / n
        compare((t.sum(), t.abs().max()), (total, largest), rtol=1e-4, atol=1e-4)
