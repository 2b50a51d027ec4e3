"""Weights from a file of any form, found by name and recognised by content."""

from __future__ import annotations

import json
import re
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from yolofleet.checkpoint import darknet, paddle, yolov5_pt
from yolofleet.checkpoint.catalogue import resolve_weights
from yolofleet.checkpoint.format import DIGEST, decode_tensors
from yolofleet.checkpoint.weights import HEADER, Weights, WeightsHeader, as_fp32, check_fit
from yolofleet.errors import CheckpointError
from yolofleet.models.darknet_cfg import DarknetDescription
from yolofleet.models.description import ModelDescription, describe

DARKNET_CUT = re.compile(r"\.conv\.\d+$")  # the first layers of a network, such as darknet53.conv.74
PADDLE = (".pdparams", ".pdema", ".pdopt")


def read_weights(path: Path, description: ModelDescription | None = None) -> Weights:
    """Ours or a stranger's. Of a training checkpoint: the moving average.

    Args:
        description: for files that do not describe their model.

    Raises:
        CheckpointError: missing, damaged, unsafe, of another family, not finite; says which.
    """
    try:
        with path.open("rb") as f:
            start = f.read(16)
    except OSError as problem:
        raise CheckpointError(
            f"cannot read {path}: {problem.strerror or problem}", hint="check the path"
        ) from None
    if not start:
        raise CheckpointError(
            f"{path} is empty (0 bytes)", hint="was a copy or a download cut off? use another copy"
        )
    if start[8:9] == b"{":  # 8 bytes of length, then JSON
        return _read_safetensors(path, description)
    if path.suffix == ".weights" or DARKNET_CUT.search(path.name):
        if description is not None and not isinstance(description, DarknetDescription):
            raise CheckpointError(
                f"{path} holds weights of a Darknet network, and {description.name} is none",
                hint="name its .cfg: --cfg FILE",
            )
        return darknet.read(path, description)
    if path.suffix in PADDLE:
        return paddle.read(path, description)
    return yolov5_pt.read(path, description)


def load_weights(name: str, cfg: str = "") -> Weights:
    """Weights by path or name, of a network that ``cfg`` describes when the file does not.

    Raises:
        CheckpointError, ConfigError: see :func:`resolve_weights`, :func:`read_weights`, ``describe``.
    """
    return read_weights(resolve_weights(name), describe(cfg) if cfg else None)


def _read_safetensors(path: Path, description: ModelDescription | None) -> Weights:
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}") from None
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not a whole safetensors file", hint="use another copy") from None
    if DIGEST in metadata:
        try:
            tensors, values = decode_tensors(content, str(path))
        except (ValueError, RecursionError):  # JSON that no writer of ours makes
            raise CheckpointError(f"{path} has a wrong header") from None
        if HEADER not in values:
            raise CheckpointError(
                f"{path} is a training state, not weights",
                hint="use weights/best.safetensors of its run, or --resume",
            )
        header = WeightsHeader.from_dict(values[HEADER], source=str(path))
        check_fit(tensors, header.description, header.nc, str(path))
        return Weights({name: as_fp32(t) for name, t in tensors.items()}, header)
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({str(problem).splitlines()[0][:160]})",
            hint="use another copy",
        ) from None
    return yolov5_pt.from_state_dict(tensors, {}, description, str(path))
