"""List the contents of an untrusted file with a network. Nothing in it is executed; unusable parts are listed too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yolofleet.families.family import load
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.table import weights_files
from yolofleet.families.weights.catalogue import KnownWeights, known_weights
from yolofleet.families.weights.format import MAX_FILE_BYTES, read_tensors
from yolofleet.families.weights.pickle_machine import PickledObject
from yolofleet.families.weights.pickles import StoredTensor, TorchFile, options_of
from yolofleet.families.weights.reader import (
    ONNX,
    PLAIN,
    STATE,
    TORCH,
    kind_of,
    read_weights,
    safetensors_header,
)
from yolofleet.families.weights.value import ASSUMED, Weights
from yolofleet.storage.foreign import digest_of, read_foreign, reading
from yolofleet.support.errors import CheckpointError
from yolofleet.support.text import screen_line, size_text

MAX_OBJECTS = 100_000  # visited in a pickle
MAX_ONNX_BYTES = 2**31 - 1  # protobuf's own limit
MAX_PATH_CHARS = 500  # of the path to a tensor in a pickle
Shapes = dict[str, list[int]]


@dataclass(frozen=True)
class Contents:
    """The contents of a file.

    Attributes:
        kind: one of the words of ``reader.kind_of``.
        weights: the weights for training and prediction; None if unusable.
        problem: why they are unusable, with a hint.
        shapes: of all tensors by name.
        training: plain values about the training, from the file.
        interface: an ONNX model's inputs and outputs, as text.
    """

    kind: str
    weights: Weights | None = None
    problem: CheckpointError | None = None
    shapes: Shapes = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    interface: tuple[str, ...] = ()

    @property
    def values(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def contents(path: Path, description: ModelDescription | None = None) -> Contents:
    """Return the contents of a file.

    Raises:
        CheckpointError: the file is missing, or too damaged or unsafe to list.
    """
    kind = kind_of(path)
    if kind == ONNX:
        return _onnx(path)
    if kind == STATE:
        tensors, header = read_tensors(path)
        training = {"step": header.get("step"), **_plain_values(header.get("state"))}
        return Contents(
            kind,
            problem=CheckpointError("it is a training state", hint="--resume continues its run"),
            shapes={name: list(t.shape) for name, t in tensors.items()},
            training=training,
        )
    try:
        weights = read_weights(path, description)
    except CheckpointError as problem:
        shapes, training = _listing(path, kind, problem)
        return Contents(kind, problem=problem, shapes=shapes, training=training)
    training = _plain_values({k: v for k, v in weights.header.extra.items() if k != ASSUMED})
    if kind == TORCH:
        training = {**training, **_listing(path, kind, None)[1]}
    shapes = {name: list(t.shape) for name, t in weights.tensors.items()}
    return Contents(kind, weights, shapes=shapes, training=training)


def published_as(path: Path) -> tuple[KnownWeights | None, KnownWeights | None, str]:
    """Return the published entry with the file's digest, the entry with its name, and its SHA-256.

    Raises:
        CheckpointError: the file cannot be read, or is larger than any weights.
    """
    with reading(path, CheckpointError):
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has {size_text(size)}, the limit is {size_text(MAX_FILE_BYTES)}")
        sha256 = digest_of(path)
    same = next((e for e in known_weights() if e.item.digest == f"sha256:{sha256}"), None)
    called = next((e for e in known_weights() if e.item.name == path.name and e.item.digest), None)
    return same, called, sha256


# -- unusable files --------------------------------------------------------------------------------------------


def _listing(path: Path, kind: str, problem: CheckpointError | None) -> tuple[Shapes, dict[str, Any]]:
    """Return tensors and training values of an untrusted file; raise ``problem`` if it has none."""
    if kind == PLAIN:
        header = safetensors_header(path)
        return {n: list(e["shape"]) for n, e in header.items() if _is_entry(e)}, {}
    if kind == TORCH:
        with TorchFile(path) as file:
            return _torch_shapes(file.root), _torch_training(file.root)
    for part in (each.shapes for each in weights_files(kind) if each.shapes):
        if (shapes := load(part)(path)) is not None:
            return shapes, {}
    assert problem is not None
    raise problem


def _is_entry(entry: Any) -> bool:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return isinstance(shape, list) and _is_shape(shape)


def _is_shape(sizes: Sequence[Any]) -> bool:
    """Return whether these are possible sizes of a tensor, so that their product is safe to compute."""
    plausible = len(sizes) <= 64 and all(type(n) is int and 0 <= n < 2**40 for n in sizes)
    return plausible and math.prod(sizes) < 2**63


def _torch_shapes(root: Any) -> Shapes:
    """Return the tensors of a pickled value by their paths, up to a number of visits."""
    shapes: Shapes = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    visited = 0
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, StoredTensor):
            shapes[path] = list(value.shape)
            continue
        if isinstance(value, PickledObject):
            value = value.state
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        inner = []
        for key, item in items if len(path) < MAX_PATH_CHARS else ():
            visited += 1
            if visited > MAX_OBJECTS:
                break
            if isinstance(item, _NESTED):
                inner.append((f"{path}.{_word(key)}" if path else _word(key), item))
        waiting += inner[::-1]
    return shapes


_NESTED = (StoredTensor, PickledObject, dict, list, tuple)


def _torch_training(root: Any) -> dict[str, Any]:
    if not isinstance(root, dict):
        return {}
    found = _plain_values(
        {key: root.get(key) for key in ("epoch", "best_fitness", "updates", "date", "version")}
    )
    options = options_of(root)
    known = ("data", "epochs", "batch_size", "imgsz", "img_size", "optimizer", "hyp", "cfg", "weights")
    return found | _plain_values({key: options.get(key) for key in known})


def _plain_values(values: Any) -> dict[str, Any]:
    """Return numbers and short texts; nested values one level deep."""
    found: dict[str, Any] = {}
    for key, value in list(values.items())[:200] if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping):
            found |= {f"{_word(key)}.{_word(name)}": _plain(item) for name, item in list(value.items())[:200]}
        else:
            found[_word(key)] = _plain(value)
    return {key: value for key, value in found.items() if value not in (None, "")}


def _plain(value: Any) -> str | float | None:
    """Return a number or short text, else None."""
    if isinstance(value, str):
        return _word(value)
    if isinstance(value, (list, tuple)) and all(type(n) is int and abs(n) < 2**63 for n in value):
        return ", ".join(map(str, value[:8]))
    is_number = (isinstance(value, int) and abs(value) < 2**63) or (
        isinstance(value, float) and math.isfinite(value)
    )
    return value if is_number else None


def _word(value: Any) -> str:
    """Return a value as one short line without control characters."""
    if isinstance(value, (bytes, tuple)) or (isinstance(value, int) and abs(value) >= 2**63):
        return type(value).__name__
    return screen_line(value[:200] if isinstance(value, str) else value, limit=200)


# -- ONNX ------------------------------------------------------------------------------------------------------


def _onnx(path: Path) -> Contents:
    try:
        import onnx
    except ImportError:
        return Contents(
            ONNX, problem=CheckpointError("it is an export", hint="pip install onnx to see more of it")
        )
    with reading(path, CheckpointError):
        content = read_foreign(path, limit_bytes=MAX_ONNX_BYTES)
    try:
        model = onnx.load_model_from_string(content)
    except Exception as problem:  # protobuf has its own exception types
        raise CheckpointError(f"{path} is not an ONNX model ({type(problem).__name__})") from None
    graph = model.graph

    def text(role: str, value: Any) -> str:
        kind = value.type.tensor_type
        sizes = [_word(d.dim_param) or str(d.dim_value) for d in kind.shape.dim]
        known = kind.elem_type in onnx.TensorProto.DataType.values()
        element = onnx.TensorProto.DataType.Name(kind.elem_type) if known else f"type {kind.elem_type}"
        return f"{role} {_word(value.name)} {element} [{', '.join(sizes)}]"

    inner = {tensor.name for tensor in graph.initializer}
    return Contents(
        ONNX,
        problem=CheckpointError(
            "it is an export", hint="train and validate with the weights that it came from"
        ),
        shapes={
            _word(tensor.name): list(tensor.dims) for tensor in graph.initializer if _is_shape(tensor.dims)
        },
        training={_word(entry.key): _word(entry.value) for entry in model.metadata_props},
        interface=(
            *(text("input", value) for value in graph.input if value.name not in inner),
            *(text("output", value) for value in graph.output),
        ),
    )
