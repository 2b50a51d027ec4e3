"""Strangers' .pt and .pdparams files: read as data, and harmless however they are made (more in tests/hostile.py)."""

import collections
import copy
import datetime
import io
import os
import pathlib
import pickle
import random
import re
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hostile import PROTO, archive, array, paddle_file, tensor, text

from yolofleet.families.build import outline
from yolofleet.families.networks.description import describe
from yolofleet.families.ppyoloe import pdparams_file as paddle
from yolofleet.families.weights import pickle_machine, pickles
from yolofleet.families.weights.pickle_machine import MAX_OBJECT_BYTES, MAX_PICKLE_BYTES, PickledObject
from yolofleet.families.weights.pickles import StoredTensor, TorchFile
from yolofleet.families.weights.reader import read_weights
from yolofleet.support.errors import CheckpointError


def written(path, content):
    path.write_bytes(content)
    return path


class Evil:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_saves_comes_back(tmp_path, legacy):
    base = torch.arange(24, dtype=torch.float32)
    value = {
        "plain": base.view(4, 6),
        "part": base.view(4, 6)[1:3, ::2],
        "turned": base.view(4, 6).t(),
        "half": torch.randn(3).half(),
        "bf16": torch.randn(3).bfloat16(),
        "whole": torch.arange(5),
        "flag": torch.tensor([True, False]),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "ordered": collections.OrderedDict(a=1, b=2),
        "set": {1, "x"},
        "size": torch.Size([2, 3]),
        "bytes": b"\x00\xff",
        "deep": [{"x": (1, 2.5, None, True, -7, 2**70, "ü")}],
        "path": pathlib.PurePosixPath("/a/b"),
        "time": datetime.datetime(2026, 1, 2),
        "number": np.float64(2.5),
        "array": np.arange(3),
        "device": torch.device("cpu"),
        "type": torch.float16,
    }
    path = tmp_path / "a ü.pt"
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    with TorchFile(path) as file:
        root = file.root
        assert list(root) == list(value)
        for name, expected in value.items():
            if isinstance(expected, torch.Tensor):
                assert isinstance(root[name], StoredTensor)
                found = file.tensor(root[name])
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected.detach())
        for name in ("ordered", "set", "size", "bytes", "deep"):
            assert root[name] == value[name]
        for name in ("path", "time", "number", "array", "device"):
            assert isinstance(root[name], PickledObject), name


def test_modules_become_inert_objects(tmp_path):
    torch.save(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.SiLU()), tmp_path / "m.pt")
    with TorchFile(tmp_path / "m.pt") as file:
        assert file.root.class_path == "torch.nn.modules.container.Sequential"
        conv = file.root.state["_modules"]["0"]
        assert file.tensor(conv.state["_parameters"]["weight"]).shape == (4, 3, 1, 1)


# of YOLOv5's repository, of its package on PyPI
@pytest.mark.parametrize("package", ["models", "yolov5.models"])
def test_modules_of_yolov5_become_inert_objects(tmp_path, package):
    pickled = PROTO + f"c{package}.yolo\nDetectionModel\n)\x81.".encode("latin-1")
    with TorchFile(written(tmp_path / "m.pt", archive(pickled))) as file:
        assert file.root.class_path == f"{package}.yolo.DetectionModel"
        assert isinstance(file.root, PickledObject)


def hollow(tensor, dtype):
    """A tensor of the same shape that keeps one number in memory and in a file."""
    if not tensor.shape:
        return torch.zeros((), dtype=tensor.dtype)
    return torch.zeros(1, dtype=dtype if tensor.is_floating_point() else tensor.dtype).expand(tensor.shape)


def test_a_training_checkpoint_of_the_largest_network_is_far_below_the_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "INERT_PACKAGES", (*pickles.INERT_PACKAGES, "yolofleet."))
    model = outline(describe("yolov5x6"), 80)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = torch.nn.Parameter(hollow(value.data, torch.float16))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = hollow(buffer, torch.float16)
    moments = ("exp_avg", "exp_avg_sq")
    state = {
        i: {name: hollow(p.data, torch.float32) for name in moments} for i, p in enumerate(model.parameters())
    }
    path = tmp_path / "last.pt"
    torch.save({"model": model, "ema": copy.deepcopy(model), "optimizer": {"state": state}}, path)
    with zipfile.ZipFile(path) as file:
        (pickled,) = (m.file_size for m in file.infolist() if m.filename.endswith("/data.pkl"))
    assert 400_000 < pickled < MAX_PICKLE_BYTES / 5
    monkeypatch.setattr(pickle_machine, "MAX_OBJECT_BYTES", MAX_OBJECT_BYTES // 5)
    with TorchFile(path) as file:
        assert len(file.root["optimizer"]["state"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Evil(os.system, "touch {ran}"), "posix.system" if os.name == "posix" else "nt.system"),
        (Evil(eval, "open('{ran}', 'w')"), "builtins.eval"),
        (Evil(exec, "open('{ran}', 'w')"), "builtins.exec"),
        (Evil(__import__, "os"), "builtins.__import__"),
        (Evil(getattr, "x", "upper"), "builtins.getattr"),
        (Evil(pickle.loads, b"x"), "pickle.loads"),
        (Evil(sys.exit, 3), "sys.exit"),
        (Evil(torch.load, "{ran}"), "torch.serialization.load"),
        (Evil(open, "{ran}", "w"), "io.open"),
        (Evil(np.fromfile, "{ran}"), "fromfile"),
        (Evil(np.load, "{ran}"), "load"),
    ],
)
@pytest.mark.parametrize("form", ["zip", "one stream", "pdparams", "pdparams 4"])
def test_code_in_a_checkpoint_is_named_and_not_run(tmp_path, value, name, form):
    ran = tmp_path / "ran"
    function, args = value.call
    evil = Evil(function, *(a.format(ran=ran) if isinstance(a, str) else a for a in args))
    path, content = tmp_path / "evil.pt", {"epoch": 1, "model": [evil]}
    if form.startswith("pdparams"):
        path = tmp_path / "evil.pdparams"
        path.write_bytes(pickle.dumps(content, protocol=4 if form.endswith("4") else 2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError) as problem:
        read_weights(path)
    assert name in str(problem.value) and "none of its code was executed" in str(problem.value)
    assert not ran.exists()


def test_a_memo_number_takes_no_memory(tmp_path):
    path = written(tmp_path / "p.pt", archive(PROTO + b"Nr\xff\xff\xff\xff."))
    with TorchFile(path) as file:
        assert file.root is None


def test_deep_nesting_does_not_overflow(tmp_path):
    n = 60_000
    for opener, closer in ((b"]", b"a"), (b"", b"\x85")):
        path = written(tmp_path / "p.pt", archive(PROTO + (opener * n or b"N") + closer * (n - 1) + b"."))
        with TorchFile(path) as file:
            assert isinstance(file.root, (list, tuple))
    chain = PROTO + b"cmodels.x\nY\nq\x00N" + b"q\x01" + b"0h\x00h\x01\x85R" * n + b"."
    TorchFile(written(tmp_path / "p.pt", archive(chain))).close()


@pytest.mark.parametrize(
    ("shape", "stride", "word"),
    [
        ((2**30, 2**20), (0, 0), "in a storage of 4"),
        ((2**31 - 1, 2**31 - 1, 2**31 - 1, 0), (1, 1, 1, 1), "damaged"),  # no elements, but absurd
    ],
)
def test_a_tensor_larger_than_its_storage_is_not_made(tmp_path, shape, stride, word):
    path = written(tmp_path / "p.pt", archive(PROTO + tensor(0, shape, stride) + b".", {"0": bytes(16)}))
    with TorchFile(path) as file, pytest.raises(CheckpointError, match=word):
        file.tensor(file.root)


def small_checkpoint(legacy):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    buffer = io.BytesIO()
    value = {
        "model": model,
        "epoch": 3,
        "names": {0: "a"},
        "best": np.float64(1),
        "when": datetime.date(2026, 1, 1),
    }
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def test_mutated_pickles_with_right_checksums_give_our_error_or_data(tmp_path):
    """Past the zip's checksum: opcodes changed, doubled, swapped."""
    with zipfile.ZipFile(io.BytesIO(small_checkpoint(False))) as z:
        pickled = next(z.read(n) for n in z.namelist() if n.endswith("data.pkl"))
        storages = {n.split("/")[-1]: z.read(n) for n in z.namelist() if "/data/" in n}
    r, path = random.Random(1), tmp_path / "p.pt"
    for _ in range(600):
        data = bytearray(pickled)
        for _ in range(r.choice((1, 2, 4))):
            at = r.randrange(len(data))
            match r.randrange(3):
                case 0:
                    data[at] = r.randrange(256)
                case 1:
                    data[at:at] = data[r.randrange(len(data)) :][: r.randrange(20)]
                case 2:
                    del data[at : at + r.randrange(20)]
        written(path, archive(bytes(data), storages))
        try:
            TorchFile(path).close()
        except CheckpointError:
            pass


def test_a_good_array_of_numpy_is_read_without_numpys_code(tmp_path):
    content = paddle_file(array(data=b"C\x08" + struct.pack("<2f", 1.5, -2)))
    found = paddle.read_arrays(written(tmp_path / "good.pdparams", content))
    assert found["x"].tolist() == [1.5, -2] and not found["x"].flags.writeable


def test_the_state_of_paddles_optimizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="Paddle's optimizer") as problem:
        paddle.read(written(tmp_path / "best_model.pdopt", b""))
    assert "best_model.pdparams" in problem.value.render()


UNPICKLE = {
    "pickle": """
import pickle, sys
class Inert(pickle.Unpickler):
    def find_class(self, module, name):
        return type(name, (), {})
with open(sys.argv[1], "rb") as file:
    Inert(file).load()
""",
    "torch": "import sys, torch\ntorch.load(sys.argv[1], weights_only=True)",
}


@pytest.mark.skipif(os.name != "posix", reason="asks for the signal that ended a process")
@pytest.mark.parametrize("library", ["pickle", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_key_ends_the_process_of_other_readers(tmp_path, library):
    """Hashing a deep tuple overflows the stack of C; why the machine is our own. If this fails, a library may replace it."""
    pickled = PROTO + b"}N" + b"\x85" * 1_000_000 + b"Ns."
    path = tmp_path / {"pickle": "bad.pdparams", "torch": "bad.pt"}[library]
    written(path, pickled if library == "pickle" else archive(pickled))
    if library == "torch":
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("archive/version", "3\n")  # without it torch.load refuses the file
    ended = subprocess.run([sys.executable, "-c", UNPICKLE[library], path], capture_output=True, timeout=900)
    assert ended.returncode < 0, ended.stderr
    with pytest.raises(CheckpointError, match="a tuple as key"):
        read_weights(path)


def bombs():
    yield "shared halves", b"N\x85" + b"2\x86" * 80_000
    yield "lists", b"]" * 80_000
    yield "dicts", b"}" * 80_000
    yield "a deep tuple", b"N" + b"\x85" * 80_000
    yield "marks", b"(" * 80_000
    yield "memo", b"N" + b"\x94" * 80_000
    numbers = b"".join(b"r" + struct.pack("<I", 2**32 - 1 - i) for i in range(16_000))
    yield "memo numbers", b"N" + numbers
    again = b"ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00\x85R" * 10_000
    yield "copies of a list", b"(" + b"N" * 50_000 + b"lq\x00" + again
    once = text("x" * 1_000_000) + b"q\x00" + text("latin1") + b"q\x01c_codecs\nencode\nq\x02"
    yield "copies of a text", once + b"h\x02h\x00h\x01\x86R" * 10_000
    yield "wide text", text("x" * 1_000_000 + "\U0001f600")


@pytest.mark.parametrize(("name", "content"), list(bombs()), ids=[name for name, _ in bombs()])
def test_bombs_take_little_memory(tmp_path, monkeypatch, name, content):
    """With a part of the allowance, because measuring is slow."""
    monkeypatch.setattr(paddle, "MAX_STRUCTURE_BYTES", paddle.MAX_STRUCTURE_BYTES // 32)
    path = written(tmp_path / "bad.pdparams", PROTO + content + b".")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            paddle.read(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
