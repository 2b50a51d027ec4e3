"""YOLOv3, YOLOv3-SPP and YOLOv3-tiny in the YAML trainers' form (SiLU, squared sigmoid), against numbers of
ultralytics/yolov3."""

import json

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from formula import fill_by_formula, formula_image
from reference import parity

from yolofleet.families.build import build_model, outline
from yolofleet.families.networks.cost import gflops
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import fuse
from yolofleet.families.yolov5.network import RowNetwork
from yolofleet.families.yolov5.rows import RowDescription

FACTS = json.loads(parity("yolov3_rows/facts.json").read_text())
NAMES = list(FACTS)
COLUMNS = [0, 1, 2, 3, 4, *range(5, 85, 5)]  # kept ones of decoded outputs; of their rows every 7th


@pytest.fixture(scope="module")
def outputs():
    with np.load(parity("yolov3_rows/formula_io.npz")) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_counts_and_operations_are_the_originals(name):
    facts, description = FACTS[name], describe(name)
    assert isinstance(description, RowDescription)
    model = outline(description, 80)
    assert isinstance(model, RowNetwork)
    assert {n: list(t.shape) for n, t in model.state_dict().items()} == facts["state_dict"]
    assert list(model.state_dict()) == list(facts["state_dict"])
    assert sum(p.numel() for p in model.parameters()) == facts["params"]
    rows = [row.to_list() for row in description.rows]
    parameters = [sum(p.numel() for p in layer.parameters()) for layer in model.model]
    assert [
        [inputs, module.removeprefix("nn."), count]
        for (inputs, _, module, _), count in zip(rows, parameters, strict=True)
    ] == facts["layers"]
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == facts["bn_layers"]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == facts["conv2d_layers"]
    assert list(model.strides) == facts["strides"]
    assert np.array_equal(description.anchors_px, facts["anchors_px"])
    inputs = {i for layer, inputs in enumerate(model._inputs) for i in inputs if i != layer - 1}
    last = len(model.model) - 2  # Detect names its last input, too
    assert inputs | {last} == {*facts["save_indices"], last}
    compare(gflops(model), facts["gflops_640_thop_unfused"], rtol=1e-12)


@pytest.mark.parametrize(
    "name", [n if n == "yolov3-tiny" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_outputs_are_the_originals(name, outputs):
    facts = FACTS[name]
    model = build_model(describe(name), 80).eval()
    assert isinstance(model, RowNetwork)
    assert np.array_equal(model.detect.anchors.numpy(), np.float32(facts["anchors_buffer_grid_units"]))
    fill_by_formula(model, facts["formula"]["gain"])
    height, width = facts["formula"]["input_hw"]
    images = perturbed(formula_image(height, width, facts["formula"]["seed"]))
    perturbed(model)
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            model.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks memory_format
            raws = model(images.to(memory_format=layout))
            decoded = model.decode(raws).rows
            for level, raw in enumerate(raws):
                expected = outputs[f"{name}.raw{level}.every7"]
                compare(raw.reshape(-1)[::7], expected, atol=5e-4)
            rows, expected = decoded[:, ::7, COLUMNS], outputs[f"{name}.decoded_rows"]
            compare(rows[..., :4], expected[..., :4], atol=0.05)  # pixels
            compare(rows[..., 4:], expected[..., 4:], atol=1e-4)  # probabilities
        fused = fuse(model)
        folded = fused.decode(fused(images)).rows
    assert sum(p.numel() for p in fused.parameters()) == facts["params_fused"]
    change = folded - decoded
    compare(change[..., :4], torch.zeros_like(change[..., :4]), atol=0.05)
    compare(change[..., 4:], torch.zeros_like(change[..., 4:]), atol=1e-4)
