"""Check an ONNX file before a runtime loads it.

The file may refer to other files with tensors (external data). These must be in its folder or below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from yolofleet.storage.foreign import read_foreign, reading
from yolofleet.support.errors import CheckpointError

MAX_FILE = 2**31 - 1  # bytes, protobuf's limit
MAX_NODES = 200_000
MESSAGES = ("GraphProto", "NodeProto", "AttributeProto", "SparseTensorProto", "TensorProto")
MAX_DEPTH = 24  # of nested messages: 8 graphs
ENDLESS = ("Loop", "Scan")  # the file sets their number of iterations
DOMAINS = ("", "ai.onnx", "com.microsoft")  # operations of onnxruntime itself


def checked_model(path: Path) -> Any:
    """Return the parsed file, an ``onnx.ModelProto``, without its external data.

    Raises:
        CheckpointError: the file is damaged or too large, needs unknown operations, or names files outside its folder.
    """
    import onnx

    with reading(path, CheckpointError, "check the path"):
        content = read_foreign(path, limit_bytes=MAX_FILE)
    if not content:
        raise CheckpointError(f"{path} is empty (0 bytes)", hint="use another copy")
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # exceptions differ between implementations of protobuf
        raise CheckpointError(f"{path} is not a complete ONNX file", hint="use another copy") from None
    if not model.HasField("graph") or not model.graph.node:
        raise CheckpointError(f"{path} is not a complete ONNX file: it has no graph", hint="use another copy")
    if model.functions:
        raise CheckpointError(f"{path} defines functions, which no export of a detector needs")
    nodes = (part for part in _messages(model.graph, path) if part.DESCRIPTOR.name == "NodeProto")
    for count, node in enumerate(nodes):
        if count >= MAX_NODES:
            raise CheckpointError(f"{path} has more than {MAX_NODES:,} nodes")
        if node.domain not in DOMAINS:
            raise CheckpointError(
                f"{path} needs operations of {node.domain[:80]!r}", hint="export it without custom operations"
            )
        if node.op_type in ENDLESS:
            raise CheckpointError(
                f"{path} has a {node.op_type}, which may never end and which no export of a detector needs",
                hint="export it again without NMS, or with the operation NonMaxSuppression",
            )
    for values in external_values(path, model):
        _check_external(path, values)
    return model


def external_values(path: Path, model: Any) -> Iterator[dict[str, str]]:
    """Yield where the external data of each tensor is: ``location``, and perhaps ``offset`` and ``length``."""
    for tensor in _messages(model.graph, path):
        if tensor.DESCRIPTOR.name == "TensorProto" and tensor.data_location == tensor.EXTERNAL:
            yield {entry.key: entry.value for entry in tensor.external_data}


def _check_external(path: Path, values: dict[str, str]) -> None:
    location = values.get("location", "")
    folder = path.resolve().parent
    windows = PureWindowsPath(location)
    target = (folder / location.replace("\0", "")).resolve()
    if (
        not location
        or "\0" in location
        or windows.drive
        or windows.root
        or ".." in windows.parts
        or not target.is_relative_to(folder)
    ):
        raise CheckpointError(
            f"{path} names the file {location[:200]!r} outside its folder", hint="do not use this file"
        )
    if not target.is_file():
        raise CheckpointError(
            f"{path} needs the file {location[:200]!r} beside it", hint="copy both files together"
        )
    try:
        offset, length = (int(values.get(key) or 0) for key in ("offset", "length"))
    except ValueError:
        raise CheckpointError(f"{path} has a wrong offset or length for {location[:200]!r}") from None
    if min(offset, length) < 0 or offset + length > target.stat().st_size:
        raise CheckpointError(
            f"{path} needs bytes {offset:,} to {offset + length:,} of {target.name}, which has "
            f"{target.stat().st_size:,}",
            hint="use another copy of both files",
        )


def _messages(message: Any, path: Path, depth: int = 0) -> Iterator[Any]:
    """Yield a message and those inside it: graphs, nodes and tensors, also of other graphs inside nodes."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path} has graphs inside graphs, {MAX_DEPTH} messages deep")
    yield message
    if message.DESCRIPTOR.name != "TensorProto":
        for field, value in message.ListFields():
            if field.message_type is not None and field.message_type.name in MESSAGES:
                for part in (value,) if hasattr(value, "DESCRIPTOR") else value:
                    yield from _messages(part, path, depth + 1)
