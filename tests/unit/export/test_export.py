"""Exported files: what is written computes what the network computes, and says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from exported import NAMES, SIZE_HW, job_of, metadata_of, network, pictures
from torch import nn
from walks import chosen

from yolofleet.config.load import resolve_export
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.families.networks.detector import Detector
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.inference.export.export_metadata import ExportMetadata, Suppression
from yolofleet.inference.export.exporter import export, export_command, size_of
from yolofleet.inference.export.formats import FORMATS, format_named, format_of
from yolofleet.inference.export.graph import ExportGraph, ZeroBorder
from yolofleet.inference.export.runtime import Runtime, open_exported, open_weights
from yolofleet.support.errors import CheckpointError, ConfigError, NumericsError, install_hint
from yolofleet.tasks.boxes.differences import partners_difference
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.boxes.task import BOXES

pytestmark = pytest.mark.long

HERE = [name for name in ("onnx", "torchscript", "openvino", "ncnn") if not [
    module for module in (*FORMATS[name].writes, *FORMATS[name].runs) if find_spec(module) is None
]]  # fmt: skip
QUICK = [
    name if name in ("onnx", "torchscript") else pytest.param(name, marks=pytest.mark.slow) for name in HERE
]


@pytest.fixture(scope="module")
def model() -> Detector:
    return network()


@pytest.fixture(scope="module")
def torchscript_file(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model.torchscript"
    FORMATS["torchscript"].module.write(job_of(model, metadata_of(model)), out)
    return out


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    write_weights(path, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    """A folder of the test's own for what the opening of files remembers."""
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path_factory.mktemp("cache")))


def assert_near(theirs: Decoded, ours: Decoded, size_hw: tuple[int, int] = SIZE_HW) -> None:
    """Rounding, through a network that multiplies it."""
    off = BOXES.difference(ours, theirs, size_hw, in_order=True)
    assert off.place < 0.05 and off.score < 1e-3


# -- what is computed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", QUICK)
def test_a_file_of_one_size_computes_what_the_network_does_for_any_number_of_images(model, format, tmp_path):
    out = tmp_path / ("a b ü" + FORMATS[format].suffix)
    metadata = metadata_of(model, batch=1 if format == "ncnn" else 2)
    figures = export(model, FORMATS[format], metadata, SIZE_HW, out)
    assert figures["verified"] and figures["box_px"] < 0.05 and figures["score"] < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "nothing temporary is left"
    runtime = open_exported(out)
    images = pictures(3)
    with torch.inference_mode():
        ours = model.decode(model(images))
    assert_near(runtime.decode(runtime(images)), ours)
    assert (runtime.nc, runtime.names, runtime.strides) == (3, NAMES, (8, 16, 32))


AFTERWARDS = """
import gc, os, signal, sys
from pathlib import Path
import torch
from yolofleet.inference.export.runtime import open_exported
one, two = (open_exported(Path(sys.argv[1])) for _ in range(2))
one(torch.rand(1, 3, 64, 96))
del one
two(torch.rand(1, 3, 64, 96))
del two
gc.collect()
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
@pytest.mark.parametrize("format", HERE)
def test_ctrl_c_still_interrupts_after_a_runtime_was_used(model, format, tmp_path):
    """OpenVINO's leaves a stack for signals behind that is gone: the process would end with a segmentation fault."""
    out = tmp_path / ("m" + FORMATS[format].suffix)
    export(model, FORMATS[format], metadata_of(model), SIZE_HW, out)
    child = [sys.executable, "-X", "faulthandler", "-c", AFTERWARDS, str(out)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["interrupted"]), done.stderr


@pytest.mark.parametrize("format", [name for name in HERE if name in ("onnx", "torchscript")])
def test_a_file_of_any_size_computes_what_the_network_does_at_another_one(model, format, tmp_path):
    out = tmp_path / ("model" + FORMATS[format].suffix)
    metadata = metadata_of(model, size_hw=None, batch=None)
    FORMATS[format].module.write(job_of(model, metadata), out)
    runtime = open_exported(out, trust=bool(FORMATS[format].danger))
    for count, size_hw in ((1, (96, 64)), (2, (32, 128))):
        images = pictures(count, size_hw)
        with torch.inference_mode():
            ours = model.decode(model(images))
        assert_near(runtime(images), ours, size_hw)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("yolov3-tiny", "darknet-yolov3-tiny")),
        "ppyoloe-s",
    ],
)
def test_networks_of_every_family_can_be_exported(name, tmp_path):
    pytest.importorskip("onnxruntime")
    other = network(name)
    is_free = name == "ppyoloe-s"
    metadata = metadata_of(other, size_hw=None if is_free else SIZE_HW)
    figures = export(other, FORMATS["onnx"], metadata, SIZE_HW, tmp_path / "model.onnx")
    # a free size is also tried three times as large, where rounding moves the boxes of random weights further
    most_px, most_score = (0.5, 1e-3) if is_free else (0.01, 1e-4)
    assert figures["verified"] and figures["box_px"] < most_px and figures["score"] < most_score


def test_onnx_in_16_bits_has_inputs_and_outputs_in_32(model, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxslim")
    out = tmp_path / "model.onnx"
    export(model, FORMATS["onnx"], metadata_of(model, half=True), SIZE_HW, out, simplify=True)
    images, runtime = pictures(1), open_exported(out)
    with torch.inference_mode():
        ours = model.decode(model(images))
    assert runtime(images).rows.dtype == torch.float32
    off = BOXES.difference(ours, runtime(images), SIZE_HW, in_order=True)
    assert 1e-3 < off.place < 8 and 1e-4 < off.score < 0.05
    weights = sum(p.numel() for p in model.parameters())
    assert 2 * weights < out.stat().st_size < 2.3 * weights


@pytest.mark.parametrize(
    ("format", "agnostic"), [("onnx", False), pytest.param("openvino", True, marks=pytest.mark.slow)], ids=str
)
def test_suppression_inside_a_file_keeps_the_boxes_that_ours_keeps(model, format, agnostic, tmp_path):
    if format not in HERE:
        pytest.skip(f"{format} is not installed")
    settings = Suppression(median_score(model), 0.45, 20, agnostic)
    metadata = metadata_of(model, size_hw=None, batch=None, nms=settings)
    out = tmp_path / ("model" + FORMATS[format].suffix)
    figures = export(model, FORMATS[format], metadata, SIZE_HW, out)
    assert figures["boxes"] == 6 * 20, (
        "the limit is reached on every picture, so it is part of what is compared"
    )
    assert figures["kept_box_px"] < 1e-3 and figures["kept_score"] < 1e-5
    boxes = open_exported(out)(pictures(3))
    assert boxes.shape == (3, 20, 6)
    assert (boxes[:, :-1, 4] >= boxes[:, 1:, 4]).all(), "best first"


def median_score(model: Detector) -> float:
    """Above which half of the places of some picture lie."""
    with torch.inference_mode():
        decoded = model.decode(model(pictures(1)))
    return round(float(decoded.scores.amax(2).median()), 3)


def test_suppression_inside_a_file_fills_up_with_zeros_where_it_finds_nothing(model, tmp_path):
    pytest.importorskip("onnxruntime")
    images = torch.cat([pictures(1), torch.zeros(1, 3, *SIZE_HW)])
    with torch.inference_mode():
        decoded = model.decode(model(images))
    best = decoded.scores.amax((1, 2))
    settings = Suppression(float(best.mean()), 0.45, 300, False)  # between the best of both pictures
    metadata = metadata_of(model, batch=None, nms=settings)
    FORMATS["onnx"].module.write(job_of(model, metadata), tmp_path / "model.onnx")
    runtime, least = open_exported(tmp_path / "model.onnx"), int(best.argmin())
    boxes = runtime(images)
    assert not boxes[least].any()
    assert boxes[1 - least, 0].any() and not boxes[1 - least, -1].any()
    assert not runtime(images[least : least + 1]).any(), "no box in the whole batch"


def test_borders_of_zeros_are_those_of_zero_padding():
    x = torch.randn(2, 3, 5, 7)
    for padding in ((0, 1, 0, 1), (1, 0, 2, 3), (0, 0, 0, 0)):
        assert torch.equal(ZeroBorder(padding)(x), nn.ZeroPad2d(padding)(x))


@pytest.mark.parametrize("name", ["yolov3-tiny", "darknet-yolov3-tiny"])
def test_the_graph_that_is_exported_equals_the_network(name):
    other = network(name)
    images = pictures(1)
    with torch.inference_mode():
        assert_near(Decoded(ExportGraph(other)(images)), other.decode(other(images)))


# -- verification ----------------------------------------------------------------------------------------------


class Deceiving(nn.Module):
    """Computes something else for the black picture that is traced than for all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.any()) else x + 1


def test_a_file_that_computes_something_else_is_not_kept(tmp_path):
    pytest.importorskip("onnxruntime")
    wrong = network()
    layers: Any = wrong.model
    layers[0] = nn.Sequential(Deceiving(), layers[0])
    out = tmp_path / "model.onnx"
    out.write_bytes(b"an older file")
    with pytest.raises(NumericsError, match="differs from the network") as caught:
        export(wrong, FORMATS["onnx"], metadata_of(wrong), SIZE_HW, out)
    assert caught.value.exit_code == 5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert out.read_bytes() == b"an older file"


def test_a_torchscript_file_is_verified_with_torchs_own_loader(model, tmp_path, monkeypatch):
    load = torch.jit.load

    def worse(file, **options):
        module = load(file, **options)
        return lambda images: module(images) + 1

    out = tmp_path / "model.torchscript"
    figures = export(model, FORMATS["torchscript"], metadata_of(model), SIZE_HW, out)
    assert figures["verified"] and "torch.jit" in figures["runtime"]
    monkeypatch.setattr(torch.jit, "load", worse)
    with pytest.raises(NumericsError, match="differs from the network"):
        export(model, FORMATS["torchscript"], metadata_of(model), SIZE_HW, out)


@pytest.mark.skipif(sys.platform == "win32", reason="a limit on the size of files stands for a full disk")
@pytest.mark.parametrize("format", chosen(QUICK, "torchscript"))
def test_a_full_disk_is_named_and_leaves_nothing(weights, format, tmp_path):
    out = tmp_path / f"full{FORMATS[format].suffix}"
    program = (
        "import resource, sys; from yolofleet.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); sys.exit(main(sys.argv[1:]))"
    )
    words = ["export", "--weights", weights, "--format", format, "--out", out]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert f"StorageError: cannot write {out}: File too large" in done.stderr and "--out" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", chosen(HERE, "onnx"))
def test_an_export_needs_no_folder_for_temporary_files(model, format, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    nms = Suppression(0.25, 0.45, 300, False) if FORMATS[format].nms else None
    out = tmp_path / f"made{FORMATS[format].suffix}"
    assert export(model, FORMATS[format], metadata_of(model, nms=nms), SIZE_HW, out)["verified"]
    assert list(tmp_path.iterdir()) == [out]


def test_boxes_without_a_partner_are_infinitely_far():
    row = np.array([[0.0, 0, 10, 10, 0.9, 1]])

    def off(ours, theirs, above=0.5):
        found = partners_difference(FoundBoxes.of_rows(ours), FoundBoxes.of_rows(theirs), above=above)
        return found.place, found.score

    assert off(row, row) == (0, 0)
    assert off(row, row + np.array([0.25, 0, 0, 0, 0.05, 0])) == pytest.approx((0.25, 0.05))
    for other in (row[:0], row + np.eye(6)[5]):  # none, and another class
        assert off(row, other) == off(other, row) == (float("inf"), float("inf"))
    assert off(row, row[:0], above=0.95) == (0, 0)


def test_without_its_runtime_a_file_is_written_and_said_to_be_unverified(model, tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    out = tmp_path / "model.onnx"
    figures = export(model, FORMATS["onnx"], metadata_of(model), SIZE_HW, out)
    assert out.stat().st_size > 4 * sum(p.numel() for p in model.parameters())
    assert not figures["verified"] and figures["why_not"] == "onnxruntime is not installed"
    assert figures["install"] == install_hint("onnx")
    with pytest.raises(ConfigError, match="needs onnxruntime") as caught:
        open_exported(out)
    assert caught.value.hint == install_hint("onnx")


# -- the verb --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"format": "onxx"}, "did you mean onnx?"),
        ({"format": "paddle"}, "not supported"),
        ({"format": "tflite", "half": True}, "tflite does not support --half"),
        ({"format": "ncnn", "dynamic": "size"}, "ncnn does not support --dynamic"),
        ({"format": "torchscript", "nms": True}, "use --format onnx or openvino"),
        ({"format": "torchscript", "simplify": True}, "does not support --simplify"),
        ({"format": "torchscript", "weights": "nowhere.pt"}, "neither here nor in"),
        ({"format": "torchscript", "out": "model.onnx"}, "ends in .torchscript"),
    ],
)
def test_what_cannot_be_exported_says_why(settings, says, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        export_command(resolve_export({"weights": str(weights), **settings}).value)
    assert says in caught.value.render()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "--weights is missing"),
        ({"weights": "w", "conf": "0.5"}, "no effect without --nms"),
        ({"weights": "w", "dynamic": "batch", "batch": "2"}, "are mutually exclusive"),
        ({"weights": "w", "img": "64x96"}, "img"),
    ],
)
def test_settings_of_export_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(ConfigError) as caught:
        resolve_export(settings)
    assert says in caught.value.render()


def test_sizes_are_rounded_up_to_the_stride():
    assert size_of([640], 32) == (640, 640)
    assert size_of([100], 32) == (128, 128)
    assert size_of([384, 641], 64) == (384, 704)


def test_a_converter_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch):
    from yolofleet.inference.export.formats import need

    monkeypatch.setitem(sys.modules, "pnnx", None)
    with pytest.raises(ConfigError, match="needs pnnx") as caught:
        need(format_named("ncnn"), FORMATS["ncnn"].writes, "--format ncnn")
    assert caught.value.hint == install_hint("ncnn")


# -- metadata -----------------------------------------------------------------------------------------------------


def test_metadata_come_back_from_text(model):
    for metadata in (
        metadata_of(model),
        metadata_of(model, size_hw=None, batch=None, half=True, nms=Suppression(0.25, 0.45, 300, True)),
    ):
        assert ExportMetadata.from_json(metadata.to_json(), source="here") == metadata


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"names": []},
        {"names": "person"},
        {"names": [1]},
        {"strides": [0]},
        {"strides": []},
        {"strides": [8] * 100},
        {"size_hw": [640]},
        {"size_hw": [1e9, 2]},
        {"batch": -1},
        {"batch": True},
        {"nms": {"conf": 2, "iou": 0.5, "max_det": 1, "agnostic": False}},
        {"nms": {"conf": float("nan"), "iou": 0.5, "max_det": 1, "agnostic": False}},
        {"family": None},
    ],
)
def test_metadata_that_somebody_changed_are_refused(model, change):
    values = json.loads(metadata_of(model).to_json()) | change
    with pytest.raises(CheckpointError, match="here"):
        ExportMetadata.from_json(json.dumps(values), source="here")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_metadata_that_are_none_are_refused(text):
    with pytest.raises(CheckpointError, match="here"):
        ExportMetadata.from_json(text, source="here")


def test_names_are_shown_without_control_characters(model):
    values = json.loads(metadata_of(model).to_json()) | {"names": ["a\x1b[2Jb"]}
    assert ExportMetadata.from_json(json.dumps(values), source="here").names == ("a?[2Jb",)


def test_formats_are_known_by_names_and_folders(tmp_path):
    for name in ("a.onnx", "a.torchscript", "A.ONNX", "a.tflite"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "ov").mkdir()
    (tmp_path / "ov" / "model.xml").write_bytes(b"")
    found = {path.name: format_of(path) for path in tmp_path.iterdir()}
    names = {name: format and format.name for name, format in found.items()}
    assert names == {
        "a.onnx": "onnx",
        "A.ONNX": "onnx",
        "a.torchscript": "torchscript",
        "a.tflite": "tflite",
        "ov": "openvino",
    }
    assert format_of(tmp_path / "ov" / "model.xml") is FORMATS["openvino"]
    assert format_of(tmp_path) is None and format_of(tmp_path / "missing.onnx") is None


def test_onnx_runtime_takes_the_cpu_only_where_nobody_named_a_gpu(model, tmp_path, monkeypatch):
    """onnxruntime-gpu takes the CPU if a library of CUDA is missing. Here a build for the CPU stands for it."""
    onnxruntime = pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    FORMATS["onnx"].module.write(job_of(model, metadata_of(model)), file)
    there = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        assert open_exported(file).place.endswith("CPU")
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(ConfigError, match=r"ONNX Runtime .* cannot use cuda:0"),
    ):
        open_exported(file, torch.device("cuda", 0))


def test_weights_and_exported_files_open_by_the_same_name(torchscript_file, weights):
    assert isinstance(open_weights(str(torchscript_file), trust=True), Runtime)
    assert isinstance(open_weights(str(weights)), Detector)
    with pytest.raises(ConfigError, match="runs on the CPU"):
        open_weights(str(torchscript_file), device=torch.device("meta"), trust=True)
    with pytest.raises(ConfigError, match="describes itself"):
        open_weights(str(torchscript_file), "model.cfg")
