"""Reading strangers' PyTorch files (``.pt``) as data. Nothing in them is ever called or imported.

A pickle is a program for a small stack machine. This module is such a machine without the dangerous half: a
name in the file becomes a :class:`Global`, which cannot be called; "calling" one either fills a plain container
or leaves an inert :class:`PickledObject`; tensors become :class:`StoredTensor`, a checked place in the file.
A name that no detector checkpoint needs is an error that says it. Work and memory are bounded by the size of
the file: no number in it is trusted before it is compared with the bytes that are there.

Formats: torch's zip archive (torch >= 1.6) and the older sequence of pickles.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from yolofleet.errors import CheckpointError

MAX_PICKLE_BYTES = 16 * 2**20  # tensors are beside it; a training checkpoint of yolov5n has 0.17 MB
MAX_MEMBERS = 100_000
MAX_DIMENSIONS = 16
MAX_INTEGER_BYTES = 32

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

# Classes and functions of these packages become inert objects; so do the single names below.
INERT_PACKAGES = ("models.", "ultralytics.", "utils.", "torch.nn.", "torch.optim.")
INERT_NAMES = {
    *(f"torch.{name}" for name in DTYPES),
    *(f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16")),
    *(f"torch.{name}" for name in ("int8", "uint8", "bool", "contiguous_format", "channels_last", "strided")),
    "torch.device",
    "torch.torch_version.TorchVersion",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "datetime.datetime",
    "datetime.date",
    "datetime.timedelta",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "builtins.list",
    "builtins.dict",
    "builtins.int",
    "builtins.float",
    "builtins.str",
    "builtins.object",
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "WindowsPath")),
}
PYTHON2_BUILTINS = "__builtin__."  # what protocol 2 writes for `builtins`


@dataclass(frozen=True)
class Global:
    """A name in the file; it stands for nothing."""

    path: str


@dataclass(eq=False)
class PickledObject:
    """What would have been an instance: class path, constructor arguments, state (usually its ``__dict__``)."""

    class_path: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __repr__(self) -> str:
        return f"<{self.class_path}>"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies within a storage of the file; read with :meth:`TorchFile.tensor`.

    Attributes:
        storage: number of the storage in the file.
        offset, shape, stride: in elements; checked against the storage's size.
    """

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    numel: int


class TorchFile:
    """An open ``.pt`` file.

    Attributes:
        root: the pickled value: plain containers, :class:`PickledObject`, :class:`StoredTensor`.

    Raises:
        CheckpointError: missing, damaged, unsafe, or of another kind; the message says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, zipfile.ZipInfo | tuple[int, int]] = {}  # legacy: offset and length in bytes
        self._storages: dict[str, _Storage] = {}
        self._zip: zipfile.ZipFile | None = None
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as problem:
            raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}") from None
        try:
            self._bytes = self._file.seek(0, io.SEEK_END)
            self._file.seek(0)
            is_zip = self._file.read(4) == b"PK\x03\x04"
            self._file.seek(0)
            self.root = self._open_zip() if is_zip else self._open_legacy()
            self._check_storages()
        except BaseException as problem:
            self.close()
            if isinstance(problem, DAMAGE):
                raise self._error(f"is damaged ({_first_line(problem)})") from None
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
        self._file.close()

    def tensor(self, stored: StoredTensor) -> Tensor:
        """A copy in memory; not larger than its storage in the file.

        Raises:
            CheckpointError: the file changed or its checksum is wrong; or the tensor's elements overlap, so
                that it would be larger than its storage.
        """
        storage = self._storages[stored.storage]
        numel = 1
        for n in stored.shape:
            numel *= n
        if numel > storage.numel:
            raise self._error(f"has a tensor of {numel} elements in a storage of {storage.numel}")
        try:
            if numel == 0:
                return torch.empty(stored.shape, dtype=stored.dtype)
            place = self._places[stored.storage]
            if isinstance(place, zipfile.ZipInfo):
                assert self._zip is not None
                data = self._zip.read(place)
            else:
                self._file.seek(place[0])
                data = self._file.read(place[1])
            flat = torch.frombuffer(bytearray(data), dtype=stored.dtype, count=storage.numel)
            return flat.as_strided(stored.shape, stored.stride, stored.offset).clone()
        except DAMAGE as problem:
            raise self._error(f"is damaged ({_first_line(problem)})") from None

    # -- the two layouts ----------------------------------------------------------------------------

    def _open_zip(self) -> Any:
        self._zip = zipfile.ZipFile(self._file)
        members = self._zip.infolist()
        names = {m.filename for m in members}
        if len(members) > MAX_MEMBERS or len(names) != len(members):
            raise self._error(f"has {len(members)} members of {len(names)} names: not written by torch.save")
        for m in members:
            if m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 or m.file_size != m.compress_size:
                raise self._error(f"has a compressed member {m.filename[:80]!r}: not written by torch.save")
        if sum(m.file_size for m in members) > self._bytes:  # members on top of each other
            raise self._error("is smaller than its members together: not written by torch.save")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._error("holds no torch checkpoint", "expected a .pt file written by torch.save")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}constants.pkl" in names:
            raise self._error("is a TorchScript program, not weights", "use the .pt file that training wrote")
        order = f"{folder}byteorder"
        if order in names and self._zip.read(order) != b"little":
            raise self._error("was written on a big-endian machine", "save it again on a usual one")
        data = f"{folder}data/"
        self._places = {m.filename.removeprefix(data): m for m in members if m.filename.startswith(data)}
        if self._zip.getinfo(pickles[0]).file_size > MAX_PICKLE_BYTES:
            raise self._error(f"has a pickle of more than {MAX_PICKLE_BYTES} bytes")
        return self._machine(io.BytesIO(self._zip.read(pickles[0]))).run()

    def _open_legacy(self) -> Any:
        if self._file.read(2) != b"\x80\x02":
            raise self._error("is not a torch checkpoint", "expected .safetensors, or a .pt file of YOLOv5")
        self._file.seek(0)
        machine = self._machine(self._file)
        if machine.run() != LEGACY_MAGIC or machine.run() != LEGACY_PROTOCOL:
            raise self._error("is a pickle, but not one of torch.save")
        system = machine.run()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise self._error("was written on a big-endian machine", "save it again on a usual one")
        root = machine.run()
        keys = machine.run()
        if not isinstance(keys, list) or not set(self._storages) <= {k for k in keys if isinstance(k, str)}:
            raise self._error("does not hold all of its storages")
        for key in keys:
            if key not in self._storages:
                raise self._error("holds a storage that no tensor uses")
            header = self._file.read(8)  # number of elements
            numel = struct.unpack("<q", header)[0]
            length = numel * self._storages[key].dtype.itemsize
            start = self._file.tell()
            if not 0 <= length <= self._bytes - start:
                raise self._error(f"ends within storage {key[:40]!r}")
            self._places[key] = (start, length)
            self._file.seek(length, io.SEEK_CUR)
        return root

    def _machine(self, stream: BinaryIO) -> _Machine:
        return _Machine(stream, self._storage, self._error)

    def _storage(self, key: str, dtype: torch.dtype, numel: int) -> _Storage:
        storage = self._storages.setdefault(key, _Storage(key, dtype, numel))
        if storage.dtype != dtype or storage.numel != numel:
            raise self._error(f"describes storage {key[:40]!r} in two ways")
        return storage

    def _check_storages(self) -> None:
        for storage in self._storages.values():
            place = self._places.get(storage.key)
            there = (
                -1 if place is None else place.file_size if isinstance(place, zipfile.ZipInfo) else place[1]
            )
            if there != storage.numel * storage.dtype.itemsize:
                raise self._error(
                    f"is damaged: storage {storage.key[:40]!r} should have "
                    f"{storage.numel * storage.dtype.itemsize} bytes and has {max(there, 0)}"
                )

    def _error(self, what: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}", hint=hint)


# What damaged bytes make of Python's readers; all become one CheckpointError.
DAMAGE = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    NotImplementedError,
    OverflowError,
    RuntimeError,
)


def _first_line(problem: BaseException) -> str:
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0][:160]


# -- names that do something: fill a plain container ------------------------------------------------------


def _as_dict(*pairs: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in _sequence(pairs[0]) if pairs else ():
        key, value = _sequence(pair)
        found[_key(key)] = value
    return found


def _as_defaultdict(_factory: Any = None, *pairs: Any) -> dict[Any, Any]:
    return _as_dict(*pairs)


def _as_set(values: Iterable[Any] = ()) -> set[Any]:
    return {_key(v) for v in _sequence(values)}


def _as_tuple(values: Iterable[Any] = ()) -> tuple[Any, ...]:
    return tuple(_sequence(values))


def _as_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes in encoding {encoding!r:.20}")
    return text.encode("latin1")


def _parameter(data: Any, _requires_grad: Any = None, _hooks: Any = None, _state: Any = None) -> Any:
    return data


def _stored_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_unused: Any) -> StoredTensor:
    """Checks what torch itself leaves to the reader: every element lies within the storage."""
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise ValueError("a tensor without storage, shape or stride")
    numbers = (offset, *shape, *stride)
    if (
        len(shape) != len(stride)
        or len(shape) > MAX_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in numbers)
    ):
        raise ValueError("a tensor whose shape and stride are not such")
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.numel:
        raise ValueError(f"a tensor that reaches element {last} of a storage of {storage.numel}")
    return StoredTensor(storage.key, storage.dtype, offset, shape, stride)


REBUILD: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _as_dict,
    "collections.defaultdict": _as_defaultdict,
    "builtins.set": _as_set,
    "builtins.frozenset": _as_set,
    "torch.Size": _as_tuple,
    "_codecs.encode": _as_bytes,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _stored_tensor,
    "torch._utils._rebuild_tensor_v2": _stored_tensor,
}


def _sequence(values: Any) -> Any:
    if not isinstance(values, (list, tuple, set)):
        raise ValueError(f"{type(values).__name__} where a sequence is expected")
    return values


def _key(value: Any) -> Any:
    """Only flat keys: hashing a deeply nested tuple would overflow Python's own stack."""
    flat = value if isinstance(value, tuple) else (value,)
    if len(flat) > MAX_DIMENSIONS or not all(
        isinstance(v, (str, int, float, bool, bytes, type(None))) for v in flat
    ):
        raise ValueError(f"a {type(value).__name__} as key")
    return value


# -- the machine ------------------------------------------------------------------------------------------


class _Machine:
    """Pickle opcodes of protocols 2 to 5 that build values, on a stack; see Python's ``pickletools``."""

    def __init__(
        self,
        stream: BinaryIO,
        storage: Callable[[str, torch.dtype, int], _Storage],
        error: Callable[..., CheckpointError],
    ) -> None:
        self._stream = stream
        self._storage = storage
        self._error = error
        self._budget = MAX_PICKLE_BYTES

    def run(self) -> Any:
        """The value of the pickle at the stream's position."""
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        while True:
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            operation = OPERATIONS.get(code)
            if operation is None:
                raise self._error(f"uses pickle opcode 0x{code.hex()}, which no weights need")
            operation(self)

    # -- input ------------------------------------------------------------------------------------

    def take(self, n: int) -> bytes:
        """The next n bytes; a length that the file does not have costs nothing."""
        self.spend(n)
        data = self._stream.read(n)
        if len(data) != n:
            raise ValueError("it ends too early")
        return data

    def spend(self, n: int) -> None:
        self._budget -= n
        if self._budget < 0:
            raise ValueError(f"its pickle needs more than {MAX_PICKLE_BYTES} bytes")

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        data = self._stream.readline(1000)
        self.spend(len(data))
        if not data.endswith(b"\n"):
            raise ValueError("a name without end")
        return data[:-1].decode("ascii")

    # -- stack ------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise ValueError("an empty stack")
        return self.stack.pop()

    def pop_many(self, n: int) -> tuple[Any, ...]:
        return tuple(self.pop() for _ in range(n))[::-1]

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError(f"items for a {type(target).__name__}")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"pairs for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"members for a {type(target).__name__}")
        target.update(_key(v) for v in items)

    # -- names and objects --------------------------------------------------------------------------

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is no text")
        path = f"{module}.{name}"
        if path.startswith(PYTHON2_BUILTINS):
            path = f"builtins.{path.removeprefix(PYTHON2_BUILTINS)}"
        if path not in REBUILD and path not in INERT_NAMES and not path.startswith(INERT_PACKAGES):
            raise self._error(
                f"names {path[:100]}, which no weights need: it may be malicious",
                "nothing of it was run; get the weights from a source you trust, as .safetensors if there are",
            )
        self.push(Global(path))

    def call(self) -> None:
        """REDUCE and NEWOBJ: the only calls are of our own functions in ``REBUILD``."""
        function, args = self.pop_many(2)
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise ValueError("a call of something that is no name")
        # copies are paid for: a short loop over one long list must not fill the memory
        self.spend(sum(len(a) for a in args if isinstance(a, (str, list, tuple, set, dict))))
        rebuild = REBUILD.get(function.path)
        self.push(rebuild(*args) if rebuild else PickledObject(function.path, args))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, PickledObject):
            target.state = state
        elif not isinstance(target, (dict, StoredTensor)):  # attributes of those carry no weights
            raise ValueError(f"a state for a {type(target).__name__}")

    def persistent(self) -> None:
        """("storage", type, key, device, number of elements); old files add a view, which must be None, and
        write ("module", class, file, source text) for classes."""
        match self.pop():
            case ("module", Global() as kind, *_):
                self.push(kind)
                return
            case ("storage", Global(path), str(key), str(), int(numel)) if 0 <= numel < 2**48:
                pass
            case ("storage", Global(path), str(key), str(), int(numel), None) if 0 <= numel < 2**48:
                pass
            case _:
                raise ValueError("a storage without type, key and size")
        name = path.removeprefix("torch.")
        if name not in DTYPES:
            raise self._error(f"stores numbers as {path[:60]}, which is not supported")
        self.push(self._storage(key, DTYPES[name], numel))

    def integer(self, length: int) -> None:
        if not 0 <= length <= MAX_INTEGER_BYTES:
            raise ValueError(f"a whole number of {length} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def text(self, length: int) -> None:
        self.push(self.take(length).decode("utf-8"))

    def put(self, at: int) -> None:
        self.memo[at] = self.stack[-1]


OPERATIONS: dict[bytes, Callable[[_Machine], object]] = {
    b"\x80": lambda m: m.take(1),  # protocol
    b"\x95": lambda m: m.take(8),  # frame length
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": lambda m: m.pop(),
    b"1": lambda m: m.pop_to_mark(),
    b"2": lambda m: m.push(m.stack[-1]),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.integer(m.number("<B")),
    b"\x8b": lambda m: m.integer(m.number("<i")),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"\x8c": lambda m: m.text(m.number("<B")),
    b"X": lambda m: m.text(m.number("<I")),
    b"\x8d": lambda m: m.text(m.number("<Q")),
    b"C": lambda m: m.push(m.take(m.number("<B"))),
    b"B": lambda m: m.push(m.take(m.number("<I"))),
    b"\x8e": lambda m: m.push(m.take(m.number("<Q"))),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b")": lambda m: m.push(()),
    b"\x8f": lambda m: m.push(set()),
    b"l": lambda m: m.push(m.pop_to_mark()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m: m.push(m.pop_many(1)),
    b"\x86": lambda m: m.push(m.pop_many(2)),
    b"\x87": lambda m: m.push(m.pop_many(3)),
    b"\x91": lambda m: m.push(_as_set(m.pop_to_mark())),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.pop_to_mark()),
    b"s": lambda m: m.update(list(m.pop_many(2))),
    b"u": lambda m: m.update(m.pop_to_mark()),
    b"\x90": lambda m: m.add(m.pop_to_mark()),
    b"c": lambda m: m.named(m.line(), m.line()),
    b"\x93": lambda m: m.named(*m.pop_many(2)),
    b"R": lambda m: m.call(),
    b"\x81": lambda m: m.call(),
    b"b": lambda m: m.build(),
    b"Q": lambda m: m.persistent(),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
}
