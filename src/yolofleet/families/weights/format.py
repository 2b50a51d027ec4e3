"""The file format of weights and training states: safetensors with a digest of the whole content in its header.

A write uses a temporary name in the same folder, flushes the file, reads it back, compares it, renames it and flushes the
folder. So a file with its final name is complete and verified. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from yolofleet.storage.atomic import write_atomically
from yolofleet.storage.foreign import read_foreign, reading
from yolofleet.support.errors import CheckpointError, NotAsListed, NumericsError
from yolofleet.support.text import screen_line

DIGEST = "sha256"
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
MAX_FILE_BYTES = 2**38  # stops the read of endless files; memory is the real limit


def tensors_sha256(tensors: Mapping[str, Tensor], extra: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 of names, types, shapes and bytes in name order, then of ``extra``'s text."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        h.update(f"{name}|{t.dtype}|{tuple(t.shape)}|".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().data)
    for key in sorted(extra or {}):
        h.update(f"{key}={(extra or {})[key]}|".encode())
    return h.hexdigest()


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have NaN or infinity; waits for each of their devices once."""
    floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
    suspects = set()  # a sum takes a third of the time of isfinite, and is finite only if all values are
    for device in {t.device for t in floats.values()}:
        names = [name for name, t in floats.items() if t.device == device]
        sums = torch.stack([floats[name].sum().float() for name in names]).tolist()
        suspects |= {name for name, total in zip(names, sums, strict=True) if not math.isfinite(total)}
    return [name for name, t in floats.items() if name in suspects and not torch.isfinite(t).all()]


def check_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise NumericsError, with the first name and their number, if tensors of ``what`` have NaN or infinity."""
    if names := non_finite(tensors):
        first, more = screen_line(names[0]), f" and {len(names) - 1} more tensors" if names[1:] else ""
        raise NumericsError(f"{what} has NaN or infinity in {first}{more}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and JSON values.

    Raises:
        NumericsError: a tensor has NaN or infinity; ``path`` is unchanged.
        StorageError: see :func:`write_atomically`.
    """
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    check_finite(plain, f"the content for {path}")

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(tensor_pieces(plain, header))

    write_atomically(path, write, read_tensors)


def read_plain(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of another program. Raise CheckpointError if it cannot be read or is damaged."""
    try:
        return load(read_whole(path))
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({screen_line(problem, limit=160)})",
            hint="use another copy",
        ) from None


def tensor_pieces(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Iterator[memoryview]:
    """Yield the bytes of a file with these tensors and JSON values, without a copy of the tensors.

    Format: huggingface.co/docs/safetensors; eight bytes with the header's length, the header as JSON, the tensors.
    """
    by_width = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so all are aligned
    plain = {name: t.detach().cpu().contiguous() for name, t in by_width}
    metadata = {key: json.dumps(value, sort_keys=True) for key, value in header.items()}
    table: dict[str, Any] = {"__metadata__": {**metadata, DIGEST: tensors_sha256(plain, metadata)}}
    end = 0
    for name, t in plain.items():
        begin, end = end, end + t.nbytes
        table[name] = {"dtype": TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for t in plain.values():
        yield t.reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors (CPU) and header of a file that yolofleet wrote, after a check of its digest.

    Raises:
        CheckpointError: the file is missing, incomplete or changed, or yolofleet did not write it.
    """
    return decode_tensors(read_whole(path), str(path))


def read_whole(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        CheckpointError: it is missing, cannot be read, or is no regular file; or it is an object that differs from the list
            of its store, like a damaged file.
        StorageError: the store of the file does not answer.
    """
    try:
        with reading(path, CheckpointError, "check the path"):
            return read_foreign(path, limit_bytes=MAX_FILE_BYTES)
    except NotAsListed as problem:
        raise CheckpointError(problem.what) from None


def decode_tensors(content: bytes, origin: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return and raise the same as :func:`read_tensors`, from bytes of another rank; ``origin`` is for messages."""
    try:
        tensors = load(content)
        header_bytes = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + header_bytes]).get("__metadata__") or {}
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata has values that are not text")
    except (SafetensorError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as problem:
        raise CheckpointError(
            f"{origin} is not a complete safetensors file ({screen_line(problem, limit=200)})",
            hint="it may be cut off or still being copied; use another copy",
        ) from None
    digest = metadata.pop(DIGEST, None)
    if digest is None:
        raise CheckpointError(f"{origin} was not written by yolofleet: its header has no digest")
    if tensors_sha256(tensors, metadata) != digest:
        raise CheckpointError(
            f"{origin} is damaged: its content does not match its SHA-256", hint="use another copy"
        )
    try:
        return tensors, {key: json.loads(value) for key, value in metadata.items()}
    except (ValueError, RecursionError) as problem:  # RecursionError: deeply nested lists
        raise CheckpointError(
            f"{origin}: its header is not JSON ({screen_line(problem, limit=200)})"
        ) from None
