"""Exported files from strangers: data that is looked at first, never a traceback."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import NAMES, SIZE_HW, job_of, metadata_of, network

from yolofleet.errors import CheckpointError, ConfigError, YolofleetError
from yolofleet.export import torchscript, trial
from yolofleet.export.export_metadata import ExportMetadata
from yolofleet.export.formats import FORMATS, missing
from yolofleet.export.runtime import open_exported
from yolofleet.export.trial import open_format, run_once

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
    from yolofleet.export import onnx as onnx_format

    onnx_format.write(job_of(model, metadata_of(model)), folder / "model.onnx")
    return folder


@pytest.fixture
def onnx_model(files):
    """A fresh copy of the parsed file."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    return onnx.load(files / "model.onnx")


def refusal(path: Path) -> str:
    with pytest.raises(YolofleetError) as caught:
        open_exported(path)
    assert caught.value.hint
    return caught.value.render()


def refusal_here(path: Path) -> str:
    """The refusal of a file that is opened and run in this process, without the trial in a child process."""
    with pytest.raises(YolofleetError) as caught:
        run_once(
            path, open_format(FORMATS["torchscript"], path, "cpu", 1), np.zeros((1, 3, *SIZE_HW), np.float32)
        )
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
    assert "cannot be run" in refusal(tmp_path / "a.onnx")


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
    assert runtime(torch.zeros(2, 3, *SIZE_HW)).shape == (2, 3 * (96 + 24 + 6), 8)


@pytest.mark.parametrize(
    "shape",
    [(1, 8, 378), (1, 100, 6), (1, 378), (1, 300, 8)],
    ids=["transposed", "boxes", "flat", "other rows"],
)
def test_a_foreign_file_of_another_form_is_refused_with_its_form(onnx_model, tmp_path, shape):
    from onnx import TensorProto, helper

    del onnx_model.metadata_props[:]
    del onnx_model.graph.output[:]
    onnx_model.graph.output.append(helper.make_tensor_value_info("decoded", TensorProto.FLOAT, shape))
    (tmp_path / "a.onnx").write_bytes(onnx_model.SerializeToString())
    message = refusal(tmp_path / "a.onnx")
    assert "of another program" in message and str(list(shape)) in message


# -- TorchScript -----------------------------------------------------------------------------------------------


class Writes(torch.nn.Module):
    """Maps the file ``path`` for writing and writes into it."""

    def __init__(self, path: str = "/nowhere/written") -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_file(self.path, shared=True, size=4).copy_(x[0, 0, 0, :4]).sum()


class Endless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.sum() > -1):
            x = x + 1
        return x


class Awakes(torch.nn.Module):
    """Does something while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    @torch.jit.export
    def __getstate__(self) -> tuple[float, bool]:
        return self.scale, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[float, bool]) -> None:
        self.scale, self.training = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("made", "says"),
    [(Writes, "Attribute"), (Endless, "bool"), (Awakes, "__getstate__")],
    ids=["writes", "endless", "awakes"],
)
def test_torchscript_that_is_more_than_a_network_is_refused_before_it_is_loaded(tmp_path, made, says):
    torch.jit.script(made()).save(str(tmp_path / "a.torchscript"))
    assert says in refusal(tmp_path / "a.torchscript")


def test_torchscript_of_another_program_is_refused(tmp_path):
    traced = torch.jit.trace(torch.nn.SiLU(), torch.zeros(1, 3, 8, 8))
    torch.jit.freeze(traced.eval()).save(str(tmp_path / "a.torchscript"))
    assert "without metadata of yolofleet" in refusal(tmp_path / "a.torchscript")


def test_torchscript_whose_program_hides_behind_capital_letters_is_refused(tmp_path):
    """torch's own reader of archives ignores case: it would run the part in ``.PY``."""
    written = tmp_path / "written"
    written.write_bytes(bytes(16))
    metadata = {torchscript.METADATA_FILE: metadata_of(network()).to_json().encode()}
    torch.jit.save(
        torch.jit.script(Writes(str(written)).eval()), str(tmp_path / "evil.pt"), _extra_files=metadata
    )
    hidden = tmp_path / "a.torchscript"
    with (
        zipfile.ZipFile(tmp_path / "evil.pt") as source,
        zipfile.ZipFile(hidden, "w") as target,
        zipfile.ZipFile(tmp_path / "twin.torchscript", "w") as twin,
    ):
        for name in source.namelist():
            upper = name[:-3] + ".PY" if name.endswith(".py") else name
            for archive in (target, twin):
                archive.writestr(upper, source.read(name))
        target.writestr("evil/code/harmless.py", "x = torch.add(1, 2)\n")
        twin.writestr(next(n for n in source.namelist() if n.endswith(".py")), "x = torch.add(1, 2)\n")
    images = torch.rand(1, 3, *SIZE_HW)
    torch.jit.load(str(hidden))(images)
    assert written.read_bytes() != bytes(16), "torch's own loader runs it: the attack is real"
    written.write_bytes(bytes(16))
    assert "a.torchscript" in refusal(hidden)
    assert "differ only in case" in refusal(tmp_path / "twin.torchscript")
    assert written.read_bytes() == bytes(16)


@pytest.mark.parametrize(
    "line",
    [
        "a = torch.save(images, '/tmp/x')",
        "a = torch.from_file('/tmp/x', True, 4)",
        "a = ops.aten.from_file('/tmp/x', True, 4)",
        "a = images.sum()",
        "a = [images for images in images]",
        "a = CONSTANTS.c99999",
        "a = torch.add(*images)",
        "a = torch.add(**images)",
        "a = torch.__init__(images)",
        "a = unknown",
        "images.x = images",
        "a = " + "-" * 50_000 + "1",
        "a = torch" + ".b" * 5_000 + "()",
        "import os",
    ],
)
def test_lines_that_are_no_arithmetic_are_refused(files, tmp_path, line):
    changed = with_line(files / "model.torchscript", tmp_path / "a.torchscript", line)
    assert "a.torchscript" in (refusal if line == "import os" else refusal_here)(changed)


def with_line(file: Path, changed: Path, line: str) -> Path:
    """Write a copy of a TorchScript file whose program ends with ``line``."""
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".py"):
                content = content.replace(b"    return ", f"    {line}\n    return ".encode())
            target.writestr(name, content)
    return changed


def test_an_archive_that_is_no_torchscript_or_too_large_is_refused(files, tmp_path):
    plain = tmp_path / "plain.torchscript"
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("a/code/a.py", "x = 1\n")
    assert "not a TorchScript file" in refusal(plain)
    bomb = tmp_path / "bomb.torchscript"
    shutil.copy(files / "model.torchscript", bomb)
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/bomb", bytes(100 * 2**20))
    assert bomb.stat().st_size < 5e6
    assert "compressed" in refusal(bomb)
    with zipfile.ZipFile(files / "model.torchscript") as source, zipfile.ZipFile(bomb, "w") as target:
        for name in source.namelist():
            longer = bytes(2 * 2**20) if name.endswith(".py") else b""
            how = zipfile.ZIP_DEFLATED if longer else zipfile.ZIP_STORED
            target.writestr(name, source.read(name) + longer, compress_type=how)
    assert "more than 1,048,576 bytes" in refusal(bomb)
    twice = tmp_path / "twice.torchscript"
    shutil.copy(files / "model.torchscript", twice)
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning):
        archive.writestr(archive.namelist()[0], b"")
    assert "members" in refusal(twice)


@pytest.mark.parametrize(
    "name",
    [
        "yolov5n",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("yolov3-tiny", "darknet-yolov3-tiny", "ppyoloe-s")
        ),
    ],
)
def test_our_own_torchscript_gives_the_bits_that_torchs_loader_gives(tmp_path, name):
    model, path = network(name), tmp_path / "model.torchscript"
    metadata = metadata_of(model, size_hw=None, batch=None)
    torchscript.write(job_of(model, metadata), path)
    runtime, by_torch = open_exported(path), torch.jit.load(str(path))
    for shape in ((1, 3, 64, 96), (2, 3, 96, 32)):
        images = torch.rand(shape)
        with torch.inference_mode():
            expected = by_torch(images.to(memory_format=torch.channels_last))
        assert torch.equal(runtime(images), expected)


# -- the trial in a child process ------------------------------------------------------------------------------


def made(format: str, folder: Path) -> Path:
    """Write the small network in a format, or skip the test where its packages are missing."""
    if missing((*FORMATS[format].writes, *FORMATS[format].runs)):
        pytest.skip(f"{format} is not installed")
    model, path = network(), folder / f"model{FORMATS[format].suffix}"
    FORMATS[format].module.write(job_of(model, metadata_of(model)), path)
    return path


@pytest.mark.parametrize("format", ["torchscript", "openvino"])
def test_a_file_is_tried_once_and_again_when_a_byte_of_it_changed(tmp_path, monkeypatch, cache, format):
    path = made(format, tmp_path)
    open_exported(path)
    assert len(list((cache / "tried").iterdir())) == 1
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # a second child would not start
    assert open_exported(path).names == NAMES
    part = FORMATS[format].module.parts(path)[-1]
    part.write_bytes(part.read_bytes() + b" ")
    assert "cannot start a process to try" in refusal(path)


@pytest.mark.parametrize("format", ["onnx"])
def test_a_file_that_this_process_has_written_needs_no_trial(tmp_path, monkeypatch, format):
    path = made(format, tmp_path)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert open_exported(path, is_ours=True).names == NAMES
    assert open_exported(path).names == NAMES, "nor in later processes"


def test_onnx_runtime_keeps_no_record_of_its_use(tmp_path):
    """Its builds for Linux would collect events in the home folder and send them to Microsoft."""
    pytest.importorskip("onnxruntime")
    (tmp_path / "cut off.onnx").write_bytes(b"\x08\x08")
    open_it = "import pathlib; from yolofleet.export.onnx import open_file; open_file(pathlib.Path('cut off.onnx'), None, 1)"
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
        "import sys; from yolofleet.export import openvino; openvino._core();"
        " assert sys.modules.get('openvino_telemetry') is None; assert 'openvino.tools.ovc.telemetry_stub' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def powers_of_a_matrix(path: Path, side: int, count: int) -> Path:
    """Write an ONNX file with our description that squares a matrix of ``side`` rows ``count`` times."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    node, form = onnx.helper.make_node, [1, 3, *SIZE_HW]
    nodes = [node("ConstantOfShape", ["side"], ["m0"])]
    nodes += [node("MatMul", [f"m{i}", f"m{i}"], [f"m{i + 1}"]) for i in range(count)]
    nodes += [
        node("ReduceSum", [f"m{count}"], ["sum"], keepdims=0),
        node("Mul", ["images", "sum"], ["decoded"]),
    ]
    given, result = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, form)
        for name in ("images", "decoded")
    )
    shape = onnx.numpy_helper.from_array(np.array([side, side]), "side")
    graph = onnx.helper.make_graph(nodes, "graph", [given], [result], [shape])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    entry = model.metadata_props.add()
    entry.key = "yolofleet"
    entry.value = ExportMetadata("yolov5", "yolov5n", NAMES, (32,), SIZE_HW, 1).to_json()
    path.write_bytes(model.SerializeToString())
    return path


@POSIX
def test_an_onnx_file_that_computes_without_end_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "CPU_S", 2)
    assert "takes more CPU time" in refusal(powers_of_a_matrix(tmp_path / "a.onnx", 3000, 500))


@LINUX
def test_an_onnx_file_that_asks_for_all_memory_is_a_message(tmp_path):
    assert "a.onnx cannot be run" in refusal(powers_of_a_matrix(tmp_path / "a.onnx", 200_000, 1))


@LINUX
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("a = torch.arange(30000000000)", marks=pytest.mark.slow),
        pytest.param("a = torch.new_zeros(images, [200000, 200000])", marks=pytest.mark.slow),
        "a = torch.repeat(images, [1, 1, 2000, 2000])",
        pytest.param(
            "a = torch.reshape(torch.expand(torch.unsqueeze(images, 0), [4000000, -1, -1, -1, -1]), [-1])",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_torchscript_that_asks_for_all_memory_is_a_message(files, tmp_path, line):
    with zipfile.ZipFile(files / "model.torchscript") as archive:
        code = next(archive.read(name).decode() for name in archive.namelist() if name.endswith(".py"))
    found = re.search(r"(\w+): Tensor\)", code)
    assert found
    argument = found[1]
    changed = with_line(
        files / "model.torchscript", tmp_path / "a.torchscript", line.replace("images", argument)
    )
    message = refusal(changed)
    assert "cannot be run" in message and "memory" in message


@POSIX
@pytest.mark.parametrize("format", FORMATS)
def test_a_named_pipe_is_refused_as_any_part_of_any_format(tmp_path, format):
    format = FORMATS[format]
    path = tmp_path / f"model{format.suffix}"
    if format.name == "onnx":  # the ONNX package reads it before
        pytest.importorskip("onnx")
    if format.marker or format.name == "coreml":
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
            trial.ensure_tried(format, path, 1)
        part.unlink()
        part.write_bytes(b"x")


# -- formats of several files ----------------------------------------------------------------------------------


def test_broken_ncnn_files_are_refused(tmp_path):
    pytest.importorskip("ncnn")
    folder = tmp_path / "a_ncnn"
    folder.mkdir()
    (folder / "model.ncnn.param").write_bytes(b"nothing")
    (folder / "model.ncnn.bin").write_bytes(b"nothing")
    assert "yolofleet.json" in refusal(folder)
    (folder / "yolofleet.json").write_text(metadata_of(network()).to_json(), encoding="utf-8")
    assert "not a complete ncnn network" in refusal(folder)
    (folder / "yolofleet.json").write_text("{", encoding="utf-8")
    assert "invalid metadata" in refusal(folder)


CRASHING = [  # a changed number each; ncnn 1.0.20261020 ends with SIGSEGV
    "7767517\n2 2\nInput in0 0 1 in0\nReshape c 1 1 in0 out0 0=99999999 1=8\n",
    "7767517\n2 3\nInput in0 0 1 in0\nSlice c 1 2 in0 a out0 -23300=2,1,1000 1=0\n",
]


@pytest.mark.parametrize("param", CRASHING)
def test_an_ncnn_file_on_which_ncnn_crashes_is_a_message(tmp_path, param):
    pytest.importorskip("ncnn")
    folder = tmp_path / "a_ncnn"
    folder.mkdir()
    (folder / "model.ncnn.param").write_text(param)
    (folder / "model.ncnn.bin").write_bytes(bytes(1000))
    (folder / "yolofleet.json").write_text(metadata_of(network()).to_json(), encoding="utf-8")
    message = refusal(folder)
    assert "ncnn's runtime crashed on it (SIG" in message or "ncnn cannot run" in message, (
        "or no memory for it"
    )


def test_a_runtime_that_is_not_here_is_named(tmp_path):
    (tmp_path / "a.engine").write_bytes(b"")
    with pytest.raises(ConfigError, match="needs tensorrt") as caught:
        open_exported(tmp_path / "a.engine")
    assert "tensorrt>=" in caught.value.hint
