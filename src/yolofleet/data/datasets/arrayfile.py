"""Files of flat arrays that many processes map at once: safetensors layout, no pickle.

A file is written completely or not at all (temporary name, fsync, rename). Its header holds a checksum, so a file that
a full disk or a crash damaged is never used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.storage.atomic import whole_file
from yolofleet.storage.caches import cache_folder

_DTYPES = {
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "BOOL": np.bool_,
    "I32": np.int32,
    "I64": np.int64,
    "F32": np.float32,
    "F64": np.float64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 64 << 20


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, str]) -> None:
    """Replace ``path`` atomically with a file of these arrays.

    Args:
        arrays: uint8, uint16, uint32, bool, int32, int64, float32 or float64, any shape.
        meta: strings for the header; the key ``crc32`` is reserved.
    Raises:
        OSError: the disk is full, read-only or missing; ``path`` is unchanged.
    """
    ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # widest first: all are aligned
    views = [np.ascontiguousarray(arrays[name]) for name in ordered]
    crc, end, header = 0, 0, {}
    for name, view in zip(ordered, views, strict=True):
        crc = zlib.crc32(_bytes(view), crc)
        start, end = end, end + view.nbytes
        header[name] = {"dtype": _NAMES[view.dtype], "shape": list(view.shape), "data_offsets": [start, end]}
    crc = zlib.crc32(json.dumps({**meta, **header}).encode(), crc)
    text = json.dumps({"__metadata__": {**meta, "crc32": str(crc)}, **header}).encode()
    text += b" " * (-len(text) % 8)

    with whole_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for view in views:
            file.write(_bytes(view))


def cached_arrays(
    kind: str, key_text: str, make: Callable[[], tuple[dict[str, np.ndarray], dict[str, str]]]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return arrays and strings from the folder ``kind`` of the cache; make them, and store them if possible.

    Args:
        key_text: names the files that the arrays depend on, with their times.
    """
    key = hashlib.blake2b(key_text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    stored = cache_folder(kind) / f"{key}.arrays"
    found = read_arrays(stored)
    if found is None:
        found = make()
        with suppress(OSError):  # without a cache folder, the next start makes them again
            write_arrays(stored, *found)
    return found


def arrays_of(value: Any) -> dict[str, np.ndarray]:
    """Return the arrays among the fields of a dataclass by name."""
    arrays = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def read_arrays(path: Path, *, verify: bool = True) -> tuple[dict[str, np.ndarray], dict[str, str]] | None:
    """Map a file and return its read-only arrays, views of the mapping, and the strings of its header.

    Args:
        verify: compare the checksum, which reads the whole file once (about 1 GB/s).
    Returns:
        None if the file is absent, unreadable or damaged.
    """
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # ValueError: an empty file, or a path with a NUL character
        return None
    try:
        (length,) = struct.unpack_from("<Q", mapped, 0)
        if length > min(_MAX_HEADER_BYTES, len(mapped) - 8):
            return None
        header = json.loads(mapped[8 : 8 + length])
        meta = header.pop("__metadata__")
        crc = int(meta.pop("crc32"))
        base, arrays, used = 8 + length, {}, 0
        for name, entry in header.items():
            dtype, (start, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["data_offsets"]
            flat = np.frombuffer(mapped, dtype, (end - start) // dtype.itemsize, base + start)
            arrays[name] = flat.reshape(entry["shape"])
            used = max(used, end)
        if base + used != len(mapped):
            return None
        if verify and crc != zlib.crc32(
            json.dumps({**meta, **header}).encode(), zlib.crc32(memoryview(mapped)[base:])
        ):
            return None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return arrays, meta
