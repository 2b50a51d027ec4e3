"""Darknet's .weights: what is read, what is refused, and in which bytes."""

import math
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from yolofleet.families.darknet import weights_file as darknet
from yolofleet.families.darknet.cfg import DarknetDescription, parse_cfg, preset
from yolofleet.families.darknet.network import DarknetNetwork
from yolofleet.families.weights.transfer import transfer
from yolofleet.families.weights.value import Weights, WeightsHeader
from yolofleet.families.yolov5.presets import preset as row_preset
from yolofleet.support.errors import CheckpointError

CFG = """\
[net]
width=64
height=64
[convolutional]
batch_normalize=1
filters=4
size=3
stride=2
pad=1
activation=leaky
[convolutional]
batch_normalize=1
filters=6
groups=2
size=3
stride=2
pad=1
activation=leaky
[convolutional]
filters=7
activation=linear
[yolo]
anchors=8,9
classes=2
num=1
"""
# of each batch norm 4 values a filter, then weights: 4 4 + 4 3 9, 4 6 + 6 2 9; of the last 7 biases, 7 6 weights
VALUES = (16 + 108) + (24 + 108) + (7 + 42)


def description(nc=2):
    return parse_cfg(CFG, name="small", source="small.cfg").with_classes(nc)


def network(nc=2):
    model = DarknetNetwork(description(), nc)
    model.initialise(torch.Generator().manual_seed(3))
    return model


HEADER = struct.pack("<3iQ", 0, 2, 5, 77)


def content(values=None, header=HEADER):
    values = np.arange(VALUES) if values is None else values
    return header + np.asarray(values, "<f4").tobytes()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "weights of ü"
    folder.mkdir()
    (folder / "small.cfg").write_text(CFG)
    return folder


def written(folder, content):
    path = folder / "small.weights"
    path.write_bytes(content)
    return path


def test_values_go_to_their_tensors_in_darknets_order(folder):
    weights = darknet.read(written(folder, content()))
    first = 0
    for name, shape in (
        ("layers.0.bn.bias", (4,)),
        ("layers.0.bn.weight", (4,)),
        ("layers.0.bn.running_mean", (4,)),
        ("layers.0.bn.running_var", (4,)),
        ("layers.0.conv.weight", (4, 3, 3, 3)),
        ("layers.1.bn.bias", (6,)),
        ("layers.1.bn.weight", (6,)),
        ("layers.1.bn.running_mean", (6,)),
        ("layers.1.bn.running_var", (6,)),
        ("layers.1.conv.weight", (6, 2, 3, 3)),
        ("layers.2.conv.bias", (7,)),
        ("layers.2.conv.weight", (7, 6, 1, 1)),
    ):
        last = first + int(np.prod(shape))
        assert weights.tensors[name].tolist() == np.arange(first, last).reshape(shape).tolist()
        first = last
    header = weights.header
    assert first == VALUES and len(weights.tensors) == 12
    assert (header.description, header.nc, header.strides, header.img) == (description(), 2, (4,), 64)
    assert header.extra == {"darknet": {"version": [0, 2, 5], "seen": 77}}


@pytest.mark.parametrize(
    "header",
    [struct.pack("<4i", 0, 1, 0, 9), struct.pack("<3iQ", 0, 2, 0, 2**40), struct.pack("<3iQ", 1, 0, 0, 5)],
)
def test_the_counter_has_32_bits_before_version_0_2(folder, header):
    original = content(header=header)
    weights = darknet.read(written(folder, original))
    assert weights.tensors["layers.0.bn.bias"].tolist() == [0, 1, 2, 3]
    darknet.write(folder / "again.weights", weights)
    assert (folder / "again.weights").read_bytes() == original


def test_a_written_file_needs_nothing_else(folder, tmp_path):
    model = network(nc=5)
    names = ("a", "b", "c", "d", "e")
    weights = Weights(dict(model.state_dict()), replace(WeightsHeader.of(model, img=96), names=names))
    path = tmp_path / "new" / "mine.weights"
    darknet.write(path, weights)
    again = darknet.read(path)
    assert isinstance(again.description, DarknetDescription)
    assert again.header.nc == again.description.nc == 5
    loaded = DarknetNetwork(again.description, 5)
    assert loaded.load_state_dict(again.tensors, strict=False).unexpected_keys == []
    for name, t in model.state_dict().items():
        assert torch.equal(t, loaded.state_dict()[name])
    darknet.write(path, weights)  # again: its .cfg is already there
    with pytest.raises(CheckpointError, match=r"mine\.cfg exists and describes another network"):
        darknet.write(path, darknet.read(written(folder, content())))
    assert darknet.read(path).header.nc == 5


def test_another_number_of_classes_is_found_by_size(folder):
    weights = Weights(dict(network(nc=7).state_dict()), WeightsHeader.of(network(nc=7), img=64))
    darknet.write(folder / "seven.weights", weights)
    found = darknet.read(folder / "seven.weights", description())
    assert isinstance(found.description, DarknetDescription)
    assert found.header.nc == 7 and found.description.nc == 2
    assert found.tensors["layers.2.conv.bias"].shape == (12,)
    model = network()
    report = transfer(model, found)
    assert {name for name, _ in report.skipped} == {"layers.2.conv.weight", "layers.2.conv.bias"}


@pytest.mark.parametrize(("convolutions", "values"), [(1, 124), (2, 256)])
def test_files_of_backbones_end_after_a_convolution(folder, convolutions, values):
    found = darknet.read(written(folder, content(range(values))))
    assert len(found.tensors) == 5 * convolutions
    assert f"the first {5 * convolutions} of 12 tensors" in found.header.extra["partial"]
    report = transfer(network(), found)
    assert len(report.loaded) == 5 * convolutions
    with pytest.raises(CheckpointError, match="missing"):
        darknet.write(folder / "b.weights", found)


def test_the_published_backbone_ends_where_darknet_cuts_it():
    total, convolutions = 20, 0  # bytes of the header
    for name, shape in darknet._tensors(preset("darknet-yolov3")):
        total += 4 * math.prod(shape) if convolutions < 52 else 0
        convolutions += name.endswith("conv.weight")
    assert total == 162_482_580  # bytes of darknet53.conv.74


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda full: full[:-4], ["1,216 bytes", "1,220", "cut off"]),
        (lambda full: full + b"\0" * 4, ["1,224 bytes", "1,220", "28 more or less for each class"]),
        (lambda full: full[:-1], ["1,219 bytes"]),
        (lambda full: full[:20], ["0 bytes after its header"]),
        (lambda full: full[:16], ["ends inside its header"]),
        (lambda full: full[:5], ["does not begin with"]),
        (lambda full: b"", ["does not begin with"]),
        (lambda full: b"PK\3\4" + full[4:], ["does not begin with"]),
        (
            lambda full: full[:20] + struct.pack("<f", float("nan")) + full[24:],
            ["layers.0.bn.bias is not finite"],
        ),
        (lambda full: full[:-4] + struct.pack("<f", float("-inf")), ["layers.2.conv.weight is not finite"]),
        (lambda full: full[:68] + struct.pack("<f", -1) + full[72:], ["layers.0.bn.running_var", "negative"]),
    ],
)
def test_damaged_files_are_refused_with_their_bytes(folder, cut, words):
    path = written(folder, cut(content()))
    with pytest.raises(CheckpointError) as problem:
        darknet.read(path)
    assert str(path) in str(problem.value)
    for word in words:
        assert word in str(problem.value), str(problem.value)


def test_a_file_without_its_cfg_says_so(tmp_path):
    path = tmp_path / "small.weights"
    path.write_bytes(content())
    with pytest.raises(CheckpointError, match=r"no small\.cfg beside it.*\n.*--cfg"):
        darknet.read(path)
    assert darknet.read(path, description()).header.nc == 2
    (tmp_path / "small.cfg").write_text(CFG.replace("stride=2", "stride=9"))
    with pytest.raises(CheckpointError, match=r"small\.cfg: line 8 \[convolutional\]: stride"):
        darknet.read(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        darknet.read(tmp_path / "none.weights", description())


def test_only_whole_darknet_networks_are_written(tmp_path):
    header = WeightsHeader.of(network(), img=64)
    tensors = dict(network().state_dict())
    with pytest.raises(CheckpointError, match="cannot write yolov5n of the family yolov5"):
        darknet.write(tmp_path / "a.weights", Weights({}, replace(header, description=row_preset("yolov5n"))))
    with pytest.raises(CheckpointError, match=r"called \*\.weights"):
        darknet.write(tmp_path / "a.pt", Weights(tensors, header))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"darknet": 3},
        {"darknet": {"version": [0, 2], "seen": 1}},
        {"darknet": {"version": [0, 2, 2**40], "seen": 1}},
        {"darknet": {"version": [0, 2, 0], "seen": "x"}},
    ],
)
def test_a_header_without_sense_gives_the_usual_one(tmp_path, extra):
    weights = Weights(dict(network().state_dict()), WeightsHeader.of(network(), img=64, extra=extra))
    darknet.write(tmp_path / "a.weights", weights)
    assert (tmp_path / "a.weights").read_bytes()[:20] == struct.pack("<3iQ", 0, 2, 5, 0)


def test_a_large_network_of_a_small_file_takes_no_memory(folder):
    wide = (
        CFG.replace("filters=6", "filters=16384")
        .replace("groups=2\n", "")
        .replace("filters=4", "filters=16384")
    )
    (folder / "small.cfg").write_text(wide)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="expected 9,66"):  # 16384 x 16384 x 9 values
        darknet.read(written(folder, content()))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5_000_000
