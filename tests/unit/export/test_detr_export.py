"""Exported files of RT-DETR and D-FINE, run by their runtimes alone, give the network's boxes for any number of images."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from exported import metadata_of, pictures

from yolofleet.config.schema.verbs import ExportConfig
from yolofleet.families.build import build_model
from yolofleet.families.networks.detector import Detector
from yolofleet.families.rtdetr import NO_EXPORT
from yolofleet.inference.export.exporter import check_format, export
from yolofleet.inference.export.formats import FORMATS
from yolofleet.support.errors import ConfigError

pytestmark = pytest.mark.long
SIZE_HW = (64, 96)


@pytest.fixture(scope="module", params=["dfine", pytest.param("rtdetr", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Detector:
    # an import would keep its name from other tests, whose runs load a copy
    small = runpy.run_path(str(Path(__file__).resolve().parents[2] / "detr_family" / "small_detr.py"))
    network = build_model(small["preset"](f"{request.param}-toy"), 3)
    network.names = ("a", "b", "c")
    with torch.no_grad():  # scores that rounding does not bring into another order
        network.decoder.enc_score_head.weight.mul_(30)  # type: ignore[union-attr, operator]
    return network.eval()


def onnx_rows(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed").InferenceSession(
        str(path)
    )
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def openvino_rows(path: Path, images: torch.Tensor) -> torch.Tensor:
    from yolofleet.inference.export.openvino import _core

    compiled = _core().compile_model(str(path / "model.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled(images.numpy())[0].copy())


@pytest.mark.parametrize(
    ("name", "rows"), [("onnx", onnx_rows), pytest.param("openvino", openvino_rows, marks=pytest.mark.slow)]
)
def test_any_batch_gives_the_boxes_of_the_network(model, name, rows, tmp_path):
    for module in FORMATS[name].runs:
        pytest.importorskip(module, reason=f"{module} is not installed")
    out = tmp_path / f"file{FORMATS[name].suffix}"
    figures = export(model, FORMATS[name], metadata_of(model, batch=None, size_hw=SIZE_HW), SIZE_HW, out)
    assert figures["verified"] and figures["box_px"] < 0.05
    for count in (1, 3):
        images = pictures(count, SIZE_HW)
        with torch.no_grad():
            expected = model.decode(model(images)).rows
        assert rows(out, images).shape == expected.shape == (count, 20, 8)
        torch.testing.assert_close(rows(out, images), expected, atol=0.05, rtol=1e-3)


LACKING = {
    f"{name} --{option}": f"does not support --{option}"
    for name, option in (("torchscript", "half"), ("tflite", "half"), ("torchscript", "int8"))
}


@pytest.mark.parametrize(("words", "says"), {**NO_EXPORT, **LACKING}.items())
def test_what_a_format_cannot_hold_is_refused_before_a_file_is_written(model, words, says):
    name, _, option = words.partition(" --")
    config = ExportConfig(
        weights="best.safetensors", format=name, half=option == "half", int8=option == "int8"
    )
    with pytest.raises(ConfigError, match=says) as caught:
        check_format(FORMATS[name], config, model)
    _, found, offered = str(caught.value.hint).rpartition("--format ")
    # no hint leads to another refusal
    for other in offered.replace(", ", " or ").split(" or ") if found else ():
        check_format(FORMATS[other], config, model)
