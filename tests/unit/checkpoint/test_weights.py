"""Weights files: ours round-trip whole or not at all; YOLOv5's are read in each of their forms."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import safetensors.torch
import torch
from corpus import yolov5_objects
from walks import sampled

from yolofleet.families.build import build_model, outline
from yolofleet.families.custom import CustomDescription
from yolofleet.families.networks.description import description_from_dict, preset, pretrained_name
from yolofleet.families.weights import format as file_format
from yolofleet.families.weights.catalogue import known_weights, resolve_weights
from yolofleet.families.weights.format import write_tensors
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.transfer import model_from_weights, transfer, with_class_order
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.families.yolov5 import presets as row_presets
from yolofleet.families.yolov5 import rows
from yolofleet.families.yolov5.pt_file import description_by_shapes
from yolofleet.storage.fetch import DownloadError
from yolofleet.support.errors import CheckpointError

NAMES = ("ape", "bird ü", "cat's")


def small_description():
    """YOLOv5n's rows at a quarter of its width: 24 channels at most where it has 256."""
    return description_from_dict({**preset("yolov5n").to_dict(), "name": "small", "width_multiple": 0.02})


@pytest.fixture(scope="module")
def model():
    model = build_model(small_description(), 3, seed=1)
    model.names = NAMES
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if "running" in name:
                t.uniform_(0.5, 1.5)
    return model.eval()


def weights_of(model):
    return Weights(model.state_dict(), WeightsHeader.of(model, img=320, extra={"epoch": 4}))


def same(first, second):
    return list(first) == list(second) and all(torch.equal(first[n], second[n]) for n in first)


# -- ours -----------------------------------------------------------------------------------------------------


def test_ours_round_trip(tmp_path, model):
    path = tmp_path / "a folder" / "bést.safetensors"
    write_weights(path, weights_of(model))
    weights = read_weights(path)
    assert weights.header == weights_of(model).header
    assert weights.header.names == NAMES
    assert weights.header.extra == {"epoch": 4}
    again = model_from_weights(weights)
    assert same(again.state_dict(), model.state_dict())
    assert again.names == NAMES and not again.training
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(again.decode(again(images)).rows, model.decode(model(images)).rows)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_half_precision_is_stored_as_fp32_and_layout_does_not_matter(tmp_path, model):
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    tensors["model.0.conv.weight"] = tensors["model.0.conv.weight"].to(memory_format=torch.channels_last)
    write_weights(tmp_path / "w.safetensors", Weights(tensors, weights_of(model).header))
    read = read_weights(tmp_path / "w.safetensors").tensors
    assert {t.dtype for t in read.values()} == {torch.float32, torch.int64}
    assert torch.equal(read["model.0.conv.weight"], tensors["model.0.conv.weight"].float())


def test_counters_may_be_absent(tmp_path, model):
    tensors = {n: t for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    write_weights(tmp_path / "w.safetensors", Weights(tensors, weights_of(model).header))
    again = model_from_weights(read_weights(tmp_path / "w.safetensors"))
    assert again.state_dict()["model.0.bn.num_batches_tracked"] == 0


def header_with(model, **changes):
    return {**weights_of(model).header.to_dict(), **changes}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 99}, "unknown version"),
        ({"nc": 10**9}, "number"),
        ({"nc": 4}, "names"),
        ({"nc": "3"}, "number"),
        ({"names": ["a"]}, "names"),
        ({"strides": [8, 16]}, "strides"),
        ({"strides": 7}, "wrong header"),
        ({"img": -1}, "number"),
        ({"extra": [1]}, "extra"),
        ({"description": {}}, "family None"),
        ({"description": [[]]}, "mapping"),
    ],
)
def test_a_strange_header_is_refused(tmp_path, model, changes, word):
    write_tensors(tmp_path / "w.safetensors", model.state_dict(), {"weights": header_with(model, **changes)})
    with pytest.raises(CheckpointError, match=word):
        read_weights(tmp_path / "w.safetensors")


def test_a_header_cannot_ask_for_memory_that_its_tensors_do_not_need(tmp_path, model):
    """A file of a few bytes that describes yolov5x is refused by names and shapes."""
    large = WeightsHeader(preset("yolov5x"), 3, NAMES, (8, 16, 32), 640).to_dict()
    write_tensors(tmp_path / "w.safetensors", {"model.0.conv.weight": torch.zeros(1)}, {"weights": large})
    with pytest.raises(CheckpointError, match="do not fit the model yolov5x"):
        read_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 10_000, "nonsense"])
def test_a_header_that_chokes_json_is_refused(tmp_path, value):
    tensors = {"a": torch.zeros(1)}
    digest = file_format.tensors_sha256(tensors, {"weights": value})
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(tensors, path, {"weights": value, "sha256": digest})
    with pytest.raises(CheckpointError, match="header"):
        read_weights(path)


def test_a_training_state_is_not_taken_for_weights(tmp_path):
    write_tensors(tmp_path / "step-1.safetensors", {"model/a": torch.zeros(1)}, {"state": {}, "step": 1})
    with pytest.raises(CheckpointError, match="training state") as problem:
        read_weights(tmp_path / "step-1.safetensors")
    assert "--resume" in str(problem.value)


# -- transfer ---------------------------------------------------------------------------------------------------


def test_transfer_takes_what_fits_and_says_what_does_not(model):
    other = build_model(small_description(), 5, seed=2)
    fresh = {n: t.clone() for n, t in other.state_dict().items()}
    report = transfer(other, weights_of(model))
    assert torch.equal(other.state_dict()["model.0.conv.weight"], model.state_dict()["model.0.conv.weight"])
    for level in range(3):
        assert torch.equal(other.state_dict()[f"model.24.m.{level}.bias"], fresh[f"model.24.m.{level}.bias"])
    assert len(report.skipped) == 6
    assert ("model.24.m.0.bias", "24 in the file, 30 here") in report.skipped
    total = len([n for n in fresh if not n.endswith(("num_batches_tracked", "anchors"))])
    assert report.text().startswith(
        f"{total - 6} of {total} tensors taken over; freshly initialised: model.24.m.0.weight"
    )


def test_transfer_keeps_the_anchors_of_the_model(model):
    doubled = [[[2 * w, 2 * h] for w, h in level] for level in small_description().anchors_px]
    other = build_model(small_description().with_anchors(doubled), 3)
    report = transfer(other, weights_of(model))
    assert not report.skipped
    assert other.anchors_px is not None and other.anchors_px.tolist() == doubled


def test_transfer_of_nothing_is_an_error(model):
    with pytest.raises(CheckpointError, match="no layer of the weights"):
        transfer(build_model(preset("yolov5n"), 3), weights_of(model))


def test_a_network_with_masks_takes_the_layers_of_one_for_boxes_but_not_its_head():
    # 3 (5 + 40) rows of the head are 3 (5 + 8 + 32)
    boxes, masks = build_model(preset("yolov5n"), 40, seed=1), build_model(preset("yolov5n-seg"), 8, seed=2)
    for start, to in ((boxes, masks), (masks, boxes)):
        fresh = {name: t.clone() for name, t in to.state_dict().items()}
        assert fresh["model.24.m.0.weight"].shape == start.state_dict()["model.24.m.0.weight"].shape
        report = transfer(to, weights_of(start))
        left_out = dict(report.skipped)
        assert all(name.startswith("model.24.") for name in left_out)
        for level in range(3):
            assert f"find {start.task}, and these {to.task}" in left_out[f"model.24.m.{level}.weight"]
            assert torch.equal(to.state_dict()[f"model.24.m.{level}.bias"], fresh[f"model.24.m.{level}.bias"])
        assert ("model.24.proto.cv1.conv.weight" in left_out) == (to is masks)
        assert torch.equal(to.state_dict()["model.0.conv.weight"], start.state_dict()["model.0.conv.weight"])


def test_another_order_of_classes_leaves_the_coefficients_of_masks_in_their_place():
    model = build_model(preset("yolov5n-seg"), 3, seed=1)
    model.names = NAMES
    turned = model_from_weights(with_class_order(weights_of(model), [2, 0, 1]))
    assert turned.names == (NAMES[2], NAMES[0], NAMES[1])
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, theirs = model.eval().decode(model(images)), turned.decode(turned(images))
    assert torch.equal(mine.of_classes([2, 0, 1]).decoded, theirs.decoded)
    assert torch.equal(mine.coefficients, theirs.coefficients)
    assert torch.equal(mine.prototypes, theirs.prototypes)


# -- YOLOv5's forms -----------------------------------------------------------------------------------------------


@pytest.fixture
def foreign():
    """Makes YOLOv5's module object around a model: same tensors, their class paths, their ``yaml`` mapping."""
    with yolov5_objects() as made:
        yield partial(made, names=NAMES)


def halved(model):
    return {n: t.half().float() if t.is_floating_point() else t for n, t in model.state_dict().items()}


def by_name(tensors):
    return dict(sorted(tensors.items()))


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")  # torch, of the old format
@pytest.mark.parametrize(
    ("legacy", "names"), sampled(product((False, True), (list(NAMES), dict(enumerate(NAMES)))), 3)
)
def test_a_checkpoint_with_module_objects(tmp_path, model, foreign, legacy, names):
    other = build_model(small_description(), 3, seed=9)
    content = {
        "epoch": 7,
        "model": foreign(other),
        "ema": foreign(model, names=names),
        "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]},
        "opt": {"imgsz": 416, "device": ""},
    }
    torch.save(content, tmp_path / "last.pt", _use_new_zipfile_serialization=not legacy)
    weights = read_weights(tmp_path / "last.pt")
    assert same(by_name(weights.tensors), by_name(halved(model)))
    header = weights.header
    assert (header.names, header.nc, header.img, header.strides) == (NAMES, 3, 416, (8, 16, 32))
    assert isinstance(header.description, rows.RowDescription)
    assert header.description.rows == small_description().rows
    assert header.description.name == "small"
    content["ema"] = None
    torch.save(content, tmp_path / "best.pt", _use_new_zipfile_serialization=not legacy)
    assert same(by_name(read_weights(tmp_path / "best.pt").tensors), by_name(halved(other)))
    torch.save(content["model"], tmp_path / "module.pt", _use_new_zipfile_serialization=not legacy)
    assert same(by_name(read_weights(tmp_path / "module.pt").tensors), by_name(halved(other)))


def test_learned_anchors_come_from_the_tensor_not_from_the_yaml(tmp_path, model, foreign):
    root = foreign(model)
    root.model._modules["24"].anchors *= 2
    torch.save({"model": root}, tmp_path / "best.pt")
    anchors = read_weights(tmp_path / "best.pt").header.anchors_px
    assert anchors[0][0] == (20, 26)  # 10 x 13 in the description


def test_anchors_that_the_yaml_only_counts_come_from_the_tensor(tmp_path, model, foreign):
    root = foreign(model)
    root.yaml["anchors"] = 3  # what YOLOv5's hyperparameter `anchors: 3` leaves there
    torch.save({"model": root}, tmp_path / "best.pt")
    assert read_weights(tmp_path / "best.pt").header.anchors_px == small_description().anchors_px


def test_a_moving_average_beside_its_number_of_updates(tmp_path, model, foreign):
    other = build_model(small_description(), 3, seed=9)
    torch.save({"model": foreign(other), "ema": (foreign(model), 17)}, tmp_path / "last.pt")
    assert same(by_name(read_weights(tmp_path / "last.pt").tensors), by_name(halved(model)))


def old_description():
    """The form of releases v4.0 and v5.0: Focus first, SPP before the last block, which has no shortcuts."""
    values = small_description().to_dict()
    backbone = values["backbone"]
    backbone[0] = [-1, 1, "Focus", [64, 3]]
    backbone[8:] = [[-1, 1, "SPP", [1024, [5, 9, 13]]], [-1, 3, "C3", [1024, False]]]
    return description_from_dict({**values, "name": "old"})


def yolov3_description():
    values = preset("yolov3-spp").to_dict()
    values["head"][3][3] = [512, [1, 1]]  # as its files write a kernel
    return description_from_dict({**values, "width_multiple": 0.02, "depth_multiple": 0.3})


@pytest.mark.parametrize(
    "description",
    [
        old_description(),
        yolov3_description(),
        description_from_dict({**preset("yolov3-tiny").to_dict(), "width_multiple": 0.02}),
        description_from_dict({**preset("yolov5n6").to_dict(), "width_multiple": 0.02}),
        description_from_dict({**preset("yolov5n-seg").to_dict(), "width_multiple": 0.02}),
    ],
    ids=["v5.0", "yolov3-spp", "yolov3-tiny", "P6", "masks"],
)
def test_other_networks_of_rows_are_read(tmp_path, foreign, description):
    model = build_model(description, 3, seed=4).eval()
    root = foreign(model)
    last = root.model._modules[str(len(description.rows) - 1)]
    last.register_buffer("anchor_grid", torch.ones(len(model.strides), 1, 3, 1, 1, 2).half())
    torch.save({"model": root, "ema": None}, tmp_path / "w.pt")
    weights = read_weights(tmp_path / "w.pt")
    assert weights.header.strides == model.strides
    assert isinstance(weights.description, rows.RowDescription)
    assert weights.description.rows == description.rows
    again, images = model_from_weights(weights), torch.rand(1, 3, 64, 64)
    for ours, theirs in zip(again(images), model.half().float()(images), strict=True):
        assert torch.equal(ours, theirs)


def test_other_activations_and_modules_are_refused(tmp_path, model, foreign):
    torch.save({"model": foreign(model, activation=torch.nn.LeakyReLU)}, tmp_path / "v3.pt")
    with pytest.raises(CheckpointError, match="activation LeakyReLU") as problem:
        read_weights(tmp_path / "v3.pt")
    assert "v4.0 to v7.0" in problem.value.hint and "--model" in problem.value.hint
    values = foreign(model).yaml
    values["backbone"][2][2] = "C2f"
    torch.save({"model": foreign(model, yaml=values)}, tmp_path / "v8.pt")
    with pytest.raises(CheckpointError, match="unknown module 'C2f'") as problem:
        read_weights(tmp_path / "v8.pt")
    assert "v4.0 to v7.0" in problem.value.hint


def test_a_module_that_holds_itself_is_refused(tmp_path, model, foreign):
    root = foreign(model)
    root.model._modules["1"]._modules["again"] = root
    torch.save({"model": root}, tmp_path / "loop.pt")
    with pytest.raises(CheckpointError, match="endless"):
        read_weights(tmp_path / "loop.pt")


def doubling():
    """2^60 leaves by sharing: nobody may walk through it or write it out."""
    value: tuple[object, ...] = ("x",)
    for _ in range(60):
        value = (value, value)
    return value


@pytest.mark.parametrize("attribute", ["yaml_file", "names", "_non_persistent_buffers_set", "class_weights"])
def test_strange_attributes_are_passed_over(tmp_path, model, foreign, attribute):
    torch.save({"model": foreign(model, **{attribute: doubling()}), "opt": doubling()}, tmp_path / "w.pt")
    weights = read_weights(tmp_path / "w.pt")
    assert same(by_name(weights.tensors), by_name(halved(model)))
    assert len(weights.header.names) == 3


@pytest.mark.parametrize("key", ["depth_multiple", "anchors", "backbone", "row", "inputs", "module", "args"])
def test_strange_descriptions_are_refused(tmp_path, model, foreign, key):
    root = foreign(model)
    if key in root.yaml:
        root.yaml[key] = doubling()
    else:
        row = doubling() if key == "row" else list(root.yaml["backbone"][0])
        if key != "row":
            row[{"inputs": 0, "module": 2, "args": 3}[key]] = doubling()
        root.yaml["backbone"][0] = row
    torch.save({"model": root}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="cannot build its model"):
        read_weights(tmp_path / "w.pt")


def test_weights_that_are_not_finite_are_refused(tmp_path, model, foreign):
    root = foreign(model)
    root.model._modules["3"]._modules["conv"].weight[0, 0, 0, 0] = float("nan")
    torch.save({"model": root}, tmp_path / "nan.pt")
    with pytest.raises(CheckpointError, match=r"model\.3\.conv\.weight is not finite"):
        read_weights(tmp_path / "nan.pt")


@pytest.mark.parametrize(
    "form",
    ["pt", "pt in a dict", "pt of DataParallel", "pt under model, without moving average", "safetensors"],
)
def test_plain_state_dicts_are_recognised_by_their_shapes(tmp_path, form):
    model = build_model(preset("yolov5n"), 2, seed=3)
    state, path = model.state_dict(), tmp_path / "w.bin"
    if form == "safetensors":
        safetensors.torch.save_file(state, path)
    elif form == "pt in a dict":
        torch.save({"state_dict": state, "epoch": 1}, path)
    elif form == "pt of DataParallel":
        torch.save({f"module.{n}": t for n, t in state.items()}, path)
    elif form == "pt under model, without moving average":
        torch.save({"ema": None, "model": state, "optimizer": {"state": {}}}, path)
    else:
        torch.save(state, path)
    weights = read_weights(path)
    assert weights.description == preset("yolov5n")
    assert (weights.header.nc, weights.header.names) == (2, ("0", "1"))
    assert same(by_name(weights.tensors), by_name(state))


@pytest.mark.parametrize("name", row_presets.preset_names())
def test_every_built_in_model_is_recognised_by_its_shapes(name):
    tensors = outline(preset(name), 3).state_dict()
    assert description_by_shapes(tensors) == preset(name)
    missing = next(n for n in tensors if n.endswith(".conv.weight"))
    assert description_by_shapes({n: t for n, t in tensors.items() if n != missing}) is None


def test_a_plain_state_dict_of_an_own_model_needs_its_description(tmp_path, model):
    safetensors.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="--cfg"):
        read_weights(tmp_path / "w.safetensors")
    weights = read_weights(tmp_path / "w.safetensors", small_description())
    assert same(model_from_weights(weights).state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match="does not fit"):
        read_weights(tmp_path / "w.safetensors", preset("yolov5n6"))


@pytest.mark.parametrize(
    "content", [{}, {"epoch": 3}, [1, 2], torch.zeros(3), {"model": {"a": 1}}, {"model": 7}]
)
def test_files_without_a_model_say_what_they_hold(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt"):
        read_weights(tmp_path / "w.pt")


# -- names --------------------------------------------------------------------------------------------------------


def test_bare_names_are_looked_for_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DownloadError) as problem:  # tests run offline
        resolve_weights("yolov5s.pt")
    assert str(tmp_path / "weights") in problem.value.render()
    (tmp_path / "weights").mkdir(exist_ok=True)
    cached = tmp_path / "weights" / "yolov5s.pt"
    cached.touch()
    assert resolve_weights("yolov5s.pt") == cached
    assert resolve_weights("yolov5s") == cached
    (tmp_path / "yolov5s.pt").touch()
    assert resolve_weights("yolov5s.pt").resolve() == tmp_path / "yolov5s.pt"
    for wrong in ("nowhere/yolov5s.pt", str(tmp_path)):
        with pytest.raises(CheckpointError):
            resolve_weights(wrong)
    with pytest.raises(CheckpointError, match="is a folder, neither of a run nor of transformers"):
        resolve_weights(str(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"has a config\.json, but no model\.safetensors"):
        resolve_weights(str(tmp_path))


def test_pretrained_weights_are_of_the_family_of_the_network():
    for name in ("yolov5m", "yolov3-tiny", "darknet-yolov3-spp", "ppyoloe-plus-s"):
        assert pretrained_name(preset(name)) == name
        assert name in [weights.name for weights in known_weights()]
    preset_s: Any = preset("ppyoloe-s")
    own = replace(preset_s, name="mine")
    assert pretrained_name(own) == "ppyoloe-s"
    assert pretrained_name(CustomDescription("Mine")) == ""
