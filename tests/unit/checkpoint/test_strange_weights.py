"""Weights, checkpoints and descriptions that somebody made to exhaust memory or time, or to end in a traceback."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from exported import NAMES, metadata_of, network
from hostile import PROTO, archive, text
from safetensors.torch import _SIZE, save

from yolofleet.cli.app import run
from yolofleet.families.networks.description import describe
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.hugging_face import check_config, config_of
from yolofleet.families.weights import format as file_format
from yolofleet.families.weights.contents import contents
from yolofleet.families.weights.pickles import TorchFile
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.support.errors import CheckpointError, YolofleetError

SPARE_MIB = 700
BOUNDED = """
import contextlib, json, resource, sys
import torch  # its libraries count as address space, and those of onnx
with contextlib.suppress(ImportError):
    import onnx
from yolofleet.cli.app import run
from yolofleet.families.weights import contents
from yolofleet.families.weights import reader
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for words in json.loads(sys.argv[2]):
    print("code", run(words), flush=True)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit on the address space")


def bounded(*commands: list[str]) -> list[tuple[int, str]]:
    """Exit code and output of commands in one process that gets SPARE_MIB beyond its libraries."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(SPARE_MIB), json.dumps(commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout
    parts = done.stdout.split("code ")
    assert len(parts) == len(commands) + 1, done.stdout
    return [(int(after.split()[0]), before) for before, after in itertools.pairwise(parts)]


def get(n: int) -> bytes:
    return b"j" + struct.pack("<I", n)


def put(n: int) -> bytes:
    return b"r" + struct.pack("<I", n)


def module(state: bytes) -> bytes:
    """A pickled object of YOLOv5 with this ``__dict__``."""
    return b"cmodels.yolo\nModel\n)\x81" + state + b"b"


def fan_out(levels: int, width: int, wrap: str) -> bytes:
    """One dict of ``width`` entries that all mean the same dict below, ``levels`` deep: width ** levels ways."""
    content = PROTO + b"}" + put(0)
    for level in range(1, levels + 1):
        entries = b"".join(text(f"k{i}") + get(level - 1) for i in range(width))
        inside = b"}(" + entries + b"u"
        if wrap == "modules":
            inside = module(b"}(" + text("_modules") + inside + b"u")
        content += b"0" + inside + put(level)
    return content + b"."


@linux
@pytest.mark.slow
def test_small_files_need_little_memory_and_end_in_a_message(tmp_path: Path) -> None:
    bombs = {
        "ways.pt": fan_out(6, 3000, "dicts"),
        "modules.pt": fan_out(6, 3000, "modules"),
        "sets.pt": PROTO + b"(" + b"\x8f" * (1 << 20) + b"l.",
        "lists.pt": PROTO + b"(" + b"]" * (2 << 20) + b"l.",
        "memo.pt": PROTO + b"N" + b"\x94" * (2 << 20) + b".",
        "anchors.pt": PROTO
        + module(
            b"}("
            + text("yaml")
            + b"}("
            + text("depth_multiple") + b"K\x01" + text("width_multiple") + b"K\x01" + text("head") + b"]"
            + text("backbone") + b"]"
            + text("anchors") + b"](" + b"](" + b"K\x01" * 200_000 + b"e" + put(7) + get(7) * 200_000 + b"eu"
            + text("_modules") + b"}u"
        )
        + b".",
    }  # fmt: skip
    commands = []
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(archive(content))
        commands.append(["weights", "inspect", str(tmp_path / name)])
    (tmp_path / "merge.yaml").write_text(
        "a: &a {x0: 1}\n"
        + "".join(
            f"b{i}: &b{i} {{<<: [{', '.join(['*' + (f'b{i - 1}' if i else 'a')] * 9)}]}}\n" for i in range(12)
        )
    )
    (tmp_path / "sixty.yaml").write_text("nc: " + "1" + ":1" * 49_000 + "\n")
    deep = tmp_path / "deep.yaml"
    deep.write_text("nc: " + "[" * 40_000 + "\n")
    for file in ("merge", "sixty", "deep"):
        commands.append(["weights", "inspect", commands[0][2], "--cfg", str(tmp_path / f"{file}.yaml")])
    for words, (code, said) in zip(commands, bounded(*commands), strict=True):
        assert code in (0, 2, 3), words
        assert "Traceback" not in said and "too little memory" not in said, (words, said)


def test_many_tensors_of_one_storage_are_read_twice_and_not_more_than_the_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = torch.arange(100_000.0)
    torch.save({f"t{i}": base[i * 1000 : (i + 1) * 1000] for i in range(100)}, tmp_path / "views.pt")
    reads = []
    read = zipfile.ZipFile.read

    def counted(self: zipfile.ZipFile, name: str | zipfile.ZipInfo, pwd: bytes | None = None) -> bytes:
        reads.append(name)
        return read(self, name, pwd)

    monkeypatch.setattr(zipfile.ZipFile, "read", counted)
    with TorchFile(tmp_path / "views.pt") as file:
        opened = len(reads)
        for i in range(100):
            assert torch.equal(file.tensor(file.root[f"t{i}"]), base[i * 1000 : (i + 1) * 1000])
        assert len(reads) - opened <= 2
    torch.save({f"t{i}": base for i in range(100)}, tmp_path / "same.pt")
    with (
        TorchFile(tmp_path / "same.pt") as file,
        pytest.raises(CheckpointError, match="more bytes in tensors"),
    ):
        for stored in file.root.values():
            file.tensor(stored)


def test_yaml_descriptions_of_other_programs_are_read(tmp_path: Path) -> None:
    rows = "[[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]]]"
    head = "[[-1, 1, nn.Upsample, [None, 2, 'nearest']], [-1, 1, Conv, [8, 3, 2]], [[-1], 1, Detect, [nc, anchors]]]"
    (tmp_path / "a.yaml").write_text(
        f"# a comment\nnc: 80\ndepth_multiple: 1e0\nwidth_multiple: 1\nanchors:\n  - [10,13, 16,30, 33,23]\n"
        f"backbone: {rows}\nhead: {head}\n"
    )
    assert describe(str(tmp_path / "a.yaml")).name == "a"


def test_onnx_with_impossible_types_and_sizes_is_listed(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info("x\x1b[2J", 1, [2**62, 2**62])
    value.type.tensor_type.elem_type = 999
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [value])
    tensor = graph.initializer.add()
    tensor.name, tensor.data_type = "w", 1
    tensor.dims.extend([2**62] * 300)
    path = tmp_path / "a.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    found = contents(path)
    assert "type 999" in found.interface[0] and "\x1b" not in "".join(found.interface)
    assert found.values == 0
    assert run(["weights", "inspect", str(path)]) in (0, 3)


# -- our own form ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> Weights:
    model = network()
    return Weights(model.state_dict(), WeightsHeader.of(model, img=64))


def test_weights_get_the_mode_of_the_umask(tmp_path: Path, weights: Weights) -> None:
    write_weights(tmp_path / "a.safetensors", weights)
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("kind", ["nan", "infinity", "negative variance", "complex", "bool", "whole numbers"])
def test_values_that_no_training_gives_are_refused(tmp_path: Path, weights: Weights, kind: str) -> None:
    tensors = {name: t.clone() for name, t in weights.tensors.items()}
    name = next(n for n in tensors if n.endswith("running_var"))
    if kind in ("nan", "infinity"):
        tensors[name][0] = float("nan" if kind == "nan" else "inf")
    elif kind == "negative variance":
        tensors[name][0] = -1
    else:
        types = {"complex": torch.complex64, "bool": torch.bool, "whole numbers": torch.int64}
        if kind == "complex" and types[kind] not in _SIZE:
            pytest.skip("this safetensors writes no complex numbers")
        tensors[name] = tensors[name].to(types[kind])
    header = {"weights": json.dumps(weights.header.to_dict(), sort_keys=True)}
    digest = file_format.tensors_sha256(tensors, header)
    path = tmp_path / "a.safetensors"
    path.write_bytes(save(tensors, {**header, file_format.DIGEST: digest}))
    with pytest.raises(CheckpointError, match="running_var"):
        read_weights(path)


def test_names_of_a_file_cannot_command_a_terminal(tmp_path: Path, weights: Weights, capfd) -> None:
    values = weights.header.to_dict()
    values["names"] = [*NAMES[:2], "\x1b[2J\u202e"]
    values["description"] = {**values["description"], "name": "a\x1b]0;title\x07\nb"}
    values["extra"] = {"partial": "\x1b[2J", "\x1b[1m": "\x1b[2J"}
    header = {"weights": json.dumps(values, sort_keys=True)}
    digest = file_format.tensors_sha256(weights.tensors, header)
    path = tmp_path / "a.safetensors"
    path.write_bytes(save(dict(weights.tensors), {**header, file_format.DIGEST: digest}))
    for words in (["weights", "inspect"], ["weights", "verify"], ["predict", "--source", "x", "--weights"]):
        run([*words, str(path)])
    said = "".join(capfd.readouterr())
    assert "title" in said and not any(mark in said for mark in "\x1b\x07\u202e")


# -- what an exported file says of itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"batch": 65536}, {"size_hw": [100_000, 100_000]}, {"batch": 4096, "size_hw": [640, 640]}]
)
def test_exported_files_that_ask_for_endless_images_are_refused(change: dict) -> None:
    values = json.loads(metadata_of(network()).to_json()) | change
    with pytest.raises(YolofleetError):
        ExportMetadata.from_json(json.dumps(values), source="a.onnx")


def test_what_the_shapes_of_tensors_say_is_not_compared_with_a_config_of_transformers():
    description = describe("dfine-s")
    assert isinstance(description, DetrDescription)
    config = config_of(description)
    config["backbone_config"]["hidden_sizes"] = [256, 512, 1024, 2048]  # the default of transformers
    check_config(config, description, "config.json")
    config["backbone_config"]["stage_num_blocks"] = [9, 9, 9, 9]
    with pytest.raises(CheckpointError, match="stage_num_blocks"):
        check_config(config, description, "config.json")
