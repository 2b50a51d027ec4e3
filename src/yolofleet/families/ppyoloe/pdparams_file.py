"""Read and write Paddle's weights files of PP-YOLOE (``.pdparams``, ``.pdema``), without executing them.

PaddleDetection's training writes its moving average into ``.pdparams``, the weights of the last step into
``.pdema``, and the optimizer's state into ``.pdopt``.

Such a file is one pickle of ``{name: numpy array}``. The machine of ``pickle_machine.py`` reads it and cannot call
anything. An array becomes a view of the file's bytes, after a check of its size.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.networks.checked import MAX_CLASSES, short
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.networks.detector import UNSTATED_PX
from yolofleet.families.ppyoloe.description import PpyoloeDescription, preset, preset_names
from yolofleet.families.ppyoloe.network import REG_BINS
from yolofleet.families.weights.pickle_machine import (
    DAMAGE,
    MAX_DIMENSIONS,
    PLAIN,
    Global,
    Machine,
    first_line,
)
from yolofleet.families.weights.reader import check_fit, check_values, misfits
from yolofleet.families.weights.value import UNCOUNTED, UNSTATED, Weights, WeightsHeader, as_fp32, class_names
from yolofleet.storage.atomic import write_atomically
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import CheckpointError

LONG = 1024  # bytes; a longer byte string is the content of an array
MAX_STRUCTURE_BYTES = 2 * 2**20  # of everything else; ppyoloe-plus-x has 0.2 MB

STATISTICS = {"._mean": ".running_mean", "._variance": ".running_var"}  # Paddle's name: our name
PROJECTION = "yolo_head.proj_conv.weight"  # 0..16, the values of a distance's bins
# constants, not weights
FIXED = (PROJECTION, "yolo_head.proj", "yolo_head.anchor_points", "yolo_head.stride_tensor")

NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "b1")


def read(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read weights; the shapes of the arrays identify the model.

    Raises:
        CheckpointError: the file is missing, damaged or unsafe, belongs to another model, or has values that are not
            finite.
    """
    source = str(path)
    if path.suffix.lower() == ".pdopt":
        raise CheckpointError(
            f"{source} is the state of Paddle's optimizer, without weights",
            hint=f"use {path.with_suffix('.pdparams').name} of the same folder",
        )
    arrays = read_arrays(path)
    given: dict[str, Tensor] = {}
    for name in list(arrays):
        array = arrays.pop(name)  # so that memory does not hold a large file twice
        if name in FIXED:
            continue
        if array.dtype.kind != "f":
            raise CheckpointError(
                f"{source}: {short(name)} holds {array.dtype} instead of floating-point numbers"
            )
        with np.errstate(over="ignore"):  # infinity is found below
            given[our_name(name)] = torch.from_numpy(array.astype(np.float32))
    nc = _classes_by_shapes(given, source)
    if description is None:
        description = _description_by_shapes(given, nc, source)
    check_fit(given, description, nc, source)
    check_values(given, source)
    strides = outline(description, nc).strides
    return Weights(
        given, WeightsHeader(description, nc, class_names(None, nc), strides, UNSTATED_PX, UNSTATED)
    )


def shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the arrays of any file with a dict of arrays, by name."""
    return {name: list(array.shape) for name, array in read_arrays(path).items()}


def our_name(name: str) -> str:
    """Return our name of a Paddle tensor: ``x.bn._mean`` becomes ``x.bn.running_mean``, other names stay."""
    for theirs, ours in STATISTICS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def paddle_name(name: str) -> str:
    """Return Paddle's name of one of our tensors."""
    for theirs, ours in STATISTICS.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


def _classes_by_shapes(given: Mapping[str, Tensor], source: str) -> int:
    bias = given.get("yolo_head.pred_cls.0.bias")
    if bias is None and "stem.conv1.conv.weight" in given:
        raise CheckpointError(
            f"{source} has a backbone without a detector", hint="use weights of a whole PP-YOLOE model"
        )
    if bias is None or bias.dim() != 1 or not 1 <= len(bias) <= MAX_CLASSES:
        raise CheckpointError(f"{source} is not a PP-YOLOE model: it has no class predictions")
    return len(bias)


def _description_by_shapes(given: Mapping[str, Tensor], nc: int, source: str) -> ModelDescription:
    for name in preset_names():
        description = preset(name)
        if not misfits(given, description, nc):
            return description
    folded = any(name.endswith(".conv2.conv.bias") for name in given)
    raise CheckpointError(
        f"{source} fits none of the models {', '.join(preset_names())}",
        hint="its blocks are folded for inference; use the file that training wrote" if folded else None,
    )


# -- the pickle ------------------------------------------------------------------------------------------


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a pickled dict by name, as read-only views of memory as large as the file.

    Raises:
        CheckpointError: the file is missing, damaged or unsafe, or is not a dict of arrays.
    """

    def error(what: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{path} {what}", hint=hint)

    try:
        with open_foreign(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            root = _ArrayMachine(file, size, error).run()
            rest = size - file.tell()
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror or problem}") from None
    except DAMAGE as problem:
        raise error(f"is damaged or not a weights file of Paddle ({first_line(problem)})") from None
    if not isinstance(root, dict) or rest:
        raise error("is not a dict of arrays, as paddle.save writes for weights")
    found = {name: value for name, value in root.items() if isinstance(value, _Array)}
    arrays = {}
    for name, pending in found.items():
        if not isinstance(name, str) or pending.values is None:
            raise error("has an array without name or content")
        arrays[name] = pending.values
    if sum(a.nbytes for a in arrays.values()) > size:
        raise error("has one array under several names, so its arrays are larger than the file")
    if not arrays:
        raise error("has no arrays", "expected the .pdparams file of a PP-YOLOE model")
    return arrays


class _Array:
    """A numpy array: created empty, then filled by its pickled state."""

    values: np.ndarray | None = None

    def set_state(self, state: Any) -> None:
        match state:
            case (1, tuple(shape), _Dtype(code=str(code), order="<" | "|" | "="), False, bytes(data)):
                pass
            case (_, _, _Dtype(order=">"), _, _):
                raise ValueError("an array of a big-endian machine")
            case (_, _, _, True, _):
                raise ValueError("an array in Fortran order")
            case _:
                raise ValueError("an array without shape, type and content")
        if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 2**40 for n in shape):
            raise ValueError("an array with an invalid shape")
        dtype = np.dtype(f"<{code}")
        if prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"an array of shape {list(shape)} in {len(data)} bytes")
        self.values = np.frombuffer(data, dtype).reshape(shape)


class _Dtype:
    """A numpy dtype: created from a type code; its pickled state has the byte order."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order: str | None = None

    def set_state(self, state: Any) -> None:
        match state:
            case (3, str(order), None, None, None, -1, -1, 0):
                self.order = order
            case _:
                raise ValueError("a type of array that is not plain numbers")


def _empty_array(kind: Any, _shape: Any, _code: Any) -> _Array:
    if kind != Global("numpy.ndarray"):
        raise ValueError("an array of a subclass of numpy.ndarray")
    return _Array()


def _dtype(code: Any, _align: Any = False, _copy: Any = False) -> _Dtype:
    if code not in NUMBERS:
        raise ValueError(f"an array of type {short(code)} instead of numbers")
    return _Dtype(code)


REBUILD: dict[str, Callable[..., Any]] = {
    **PLAIN,
    "numpy.core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy.dtype": _dtype,
}


class _ArrayMachine(Machine):
    """Reads numpy arrays too. Long byte strings have a separate budget: twice the file's size, because text is copied
    to bytes."""

    def __init__(self, stream: BinaryIO, size: int, error: Callable[..., CheckpointError]) -> None:
        super().__init__(stream, error, REBUILD, ("numpy.ndarray",), budget=MAX_STRUCTURE_BYTES)
        self._size = size
        self._long = 2 * size

    def take(self, n: int) -> bytes:
        if n > LONG and n > self._size - self._stream.tell():
            raise ValueError("it ends too early")
        return super().take(n)

    def spend(self, n: int) -> None:
        if n <= LONG:
            super().spend(n)
            return
        self._long -= n
        if self._long < 0:
            raise ValueError("it copies its arrays again and again")

    def set_state(self, target: Any, state: Any) -> None:
        if isinstance(target, (_Array, _Dtype)):
            target.set_state(state)
        else:
            super().set_state(target, state)


# -- writing ---------------------------------------------------------------------------------------------


def write(path: Path, weights: Weights) -> None:
    """Write a file for ``paddle.load``, atomically.

    Raises:
        CheckpointError: the weights are not those of a PP-YOLOE model.
        StorageError: the file cannot be written; ``path`` is unchanged.
    """
    if not isinstance(weights.description, PpyoloeDescription):
        raise CheckpointError(
            f"cannot write {weights.description.name} as .pdparams: it is not a PP-YOLOE model",
            hint="write .safetensors",
        )
    tensors = {paddle_name(n): as_fp32(t) for n, t in weights.tensors.items() if not n.endswith(UNCOUNTED)}
    tensors[PROJECTION] = torch.arange(REG_BINS, dtype=torch.float32).view(1, REG_BINS, 1, 1)

    def dump(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(b"\x80\x04}")  # protocol 4, as in Paddle; an empty dict
            for name, t in tensors.items():
                array = t.detach().contiguous().numpy().astype("<f4", copy=False)
                file.write(_text(name) + _array_opcodes(array.shape, array.nbytes))
                file.write(array.tobytes())
                file.write(b"tbs")  # end the state's tuple, set the array's state, put it into the dict
            file.write(b".")

    write_atomically(path, dump, lambda temporary: read(temporary, weights.description))


def _array_opcodes(shape: tuple[int, ...], nbytes: int) -> bytes:
    """Return the opcodes of a float32 array up to its content, as numpy's ``__reduce__`` gives for every version."""
    sizes = b"".join(_integer(n) for n in shape)
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    dtype = b"cnumpy\ndtype\n" + _text("f4") + b"\x89\x88\x87R(K\x03" + _text("<") + b"NNN" + _integer(-1) * 2
    state = b"(K\x01(" + sizes + b"t" + dtype + b"K\x00tb\x89"  # version, shape, type, not Fortran
    return empty + state + b"\x8e" + struct.pack("<Q", nbytes)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)
