"""Strangers' .pt files: read as data, and harmless however they are made."""

import collections
import copy
import datetime
import io
import os
import pathlib
import pickle
import random
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch

from yolofleet.checkpoint import pickle_machine, pickles
from yolofleet.checkpoint.pickle_machine import MAX_OBJECT_BYTES, MAX_PICKLE_BYTES, PickledObject
from yolofleet.checkpoint.pickles import StoredTensor, TorchFile
from yolofleet.checkpoint.reader import read_weights
from yolofleet.errors import CheckpointError
from yolofleet.families import outline
from yolofleet.models.description import describe

PROTO = b"\x80\x02"


def archive(path, pickled, storages=(), **write):
    """A zip in torch's layout around any pickle bytes."""
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/data.pkl", pickled, **write)
        for key, data in dict(storages).items():
            z.writestr(f"archive/data/{key}", data)
    return path


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def storage(key=b"0", numel=4, kind="FloatStorage"):
    return (
        b"("
        + text("storage")
        + b"ctorch\n"
        + kind.encode()
        + b"\n"
        + text(key.decode())
        + text("cpu")
        + b"J"
        + (struct.pack("<i", numel) + b"tQ")
    )


def tensor(offset, shape, stride, **kind):
    numbers = (
        b"".join(b"J" + struct.pack("<i", n) for n in shape),
        b"".join(b"J" + struct.pack("<i", n) for n in stride),
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(**kind) + b"J" + struct.pack("<i", offset)
        + b"(" + numbers[0] + b"t(" + numbers[1] + b"t\x89}tR"
    )  # fmt: skip


def refused(path, *words):
    with pytest.raises(CheckpointError) as problem:
        TorchFile(path).close()
    for word in words:
        assert word in str(problem.value), str(problem.value)


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


@pytest.mark.parametrize(
    "package", ["models", "yolov5.models"]
)  # of YOLOv5's repository, of its package on PyPI
def test_modules_of_yolov5_become_inert_objects(tmp_path, package):
    pickled = PROTO + f"c{package}.yolo\nDetectionModel\n)\x81.".encode("latin-1")
    with TorchFile(archive(tmp_path / "m.pt", pickled)) as file:
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


GETATTR_CHAIN = PROTO + b"cbuiltins\ngetattr\n(c__builtin__\neval\n" + text("__call__") + b"tR."


@pytest.mark.parametrize(
    ("pickled", "word"),
    [
        (GETATTR_CHAIN, "builtins.getattr"),
        (PROTO + b"c__builtin__\neval\n.", "builtins.eval"),
        (PROTO + b"(ios\nsystem\n.", "opcode 0x69"),  # INST
        (PROTO + b"(cmodels.x\nY\no.", "opcode 0x6f"),  # OBJ
        (PROTO + b"\x82\x01.", "opcode 0x82"),  # extension registry
        (PROTO + b"Pabc\n.", "opcode 0x50"),
        (PROTO + b"I12\n.", "opcode 0x49"),
        (b"\x80\x05\x97.", "opcode 0x97"),  # out-of-band buffer
        (PROTO + text("os") + text("system") + b"\x93.", "os.system"),  # name from the stack
        (PROTO + b"K\x05" + text("x") + b"\x93.", "name"),
        (PROTO + b"cmodels.yolo\nModel\n)R)R.", "call of a value that is not a name"),
        (PROTO + b"]K\x01b.", "state for a list"),  # __setstate__ of a builtin
        (PROTO + b"]K\x01K\x02s.", "pairs for a list"),
        (PROTO + b"ctorch\nSize\n(X\x03\x00\x00\x00abctR.", "sequence"),
        (PROTO + b"c_codecs\nencode\n" + text("x") + text("rot13") + b"\x86R.", "encoding"),
        (PROTO + b"}]K\x01s.", "list as key"),
        (PROTO + b"h\x07.", "damaged"),  # nothing remembered
        (PROTO + b"t.", "damaged"),  # no mark
        (PROTO + b"(.", "damaged"),
        (PROTO + b".", "damaged"),
        (PROTO + b"(K\x01(00.", "empty stack"),  # pops below a mark
        (PROTO + b"X\xff\xff\xff\xffabc.", "4194304 bytes"),
        (PROTO + b"\x8d" + b"\xff" * 8 + b"abc.", "4194304 bytes"),
        (PROTO + b"X\x00\x00\x10\x00abc.", "too early"),
        (PROTO + b"\x8b\xff\xff\xff\x7f.", "whole number of"),
        (PROTO + b"\x8b\xff\xff\xff\xff.", "whole number of"),
        (PROTO + b"X\x01\x00\x00\x00\xff.", "damaged"),  # not UTF-8
        (PROTO + b"cmodels", "does not end"),
        (PROTO, "too early"),
        (b"", "too early"),
        (PROTO + b"N(Q.", "damaged"),
        (PROTO + text("x") + b"Q.", "storage without"),
        (PROTO + storage(kind="QUInt8Storage") + b".", "QUInt8Storage"),
    ],
)
def test_hand_made_pickles_are_refused(tmp_path, pickled, word):
    refused(archive(tmp_path / "p.pt", pickled), word)


def test_a_memo_number_takes_no_memory(tmp_path):
    path = archive(tmp_path / "p.pt", PROTO + b"Nr\xff\xff\xff\xff.")
    with TorchFile(path) as file:
        assert file.root is None


def test_deep_nesting_does_not_overflow(tmp_path):
    n = 60_000
    for opener, closer in ((b"]", b"a"), (b"", b"\x85")):
        path = archive(tmp_path / "p.pt", PROTO + (opener * n or b"N") + closer * (n - 1) + b".")
        with TorchFile(path) as file:
            assert isinstance(file.root, (list, tuple))
    refused(archive(tmp_path / "p.pt", PROTO + b"}N" + b"\x85" * n + b"Ns."), "tuple as key")
    chain = PROTO + b"cmodels.x\nY\nq\x00N" + b"q\x01" + b"0h\x00h\x01\x85R" * n + b"."
    TorchFile(archive(tmp_path / "p.pt", chain)).close()


def test_a_doubling_graph_costs_nothing_to_refuse(tmp_path):
    """A tuple of 2^60 leaves by sharing, as a tensor's shape: its text must never be made."""
    doubling = b"N\x85" + b"2\x86" * 60
    begin = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"K\x00"
    refused(
        archive(tmp_path / "p.pt", PROTO + begin + doubling + b"K\x01\x85\x89}tR.", {"0": bytes(16)}),
        "shape or stride",
    )


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "word"),
    [
        (0, (5,), (1,), "reaches element 4"),
        (1, (4,), (1,), "reaches element 4"),
        (0, (2, 2), (3, 1), "reaches element 4"),
        (-1, (2,), (1,), "shape or stride"),
        (0, (2,), (-1,), "shape or stride"),
        (0, (-2,), (1,), "shape or stride"),
        (0, (2, 2), (1,), "shape or stride"),
        (0, (1,) * 17, (1,) * 17, "shape or stride"),
    ],
)
def test_a_tensor_stays_within_its_storage(tmp_path, offset, shape, stride, word):
    refused(archive(tmp_path / "p.pt", PROTO + tensor(offset, shape, stride) + b".", {"0": bytes(16)}), word)


@pytest.mark.parametrize(
    ("shape", "stride", "word"),
    [
        ((2**30, 2**20), (0, 0), "in a storage of 4"),
        ((2**31 - 1, 2**31 - 1, 2**31 - 1, 0), (1, 1, 1, 1), "damaged"),  # no elements, but absurd
    ],
)
def test_a_tensor_larger_than_its_storage_is_not_made(tmp_path, shape, stride, word):
    path = archive(tmp_path / "p.pt", PROTO + tensor(0, shape, stride) + b".", {"0": bytes(16)})
    with TorchFile(path) as file, pytest.raises(CheckpointError, match=word):
        file.tensor(file.root)


@pytest.mark.parametrize("data", [{}, {"0": b""}, {"0": bytes(15)}, {"0": bytes(17)}, {"1": bytes(16)}])
def test_a_storage_must_have_its_size(tmp_path, data):
    refused(
        archive(tmp_path / "p.pt", PROTO + tensor(0, (4,), (1,)) + b".", data),
        "expected 16",
    )


def test_one_storage_cannot_be_two(tmp_path):
    pickled = PROTO + tensor(0, (4,), (1,)) + tensor(0, (2,), (1,), numel=2, kind="DoubleStorage") + b"\x86."
    refused(archive(tmp_path / "p.pt", pickled, {"0": bytes(16)}), "in two ways")


def test_a_zip_bomb_is_refused_unopened(tmp_path):
    refused(
        archive(tmp_path / "p.pt", PROTO + b"N" * 10_000_000 + b".", compress_type=zipfile.ZIP_DEFLATED),
        "compressed member",
    )


def test_members_on_top_of_each_other_are_refused(tmp_path):
    path = archive(tmp_path / "p.pt", PROTO + b"N.", {"0": bytes(1000)})
    data = bytearray(path.read_bytes())
    entries, at = [], data.find(b"PK\x01\x02")
    end = data.find(b"PK\x05\x06")
    last = data.rfind(b"PK\x01\x02", 0, end)
    entry = bytes(data[last:end])
    for i in range(1, 10):  # nine more names for the same bytes
        entries.append(entry.replace(b"archive/data/0", b"archive/data/%d" % i))
    tail = bytearray(data[end:])
    directory = bytes(data[at:end]) + b"".join(entries)
    struct.pack_into("<HHII", tail, 8, 11, 11, len(directory), at)
    path.write_bytes(bytes(data[:at]) + directory + bytes(tail))
    refused(path, "smaller than the sum of its members")


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({"archive/code/x.py": b"", "archive/constants.pkl": b"", "archive/data.pkl": b""}, "TorchScript"),
        ({"a/data.pkl": b"", "b/data.pkl": b""}, "no torch checkpoint"),
        ({"readme.txt": b"hello"}, "no torch checkpoint"),
        ({"a/data.pkl": b"", "a/byteorder": b"big"}, "big-endian"),
    ],
)
def test_other_archives_are_named(tmp_path, members, word):
    with zipfile.ZipFile(tmp_path / "p.pt", "w") as z:
        for name, data in members.items():
            z.writestr(name, data)
    refused(tmp_path / "p.pt", word)


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
        archive(path, bytes(data), storages)
        try:
            TorchFile(path).close()
        except CheckpointError:
            pass
