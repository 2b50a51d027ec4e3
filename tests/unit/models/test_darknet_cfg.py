"""What of a .cfg is understood, what is refused and how it is said; the network around it, by hand."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from small_files import TWO_LEVELS_CFG as CFG

from yolofleet.families.darknet.cfg import (
    DarknetDescription,
    layers,
    parse_cfg,
    preset,
    preset_names,
    read_cfg,
)
from yolofleet.families.darknet.network import DarknetNetwork, Pool
from yolofleet.families.darknet.sections import Convolutional, Maxpool
from yolofleet.families.networks.cost import gflops
from yolofleet.families.networks.description import describe, description_from_dict
from yolofleet.families.networks.detector import fuse
from yolofleet.support.errors import ConfigError


def description(text=CFG):
    return parse_cfg(text, name="two", source="two.cfg")


def network(text=CFG, nc=3):
    torch.manual_seed(0)
    model = DarknetNetwork(description(text), nc)
    model.initialise(torch.Generator().manual_seed(1))
    return model


def changed(old, new, count=1):
    assert old in CFG
    return CFG.replace(old, new, count)


def test_a_file_becomes_a_network():
    found = description()
    assert (found.nc, found.img, len(found.sections)) == (3, 64, 13)
    plan = layers(found)
    inputs = [(-1,), (0,), (1, 0), (2,), (3,), (4,), (5,), (3,), (7,), (8,), (9, 2), (10,), (11,)]
    assert [layer.inputs for layer in plan] == inputs
    # the route takes the second half of 8 channels; the last one joins 8 and 8
    assert [layer.out_channels for layer in plan] == [8, 8, 8, 8, 4, 16, 16, 8, 8, 8, 16, 16, 16]
    assert [int(layer.stride) for layer in plan] == [2, 2, 2, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2]
    # finest level first, though the file has the coarsest first
    assert found.anchors_px == (((4, 5), (8.5, 9)), ((8.5, 9), (20, 10)))
    model = network()
    assert model.strides == (2, 4) and [coding.scale_xy for coding in model.codings] == [1, 1.1]
    raws = model(torch.rand(2, 3, 32, 64))
    assert [tuple(raw.shape) for raw in raws] == [(2, 2, 16, 32, 8), (2, 2, 8, 16, 8)]
    # K = 2 anchors x (16 x 32 + 8 x 16) cells
    assert model.decode(raws).rows.shape == (2, 1280, 8)
    names = list(model.state_dict())
    assert names[:2] == ["layers.0.conv.weight", "layers.0.bn.weight"]
    assert "layers.5.conv.bias" in names and "layers.5.bn.weight" not in names


def test_what_each_section_computes():
    model, x = network().eval(), torch.randn(2, 3, 32, 64)
    first, second = model.layers[0], model.layers[1]
    with torch.no_grad():
        a = F.leaky_relu(first.bn(F.conv2d(x, first.conv.weight, stride=2, padding=1)), 0.1)
        b = F.mish(second.bn(F.conv2d(a, second.conv.weight, padding=1, groups=2)))
        c = (a + b).relu()
        pooled = torch.stack([c[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(0)
        coarse = F.conv2d(pooled[:, 4:], model.layers[5].conv.weight, model.layers[5].conv.bias)
        large = pooled.repeat_interleave(2, 2).repeat_interleave(2, 3)
        fine = F.conv2d(torch.cat([large, c], 1), model.layers[11].conv.weight, model.layers[11].conv.bias)
        for raw, expected in zip(model(x), (fine, coarse), strict=True):
            expected = expected.view(2, 2, 8, *expected.shape[2:]).permute(0, 1, 3, 4, 2)
            torch.testing.assert_close(raw, expected)


@pytest.mark.parametrize(
    "size, stride, padding", [(2, 1, None), (2, 2, None), (5, 1, None), (3, 2, None), (2, 2, 1)]
)
def test_pooling_windows_begin_half_the_padding_before_the_map(size, stride, padding):
    x = torch.randn(1, 1, 8, 12)
    found = Pool(Maxpool(size=size, stride=stride, padding=padding))(x)
    assert found.shape == (1, 1, 8 // stride, 12 // stride)
    total = size - 1 if padding is None else padding
    for i in range(8 // stride):
        for j in range(12 // stride):
            top, left = i * stride - total // 2, j * stride - total // 2
            window = x[0, 0, max(top, 0) : top + size, max(left, 0) : left + size]
            assert found[0, 0, i, j] == window.max()


def test_decoding_by_hand():
    model = network(nc=1)
    fine, coarse = torch.zeros(1, 2, 2, 4, 6), torch.zeros(1, 2, 1, 2, 6)
    fine[0, 1, 1, 2] = torch.tensor([100.0, 0.0, math.log(2), 50.0, 0.0, -100.0])
    coarse[0, 0, 0, 1, 0] = 100.0
    decoded = model.decode([fine, coarse]).rows
    assert decoded.shape == (1, 16 + 4, 6) and decoded.dtype == torch.float32
    # level 0 (stride 2), anchor 1 (8.5 x 9), y 1, x 2 is row 8 + 1 x 4 + 2: centre (2 + 1, 1 + 1/2) 2, width
    # 2 x 8.5, height at the limit of e^10 anchors
    torch.testing.assert_close(decoded[0, 14], torch.tensor([6, 3, 17, 9 * math.exp(10), 0.5, 0]))
    # level 1 (stride 4, scale_x_y 1.1), anchor 0 (8.5 x 9), x 1: centre (1 + 1.1 - 0.05, 0.55 - 0.05) 4
    torch.testing.assert_close(decoded[0, 17], torch.tensor([8.2, 2, 8.5, 9, 0.5, 0.5]))


def test_raw_predictions_are_views_and_half_precision_is_decoded_in_float32():
    model = network().to(memory_format=torch.channels_last)
    seen: list[torch.Tensor] = []
    for i in (11, 5):
        model.layers[i].conv.register_forward_hook(lambda _module, _inputs, output: seen.insert(0, output))
    raws = model(torch.rand(1, 3, 32, 64).to(memory_format=torch.channels_last))
    assert [raw.data_ptr() for raw in raws] == [output.data_ptr() for output in seen]
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in seen)
    torch.testing.assert_close(
        model.decode([raw.half() for raw in raws]).rows, model.decode(raws).rows, rtol=0.05, atol=0.05
    )


def test_folding_batch_norm_changes_rounding_only():
    model = network().train()
    for _ in range(3):
        model(torch.randn(2, 3, 32, 64))  # statistics
    fused, x = fuse(model), torch.randn(1, 3, 32, 64)
    assert not any("bn" in name for name in fused.state_dict())
    with torch.no_grad():
        for ours, theirs in zip(fused(x), model.eval()(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter_and_are_right_in_place():
    model = network().double().train()
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)  # one image: a micro-batch may be that small
    sum(raw.square().sum() for raw in model(x)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    weight = model.layers[0].conv.weight
    grad, step = weight.grad[3, 1, 2, 0].item(), 1e-6
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            weight[3, 1, 2, 0] += sign * step
            values.append(sum(raw.square().sum() for raw in model(x)).item())
            weight[3, 1, 2, 0] -= sign * step
    assert grad == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


def test_starting_weights_depend_on_the_seed_alone_and_have_the_usual_priors():
    description, states = preset("darknet-yolov3-tiny"), []
    for _ in range(2):
        with torch.device("meta"):
            model = DarknetNetwork(description, 2)
        model = model.to_empty(device="cpu")
        model.initialise(torch.Generator().manual_seed(5))
        states.append(model.state_dict())
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())
    assert all(torch.isfinite(t).all() for t in states[0].values())
    bias = states[0]["layers.15.conv.bias"].view(3, 7)  # stride 32; 512 channels go in
    prior = torch.tensor([0, 0, 0, 0, math.log(8 / 20**2), *[math.log(0.6 / (2 - 0.99999))] * 2])
    assert ((bias - prior).abs() <= 512**-0.5).all()


@pytest.mark.parametrize("name", preset_names())
def test_descriptions_survive_json_and_their_own_text(name):
    found = preset(name)
    assert DarknetDescription.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert parse_cfg(found.cfg(), name=name, source="x") == found
    assert description_from_dict(found.to_dict()) == found == describe(name)
    assert hash(found) == hash(preset(name))


def test_other_classes_change_the_convolution_before_each_level():
    found = preset("darknet-yolov3")
    other = found.with_classes(3)
    changed = [i for i, (a, b) in enumerate(zip(found.sections, other.sections, strict=True)) if a != b]
    assert changed == [81, 82, 93, 94, 105, 106]
    convolution = other.sections[81]
    assert isinstance(convolution, Convolutional)
    assert convolution.filters == 3 * (5 + 3) and other.nc == 3
    assert other.with_classes(80) == found
    assert [raw.shape[-1] for raw in network(nc=7)(torch.rand(1, 3, 32, 64))] == [12, 12]


def test_other_anchors_go_to_their_levels():
    anchors = (((1, 2), (3, 4.25)), ((5, 6), (7, 8)))
    found = description().with_anchors(anchors)
    assert found.anchors_px == anchors
    assert DarknetNetwork(found, 3).anchors_px.tolist() == [[[1, 2], [3, 4.25]], [[5, 6], [7, 8]]]
    with pytest.raises(ConfigError, match="filters=16"):
        description().with_anchors((((1, 2),), ((5, 6),)))


@pytest.mark.parametrize(
    ("name", "backbone", "published"), [("darknet-yolov3", 75, 65.86), ("darknet-yolov3-tiny", 13, 5.56)]
)
def test_built_in_networks_have_their_published_size(name, backbone, published):
    with torch.device("meta"):
        model = DarknetNetwork(preset(name), 80)
    assert model.backbone_groups == backbone and len(model.freeze_groups()) == len(preset(name).sections)
    # 10^9 operations that Darknet prints at 416 pixels: of convolutions alone
    assert gflops(model, 416) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed("[max]", "[maxpol]"), ["line 26", "maxpol", "did you mean maxpool"]),
        (CFG + "[avgpool]\n", ["avgpool"]),
        (changed("width = 64", "width = 6x4"), ["line 4 [net]", "width", "'6x4'", "whole number"]),
        (changed("width = 64\n", ""), ["line 2 [net]", "width is missing"]),
        (changed("channels=3", "channels=1"), ["line 6 [net]", "'1'", "known: 3"]),
        (changed("filters=8", "filters=1000000000000"), ["line 10", "filters", "'1000000000000'"]),
        (changed("filters=8", "filters=99999999"), ["line 8", "too large"]),
        (changed("size=3", "size=33"), ["size", "'33'", "1..31"]),
        (changed("size=3", "size=4"), ["line 8", "size 4", "stride 2", "do not divide"]),
        (changed("groups=2", "groups=3"), ["line 15", "3 groups", "8 and 8 channels"]),
        (changed("mish", "selu"), ["line 22", "'selu'", "leaky"]),
        (changed("from=-2", "from=-9"), ["line 23 [shortcut]", "section -7"]),
        (changed("from=-2", "from=3"), ["section 3", "must read earlier"]),
        (changed("from=-2\n", ""), ["from is missing"]),
        (
            changed("activation=relu", "weights_type=per_channel"),
            ["weights_type", "per_channel", "not supported"],
        ),
        (changed("pad=1", "dilation=2"), ["line 13", "dilation", "'2'", "not supported"]),
        (changed("stride=1", "stride_x=1"), ["stride_x", "did you mean stride"]),
        (changed("filters=8", "filters=8\nfilters=9"), ["line 11", "filters is given twice"]),
        (changed("group_id=1", "group_id=2"), ["part 2 of 2 groups"]),
        (changed("layers=-1, 2", "layers=-1, 3"), ["line 51", "strides 2, 4"]),
        (changed("layers=-1, 2", "layers=-1, 5"), ["line 51", "section 5, which belongs to a [yolo]"]),
        (changed("layers=-4", "layers=-1"), ["line 45 [route]", "boxes of a [yolo]"]),
        (changed("activation=linear", "activation=leaky"), ["line 38 [yolo]", "activation=linear"]),
        (changed("filters=16", "filters=16\nbatch_normalize=1"), ["line 39 [yolo]", "batch_normalize"]),
        (
            changed("filters=16", "filters=255"),
            ["line 38 [yolo]", "filters=255", "expected 16", "2 anchors x (5 + 3 classes)"],
        ),
        (changed("mask = 1, 2", "mask = 1, 3"), ["mask names anchor 3"]),
        (changed("mask = 1, 2", "mask = 1"), ["filters=16"]),
        (changed("num=3", "num=4"), ["num=4", "8 numbers", "got 6"]),
        (changed("8.5,9", "8.5,-9"), ["anchors", "'-9'"]),
        (changed("8.5,9", "8.5,nan"), ["anchors", "'nan'"]),
        (changed("scale_x_y=1.1", "new_coords=1"), ["new_coords", "not supported"]),
        (changed("jitter", "jiter"), ["'jiter'", "not supported"]),
        (changed("stride=2\n[dropout]", "stride=4\n[dropout]"), ["line 48 [upsample]", "'4'"]),
        (
            CFG + "[route]\nlayers=2\n[convolutional]\nfilters=4\nactivation=linear\n",
            ["no [yolo] depends on it"],
        ),
        (CFG + "[net]\nwidth=3\nheight=3\n", ["only one [net]"]),
        (CFG[: CFG.index("[convolutional]")], ["[yolo] sections, got 0"]),
        (CFG[CFG.index("[convolutional]") :], ["does not begin with [net]"]),
        ("", ["does not begin with [net]"]),
        ("width=3", ["line 1", "expected a [section]"]),
        (CFG + "nonsense\n", ["nonsense", "expected a [section]"]),
        ("[net]\nwidth=9\nheight=9\n" + "[dropout]\n" * 1200, ["at most 1000 sections"]),
        (changed("layers=-1, 2", "layers=" + "-1," * 600), ["got 600"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "my net ü.cfg"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as problem:
        read_cfg(path)
    assert str(path) in str(problem.value)
    for word in words:
        assert word in str(problem.value), str(problem.value)


def test_levels_must_agree():
    one_anchor = changed("mask=0,1", "mask=0")
    one_anchor = one_anchor[: one_anchor.rindex("filters=16")] + one_anchor[
        one_anchor.rindex("filters=16") :
    ].replace("16", "8", 1)
    with pytest.raises(ConfigError, match="1, 2 anchors"):
        description(one_anchor)
    last = CFG.rindex("filters=16")
    with pytest.raises(ConfigError, match="4, 3 classes"):
        description(CFG[:last] + CFG[last:].replace("16", "18", 1).replace("classes=3", "classes=4"))


def test_files_that_are_no_text_or_not_there(tmp_path):
    path = tmp_path / "a.cfg"
    path.write_bytes(b"\xff\xfe\x00[net]" * 10)
    with pytest.raises(ConfigError, match="expected a"):
        read_cfg(path)
    path.write_bytes(b"# " + "é".encode() * 600_000)
    with pytest.raises(ConfigError, match="the limit is"):
        read_cfg(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_cfg(tmp_path / "none.cfg")
    path.write_bytes(b"\xef\xbb\xbf" + CFG.replace("\n", "\r\n").encode() + b"# \xb5 in another encoding\n")
    assert read_cfg(path).sections == description().sections


@pytest.mark.parametrize(
    "values",
    [None, [], {}, {"family": "yolov5"}, {"family": "darknet", "name": 3, "cfg": CFG}, {"family": "darknet", "name": "x"},
     {"family": "darknet", "name": "x", "cfg": 7}, {"family": "darknet", "name": "x", "cfg": CFG, "nc": 3},
     {"family": "darknet", "name": "x" * 201, "cfg": CFG}, {"family": "darknet", "name": "x", "cfg": "#" * 1_000_001}],
)  # fmt: skip
def test_wrong_values_are_no_description(values):
    with pytest.raises(ConfigError, match=r"header of f\.safetensors"):
        DarknetDescription.from_dict(values, source="header of f.safetensors")
