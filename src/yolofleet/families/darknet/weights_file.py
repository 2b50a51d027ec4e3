"""Darknet's ``.weights``: a short header, then the float32 values of all convolutions in the order of their ``.cfg``.

The file has no names or shapes. Only the number of bytes and the sign of variances can show that a file belongs to another
network.

Order of values: for a convolution with batch normalisation, the normalisation's bias, weight, running mean and running
variance, then the convolution's weight; for another convolution, bias and weight.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from yolofleet.families.darknet.cfg import DarknetDescription, layers, levels, read_cfg
from yolofleet.families.darknet.sections import Convolutional
from yolofleet.families.networks.checked import MAX_CLASSES
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.weights.reader import check_values
from yolofleet.families.weights.value import Weights, WeightsHeader, class_names
from yolofleet.storage.atomic import write_atomically, write_text
from yolofleet.storage.foreign import open_foreign, reading
from yolofleet.support.errors import CheckpointError, ConfigError

EXTRA = "darknet"  # key in WeightsHeader.extra
MAX_VERSION = 1000
Named = tuple[str, tuple[int, ...]]  # name and shape of a tensor


@dataclass(frozen=True)
class FileHeader:
    """The header of a ``.weights`` file.

    Attributes:
        version: major, minor, revision.
        seen: images that training had seen.
    """

    version: tuple[int, int, int] = (0, 2, 5)
    seen: int = 0

    @property
    def _layout(self) -> str:
        """Return the struct format; since version 0.2 the counter has 64 bits."""
        major, minor, _ = self.version
        return "<Q" if 10 * major + minor >= 2 else "<I"

    def to_bytes(self) -> bytes:
        return struct.pack("<3i", *self.version) + struct.pack(self._layout, self.seen)

    @classmethod
    def read(cls, file: BinaryIO, source: str) -> FileHeader:
        start = file.read(12)
        version = struct.unpack("<3i", start) if len(start) == 12 else ()
        if not version or not all(0 <= number <= MAX_VERSION for number in version):
            raise CheckpointError(
                f"{source} does not begin with the header of a Darknet weights file",
                hint="check that it is the right file and complete",
            )
        layout = cls(version)._layout
        counter = file.read(struct.calcsize(layout))
        if len(counter) < struct.calcsize(layout):
            raise CheckpointError(f"{source} ends inside its header", hint="use another copy of the file")
        return cls(version, *struct.unpack(layout, counter))

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> FileHeader:
        """Return the header from the result of :meth:`to_dict`; defaults for missing or invalid values."""
        values = extra.get(EXTRA)
        try:
            major, minor, revision = values["version"]  # type: ignore[index]
            header = cls((major, minor, revision), values["seen"])  # type: ignore[index]
            header.to_bytes()
        except (TypeError, KeyError, ValueError, struct.error):
            return cls()
        return header

    def to_dict(self) -> dict[str, Any]:
        return {"version": list(self.version), "seen": self.seen}


def read(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read weights under the names of ``models.darknet.DarknetNetwork``.

    The file may have another number of classes than the description; the returned header then has that number. Files of
    backbones end after some convolution: then the result has the tensors up to there, and ``header.extra["partial"]``
    says so.

    Args:
        description: None: read the ``.cfg`` of the same name beside the file.

    Raises:
        CheckpointError: the file cannot be read, is cut off, belongs to another network or has values that are not
            finite. The message has the actual and the expected size.
    """
    source = str(path)
    with reading(path, CheckpointError, "check the path"), open_foreign(path) as file:
        if description is None:
            description = _beside(path)
        if not isinstance(description, DarknetDescription):
            raise CheckpointError(
                f"{path} has weights of a Darknet network, but {description.name} is not a Darknet network",
                hint="name its .cfg with --cfg FILE",
            )
        file_header = FileHeader.read(file, source)
        values_bytes = os.fstat(file.fileno()).st_size - file.tell()
        nc, found = _fit(description, values_bytes, source)
        tensors = {name: _tensor(file, shape, source) for name, shape in found}
    check_values(tensors, source)
    everything = sum(1 for _ in _tensors(description))
    extra: dict[str, Any] = {EXTRA: file_header.to_dict()}
    if len(tensors) < everything:
        extra["partial"] = f"{source} holds the first {len(tensors)} of {everything} tensors"
    strides = tuple(stride for _, _, stride in levels(layers(description)))
    return Weights(
        tensors, WeightsHeader(description, nc, class_names(None, nc), strides, description.img, extra)
    )


def shapes(path: Path) -> dict[str, list[int]] | None:
    """Return no shapes, because a file that :func:`read` refuses has no names; None if it has no header either."""
    return {} if path.stat().st_size >= 16 else None


def _beside(path: Path) -> DarknetDescription:
    cfg = path.with_suffix(".cfg")
    if not cfg.is_file():
        raise CheckpointError(
            f"{path} does not describe its network, and there is no {cfg.name} beside it",
            hint="put its .cfg there under that name, or use --cfg with a file or a built-in name such as darknet-yolov3-tiny",
        )
    try:
        return read_cfg(cfg)
    except ConfigError as problem:
        raise CheckpointError(f"{problem.source}: {problem.what}", hint=problem.hint) from None


def _tensors(description: DarknetDescription) -> Iterator[Named]:
    """Yield name and shape of each tensor in the order of the file."""
    for i, layer in enumerate(layers(description)):
        section = layer.section
        if isinstance(section, Convolutional):
            if section.batch_normalize:
                for name in ("bias", "weight", "running_mean", "running_var"):
                    yield f"layers.{i}.bn.{name}", (section.filters,)
            else:
                yield f"layers.{i}.conv.bias", (section.filters,)
            shape = (section.filters, layer.in_channels[0] // section.groups, section.size, section.size)
            yield f"layers.{i}.conv.weight", shape


def _values(description: DarknetDescription) -> int:
    return sum(math.prod(shape) for _, shape in _tensors(description))


def _fit(description: DarknetDescription, values_bytes: int, source: str) -> tuple[int, list[Named]]:
    """Return the number of classes, and the tensors whose size is exactly ``values_bytes``."""
    expected = 4 * _values(description)
    if values_bytes == expected:
        return description.nc, list(_tensors(description))
    class_bytes = 4 * _values(description.with_classes(description.nc + 1)) - expected  # bytes
    more, rest = divmod(values_bytes - expected, class_bytes)
    nc = description.nc + more
    if rest == 0 and 1 <= nc <= MAX_CLASSES:
        return nc, list(_tensors(description.with_classes(nc)))
    found, found_bytes = list[Named](), 0
    for name, shape in _tensors(description):
        found.append((name, shape))
        found_bytes += 4 * math.prod(shape)
        if found_bytes == values_bytes and name.endswith(".conv.weight"):
            return description.nc, found
    raise CheckpointError(
        f"{source} has {values_bytes:,} bytes after its header, expected {expected:,} for {description.name} with "
        f"{description.nc} classes ({class_bytes:,} more or less for each class)",
        hint="the file is cut off, or belongs to another .cfg",
    )


def _tensor(file: BinaryIO, shape: tuple[int, ...], source: str) -> Tensor:
    buffer = bytearray(4 * math.prod(shape))
    if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"{source} became shorter during the read", hint="wait until its copy is complete"
        )
    return torch.from_numpy(np.frombuffer(buffer, "<f4").astype(np.float32, copy=False)).view(shape)


def write(path: Path, weights: Weights) -> None:
    """Write ``path`` (``.weights``), and its ``.cfg`` beside it if that is missing.

    Raises:
        CheckpointError: the weights belong to another family or are incomplete, or the existing ``.cfg`` describes
            another network.
        StorageError: a file cannot be written; existing files are unchanged.
    """
    header = weights.header
    description = header.description
    if not isinstance(description, DarknetDescription):
        raise CheckpointError(
            f"cannot write {description.name} of the family {description.family} as Darknet .weights",
            hint="only networks from a Darknet .cfg can be written as .weights",
        )
    if path.suffix != ".weights":
        raise CheckpointError(f"{path} must be called *.weights")
    description = description.with_classes(header.nc)
    missing = [name for name, _ in _tensors(description) if name not in weights.tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of {description.name} are missing: {', '.join(missing[:3])}",
            hint="weights of a backbone alone cannot be written",
        )
    cfg = path.with_suffix(".cfg")
    if not cfg.exists():
        write_text(cfg, description.cfg())
    elif replace(_beside(path), name=description.name) != description:
        raise CheckpointError(
            f"{cfg} exists and describes another network than {path.name}",
            hint="choose another name or folder",
        )

    def dump(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(_content(description, weights))

    def check(temporary: Path) -> None:
        with temporary.open("rb") as file:
            if any(file.read(len(part)) != part for part in _content(description, weights)):
                raise OSError(errno.EIO, "the file read back differs from the data written")

    write_atomically(path, dump, check)


def _content(description: DarknetDescription, weights: Weights) -> Iterator[bytes]:
    yield FileHeader.of(weights.header.extra).to_bytes()
    for name, shape in _tensors(description):
        values = weights.tensors[name].detach().cpu().to(torch.float32)
        assert values.shape == shape, name
        yield values.numpy().astype("<f4", copy=False).tobytes()
