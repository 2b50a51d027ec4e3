"""Darknet networks against outputs of Darknet's C library and of OpenCV, which differ in a constant of batch norm."""

import functools
import hashlib
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed, seed
from formula import formula_image
from reference import parity, reference

from yolofleet.families.darknet import weights_file
from yolofleet.families.darknet.cfg import layers, parse_cfg, preset, read_cfg
from yolofleet.families.darknet.network import DarknetNetwork
from yolofleet.families.weights.value import Weights, WeightsHeader

FACTS = json.loads(parity("darknet/facts.json").read_text())
MINI = ("mini_spp", "mini_tiny")
NETWORKS = (*MINI, "yolov3-tiny", "yolov3-spp", "yolov3")
EPS = {"darknet": 1e-5, "opencv": 1e-6}  # added to a variance
HEIGHT, WIDTH = 64, 96
ROLES = {  # role of a tensor -> its name in the formula, and values from a random state
    "conv.weight": (
        "conv_w",
        lambda r, shape, gain: r.standard_normal(shape) * np.sqrt(gain / np.prod(shape[1:])),
    ),
    "conv.bias": ("conv_b", lambda r, shape, gain: 0.5 * r.standard_normal(shape)),
    "bn.weight": ("bn_w", lambda r, shape, gain: 0.5 + r.random_sample(shape)),
    "bn.bias": ("bn_b", lambda r, shape, gain: 0.2 * r.standard_normal(shape)),
    "bn.running_mean": ("bn_mean", lambda r, shape, gain: 0.2 * r.standard_normal(shape)),
    "bn.running_var": ("bn_var", lambda r, shape, gain: 0.5 + r.random_sample(shape)),
}


def description_of(name):
    if name in MINI:
        return read_cfg(parity(f"darknet/{name}.cfg"))
    # the finer level of the file that made the numbers has other anchors than that of the published weights
    text = preset(f"darknet-{name}").cfg().replace("mask=1,2,3", "mask=0,1,2")
    return parse_cfg(text, name=name, source=name)


@functools.lru_cache(maxsize=2)
def formula_network(name, seed=None):
    """In evaluation mode, its weights a function of their names: convolutions are numbered apart from layers."""
    description = description_of(name)
    model = DarknetNetwork(description, description.nc).eval()
    convolutions: dict[str, int] = {}
    for tensor_name, tensor in model.state_dict().items():
        _, layer, role = tensor_name.split(".", 2)
        if role in ROLES:
            number = convolutions.setdefault(layer, len(convolutions))
            official, draw = ROLES[role]
            r = np.random.RandomState(zlib.crc32(f"conv{number}.{official}".encode()))
            values = draw(r, tuple(tensor.shape), FACTS[name]["gain"])
            tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    return perturbed(model)


@functools.cache
def formula_picture(seed):
    return perturbed(formula_image(HEIGHT, WIDTH, 7))


def outputs(name, program):
    perturbed(0.0)  # twins look here, and the cache may answer
    return outputs_of(name, program, seed())


@functools.lru_cache(maxsize=8)
def outputs_of(name, program, seed):
    """What ``program`` gives for each [yolo], in the order of the file: its input, and boxes in its form."""
    model = formula_network(name, seed)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = EPS[program]
    with torch.no_grad():
        raws = model(formula_picture(seed))
        decoded = model.decode(raws).rows[0].split([raw[0, ..., 0].numel() for raw in raws])
    found = {}
    # coarsest first in all the files
    for j, (raw, rows) in enumerate(zip(raws[::-1], decoded[::-1], strict=True)):
        a, h, w, values = raw.shape[1:]
        found[f"raw{j}"] = raw.permute(0, 1, 4, 2, 3).reshape(1, a * values, h, w).numpy()
        if program == "darknet":  # logits of sizes, all else between 0 and 1
            activated = torch.cat([raw[..., :2].sigmoid(), raw[..., 2:4], raw[..., 4:].sigmoid()], -1)
            found[f"yolo_activated{j}"] = (
                activated.permute(0, 1, 4, 2, 3).reshape(1, a * values, h, w).numpy()
            )
        else:  # rows by y, x, anchor; parts of the image; class scores with objectness, 0 up to 0.2
            rows = rows.view(a, h, w, values).permute(1, 2, 0, 3).reshape(-1, values).clone()
            rows[:, :4] /= torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])
            rows[:, 5:] *= rows[:, 4:5]
            rows[:, 5:] *= rows[:, 5:] > 0.2
            found[f"yolo{j}"] = rows.numpy()
    return found


def assert_near(found, expected, key):
    near_threshold = np.abs(np.maximum(found, expected) - 0.2) < 1e-5
    factor = 10 if "yolo" in key else 1  # sizes are exponentials, up to 300 times the picture here
    rtol = 5e-5 if "yolo" in key else 0.0
    compare(
        found, expected, rtol=rtol, atol=factor * 2e-4, rms=factor * 3e-5, ignore=near_threshold, name=key
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_darknet_and_opencv(name):
    steps = FACTS["steps"]["mini" if name in MINI else "full"]
    with np.load(parity("darknet/outputs.npz")) as file:
        keys = [key for key in file.files if key.split(".")[1] == name]
        assert len(keys) >= 4
        for key in keys:
            program, _, output = key.split(".")
            found = outputs(name, program)[output]
            if output.startswith("yolo") and program == "opencv":
                if name in MINI:
                    found = found[:: steps["row"]]
                else:
                    found = found[:: steps["row"], :: steps["column"]]
            else:
                found = found.reshape(-1)[:: steps["raw"]]
            assert found.shape == file[key].shape
            assert_near(found, file[key], key)


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_and_file_sizes_are_the_originals(name):
    facts, description = FACTS[name], description_of(name)
    assert len(layers(description)) == facts["layers"]
    with torch.device("meta"):
        model = DarknetNetwork(description, description.nc)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == facts["convs"]
    stored = sum(t.numel() for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked"))
    assert stored == facts["floats"]
    assert 4 * stored + 20 == facts["bytes"]
    if name not in MINI:  # as published for the networks of these shapes
        published = {"yolov3-tiny": 8_852_366, "yolov3-spp": 62_998_749, "yolov3": 61_949_149}
        assert sum(p.numel() for p in model.parameters()) == published[name]


@pytest.mark.parametrize("name", MINI)
def test_a_file_that_we_write_is_the_original_to_the_byte(name, tmp_path):
    model = formula_network(name)
    header = WeightsHeader.of(model, img=96, extra={"darknet": {"version": [0, 2, 5], "seen": 32013312}})
    path = tmp_path / f"{name}.weights"
    weights_file.write(path, Weights(dict(model.state_dict()), header))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FACTS[name]["sha256"]
    again = weights_file.read(path)  # with the .cfg that was written beside it
    assert again.header == replace(header, names=again.header.names)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in again.tensors.items())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MINI)
def test_layouts_agree(name, layout):
    model, image = formula_network(name, seed()), formula_picture(seed())
    perturbed(0.0)  # both may come from the cache
    with torch.no_grad():
        expected = model(image)
        found = model.to(memory_format=layout)(image.to(memory_format=layout))
    for ours, theirs in zip(found, expected, strict=True):
        compare(ours - theirs, torch.zeros_like(theirs), atol=4e-5)


def test_published_weights_come_back_to_the_byte(tmp_path):
    original = reference("weights/yolov3-tiny.weights")
    weights = weights_file.read(original, preset("darknet-yolov3-tiny"))
    assert (weights.header.nc, weights.header.strides, weights.header.img) == (80, (16, 32), 416)
    assert weights.header.extra == {"darknet": {"version": [0, 2, 0], "seen": 32013312}}
    copy = tmp_path / "mine.weights"
    weights_file.write(copy, weights)
    assert copy.read_bytes() == original.read_bytes()
    published = read_cfg(reference("weights/yolov3-tiny.mask123.cfg"))
    assert read_cfg(tmp_path / "mine.cfg").sections == published.sections
