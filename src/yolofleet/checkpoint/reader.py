"""Read weights from a file of any supported format, found by name and recognised by content."""

from __future__ import annotations

import json
import re
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from yolofleet.checkpoint import darknet, paddle, yolov5_pt
from yolofleet.checkpoint.catalogue import resolve_weights
from yolofleet.checkpoint.format import DIGEST, decode_tensors, read_whole
from yolofleet.checkpoint.weights import HEADER, Weights, WeightsHeader, as_fp32, check_fit, check_values
from yolofleet.errors import CheckpointError
from yolofleet.files.foreign import open_foreign
from yolofleet.models.darknet_cfg import DarknetDescription
from yolofleet.models.description import ModelDescription, describe
from yolofleet.text import screen_line

DARKNET_CUT = re.compile(r"\.conv\.\d+$")  # a file of the first layers, such as darknet53.conv.74
PADDLE = (".pdparams", ".pdema", ".pdopt")


def read_weights(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read weights of our own or another format; from a training checkpoint, read the moving average.

    Args:
        description: for files that do not describe their model.

    Raises:
        CheckpointError: the file is missing, damaged or unsafe, belongs to another family, or has values that are not
            finite.
    """
    start = first_bytes(path)
    if start[8:9] == b"{":  # 8 bytes of length, then JSON
        return _read_safetensors(path, description)
    if path.suffix == ".weights" or DARKNET_CUT.search(path.name):
        if description is not None and not isinstance(description, DarknetDescription):
            raise CheckpointError(
                f"{path} has weights of a Darknet network, but {description.name} is not a Darknet network",
                hint="name its .cfg with --cfg FILE",
            )
        return darknet.read(path, description)
    if path.suffix in PADDLE:
        return paddle.read(path, description)
    return yolov5_pt.read(path, description)


def first_bytes(path: Path) -> bytes:
    """Return the first 16 bytes of a regular file.

    Raises:
        CheckpointError: the file is missing, cannot be read, is empty or is not a regular file.
    """
    try:
        with open_foreign(path) as file:
            start = file.read(16)
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        words = getattr(problem, "strerror", None) or problem
        raise CheckpointError(f"cannot read {path}: {words}", hint="check the path") from None
    if not start:
        raise CheckpointError(
            f"{path} is empty (0 bytes)", hint="a copy or download may have been cut off; use another copy"
        )
    return start


def load_weights(name: str, cfg: str = "") -> Weights:
    """Read weights by path or name; ``cfg`` describes the network if the file does not.

    Raises:
        CheckpointError, ConfigError: see :func:`resolve_weights`, :func:`read_weights`, ``describe``.
    """
    return read_weights(resolve_weights(name), describe(cfg) if cfg else None)


def _read_safetensors(path: Path, description: ModelDescription | None) -> Weights:
    content = read_whole(path)
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not a mapping")
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not a complete safetensors file", hint="use another copy") from None
    if DIGEST in metadata:
        try:
            tensors, values = decode_tensors(content, str(path))
        except (ValueError, RecursionError):  # not valid JSON, or deeply nested
            raise CheckpointError(f"{path} has a wrong header") from None
        if HEADER not in values:
            raise CheckpointError(
                f"{path} is a training state, not weights",
                hint="use weights/best.safetensors of its run, or --resume",
            )
        header = WeightsHeader.from_dict(values[HEADER], source=str(path))
        check_fit(tensors, header.description, header.nc, str(path))
        check_values(tensors, str(path))
        return Weights({name: as_fp32(t) for name, t in tensors.items()}, header)
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({screen_line(problem, limit=160)})",
            hint="use another copy",
        ) from None
    return yolov5_pt.from_state_dict(tensors, {}, description, str(path))
