"""Folders for other servers: a parser reads what they state, and it is what the ONNX file has."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import job_of, metadata_of, network, pictures, spread
from small_weights import saved

from yolofleet.cli import main
from yolofleet.families.networks.detector import Detector
from yolofleet.inference.export.export_metadata import Suppression
from yolofleet.inference.export.formats import FORMATS
from yolofleet.inference.export.runtime import open_exported
from yolofleet.inference.export.servers import DEEPSTREAM, TRITON, Server
from yolofleet.support.errors import CheckpointError, ConfigError

NAMES = ('a "dog"\\', "two\nlines\x01", "Straßenbahn")
LABELS = 'a "dog"\\\ntwo?lines?\nStraßenbahn\n'
NMS = Suppression(0.25, 0.45, 300, False)


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def model() -> Detector:
    model = network()
    model.names = NAMES
    return model


def written(model: Detector, folder: Path, server: Server = TRITON, **form: Any) -> Path:
    """Return the folder of a server, whose file is not verified."""
    metadata = replace(metadata_of(model, **form), names=model.names)
    file = folder / server.model
    file.parent.mkdir(parents=True)
    FORMATS["onnx"].module.write(job_of(model, metadata), file)
    server.finish(folder, metadata)
    return folder


def in_protobuf(text: str) -> Any:
    """Return Triton's own message of a configuration."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    found = importlib.util.find_spec("tritonclient")
    if found is None:
        pytest.skip("Triton's model_config.proto is in the package tritonclient, which is not installed")
    file = Path(str(found.origin)).parent / "grpc/model_config_pb2.py"  # its package needs grpc
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return text_format.Parse(text, module.ModelConfig())


def session_of(folder: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(folder / TRITON.model))


def test_the_configuration_states_the_names_and_dimensions_of_the_file(model, tmp_path):
    folder = written(model, tmp_path / "best", batch=None, nms=NMS)
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    head, _, parameters = text.partition("parameters {")
    assert head.split("\n")[:3] == ['backend: "onnxruntime"', "max_batch_size: 8", "dynamic_batching { }"]
    assert [line.split(":", 1)[1].strip() for line in head.splitlines() if line.startswith("  ")] == [
        *('"images"', "TYPE_FP32", "[3, 64, 96]"),
        *('"boxes"', "TYPE_FP32", "[300, 6]"),
    ]
    assert text.isascii()
    (literal,) = re.findall(r'^ key: "yolofleet" value \{ string_value: (".*") \} \}\n$', parameters)
    assert tuple(json.loads(ast.literal_eval("b" + literal))["names"]) == NAMES
    assert (folder / "labels.txt").read_text(encoding="utf-8") == LABELS


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form", "outputs"),
    [
        ("yolov5n", {"batch": None, "nms": NMS}, {"boxes": [300, 6]}),
        ("yolov5n", {"batch": 2, "size_hw": None}, {"decoded": [-1, -1, 8]}),
        (
            "yolov5n-seg",
            {"batch": None, "size_hw": None},
            {"decoded": [-1, -1], "coefficients": [-1, -1], "prototypes": [32, -1, -1]},
        ),
        ("dfine-toy", {"batch": None}, {"decoded": [-1, 8]}),
    ],
)
def test_triton_s_own_format_reads_the_configuration(name, form, outputs, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = spread(name, 0)
    model.names = NAMES
    folder = written(model, tmp_path / "best", **form)
    config, any_batch = (
        in_protobuf((folder / "config.pbtxt").read_text(encoding="utf-8")),
        form["batch"] is None,
    )
    assert config.backend == "onnxruntime" and config.max_batch_size == 8 * any_batch
    assert config.HasField("dynamic_batching") == any_batch
    (given,) = config.input
    sides = [-1, -1] if "size_hw" in form else [64, 96]
    assert (given.name, list(given.dims)) == ("images", [2, 3, *sides][any_batch:])
    assert {one.name: list(one.dims) for one in config.output} == outputs
    assert {one.data_type for one in (*config.input, *config.output)} == {11}  # TYPE_FP32
    assert tuple(json.loads(config.parameters["yolofleet"].string_value)["names"]) == NAMES
    session = onnxruntime.InferenceSession(str(folder / TRITON.model))
    for one, answer in zip(
        config.output, session.run(None, {"images": pictures(2, (64, 96)).numpy()}), strict=True
    ):
        shape = answer.shape[any_batch:]
        assert answer.dtype == np.float32 and len(shape) == len(one.dims)
        assert all(stated in (-1, side) for stated, side in zip(one.dims, shape, strict=True))


def test_the_verb_writes_a_repository_and_replaces_only_what_it_wrote(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(model, tmp_path / "best.safetensors", 64)
    others = Path("models/best/2/model.onnx"), Path("models/best/config.pbtxt")
    others[0].parent.mkdir(parents=True)
    for file in others:
        file.write_bytes(b"of an earlier export")
    words = ["export", "--weights", "best.safetensors", "--triton", "models", "--json", "figures.json"]
    assert main(words) == 0
    figures = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    assert figures["verified"] and figures["file"] == str(Path("models/best"))
    assert "this export replaces it" in capsys.readouterr().out
    found = {path.as_posix() for path in Path("models").rglob("*") if path.is_file()}
    names = ("config.pbtxt", "labels.txt", "1/model.onnx", "2/model.onnx")
    assert found == {f"models/best/{name}" for name in names}
    assert not Path("best.onnx").exists()
    assert [b"earlier" in file.read_bytes() for file in others] == [True, False]
    others[1].unlink()
    deepstream = [*words[:3], "--deepstream", "models"]
    for refused, says in (
        (words, "has no config.pbtxt, so --triton did not write it"),
        (deepstream, "has no config_infer_primary.txt, so --deepstream did not write it"),
        ([*words, "--out", "a.onnx"], "both say where the file goes"),
        ([*words, "--deepstream", "other"], "both say where the file goes"),
        ([*words, "--format", "onnx,openvino"], "the server gets an ONNX file"),
        ([*deepstream, "--dynamic", "size"], "nvinfer scales images to one size"),
        ([*deepstream, "--nms"], "nvinfer suppresses boxes"),
    ):
        assert main(refused) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("yolov5n", None),
        pytest.param("yolov5n", 2, marks=pytest.mark.slow),
        pytest.param("dfine-toy", None, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_folder_for_deepstream_has_the_boxes_of_the_network(name, batch, tmp_path):
    model = spread(name, 0)
    model.names = NAMES
    folder = written(model, tmp_path / "best", DEEPSTREAM, batch=batch)
    assert (folder / "labels.txt").read_text(encoding="utf-8") == LABELS
    config = configparser.ConfigParser()
    config.read(folder / "config_infer_primary.txt", encoding="utf-8")
    values, suppresses = config["property"], name == "yolov5n"
    assert float(values["net-scale-factor"]) == 1 / 255 and values["offsets"] == "0;0;0"
    assert (values["model-color-format"], values["maintain-aspect-ratio"], values["symmetric-padding"]) == (
        "0",
        "1",
        "1",
    )
    assert (folder / values["onnx-file"]).is_file() and (folder / values["labelfile-path"]).is_file()
    assert (values["batch-size"], values["num-detected-classes"]) == (str(batch or 1), "3")
    assert values["cluster-mode"] == ("2" if suppresses else "4")
    assert dict(config["class-attrs-all"]) == {
        "pre-cluster-threshold": "0.25",
        "topk": "1000",
        **({"nms-iou-threshold": "0.45"} if suppresses else {}),
    }

    images = pictures(2)
    session = pytest.importorskip("onnxruntime").InferenceSession(str(folder / "model.onnx"))
    (rows,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        decoded = model.decode(model(images)).rows.double()
    centre, half = decoded[..., :2], decoded[..., 2:4] / 2
    scores = decoded[..., 4:5] * decoded[..., 5:]
    expected = torch.cat([centre - half, centre + half, scores.amax(2, keepdim=True)], 2)
    assert rows.shape == (*expected.shape[:2], 6)
    np.testing.assert_allclose(rows[..., :5], expected.numpy(), atol=2e-3, rtol=1e-3)
    chosen = torch.from_numpy(rows[..., 5:]).long()
    assert float((scores.amax(2, keepdim=True) - scores.gather(2, chosen)).max()) < 1e-4
    with pytest.raises(CheckpointError, match=r"cannot read: rows") as caught:
        open_exported(folder / "model.onnx")
    assert "without --deepstream" in str(caught.value.hint)


@pytest.mark.slow
def test_masks_are_refused_for_a_parser_of_boxes(tmp_path):
    with pytest.raises(ConfigError, match="its parser reads boxes, and yolov5n-seg finds masks"):
        DEEPSTREAM.check(tmp_path / "new", network("yolov5n-seg"))
    TRITON.check(tmp_path / "new", network("yolov5n-seg"))
