"""Descriptions as data: what is accepted, what is refused and how it is said; the network around them."""

import copy
import json
import sys
import textwrap
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from walks import sampled

from yolofleet.families.build import build_model, outline
from yolofleet.families.networks.blocks import Focus, Proto, Upsample
from yolofleet.families.networks.description import describe, description_from_dict
from yolofleet.families.networks.detector import Detector
from yolofleet.families.networks.index_limit import images_within_index, may_exceed_index
from yolofleet.families.yolov5.presets import preset, preset_names
from yolofleet.families.yolov5.rows import RowDescription, layers, rounded_depth
from yolofleet.support.errors import ConfigError

TINY = textwrap.dedent("""
    nc: 80  # the data set decides
    depth_multiple: 1.0
    width_multiple: 0.5
    anchors:
      - [10,13, 16,30]
      - [30,61, 62,45]
    backbone:
      [[-1, 1, Focus, [16, 3]],             # 0, stride 2
       [-1, 1, Conv, [32, 3, 2]],           # 1, stride 4
       [-1, 2, Bottleneck, [32]],           # 2
       [-1, 1, Conv, [32, 3, 2]],           # 3, stride 8
       [-1, 1, SPP, [32, [3, 5]]],          # 4
       [-1, 1, Conv, [64, 3, 2, None, 2]],  # 5, stride 16
       [-1, 3, C3, [64, False]]]            # 6
    head:
      [[-1, 1, nn.Upsample, [None, 2, 'nearest']],
       [[-1, 4], 1, Concat, [1]],
       [-1, 1, Conv, [32]],
       [[9, 6], 1, Detect, [nc, anchors]]]
""")


COUNTED = TINY.replace(
    """anchors:
  - [10,13, 16,30]
  - [30,61, 62,45]
""",
    "anchors: 3\n",
)


@pytest.fixture
def tiny_yaml(tmp_path):
    path = tmp_path / "my tiny ü.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def test_a_users_yaml_becomes_a_network(tiny_yaml):
    model = build_model(describe(str(tiny_yaml)), 3)
    assert model.strides == (8, 16)
    assert model.description.name == "my tiny ü"
    raws = model(torch.rand(2, 3, 64, 96))
    assert [tuple(r.shape) for r in raws] == [(2, 2, 8, 12, 8), (2, 2, 4, 6, 8)]
    # K = 2 anchors x (8 x 12 + 4 x 6) cells
    assert model.decode(raws).rows.shape == (2, 240, 8)


@pytest.mark.parametrize("name", preset_names())
def test_descriptions_survive_json(name):
    description = describe(name)
    again = description_from_dict(json.loads(json.dumps(description.to_dict())))
    assert again == description
    assert isinstance(description, RowDescription) and isinstance(again, RowDescription)
    assert layers(again) == layers(description)


def test_a_number_of_anchors_gives_plain_ones_by_stride(tmp_path):
    path = tmp_path / "counted.yaml"
    path.write_text(COUNTED)
    description = describe(str(path))
    assert isinstance(description, RowDescription)
    for level, stride in zip(description.anchors_px, (8, 16), strict=True):
        assert [w * h for w, h in level] == pytest.approx([16 * stride**2] * 3)
        assert [w / h for w, h in level] == pytest.approx([0.5, 1, 2])


POOLS = textwrap.dedent("""
    depth_multiple: 1.0
    width_multiple: 1.0
    anchors:
      - [81,82, 135,169]   # coarse first, against the order of Detect
      - [10,14, 23,27]
    backbone:
      [[-1, 1, Conv, [8, [3, 3], 1]],
       [-1, 1, nn.MaxPool2d, [2]],
       [-1, 1, Conv, [16, 3]],
       [-1, 1, nn.MaxPool2d, [4, 4, 0]],                # stride 8
       [-1, 1, nn.ZeroPad2d, [[0, 1, 0, 1]]],
       [-1, 1, nn.MaxPool2d, [2, 1, 0]],                # 5
       [-1, 1, nn.ZeroPad2d, [1]],
       [-1, 1, Conv, [24, 4, 2, 0]]]                    # 7, stride 16
    head:
      [[[5, 7], 1, Detect, [nc, anchors]]]
""")


def test_pools_and_borders_of_zeros(tmp_path):
    path = tmp_path / "pools.yaml"
    path.write_text(POOLS)
    model = build_model(describe(str(path)), 1)
    assert model.strides == (8, 16)
    assert model.anchors_px is not None
    assert model.anchors_px[:, 0].tolist() == [[10, 14], [81, 82]]
    assert [tuple(r.shape) for r in model(torch.rand(1, 3, 64, 32))] == [(1, 2, 8, 4, 6), (1, 2, 4, 2, 6)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[0, 1, 0, 1]]", "[[0, 1, 0]]", ["backbone row 4", "left, right, top, bottom"]),
        ("[[0, 1, 0, 1]]", "[[0, 1, 0, 0]]", ["row 5", "kernel 2, stride 1"]),
        ("[[0, 1, 0, 1]]", "[[0, 2, 0, 1]]", ["row 5", "after 2 rows or columns of zeros"]),
        ("MaxPool2d, [2, 1, 0]", "MaxPool2d, [2, 1, 1]", ["row 5", "padding 1", "do not divide"]),
        ("MaxPool2d, [4, 4, 0]", "MaxPool2d, [4, 4, 3]", ["row 3", "more than half"]),
        ("MaxPool2d, [4, 4, 0]", "MaxPool2d, [4, 3, 0]", ["row 3", "do not divide"]),
        ("Conv, [24, 4, 2, 0]", "C3, [24]", ["row 7", "row 6", "border"]),
        ("-1, 1, nn.MaxPool2d, [2]]", "-1, 2, nn.MaxPool2d, [2]]", ["row 1", "cannot be repeated"]),
        ("[8, [3, 3], 1]", "[8, [3, 1], 1]", ["row 0", "kernel is [3, 1]"]),
    ],
)
def test_pools_that_do_not_fit_are_refused_with_their_row(tmp_path, old, new, words):
    assert old in POOLS
    path = tmp_path / "pools.yaml"
    path.write_text(POOLS.replace(old, new))
    with pytest.raises(ConfigError) as problem:
        describe(str(path))
    for word in words:
        assert word in str(problem.value), str(problem.value)


def test_the_guides_bare_yaml_names_mean_the_built_in_models():
    assert describe("yolov5s.yaml") == preset("yolov5s")
    assert describe("yolov3-tiny.yaml") == preset("yolov3-tiny")


def replaced(old, new):
    assert old in TINY
    return TINY.replace(old, new)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (replaced("Focus, [16, 3]", "Focsu, [16, 3]"), ["backbone row 0", "Focsu", "did you mean Focus"]),
        (replaced("-1, 3, C3, [64, False]", "-1, 3, C3TR, [64]"), ["backbone row 6", "C3TR", "C3"]),
        (replaced("Conv, [32]]", "Conv, [__import__('os')]]"), ["head row 9", "output channels"]),
        (replaced("[64, 3, 2, None, 2]", "[64, 3, 2, None, 7]"), ["row 5", "7 groups"]),
        (replaced("[-1, 4], 1, Concat", "[-1, 2], 1, Concat"), ["row 8", "strides 8, 4"]),
        (replaced("[-1, 4], 1, Concat", "[-1, 12], 1, Concat"), ["row 8", "earlier row"]),
        (replaced("[[9, 6], 1, Detect", "[[9, 6, 3], 1, Detect"), ["row 10", "3 inputs", "2 levels"]),
        (replaced("Detect, [nc, anchors]", "Detect, [80, anchors]"), ["head row 10", "classes is 80"]),
        (
            replaced("Conv, [32, 3, 2]]", "Conv, [1000000000, 3, 2]]"),
            ["backbone row 1", "1000000000", "16384"],
        ),
        (replaced("-1, 3, C3", "-1, 1000000, C3"), ["backbone row 6", "1..100"]),
        (replaced("depth_multiple: 1.0", "depth_multiple: .inf"), ["depth_multiple", "inf"]),
        (replaced("Conv, [32, 3, 2]]", "Conv, [32, 3, 2, 0]]"), ["row 1", "padding 0", "divide"]),
        (replaced("width_multiple", "with_multiple"), ["with_multiple", "did you mean width_multiple"]),
        (replaced("[30,61, 62,45]", "[30,61, 62]"), ["anchors"]),
        (replaced("[30,61, 62,45]", "[30,-61, 62,45]"), ["level 1", "-61"]),
        (COUNTED.replace("anchors: 3", "anchors: 100"), ["anchors is 100"]),
        (replaced("nearest", "bilinear"), ["row 7", "bilinear", "nearest"]),
        (TINY + "activation: nn.ReLU()\n", ["unknown key", "activation"]),
        (TINY + "ch: 1\n", ["ch is 1", "3 channels"]),
        ("- 1\n- 2\n", ["does not hold `key: value` lines"]),
        ("a: [", ["not YAML"]),
        ("[" * 1200, ["nested too deeply"]),
        ("!!python/object/apply:os.system ['true']", ["does not hold `key: value` lines"]),
    ],
)
def test_a_wrong_description_is_refused_with_its_row(tmp_path, text, words):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as problem:
        describe(str(path))
    assert str(path) in str(problem.value)
    for word in words:
        assert word in str(problem.value), str(problem.value)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("yolov5n-seg", 1_986_637),
        ("yolov5s-seg", 7_611_485),
        ("yolov5m-seg", 21_971_597),
        ("yolov5l-seg", 47_894_397),
        ("yolov5x-seg", 88_774_445),
    ],
)
def test_networks_with_masks_have_the_published_number_of_parameters_and_names(name, published):
    network = outline(describe(name), 80)
    convolutions = {at.rpartition(".")[0] for at, _ in network.named_parameters() if ".bn." in at}
    norms = [p for at, p in network.named_parameters() if ".bn." in at]  # two values, folded into one bias
    assert network.task == "masks" and len(norms) == 2 * len(convolutions)
    assert sum(p.numel() for p in network.parameters()) - sum(p.numel() for p in norms) // 2 == published
    head = {at.removeprefix("model.24.") for at in network.state_dict() if at.startswith("model.24.")}
    layers = {
        f"proto.cv{i}.{part}" for i in (1, 2, 3) for part in ("conv.weight", "bn.weight", "bn.running_var")
    }
    assert head >= layers | {"anchors", "m.0.weight", "m.2.bias"}


def test_a_network_with_masks_decodes_boxes_coefficients_and_prototypes():
    network = build_model(describe("yolov5n-seg"), 3, seed=1).eval()
    with torch.no_grad():
        raws = network(torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)))
        decoded = network.decode(raws)
    cells = 3 * (8 * 12 + 4 * 6 + 2 * 3)
    assert [tuple(part.shape) for part in decoded] == [(2, cells, 8), (2, cells, 32), (2, 32, 16, 24)]
    at = 3 * 8 * 12 + (1 * 4 + 2) * 6 + 5  # of the second level: anchor 1, y 2, x 5
    assert torch.equal(decoded.coefficients[1, at], raws[1][1, 1, 2, 5, 8:])
    assert torch.equal(decoded.decoded[1, at, 4:], raws[1][1, 1, 2, 5, 4:8].sigmoid())


def test_masks_need_a_map_of_stride_8():
    values = describe("yolov5n-seg").to_dict()
    values["head"][-1][0] = [20, 23, 20]
    with pytest.raises(ConfigError, match=r"Segment.*stride 16, expected 8"):
        description_from_dict(values)


def test_networks_of_other_tasks_are_refused_with_the_detector():
    with pytest.raises(ConfigError, match="boxes and masks, and not for classes of whole images") as caught:
        describe("yolov5s-cls")
    assert caught.value.hint == "--model yolov5s"
    with pytest.raises(ConfigError, match="yolov5s6 has no form with masks") as caught:
        describe("yolov5s6-seg")
    assert "yolov5s-seg" in caught.value.hint
    with pytest.raises(ConfigError, match="and not for poses") as caught:
        describe("yolo11n-pose")
    assert "yolov5n" in caught.value.hint and "-pose" not in caught.value.hint


def test_unknown_names_offer_the_nearest():
    with pytest.raises(ConfigError, match="did you mean yolov5s"):
        describe("yolo5s")
    with pytest.raises(ConfigError, match="does not exist"):
        describe("nowhere/mine.yaml")


@pytest.mark.parametrize("nc", [0, -1, 10**9])
def test_absurd_class_counts_are_refused(nc):
    with pytest.raises(ConfigError, match="classes"):
        outline(preset("yolov5n"), nc)


def test_absurd_networks_are_refused_before_memory_is_taken():
    values = preset("yolov5x").to_dict()
    with pytest.raises(ConfigError, match="parameters"):
        build_model(description_from_dict({**values, "width_multiple": 9.9, "depth_multiple": 3.0}), 80)
    many = copy.deepcopy(values)
    many["backbone"] = many["backbone"][:2] + [[-1, 100, "C3", [8]]] * 250 + many["backbone"][2:]
    with pytest.raises(ConfigError, match="too large"):
        description_from_dict(many)


def test_depth_rounds_halves_to_even_and_keeps_single_blocks():
    assert [rounded_depth(n, m) for n, m in ((3, 0.33), (9, 0.33), (3, 0.5), (1, 0.1), (2, 0.1))] == [
        1,
        3,
        2,
        1,
        1,
    ]


def test_starting_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(preset("yolov5n"), 2, seed=5).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, other = (
        build_model(preset("yolov5n"), 2, seed=5).state_dict(),
        build_model(preset("yolov5n"), 2, seed=6),
    )
    assert all(torch.equal(t, second[name]) for name, t in first.items())
    assert not torch.equal(first["model.0.conv.weight"], other.state_dict()["model.0.conv.weight"])
    # torch's own rule: uniform within 1 / sqrt(3 x 6 x 6); batch norm as constructed
    weight = first["model.0.conv.weight"]
    assert 0.95 * 108**-0.5 < weight.abs().max() <= 108**-0.5
    assert abs(weight.std() - 108**-0.5 / 3**0.5) < 0.005
    norm = torch.nn.BatchNorm2d(16)
    for name, value in norm.state_dict().items():
        assert torch.equal(first[f"model.0.bn.{name}"], value)
    assert all(torch.isfinite(t).all() for t in first.values())


def test_raw_predictions_are_views_of_the_convolutions_outputs():
    model = cast(Any, build_model(preset("yolov5n"), 3))  # torch's stub lacks memory_format
    model.to(memory_format=torch.channels_last)
    seen: list[torch.Tensor] = []
    for conv in model.detect.m:
        conv.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    raws = model(torch.rand(1, 3, 64, 64).to(memory_format=torch.channels_last))
    for raw, output in zip(raws, seen, strict=True):
        assert raw.data_ptr() == output.data_ptr()
        assert output.is_contiguous(memory_format=torch.channels_last)


def test_decoding_by_hand():
    model = build_model(preset("yolov5n"), 1)
    raws = [torch.zeros(1, 3, 2, 2, 6), torch.zeros(1, 3, 1, 1, 6), torch.zeros(1, 3, 1, 1, 6)]
    raws[0][0, 1, 0, 1] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 100.0])
    decoded = model.decode(raws).rows
    assert decoded.shape == (1, 3 * 4 + 3 + 3, 6)
    # level 0 (stride 8), anchor 1 (16 x 30), y 0, x 1 is row 1 x 4 + 0 x 2 + 1; sigmoid(0) = 1/2:
    # centre = (2/2 - 1/2 + cell) 8 = 12, 4; size = (2/2)^2 anchor
    assert decoded[0, 5].tolist() == [12, 4, 16, 30, 0.5, 1]
    # level 1 (stride 16), anchor 0 (30 x 61), its only cell
    assert decoded[0, 12].tolist() == [8, 8, 30, 61, 0.5, 0.5]


def test_decoding_half_precision_happens_in_float32():
    model = build_model(preset("yolov5n"), 1)
    raws = [torch.zeros(1, 3, 80, 80, 6, dtype=torch.float16)] + [torch.zeros(1, 3, 1, 1, 6)] * 2
    decoded = model.decode(raws).rows
    assert decoded.dtype == torch.float32
    assert decoded[0, 79, 0] == 79.5 * 8


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_upsampling_equals_interpolation_forward_and_backward(layout):
    x = torch.randn(2, 5, 3, 4).to(memory_format=layout).requires_grad_()
    weights = torch.randn(2, 5, 6, 8)
    ours, theirs = Upsample()(x), F.interpolate(x, scale_factor=2.0, mode="nearest")
    assert torch.equal(ours, theirs)
    mine = torch.autograd.grad((ours * weights).sum(), x)[0]
    expected = torch.autograd.grad((theirs * weights).sum(), x)[0]
    assert (mine - expected).abs().max() < 1e-6


def test_prototypes_of_a_training_equal_those_of_the_published_layers_except_for_rounding():
    torch.manual_seed(0)
    proto, x = Proto(3, 8, 2).double(), torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    weights, calls = torch.randn(2, 2, 10, 14, dtype=torch.float64), []
    proto.upsample.register_forward_hook(lambda *_: calls.append(1))
    wanted = proto.cv3(proto.cv2(proto.upsample(proto.cv1(x))))
    assert len(calls) == 1
    found = proto(x)
    assert len(calls) == 1, "a training on a CPU makes no doubled map"
    inputs = [x, *proto.parameters()]
    ours, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (found, wanted))
    for mine, other in zip((found, *ours), (wanted, *theirs), strict=True):
        assert mine.shape == other.shape and (mine - other).abs().max() <= 1e-12 * other.abs().max()
    proto.eval()(x)
    assert len(calls) == 2, "predictions and exports have the published layers"


def test_focus_sees_every_pixel_once():
    focus = Focus(1, 8)
    focus.conv = torch.nn.Identity()  # type: ignore[assignment]  # shows the input of the convolution
    image = torch.arange(16.0).view(1, 1, 4, 4)
    # top left, bottom left, top right, bottom right of each 2 x 2 block
    assert focus(image)[0, :, 0, 0].tolist() == [0, 4, 1, 5]


def test_gradients_reach_every_parameter():
    model = build_model(preset("yolov5n"), 2).train()
    sum(raw.square().mean() for raw in model(torch.rand(2, 3, 64, 64))).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("yolov5s", 32 * 320 * 320),  # the first convolution
        ("yolov3", 32 * 640 * 640),
        ("yolov5n", 85 * 3 * (80 * 80 + 40 * 40 + 20 * 20)),  # the joined predictions
    ],
)
def test_images_of_a_pass_that_kernels_can_index(name: str, elements: int) -> None:
    model = outline(describe(name), 80).eval()
    assert images_within_index(model, 640) == (2**31 - 1) // elements
    assert images_within_index(model, 1 << 16) == 0


@pytest.mark.parametrize(
    ("name", "classes"),
    sampled(product(["yolov3-spp", "yolov3-tiny", "yolov5x", "yolov5n6", "ppyoloe-x"], [1, 80, 3000]), 4),
)
def test_a_pass_that_a_kernel_cannot_index_is_suspected_from_its_size(name: str, classes: int) -> None:
    fit = images_within_index(outline(describe(name), classes).eval(), 640)
    assert may_exceed_index(fit + 1, 640, classes)
    assert not may_exceed_index(16, 640, classes) or classes == 3000


def test_counting_the_elements_of_a_network_leaves_nothing_in_it() -> None:
    """A network that keeps a tensor of its last pass, and one that cannot run without values."""

    class Grid(nn.Conv2d):
        seen = torch.zeros(1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.seen = images
            return super().forward(images)

    class Reading(nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images * float(images.max()))

    layer = Grid(3, 4, 1)
    assert images_within_index(layer, 2) == (2**31 - 1) // 16
    assert layer.seen.device.type == "cpu"
    assert images_within_index(Reading(3, 4, 1), 2) == sys.maxsize


def test_a_network_of_a_user_may_name_a_layer_features() -> None:
    """A class attribute of that name would hide the layer."""

    class Own(Detector):
        def __init__(self) -> None:
            super().__init__(describe("yolov5n"), 3)
            self.features = nn.Conv2d(3, 4, 1)

    assert isinstance(Own().features, nn.Conv2d)
