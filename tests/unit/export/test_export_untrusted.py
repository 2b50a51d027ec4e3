"""Exported files of strangers: data is checked, and nothing that can execute code is opened without the user's word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from exported import NAMES, SIZE_HW, job_of, metadata_of, network

from yolofleet.cli.api import Model, load_model
from yolofleet.cli.app import run
from yolofleet.cli.hub import HubModel
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.inference.export import torchscript
from yolofleet.inference.export.exporter import export
from yolofleet.inference.export.formats import FORMATS, missing
from yolofleet.inference.export.opened import check_trusted
from yolofleet.inference.export.runtime import open_exported, open_weights
from yolofleet.support.errors import CheckpointError, ConfigError, YolofleetError

pytestmark = pytest.mark.long

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems bound no memory")
POSIX = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows bounds no CPU time and has no named pipes"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder that remembers which files were tried: a new one for each test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("YOLOFLEET_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """model.onnx and model.torchscript of a small network."""
    folder = tmp_path_factory.mktemp("exported")
    model = network()
    torchscript.write(job_of(model, metadata_of(model)), folder / "model.torchscript")
    try:
        import onnx  # noqa: F401
    except ImportError:
        return folder
    from yolofleet.inference.export import onnx as onnx_format

    onnx_format.write(job_of(model, metadata_of(model)), folder / "model.onnx")
    return folder


@pytest.fixture
def onnx_model(files):
    """A fresh copy of the parsed file."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    return onnx.load(files / "model.onnx")


def refusal(path: Path, trust: bool = False) -> str:
    with pytest.raises(YolofleetError) as caught:
        open_exported(path, trust=trust)
    assert caught.value.hint
    return caught.value.render()


# -- ONNX ------------------------------------------------------------------------------------------------------


def with_external(model, location: str, *, offset: int = 0, length: int = 64, place: str = "initializer"):
    """A tensor of the graph lies in the file ``location``."""
    from onnx import TensorProto

    if place == "initializer":
        tensor = model.graph.initializer[0]
    else:
        tensor = next(a.t for node in model.graph.node for a in node.attribute if a.HasField("t"))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return model.SerializeToString()


@pytest.mark.parametrize("place", ["initializer", "constant"])
@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "C:\\secret.bin", "\\\\host\\x", "..\\secret.bin", "link", "", "\0"],
)  # fmt: skip
def test_tensors_in_files_outside_the_folder_are_refused(onnx_model, tmp_path, location, place):
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"s" * 10_000)
    (folder / "link").symlink_to(tmp_path / "secret.bin")
    (folder / "a.onnx").write_bytes(with_external(onnx_model, location, place=place))
    assert "outside its folder" in refusal(folder / "a.onnx")


@pytest.mark.parametrize(
    ("size", "offset", "length", "says"),
    [
        (None, 0, 64, "beside it"),
        (10, 0, 64, "which has 10"),
        (100, 90, 64, "which has 100"),
        (100, -1, 64, "needs bytes"),
    ],
)
def test_external_files_that_are_missing_or_short_are_named(onnx_model, tmp_path, size, offset, length, says):
    if size is not None:
        (tmp_path / "weights.bin").write_bytes(b"w" * size)
    content = with_external(onnx_model, "weights.bin", offset=offset, length=length)
    (tmp_path / "a.onnx").write_bytes(content)
    message = refusal(tmp_path / "a.onnx")
    assert says in message and "weights.bin" in message


def test_tensors_in_a_whole_file_beside_it_are_used(onnx_model, tmp_path):
    import onnx

    onnx.save(onnx_model, tmp_path / "a.onnx", save_as_external_data=True, location="a.data")
    assert (tmp_path / "a.data").stat().st_size > 10 * (tmp_path / "a.onnx").stat().st_size / 20
    assert open_exported(tmp_path / "a.onnx").names == NAMES


def test_a_graph_that_the_runtime_refuses_is_our_error(onnx_model, tmp_path):
    onnx_model.graph.node[3].op_type = "NoSuchOperation"
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    assert "ONNX Runtime cannot load" in refusal(tmp_path / "a.onnx")
    onnx_model.graph.node[3].domain = "com.example"
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    assert "operations of 'com.example'" in refusal(tmp_path / "a.onnx")


@pytest.mark.parametrize("operation", ["Loop", "Scan"])
def test_a_graph_that_repeats_is_refused(onnx_model, tmp_path, operation):
    onnx_model.graph.node[3].op_type = operation
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    assert f"has a {operation}" in refusal(tmp_path / "a.onnx")


def test_a_file_that_lies_about_itself_is_refused_when_it_runs(onnx_model, tmp_path):
    model = network()
    model.names = (*NAMES, "another")
    onnx_model.metadata_props[0].value = metadata_of(model).to_json()
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    runtime = open_exported(tmp_path / "a.onnx")
    with pytest.raises(CheckpointError, match=r"expected \[1, K, 9\]"):
        runtime(torch.zeros(1, 3, *SIZE_HW))
    onnx_model.metadata_props[0].value = metadata_of(network(), size_hw=(32, 32)).to_json()
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    with pytest.raises(CheckpointError, match="cannot be run"):
        open_exported(tmp_path / "a.onnx")(torch.zeros(1, 3, 32, 32))


# -- ONNX of other programs ------------------------------------------------------------------------------------


def test_a_foreign_file_in_the_form_of_yolov5s_export_is_understood(onnx_model, tmp_path):
    del onnx_model.metadata_props[:]
    for key, value in (("stride", "32"), ("names", "{0: 'person', 1: \"dog's\", 2: 'traffic light'}")):
        entry = onnx_model.metadata_props.add()
        entry.key, entry.value = key, value
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    runtime = open_exported(tmp_path / "a.onnx")
    assert runtime.names == ("person", "dog's", "traffic light")
    assert (runtime.metadata.size_hw, runtime.metadata.batch, runtime.strides) == (SIZE_HW, 1, (8, 16, 32))
    assert runtime(torch.zeros(2, 3, *SIZE_HW)).rows.shape == (2, 3 * (96 + 24 + 6), 8)


@pytest.mark.parametrize(
    ("shape", "cause"),
    [
        ((1, 8, 378), ""),
        ((1, 100, 6), ""),
        ((1, 378), ""),
        ((1, 300, 8), ""),
        ((1, 126, 8), "one for each cell, as in YOLOX"),
        ((1, 7, 126), "as in YOLOv8"),
    ],
    ids=["transposed", "boxes", "flat", "other rows", "one a cell", "a row for each value"],
)
def test_a_foreign_file_of_another_form_is_refused_with_its_form(onnx_model, tmp_path, shape, cause):
    from onnx import TensorProto, helper

    del onnx_model.metadata_props[:]
    del onnx_model.graph.output[:]
    onnx_model.graph.output.append(helper.make_tensor_value_info("decoded", TensorProto.FLOAT, shape))
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    message = refusal(tmp_path / "a.onnx")
    assert "of another program" in message and str(list(shape)) in message and cause in message


# -- formats that can execute code -----------------------------------------------------------------------------


class Awakes(torch.nn.Module):
    """Writes into the file ``path`` while it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.total = path, 0.0

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        self.total = float(torch.from_file(self.path, shared=True, size=4).fill_(1.0).sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


COMMANDS = {"val": ("--data", "shapes:4"), "predict": ("--source", "a.png"), "bench": ("--passes", "1")}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_executes_nothing_of_a_torchscript_file_without_trust(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("a.png", np.zeros((64, 96, 3), np.uint8))
    written = tmp_path / "written"
    written.write_bytes(bytes(16))
    program = torch.jit.script(Awakes(str(written)))
    metadata = {torchscript.METADATA_FILE: metadata_of(network()).to_json().encode()}
    torch.jit.save(program, "a.torchscript", _extra_files=metadata)
    written.write_bytes(bytes(16))
    command = [verb, "--weights", "a.torchscript", "--device", "cpu", *COMMANDS[verb]]
    assert run(command) == 2
    message = capsys.readouterr().err
    assert "a.torchscript may execute" in message and "TorchScript file is a program" in message
    assert "--trust" in message and "Traceback" not in message
    assert written.read_bytes() == bytes(16)
    run([*command, "--trust"])
    assert written.read_bytes() != bytes(16), "the program is real: it runs with the word"


def test_no_configuration_file_can_trust(tmp_path, monkeypatch, capsys, files):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(f"weights: {files / 'model.torchscript'}\ntrust: true\n")
    assert run(["bench", "--config", "a.yaml"]) == 2
    assert "trust" in capsys.readouterr().err


@pytest.mark.parametrize(
    "predict",
    [
        lambda path, picture, **trust: load_model(path, **trust).predict(picture),
        lambda path, picture, **trust: Model(path).predict(picture, **trust),
        lambda path, picture, **trust: HubModel(path, "cpu", **trust)(picture),
    ],
    ids=["load_model", "Model", "hub"],
)
def test_python_opens_a_program_only_with_trust(files, predict):
    picture = np.zeros((*SIZE_HW, 3), np.uint8)
    path = files / "model.torchscript"
    with pytest.raises(ConfigError, match="is a program") as caught:
        predict(path, picture)
    assert "trust=True" in caught.value.hint
    assert predict(path, picture, trust=True) is not None


@pytest.mark.parametrize("format", [name for name in FORMATS if FORMATS[name].danger])
def test_every_format_that_can_execute_code_needs_trust(tmp_path, monkeypatch, format):
    # as if its runtime were installed
    monkeypatch.setattr("yolofleet.inference.export.runtime.need", lambda *_: None)
    format = FORMATS[format]
    path = tmp_path / f"model{format.suffix}"
    (path.mkdir if format.marker else path.touch)()
    for part in format.module.parts(path):
        part.touch()
    message = refusal(path)
    assert path.name in message and format.danger in message and "--trust" in message


def test_trust_in_a_file_that_is_data_is_refused(files, onnx_model, tmp_path):
    model = network()
    write_weights(tmp_path / "a.safetensors", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    for path in (files / "model.onnx", tmp_path / "a.safetensors"):
        with pytest.raises(ConfigError, match="is read as data"):
            open_weights(str(path), trust=True)
    with pytest.raises(CheckpointError):
        open_weights("missing.safetensors", trust=True)


@pytest.mark.parametrize("name", ["torchscript", "ncnn"])
def test_our_own_export_needs_no_trust_on_this_machine_until_a_byte_of_it_changes(
    tmp_path, monkeypatch, name
):
    format = FORMATS[name]
    if missing((*format.writes, *format.runs)):
        pytest.skip(f"{name} is not installed")
    model, path = network(), tmp_path / f"model{format.suffix}"
    figures = export(model, format, metadata_of(model), SIZE_HW, path)
    assert figures["verified"] and open_exported(path).names == NAMES
    moved = path.rename(tmp_path / f"moved{format.suffix}")
    assert open_exported(moved).names == NAMES
    part = format.module.parts(moved)[-1]
    content = part.read_bytes()
    part.write_bytes(content + b" ")
    assert "--trust" in refusal(moved)
    part.write_bytes(content)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "another machine"))
    assert "--trust" in refusal(moved)
    assert open_exported(moved, trust=True).names == NAMES


def test_a_damaged_file_or_one_of_another_program_is_our_error_with_trust(files, tmp_path):
    path = tmp_path / "a.torchscript"
    path.write_bytes((files / "model.torchscript").read_bytes()[:-300])
    assert "cannot load" in refusal(path, trust=True)
    traced = torch.jit.trace(torch.nn.SiLU(), torch.zeros(1, 3, 8, 8))
    torch.jit.freeze(traced.eval()).save(str(path))
    assert "without metadata of yolofleet" in refusal(path, trust=True)


def test_onnx_runtime_keeps_no_record_of_its_use(tmp_path):
    """Its builds for Linux would collect events in the home folder and send them to Microsoft."""
    pytest.importorskip("onnxruntime")
    (tmp_path / "cut off.onnx").write_bytes(b"\x08\x08")
    open_it = "import pathlib; from yolofleet.inference.export.onnx import open_file; open_file(pathlib.Path('cut off.onnx'), None, 1)"
    left_out = ("ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", open_it],
        cwd=tmp_path,
        env=env | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "CheckpointError" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cut off.onnx"]


def test_openvino_is_imported_without_its_telemetry(tmp_path):
    pytest.importorskip("openvino")
    code = (
        "import sys; from yolofleet.inference.export import openvino; openvino._core();"
        " assert sys.modules.get('openvino_telemetry') is None; assert 'openvino.tools.ovc.telemetry_stub' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@POSIX
@pytest.mark.parametrize("format", FORMATS)
def test_a_named_pipe_is_refused_as_any_part_of_any_format(tmp_path, format):
    format = FORMATS[format]
    path = tmp_path / f"model{format.suffix}"
    if format.name == "onnx":  # the ONNX package reads it before
        pytest.importorskip("onnx")
    if format.marker:
        path.mkdir()
    for name in (format.marker, "model.ncnn.bin", "model.bin", "yolofleet.json") if path.is_dir() else ():
        (path / (name or "data")).write_bytes(b"x")
    if not path.is_dir():
        path.write_bytes(b"x")
        path.with_name(path.name + ".json").write_bytes(b"x")
    parts = [path] if format.name == "onnx" else format.module.parts(path)
    for part in parts:
        part.unlink()
        os.mkfifo(part)
        with pytest.raises(CheckpointError, match="named pipe"):
            check_trusted(format, path, trust=bool(format.danger))
        part.unlink()
        part.write_bytes(b"x")


# -- formats of several files ----------------------------------------------------------------------------------


def test_broken_ncnn_files_are_refused(tmp_path):
    pytest.importorskip("ncnn")
    folder = tmp_path / "a_ncnn"
    folder.mkdir()
    (folder / "model.ncnn.param").write_bytes(b"nothing")
    (folder / "model.ncnn.bin").write_bytes(b"nothing")
    assert "yolofleet.json" in refusal(folder, trust=True)
    (folder / "yolofleet.json").write_text(metadata_of(network()).to_json(), encoding="utf-8")
    assert "not a complete ncnn network" in refusal(folder, trust=True)
    (folder / "yolofleet.json").write_text("{", encoding="utf-8")
    assert "invalid metadata" in refusal(folder, trust=True)
