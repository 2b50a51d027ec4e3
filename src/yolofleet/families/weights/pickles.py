"""Read untrusted PyTorch files (``.pt``) as data, without calling or importing anything from them.

The machine of ``pickle_machine.py`` reads their pickles. A tensor becomes a :class:`StoredTensor`, a checked position in
the file. The size of the file limits work and memory: each number in it is compared with the existing bytes before use.

Formats: torch's zip archive (torch >= 1.6) and the older sequence of pickles.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from yolofleet.families.weights import pickle_machine
from yolofleet.families.weights.pickle_machine import (
    MAX_DIMENSIONS,
    MAX_PICKLE_BYTES,
    PLAIN,
    Global,
    Machine,
    as_tuple,
    first_line,
)
from yolofleet.storage.foreign import open_foreign, reading
from yolofleet.support.closing import Closing
from yolofleet.support.errors import CheckpointError

MAX_MEMBERS = 100_000

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

# Names of these packages become inert objects; so do the single names below.
# YOLOv5 has its classes in `models`, its package on PyPI in `yolov5.models`.
INERT_PACKAGES = ("models.", "ultralytics.", "utils.", "yolov5.", "torch.nn.", "torch.optim.")
GETATTR = "builtins.getattr"  # only of such a name: YOLOv5's networks with masks hold a method of a class
INERT_NAMES = {
    *(f"torch.{name}" for name in DTYPES),
    *(f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16")),
    *(f"torch.{name}" for name in ("int8", "uint8", "bool", "contiguous_format", "channels_last", "strided")),
    *("torch.device", "torch.torch_version.TorchVersion", "numpy.dtype", "numpy.ndarray"),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *(f"datetime.{name}" for name in ("datetime", "date", "timedelta")),
    *("argparse.Namespace", "types.SimpleNamespace"),
    *(f"builtins.{name}" for name in ("list", "dict", "int", "float", "str", "object")),
    GETATTR,
    *(
        f"{module}.{name}"
        for module in ("pathlib", "pathlib._local")  # _local: in Python 3.13
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    ),
}


@dataclass(frozen=True)
class StoredTensor:
    """The position of a tensor in a storage of the file; :meth:`TorchFile.tensor` reads it.

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


class TorchFile(Closing):
    """An open ``.pt`` file.

    Attributes:
        root: the pickled value: plain containers, :class:`PickledObject`, :class:`StoredTensor`.

    Raises:
        CheckpointError: the file is missing, damaged or unsafe, or has another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, zipfile.ZipInfo | tuple[int, int]] = {}  # legacy: offset and length in bytes
        self._storages: dict[str, _Storage] = {}
        self._zip: zipfile.ZipFile | None = None
        self._used: set[str] = set()  # storages that one tensor has read
        self._kept: dict[str, Tensor] = {}  # storages that several tensors have read
        self._given_bytes = 0
        with reading(path, CheckpointError):
            self._file: BinaryIO = open_foreign(path)
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
                raise self._error(f"is damaged ({first_line(problem)})") from None
            raise

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
        self._file.close()

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return a copy in memory, which is not larger than its storage in the file.

        Raises:
            CheckpointError: the file has changed, its checksum is wrong, or the tensor's elements overlap, so that it
                would be larger than its storage.
        """
        storage = self._storages[stored.storage]
        numel = math.prod(stored.shape)
        if numel > storage.numel:
            raise self._error(f"has a tensor of {numel} elements in a storage of {storage.numel}")
        self._given_bytes += numel * storage.dtype.itemsize
        if self._given_bytes > 2 * self._bytes:
            raise self._error("has more bytes in tensors than in storages: torch.save did not write it")
        try:
            if numel == 0:
                return torch.empty(stored.shape, dtype=stored.dtype)
            flat = self._flat(storage)
            return flat.as_strided(stored.shape, stored.stride, stored.offset).clone()
        except DAMAGE as problem:
            raise self._error(f"is damaged ({first_line(problem)})") from None

    def _flat(self, storage: _Storage) -> Tensor:
        """Return all elements of a storage. A storage of several tensors is read twice at most, then kept in memory."""
        if storage.key in self._kept:
            return self._kept[storage.key]
        place = self._places[storage.key]
        if isinstance(place, zipfile.ZipInfo):
            assert self._zip is not None
            data = self._zip.read(place)
        else:
            self._file.seek(place[0])
            data = self._file.read(place[1])
        flat = torch.frombuffer(bytearray(data), dtype=storage.dtype, count=storage.numel)
        if storage.key in self._used:
            self._kept[storage.key] = flat
        self._used.add(storage.key)
        return flat

    # -- the two layouts ----------------------------------------------------------------------------

    def _open_zip(self) -> Any:
        self._zip = zipfile.ZipFile(self._file)
        members = self._zip.infolist()
        names = {m.filename for m in members}
        if len(members) > MAX_MEMBERS or len(names) != len(members):
            raise self._error(
                f"has {len(members)} members with {len(names)} names: torch.save did not write it"
            )
        for m in members:
            if m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 or m.file_size != m.compress_size:
                raise self._error(f"has a compressed member {m.filename[:80]!r}: torch.save did not write it")
        if sum(m.compress_size for m in members) > self._bytes:  # overlapping members
            raise self._error("is smaller than the sum of its members: torch.save did not write it")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._error("has no torch checkpoint", "expected a .pt file written by torch.save")
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
        return _TorchMachine(io.BytesIO(self._zip.read(pickles[0])), self._storage, self._error).run()

    def _open_legacy(self) -> Any:
        if self._file.read(2) != b"\x80\x02":
            hint = "give a .safetensors file of yolofleet, or a whole file of a project that docs/models.md names"
            raise self._error("is not a torch checkpoint", hint)
        self._file.seek(0)
        machine = _TorchMachine(self._file, self._storage, self._error)
        if machine.run() != LEGACY_MAGIC or machine.run() != LEGACY_PROTOCOL:
            raise self._error("is a pickle, but torch.save did not write it")
        system = machine.run()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise self._error("was written on a big-endian machine", "save it again on a usual one")
        root = machine.run()
        keys = machine.run()
        if not isinstance(keys, list) or not set(self._storages) <= {k for k in keys if isinstance(k, str)}:
            raise self._error("lacks some of its storages")
        for key in keys:
            if key not in self._storages:
                raise self._error("has a storage that no tensor uses")
            header = self._file.read(8)  # number of elements
            numel = struct.unpack("<q", header)[0]
            length = numel * self._storages[key].dtype.itemsize
            start = self._file.tell()
            if not 0 <= length <= self._bytes - start:
                raise self._error(f"ends inside storage {key[:40]!r}")
            self._places[key] = (start, length)
            self._file.seek(length, io.SEEK_CUR)
        return root

    def _storage(self, key: str, dtype: torch.dtype, numel: int) -> _Storage:
        storage = self._storages.setdefault(key, _Storage(key, dtype, numel))
        if storage.dtype != dtype or storage.numel != numel:
            raise self._error(f"describes storage {key[:40]!r} in two ways")
        return storage

    def _check_storages(self) -> None:
        for storage in self._storages.values():
            place = self._places.get(storage.key, (0, 0))
            length = place.file_size if isinstance(place, zipfile.ZipInfo) else place[1]
            expected = storage.numel * storage.dtype.itemsize
            if length != expected or storage.key not in self._places:
                what = f"storage {storage.key[:40]!r} has {length} bytes, expected {expected}"
                raise self._error(f"is damaged: {what}")

    def _error(self, what: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}", hint=hint)


DAMAGE = (zipfile.BadZipFile, *pickle_machine.DAMAGE)


# -- tensors ---------------------------------------------------------------------------------------------


def _parameter(data: Any, _requires_grad: Any = None, _hooks: Any = None, _state: Any = None) -> Any:
    return data


def _stored_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_unused: Any) -> StoredTensor:
    """Return the position of a tensor, after a check that every element lies inside its storage."""
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise ValueError("a tensor without storage, shape or stride")
    numbers = (offset, *shape, *stride)
    if (
        len(shape) != len(stride)
        or len(shape) > MAX_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in numbers)
    ):
        raise ValueError("a tensor with an invalid shape or stride")
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.numel:
        raise ValueError(f"a tensor that reaches element {last} of a storage of {storage.numel}")
    return StoredTensor(storage.key, storage.dtype, offset, shape, stride)


REBUILD: dict[str, Callable[..., Any]] = {
    **PLAIN,
    "torch.Size": as_tuple,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _stored_tensor,
    "torch._utils._rebuild_tensor_v2": _stored_tensor,
}


class _TorchMachine(Machine):
    """Reads tensors, and references to storages outside of the pickle."""

    def __init__(
        self,
        stream: BinaryIO,
        storage: Callable[[str, torch.dtype, int], _Storage],
        error: Callable[..., CheckpointError],
    ) -> None:
        super().__init__(stream, error, REBUILD, INERT_NAMES, INERT_PACKAGES)
        self._storage = storage

    def call(self) -> None:
        match self.stack[-2:]:
            case [Global(path), (Global(owner), str())] if path == GETATTR and owner.startswith(
                INERT_PACKAGES
            ):
                pass
            case [Global(path), _] if path == GETATTR:
                raise self.refusal(path)
        super().call()

    def set_state(self, target: Any, state: Any) -> None:
        if not isinstance(target, StoredTensor):  # attributes of a tensor have no weights
            super().set_state(target, state)

    def persistent(self) -> None:
        """Execute BINPERSID for ("storage", type, key, device, number of elements).

        Old files add a view, which must be None, and write ("module", class, file, source text) for classes.
        """
        match self.pop():
            case ("module", Global() as kind, *_):
                self.push(kind)
                return
            case ("storage", Global(path), str(key), str(), int(numel), *view) if (
                0 <= numel < 2** 48 and view in ([], [None])
            ):
                pass
            case _:
                raise ValueError("a storage without type, key and size")
        name = path.removeprefix("torch.")
        if name not in DTYPES:
            raise self._error(f"stores numbers as {path[:60]}, which is not supported")
        self.push(self._storage(key, DTYPES[name], numel))


def options_of(root: Any) -> dict[Any, Any]:
    """Return the options of the training that wrote a checkpoint; empty if it has none."""
    options = root.get("opt") if isinstance(root, dict) else None
    if isinstance(options, pickle_machine.PickledObject):  # argparse's Namespace
        options = options.state
    return options if isinstance(options, dict) else {}
