"""Strangers' .pdparams files: harmless however they are made, and named in one message."""

import struct
import tracemalloc

import pytest

from yolofleet.checkpoint import paddle
from yolofleet.errors import CheckpointError

PROTO = b"\x80\x02"
FLOAT = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x88tR(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def sizes(*shape):
    """A tuple of whole numbers of any size."""
    return b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in shape) + b"t"


PAIR = sizes(2)


def array(
    shape=PAIR,
    dtype=FLOAT,
    fortran=b"\x89",
    data=b"C\x08" + bytes(8),
    version=b"K\x01",
    kind=b"cnumpy\nndarray\n",
):
    """Opcodes of one numpy array."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + kind + b"K\x00\x85C\x01b\x87R"
    return empty + b"(" + version + shape + dtype + fortran + data + b"tb"


def dtype(code="f4", order="<", tail=b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"):
    return b"cnumpy\ndtype\n(" + text(code) + b"\x89\x88tR(K\x03" + text(order) + tail + b"tb"


def file_of(tmp_path, value, name=b"x"):
    """A dict with one value; or a whole pickle."""
    path = tmp_path / "bad.pdparams"
    path.write_bytes(value if value.startswith(b"\x80") else PROTO + b"}" + text("x") + value + b"s.")
    return path


def refused(path, *words):
    with pytest.raises(CheckpointError) as problem:
        paddle.read(path)
    for word in (str(path), *words):
        assert word in str(problem.value), str(problem.value)
    assert len(str(problem.value)) < 1000


def test_a_good_array_is_read(tmp_path):
    found = paddle.read_arrays(file_of(tmp_path, array(data=b"C\x08" + struct.pack("<2f", 1.5, -2))))
    assert found["x"].tolist() == [1.5, -2]
    assert not found["x"].flags.writeable


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (array(dtype=dtype("O8", "|")), "type 'O8'"),
        (array(dtype=dtype("V8", "|")), "type 'V8'"),
        (array(dtype=dtype("S8", "|")), "type 'S8'"),
        (array(dtype=dtype("c8")), "type 'c8'"),
        (array(dtype=dtype("M8")), "type 'M8'"),
        (array(dtype=dtype(order=">")), "big-endian"),
        (array(dtype=dtype(tail=b"N(" + text("a") + b"t}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00")), "plain numbers"),
        (array(dtype=b"cnumpy\ndtype\n(K\x05tR"), "instead of numbers"),
        (array(dtype=b"cnumpy\ndtype\n(" + text("f4") + b"tR"), "without shape, type and content"),  # no byte order
        (array(dtype=b"N"), "without shape, type and content"),
        (array(fortran=b"\x88"), "Fortran order"),
        (array(version=b"K\x02"), "without shape, type and content"),
        (array(kind=b"cnumpy\ndtype\n"), "subclass of numpy.ndarray"),
        (array(shape=sizes(-2)), "invalid shape"),
        (array(shape=sizes(-1, -2)), "invalid shape"),
        (array(shape=sizes(2**62)), "invalid shape"),
        (array(shape=sizes(2**39, 2**39, 2**39)), "in 8 bytes"),
        (array(shape=sizes(0, 2**39, 2**39), data=b"C\x00"), "damaged"),
        (array(shape=sizes(*[1] * 17)), "invalid shape"),
        (array(shape=b"G" + bytes(8) + b"\x85"), "invalid shape"),
        (array(shape=sizes(3)), "[3] in 8 bytes"),
        (array(shape=sizes()), "[] in 8 bytes"),
        (array(data=b"]"), "without shape, type and content"),
        (array(data=text("12345678")), "without shape, type and content"),
        (array(data=b"B\xff\xff\xff\xff" + bytes(8)), "too early"),
        (array(data=b"\x8e" + b"\xff" * 8 + bytes(8)), "too early"),
        (array(data=b"\x96" + struct.pack("<Q", 8) + bytes(8)), "opcode 0x96"),
        (array(data=b"c_codecs\nencode\n(]" + text("latin1") + b"tR"), "latin1"),
        (array(data=b"c_codecs\nencode\n(" + text("€") + text("latin1") + b"tR"), "damaged"),
        (array(data=b"c_codecs\nencode\n(" + text("x") + b"N\x85" + b"2\x86" * 60 + b"tR"), "latin1"),
        (array(dtype=b"cnumpy\ndtype\n(N\x85" + b"2\x86" * 60 + b"tR"), "instead of numbers"),
        (array(shape=b"N\x85" + b"2\x86" * 60), "invalid shape"),
        (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R", "without name or content"),
        (b"cnumpy.core.multiarray\n_reconstruct\n)R", "damaged"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n", "torch._utils._rebuild_tensor_v2"),
        (b"cmodels.yolo\nModel\n", "models.yolo.Model"),
        (text("x") + b"Q", "damaged"),  # a reference to an object outside of the pickle
        (array(data=b"C\x08" + bytes(4) + struct.pack("<f", float("nan"))), "not a PP-YOLOE model"),
        (array(dtype=dtype("i4")), "int32"),
        (array(dtype=dtype("u2"), shape=sizes(4)), "uint16"),
        (b"N", "has no arrays"),
        (b"}" + text("w") + array() + b"s", "has no arrays"),  # in a dict of its own
        (PROTO + b"]" + array() + b"a.", "not a dict of arrays"),
        (PROTO + b"}K\x01" + array() + b"s.", "without name"),
        (PROTO + b"}" + text("x") + array() + b"s.junk", "not a dict of arrays"),
        (PROTO + b"N.", "not a dict of arrays"),
        (PROTO + b".", "damaged"),
        (PROTO, "too early"),
    ],
)  # fmt: skip
def test_hand_made_files_are_refused(tmp_path, value, word):
    refused(file_of(tmp_path, value), word)


def test_the_optimizers_state_is_named(tmp_path):
    path = tmp_path / "best_model.pdopt"
    path.write_bytes(b"")
    refused(path, "Paddle's optimizer", "best_model.pdparams")


def test_one_array_under_many_names_is_refused(tmp_path):
    """It would be copied for every name."""
    many = b"".join(text(str(i)) + b"h\x00s" for i in range(10_000))
    first = text("x") + array(sizes(250_000), data=b"B" + struct.pack("<I", 10**6) + bytes(10**6)) + b"q\x00s"
    refused(file_of(tmp_path, PROTO + b"}" + first + many + b"."), "under several names")


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
    path = file_of(tmp_path, PROTO + content + b".")
    tracemalloc.start()
    try:
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_the_worst_pickle_is_given_up_soon(tmp_path):
    path = file_of(tmp_path, PROTO + b"}" * 10_000_000 + b".")
    refused(path, "bytes")
