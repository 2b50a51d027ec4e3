"""Darknet's ``.weights``: a short header, then the bare float32 values of all convolutions in the order of the
``.cfg`` that belongs to them. Nothing in the file tells one value from another; only the number of bytes and the
sign of variances can show that a file belongs to another network.

Order: of a convolution with batch normalisation bias, weight, running mean, running variance of that, then its own
weight; of another bias, weight.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from yolofleet.checkpoint.weights import Weights, WeightsHeader, class_names
from yolofleet.errors import CheckpointError, ConfigError
from yolofleet.files.atomic import write_atomically
from yolofleet.files.foreign import open_foreign
from yolofleet.models.darknet_cfg import DarknetDescription, layers, levels, read_cfg
from yolofleet.models.darknet_sections import MAX_CLASSES, Convolutional

EXTRA = "darknet"  # key in WeightsHeader.extra
MAX_VERSION = 1000
Named = tuple[str, tuple[int, ...]]  # name and shape of a tensor


@dataclass(frozen=True)
class Origin:
    """The header of a ``.weights`` file.

    Attributes:
        version: major, minor, revision.
        seen: images that training had seen.
    """

    version: tuple[int, int, int] = (0, 2, 5)
    seen: int = 0

    @property
    def _layout(self) -> str:
        """Since 0.2 the counter has 64 bits."""
        major, minor, _ = self.version
        return "<Q" if 10 * major + minor >= 2 else "<I"

    def to_bytes(self) -> bytes:
        return struct.pack("<3i", *self.version) + struct.pack(self._layout, self.seen)

    @classmethod
    def read(cls, file: BinaryIO, source: str) -> Origin:
        start = file.read(12)
        version = struct.unpack("<3i", start) if len(start) == 12 else ()
        if not version or not all(0 <= number <= MAX_VERSION for number in version):
            raise CheckpointError(
                f"{source} does not begin as a Darknet weights file",
                hint="is it the right file, and all of it?",
            )
        layout = cls(version)._layout
        counter = file.read(struct.calcsize(layout))
        if len(counter) < struct.calcsize(layout):
            raise CheckpointError(f"{source} ends within its header", hint="use another copy of the file")
        return cls(version, *struct.unpack(layout, counter))

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Origin:
        """What :meth:`to_dict` gave; the usual values where it is not there or makes no sense."""
        values = extra.get(EXTRA)
        try:
            major, minor, revision = values["version"]  # type: ignore[index]
            origin = cls((major, minor, revision), values["seen"])  # type: ignore[index]
            origin.to_bytes()
        except (TypeError, KeyError, ValueError, struct.error):
            return cls()
        return origin

    def to_dict(self) -> dict[str, Any]:
        return {"version": list(self.version), "seen": self.seen}


def read(path: Path, description: DarknetDescription | None = None) -> Weights:
    """Weights in Darknet's order, by the names of ``models.darknet.DarknetNetwork``.

    The file may be for another number of classes than the description, which then is the header's; or end after
    any convolution, as files of backbones do: then the tensors up to there are given, and ``header.extra`` says so
    under ``"partial"``.

    Args:
        description: None is the ``.cfg`` of the same name beside the file.

    Raises:
        CheckpointError: unreadable, cut, of another network, or not finite; says how many bytes there are and how
            many there should be.
    """
    source = str(path)
    try:
        with open_foreign(path) as file:
            if description is None:
                description = _beside(path)
            origin = Origin.read(file, source)
            values_bytes = os.fstat(file.fileno()).st_size - file.tell()
            nc, found = _fit(description, values_bytes, source)
            tensors = {name: _tensor(file, shape, name, source) for name, shape in found}
    except OSError as problem:
        raise CheckpointError(
            f"cannot read {path}: {problem.strerror or problem}", hint="check the path"
        ) from None
    everything = sum(1 for _ in _tensors(description))
    extra: dict[str, Any] = {EXTRA: origin.to_dict()}
    if len(tensors) < everything:
        extra["partial"] = f"{source} holds the first {len(tensors)} of {everything} tensors"
    strides = tuple(stride for _, _, stride in levels(layers(description)))
    return Weights(
        tensors, WeightsHeader(description, nc, class_names(None, nc), strides, description.img, extra)
    )


def _beside(path: Path) -> DarknetDescription:
    cfg = path.with_suffix(".cfg")
    if not cfg.is_file():
        raise CheckpointError(
            f"{path} does not say of which network it is, and there is no {cfg.name} beside it",
            hint="put its .cfg there under that name, or name it: --cfg FILE, or --cfg with a built-in name such as darknet-yolov3-tiny",
        )
    try:
        return read_cfg(cfg)
    except ConfigError as problem:
        raise CheckpointError(f"{problem.source}: {problem.what}", hint=problem.hint) from None


def _tensors(description: DarknetDescription) -> Iterator[Named]:
    """Name and shape of each tensor in the order of the file."""
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
    """Number of classes, and the tensors that take just ``values_bytes``."""
    expected = 4 * _values(description)
    if values_bytes == expected:
        return description.nc, list(_tensors(description))
    a_class = 4 * _values(description.with_classes(description.nc + 1)) - expected  # bytes
    more, rest = divmod(values_bytes - expected, a_class)
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
        f"{source} has {values_bytes:,} bytes after its header; {description.name} with {description.nc} classes "
        f"has {expected:,}, and {a_class:,} more or less for each class",
        hint="the file is cut off, or belongs to another .cfg",
    )


def _tensor(file: BinaryIO, shape: tuple[int, ...], name: str, source: str) -> Tensor:
    buffer = bytearray(4 * math.prod(shape))
    if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
        raise CheckpointError(f"{source} became shorter while it was read", hint="is it still being copied?")
    values = np.frombuffer(buffer, "<f4").astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{source}: {name} is not finite",
            hint="the training diverged, or the file is damaged; use other weights",
        )
    if name.endswith("running_var") and values.min() < 0:
        raise CheckpointError(
            f"{source}: {name}, a variance, is negative",
            hint="the file is damaged, or belongs to another .cfg",
        )
    return torch.from_numpy(values).view(shape)


def write(path: Path, weights: Weights) -> None:
    """Write ``path`` (``.weights``), and the ``.cfg`` that belongs to it beside it if there is none.

    Raises:
        CheckpointError: the weights are of another family or not all there; or the ``.cfg`` that lies there
            describes another network.
        StorageError: the disk refused; files are as they were.
    """
    header = weights.header
    description = header.description
    if not isinstance(description, DarknetDescription):
        raise CheckpointError(
            f"{description.name} is of the family {description.family}; Darknet cannot hold it",
            hint="only networks that come from a Darknet .cfg can be written as .weights",
        )
    if path.suffix != ".weights":
        raise CheckpointError(f"{path} must be called *.weights")
    description = description.with_classes(header.nc)
    missing = [name for name, _ in _tensors(description) if name not in weights.tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of {description.name} are missing: {', '.join(missing[:3])}",
            hint="a backbone alone cannot be written",
        )
    cfg = path.with_suffix(".cfg")
    if not cfg.exists():
        _write_bytes(cfg, lambda: iter([description.cfg().encode()]))
    elif replace(_beside(path), name=description.name) != description:
        raise CheckpointError(
            f"{cfg} describes another network than {path.name} would hold",
            hint="choose another name or folder",
        )
    _write_bytes(path, lambda: _content(description, weights))


def _content(description: DarknetDescription, weights: Weights) -> Iterator[bytes]:
    yield Origin.of(weights.header.extra).to_bytes()
    for name, shape in _tensors(description):
        values = weights.tensors[name].detach().cpu().to(torch.float32)
        assert values.shape == shape, name
        yield values.numpy().astype("<f4", copy=False).tobytes()


def _write_bytes(path: Path, content: Callable[[], Iterator[bytes]]) -> None:
    """Atomically, and read back."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(content())

    def check(temporary: Path) -> None:
        with temporary.open("rb") as file:
            for part in content():
                if file.read(len(part)) != part:
                    raise OSError(errno.EIO, "what was written is not what is read back")

    write_atomically(path, write, check)
