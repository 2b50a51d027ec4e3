"""8-bit files: the head stays in 32 bits, the file finds what the network finds, and settings that cannot work are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported import SIZE_HW, metadata_of, network
from reference import reference
from small_data import yolo_set
from torch import nn

from yolofleet.config.load import resolve_export
from yolofleet.inference.export.export_metadata import ExportMetadata, Suppression
from yolofleet.inference.export.exporter import export, verdict_text
from yolofleet.inference.export.formats import FORMATS, format_named
from yolofleet.inference.export.quantize import head_nodes
from yolofleet.inference.export.runtime import open_exported
from yolofleet.inference.export.verify import Agreement
from yolofleet.support.errors import ConfigError, NumericsError

pytestmark = pytest.mark.long

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(yolo_set(tmp_path / "set", {f"{i}": "0 0.5 0.5 0.4 0.4\n" for i in range(6)}))


def assert_last_convolutions_have_32_bits(file: Path) -> None:
    graph = onnx.load(str(file)).graph
    makers = {tensor: node for node in graph.node for tensor in node.output}
    convs = [node for node in graph.node if node.op_type == "Conv"]
    in_8_bits = [node for node in convs if node.input[1] in makers]  # others have their weights as constants
    head = {node.name for node in convs if node.name in head_nodes(graph)}
    assert head and not head & {node.name for node in in_8_bits}
    assert len(in_8_bits) == len(convs) - len(head)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov5n", "darknet-yolov3-tiny", "ppyoloe-s"])
def test_the_last_convolutions_and_the_decoding_stay_in_32_bits(name: str, data: str, tmp_path: Path) -> None:
    model = network(name)
    metadata = replace(metadata_of(model), int8=True)
    out = tmp_path / "a.onnx"
    figures = export(model, FORMATS["onnx"], metadata, SIZE_HW, out, data=data, calibration_images=4)
    assert figures["verified"] and 0.5 <= figures["agreement"] <= 1 and figures["facts"]["int8"] is True
    assert_last_convolutions_have_32_bits(out)
    open_exported(out)


@pytest.mark.slow
def test_a_variable_batch_and_nms_work_with_8_bits(data: str, tmp_path: Path) -> None:
    model, out = network(), tmp_path / "a.onnx"
    metadata = replace(metadata_of(model, batch=None, nms=Suppression(0.25, 0.45, 20, False)), int8=True)
    figures = export(model, FORMATS["onnx"], metadata, SIZE_HW, out, data=data, calibration_images=4)
    assert figures["verified"] and 0.5 <= figures["agreement"] <= 1 and figures["facts"]["int8"] is True
    assert_last_convolutions_have_32_bits(out)
    assert open_exported(out).metadata == metadata


def test_a_file_is_not_called_verified_if_there_were_no_boxes_to_compare(data: str, tmp_path: Path) -> None:
    model, out = network(), tmp_path / "a.onnx"
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                module.bias.fill_(-20)  # no score reaches the threshold
    metadata = replace(metadata_of(model), int8=True)
    figures = export(model, FORMATS["onnx"], metadata, SIZE_HW, out, data=data, calibration_images=4)
    assert not figures["verified"] and out.is_file()
    assert verdict_text(figures) == (
        "exported, NOT VERIFIED: the network finds no boxes to compare in the images "
        "(to verify: --data with images that have objects)"
    )


@pytest.mark.slow
def test_openvino_computes_the_same_graph(data: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model, out = network(), tmp_path / "a_openvino"
    metadata = replace(metadata_of(model), int8=True)
    figures = export(model, FORMATS["openvino"], metadata, SIZE_HW, out, data=data, calibration_images=4)
    assert figures["verified"] and open_exported(out).metadata.int8


def test_metadata_of_earlier_versions_is_not_8_bit() -> None:
    values = json.loads(metadata_of(network()).to_json())
    del values["int8"]
    assert ExportMetadata.from_json(json.dumps(values), source="a").int8 is False


def test_a_file_that_finds_other_boxes_is_refused() -> None:
    Agreement(0.5, 10).check()
    with pytest.raises(NumericsError, match="agree on 49% of the boxes"):
        Agreement(0.49, 10).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"int8": True}, "--data with the data set"),
        ({"int8": True, "data": "d", "half": True}, "mutually exclusive"),
        ({"int8": True, "data": "d", "simplify": True}, "mutually exclusive"),
        ({"int8": True, "data": "d", "batch": 8, "calibration_images": 4}, "do not fill a batch of 8"),
        ({"calibration_images": 4}, "no effect without --int8"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_export({"weights": "w", **settings})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "way"), [("saved_model", "tflite"), ("engine", "trtexec"), ("coreml", "coremltools")]
)
def test_formats_that_are_not_written_are_refused_with_another_way(name: str, way: str) -> None:
    with pytest.raises(ConfigError, match="is not supported: ") as caught:
        format_named(name)
    assert way in str(caught.value.hint)


@pytest.mark.slow
def test_8_bit_files_of_yolov5n_keep_its_accuracy_within_002(tmp_path: Path) -> None:
    from yolofleet import Model

    model, data = Model(reference("weights/yolov5n.pt")), reference("data/coco128val/data.yaml")
    weights = tmp_path / "yolov5n.pt"
    weights.write_bytes(Path(model.weights).read_bytes())
    model = Model(weights)
    quiet = {"data": data, "device": "cpu", "workers": 0, "plots": False, "project": tmp_path}
    whole = model.val(**quiet, fit="square").metrics["mAP50-95"]
    for made in model.export(format="onnx,openvino", int8=True, data=data):
        found = Model(made.file).val(**quiet).metrics["mAP50-95"]
        assert abs(found - whole) <= 0.02, made.format
