"""Content that somebody made on purpose to mislead a reader of ``damage.py``, and a word of the message that refuses it.

``tests/unit/test_damaged_files.py`` tries every row. Pickles are written opcode by opcode; ``pickletools.dis`` reads them.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping

# -- images ------------------------------------------------------------------------------------------------------


def scans(width: int, height: int, count: int, *, progressive: bool = False) -> bytes:
    """Return a JPEG of three components with ``count`` scans that hold nothing."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    kind = b"\xc2" if progressive else b"\xc0"
    scan = b"\xff\xda" + struct.pack(">H", 8) + b"\1\1\0\0\0\0"
    return b"\xff\xd8\xff" + kind + struct.pack(">H", 2 + len(frame)) + frame + scan * count + b"\xff\xd9"


def before_frame(inserted: bytes, side: int = 9000) -> bytes:
    """Return a JPEG of three components with ``inserted`` between an empty comment and its frame."""
    plain = scans(side, side, 1)
    return plain[:2] + b"\xff\xfe\0\2" + inserted + plain[2:]


def tiff(entries: list[tuple[int, int, int]], *, order: str = "<", big: bool = False) -> bytes:
    """Return a TIFF, or a BigTIFF, of one directory with these (tag, kind, value)."""
    mark = b"II" if order == "<" else b"MM"
    if big:
        rows = b"".join(struct.pack(order + "HHQQ", tag, kind, 1, value) for tag, kind, value in entries)
        return mark + struct.pack(order + "HHHQQ", 43, 8, 0, 16, len(entries)) + rows + bytes(8)
    rows = b"".join(struct.pack(order + "HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return mark + struct.pack(order + "HIH", 42, 8, len(entries)) + rows + bytes(4)


def jp2_with_a_second_stream(side: int) -> bytes:
    """Return a JPEG 2000 file: an unknown box holds the size 8 x 8, the code stream that is read is larger."""
    sizes = [jp2_stream(wide) for wide in (8, side)]
    boxes = [(b"free", sizes[0]), (b"jp2c", sizes[1])]
    packed = b"".join(struct.pack(">I", 8 + len(body)) + kind + body for kind, body in boxes)
    return JP2 + packed


def jp2_stream(side: int) -> bytes:
    return b"\xff\x4f\xff\x51" + struct.pack(">HHIIII", 41, 0, side, side, 0, 0) + bytes(200)


def animated_webp(width: int, height: int) -> bytes:
    """Return the first chunks of an animated WebP file."""
    canvas = b"\x02\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<I", 10) + canvas + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


JP2 = b"\0\0\0\x0cjP  \r\n\x87\n"
PNG = (
    b"\x89PNG\r\n\x1a\n"
    + struct.pack(">I4sII", 13, b"IHDR", 15000, 15000)
    + bytes(5)
    + b"IEND\xae\x42\x60\x82"
)
SUN = b"\x59\xa6\x6a\x95" + struct.pack(">7I", 11000, 11000, 24, 0, 1, 0, 0) + bytes(900)
IMAGES = [
    # small files that claim a huge image, wherever a decoder finds the size
    (scans(23000, 23000, 1) + bytes(5000), "claims 23000 x 23000 pixels"),
    (scans(16000, 16000, 1, progressive=True) + bytes(5000), "claims 16000 x 16000 pixels"),
    (before_frame(b"\0"), "claims 9000 x 9000 pixels"),
    (before_frame(b"\xff\0\0\xff\xff"), "claims 9000 x 9000 pixels"),
    (before_frame(b"\xff" * 5000), "claims 9000 x 9000 pixels"),
    (before_frame(b"\xff\xd0\xff\x01"), "claims 9000 x 9000 pixels"),  # marks that have no length
    (before_frame(b"\xff\xfe\0\4ab\0\0"), "claims 9000 x 9000 pixels"),
    (PNG, "claims 15000 x 15000 pixels"),
    (b"GIF89a" + struct.pack("<HH", 11000, 11000) + bytes(800), "claims 11000 x 11000 pixels"),
    (tiff([(0x100, 3, 11000), (0x101, 3, 11000)], big=True), "claims 11000 x 11000 pixels"),
    (tiff([(0x100, 16, 1 << 40), (0x101, 16, 11000)], big=True, order=">"), "claims 1099511627776 x 11000 pixels"),
    (tiff([(0x100, 3, 11000), (0x101, 3, 11000), (0x100, 3, 8), (0x101, 3, 8)]), "claims"),  # two sizes
    (animated_webp(16000, 16000), "claims 16000 x 16000 pixels"),
    (jp2_stream(30000), "claims 30000 x 30000 pixels"),
    (jp2_with_a_second_stream(11000), "claims 11000 x 11000 pixels"),
    (b"P6\n# size\n11000#\n" + b"\n11000\n255\n" + bytes(900), "without a size"),
    (b"P5 11000 11000 255 " + bytes(900), "claims 11000 x 11000 pixels"),
    (b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 11000, 11000, 1, 24) + bytes(900), "claims 11000 x 11000 pixels"),  # OS/2
    # sizes that cannot be found, or make no sense
    (JP2 + bytes(60), "without a size"),
    (before_frame(b"\xff\xfe\0\2" * 4200), "more than 4096 segments"),
    (before_frame(bytes(1 << 17)), "other bytes in the place of its header"),
    (before_frame(b"\xff\xfe\0\1\0"), "without a size"),
    (b"\xff\xd8\xff\xc0" + struct.pack(">HBH", 11, 8, 1) + b"\xff\xd9", "a.jpg"),  # ends inside its frame, where the width stands
    (tiff([(0x101, 3, 8)]), "without a size"),
    (tiff([(0x100, 9, 11000), (0x101, 9, 11000)]), "claims 0 x 0"),
    (tiff([(0x100, 3, 8), (0x101, 3, 8), (0x142, 3, 16384), (0x143, 3, 16384)]), "tiles of 268435456 pixels"),
    (b"II+\0\x08\0\0\0" + b"\xff" * 100, "without a size"),
    # 3.8 KB with 300 scans take 10 s to decode; without repeated scans it is a matter for the decoder
    (scans(2000, 1500, 300, progressive=True), "has 300 scans of 2000 x 1500 pixels"),
    (scans(2000, 1500, 300), "has 300 scans of 2000 x 1500 pixels"),
    # formats that OpenCV reads and we do not
    (SUN, "not in a known image format"),
    (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 11000 +X 11000\n" + bytes(900), "not in a known image format"),
    (b"PF\n11000 11000\n-1.0\n" + bytes(900), "not in a known image format"),
]  # fmt: skip

# -- pickles of torch --------------------------------------------------------------------------------------------

PROTO = b"\x80\x02"
DOUBLED = b"N\x85" + b"2\x86" * 60  # a tuple of 2^60 leaves by sharing: its text must never be made


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def archive(pickled: bytes, storages: Mapping[str, bytes] = {}, **write: int) -> bytes:
    """Return a zip in torch's layout around any pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as z:
        z.writestr("archive/data.pkl", pickled, **write)  # type: ignore[arg-type]
        for key, data in storages.items():
            z.writestr(f"archive/data/{key}", data)
    return content.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as z:
        for name, data in members.items():
            z.writestr(name, data)
    return content.getvalue()


def storage(numel: int = 4, kind: str = "FloatStorage") -> bytes:
    start = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n"
    return start + text("0") + text("cpu") + b"J" + struct.pack("<i", numel) + b"tQ"


def tensor(offset: int, shape: tuple[int, ...], stride: tuple[int, ...], stored: bytes = storage()) -> bytes:
    numbers = [b"".join(b"J" + struct.pack("<i", n) for n in each) for each in (shape, stride)]
    start = b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + b"J" + struct.pack("<i", offset)
    return start + b"(" + numbers[0] + b"t(" + numbers[1] + b"t\x89}tR"


def members_on_top_of_each_other() -> bytes:
    """Return an archive whose directory has nine more names for the same bytes."""
    data = bytearray(archive(PROTO + b"N.", {"0": bytes(1000)}))
    at, end = data.find(b"PK\x01\x02"), data.find(b"PK\x05\x06")
    entry = bytes(data[data.rfind(b"PK\x01\x02", 0, end) : end])
    more = b"".join(entry.replace(b"archive/data/0", b"archive/data/%d" % i) for i in range(1, 10))
    directory, tail = bytes(data[at:end]) + more, bytearray(data[end:])
    struct.pack_into("<HHII", tail, 8, 11, 11, len(directory), at)
    return bytes(data[:at]) + directory + bytes(tail)


PICKLES = [
    (PROTO + b"cbuiltins\ngetattr\n(c__builtin__\neval\n" + text("__call__") + b"tR.", "builtins.eval"),
    (PROTO + b"cbuiltins\ngetattr\n(" + text("a text") + text("__class__") + b"tR.", "builtins.getattr"),
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
    (PROTO + b"}N" + b"\x85" * 60_000 + b"Ns.", "tuple as key"),
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
]  # fmt: skip
STRETCHES: list[tuple[int, tuple[int, ...], tuple[int, ...], str]] = [  # of a storage of four elements
    (0, (5,), (1,), "reaches element 4"),
    (1, (4,), (1,), "reaches element 4"),
    (0, (2, 2), (3, 1), "reaches element 4"),
    (-1, (2,), (1,), "shape or stride"),
    (0, (2,), (-1,), "shape or stride"),
    (0, (-2,), (1,), "shape or stride"),
    (0, (2, 2), (1,), "shape or stride"),
    (0, (1,) * 17, (1,) * 17, "shape or stride"),
]
TORCH = [
    *((archive(pickled), word) for pickled, word in PICKLES),
    *((archive(PROTO + tensor(at, shape, stride) + b".", {"0": bytes(16)}), word) for at, shape, stride, word in STRETCHES),
    *((archive(PROTO + tensor(0, (4,), (1,)) + b".", each), "expected 16")
      for each in ({}, {"0": b""}, {"0": bytes(15)}, {"0": bytes(17)}, {"1": bytes(16)})),
    (archive(PROTO + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"K\x00" + DOUBLED + b"K\x01\x85\x89}tR.", {"0": bytes(16)}),
     "shape or stride"),
    (archive(PROTO + tensor(0, (4,), (1,)) + tensor(0, (2,), (1,), storage(2, "DoubleStorage")) + b"\x86.", {"0": bytes(16)}), "in two ways"),
    (archive(PROTO + b"N" * 10_000_000 + b".", compress_type=zipfile.ZIP_DEFLATED), "compressed member"),
    (members_on_top_of_each_other(), "smaller than the sum of its members"),
    (zipped({"archive/code/x.py": b"", "archive/constants.pkl": b"", "archive/data.pkl": b""}), "TorchScript"),
    (zipped({"a/data.pkl": b"", "b/data.pkl": b""}), "no torch checkpoint"),
    (zipped({"readme.txt": b"hello"}), "no torch checkpoint"),
    (zipped({"a/data.pkl": b"", "a/byteorder": b"big"}), "big-endian"),
]  # fmt: skip

# -- pickles of Paddle -------------------------------------------------------------------------------------------

FLOAT = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x88tR(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def sizes(*shape: int) -> bytes:
    """Return a tuple of whole numbers of any size."""
    return b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in shape) + b"t"


def array(
    shape: bytes = sizes(2),
    dtype: bytes = FLOAT,
    fortran: bytes = b"\x89",
    data: bytes = b"C\x08" + bytes(8),
    version: bytes = b"K\x01",
    kind: bytes = b"cnumpy\nndarray\n",
) -> bytes:
    """Return the opcodes of one numpy array."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + kind + b"K\x00\x85C\x01b\x87R"
    return empty + b"(" + version + shape + dtype + fortran + data + b"tb"


def dtype(
    code: str = "f4", order: str = "<", tail: bytes = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
) -> bytes:
    return b"cnumpy\ndtype\n(" + text(code) + b"\x89\x88tR(K\x03" + text(order) + tail + b"tb"


def paddle_file(value: bytes) -> bytes:
    """Return a pickled dict with one value."""
    return PROTO + b"}" + text("x") + value + b"s."


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
PADDLE = [
    *((paddle_file(value), word) for value, word in [
        (array(dtype=dtype("O8", "|")), "type 'O8'"),
        (array(dtype=dtype("V8", "|")), "type 'V8'"),
        (array(dtype=dtype("S8", "|")), "type 'S8'"),
        (array(dtype=dtype("c8")), "type 'c8'"),
        (array(dtype=dtype("M8")), "type 'M8'"),
        (array(dtype=dtype(order=">")), "big-endian"),
        (array(dtype=dtype(tail=b"N(" + text("a") + b"t}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00")), "plain numbers"),
        (array(dtype=b"cnumpy\ndtype\n(K\x05tR"), "instead of numbers"),
        (array(dtype=b"cnumpy\ndtype\n(" + text("f4") + b"tR"), "without shape, type and content"),  # no byte order
        (array(dtype=b"cnumpy\ndtype\n(" + DOUBLED + b"tR"), "instead of numbers"),
        (array(dtype=b"N"), "without shape, type and content"),
        (array(dtype=dtype("i4")), "int32"),
        (array(dtype=dtype("u2"), shape=sizes(4)), "uint16"),
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
        (array(shape=DOUBLED), "invalid shape"),
        (array(shape=sizes(3)), "[3] in 8 bytes"),
        (array(shape=sizes()), "[] in 8 bytes"),
        (array(data=b"]"), "without shape, type and content"),
        (array(data=text("12345678")), "without shape, type and content"),
        (array(data=b"B\xff\xff\xff\xff" + bytes(8)), "too early"),
        (array(data=b"\x8e" + b"\xff" * 8 + bytes(8)), "too early"),
        (array(data=b"\x96" + struct.pack("<Q", 8) + bytes(8)), "opcode 0x96"),
        (array(data=b"c_codecs\nencode\n(]" + text("latin1") + b"tR"), "latin1"),
        (array(data=b"c_codecs\nencode\n(" + text("€") + text("latin1") + b"tR"), "damaged"),
        (array(data=b"c_codecs\nencode\n(" + text("x") + DOUBLED + b"tR"), "latin1"),
        (array(data=b"C\x08" + bytes(4) + struct.pack("<f", float("nan"))), "not a PP-YOLOE model"),
        (RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85C\x01b\x87R", "without name or content"),
        (RECONSTRUCT + b")R", "damaged"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n", "torch._utils._rebuild_tensor_v2"),
        (b"cmodels.yolo\nModel\n", "models.yolo.Model"),
        (text("x") + b"Q", "damaged"),  # a reference to an object outside of the pickle
        (b"N", "has no arrays"),
        (b"}" + text("w") + array() + b"s", "has no arrays"),  # in a dict of its own
    ]),
    (PROTO + b"]" + array() + b"a.", "not a dict of arrays"),
    (PROTO + b"}K\x01" + array() + b"s.", "without name"),
    (PROTO + b"}" + text("x") + array() + b"s.junk", "not a dict of arrays"),
    (PROTO + b"N.", "not a dict of arrays"),
    (PROTO + b".", "damaged"),
    (PROTO, "too early"),
    (PROTO + b"}" * 10_000_000 + b".", "bytes"),  # given up soon
    # one array under many names would be copied for each
    (PROTO + b"}" + text("x") + array(sizes(250_000), data=b"B" + struct.pack("<I", 10**6) + bytes(10**6)) + b"q\x00s"
     + b"".join(text(str(i)) + b"h\x00s" for i in range(10_000)) + b".", "under several names"),
]  # fmt: skip

# -- safetensors, YAML and XML -----------------------------------------------------------------------------------


def safetensors_file(header: object) -> bytes:
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


HEADERS: list[object] = [
    {"__metadata__": 5},
    {"__metadata__": True},
    {"__metadata__": []},
    {"w": {"dtype": "F32", "shape": [2**39] * 400, "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    {"w": 5},
    [],
]
METADATA: list[object] = [5, True, "x", [], [1], {"sha256": 5}, {"sha256": None}, {"a": {}}]
VALUES = [
    "!!bool foo",
    "!!int ''",
    "!!float ''",
    "!!timestamp foo",
    "!!python/object:os.system {}",
    "&a [*a]",
    "1:1:1",
]
ENCODINGS = ["evil", "hex", "zlib_codec", "rot13", "base64", "idna", "punycode"]
HOSTILE: dict[str, list[tuple[bytes, str]]] = {
    "image": IMAGES,
    "torch": TORCH,
    "Paddle weights": PADDLE,
    "weights": [(safetensors_file(header), "best.safetensors") for header in HEADERS],
    "state of a run": [(safetensors_file({"__metadata__": each}), "step-0") for each in METADATA],
    "network": [(f"nc: 3\ndepth_multiple: {value}\n".encode(), "good.yaml") for value in VALUES],
    "VOC": [(f'<?xml version="1.0" encoding="{name}"?><annotation/>'.encode(), "XML") for name in ENCODINGS],
}
