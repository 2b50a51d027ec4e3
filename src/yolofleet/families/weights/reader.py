"""Read weights from a file of any supported format, found by name and recognised by content."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from yolofleet.families.family import WeightsFile, load
from yolofleet.families.networks.description import ModelDescription, describe
from yolofleet.families.table import FAMILIES, weights_files
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.families.weights.checks import check_fit, check_values
from yolofleet.families.weights.format import DIGEST, decode_tensors, read_whole
from yolofleet.families.weights.value import HEADER, Weights, WeightsHeader, as_fp32
from yolofleet.support.errors import CheckpointError
from yolofleet.support.files.foreign import open_foreign, reading

MAX_HEADER_BYTES = 100 << 20  # of a safetensors file
# magic number at the start of files of torch < 1.6
LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
OURS, STATE, PLAIN = "weights of yolofleet", "training state of yolofleet", "safetensors"
TORCH, ONNX = "torch checkpoint", "ONNX model"


def read_weights(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read weights of our own or another format; from a training checkpoint, read the moving average.

    Args:
        description: for files that do not describe their model.

    Raises:
        CheckpointError: the file is missing, damaged or unsafe, belongs to another family, or has values that are not
            finite.
    """
    kind = kind_of(path)
    if kind in (OURS, STATE):
        return _read_ours(path)
    files = weights_files(kind) or weights_files(TORCH)
    own = FAMILIES[description.family].weights_files if description is not None else ()
    recognised = (file for file in files if file.recognises and load(file.recognises)(path))
    chosen = next((file for file in files if file in own), None) or next(recognised, files[0])
    weights: Weights = load(chosen.read)(path, description)
    return weights


def kind_of(path: Path) -> str:
    """Return the kind of a file, from its first bytes, else from its name. Raises CheckpointError if it is missing or empty."""
    with reading(path, CheckpointError, "check the path"), open_foreign(path) as file:
        start = file.read(16)
    if not start:
        raise CheckpointError(
            f"{path} is empty (0 bytes)", hint="a copy or download may have been cut off; use another copy"
        )
    if start[8:9] == b"{":
        metadata = safetensors_header(path).get("__metadata__")
        if not isinstance(metadata, dict) or DIGEST not in metadata:
            return PLAIN
        return OURS if HEADER in metadata else STATE
    suffix = path.suffix.lower()
    if start[:4] == b"PK\3\4" or start.startswith(LEGACY_TORCH):
        return TORCH
    if suffix == ".onnx":
        return ONNX
    found = (file for file in weights_files() if suffix in file.suffixes or _has_name(path, file))
    return next((file.kind for file in found), TORCH)


def _has_name(path: Path, file: WeightsFile) -> bool:
    return bool(file.pattern and re.search(file.pattern, path.name))


def safetensors_header(path: Path) -> dict[str, Any]:
    broken = CheckpointError(f"{path} is not a complete safetensors file", hint="use another copy")
    try:
        with reading(path, CheckpointError), open_foreign(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, path.stat().st_size - 8) or length < 2:
                raise broken
            header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise broken from None
    if not isinstance(header, dict):
        raise broken
    return header


def load_weights(name: str, cfg: str = "") -> Weights:
    """Read weights by path or name; ``cfg`` describes the network if the file does not.

    Raises:
        CheckpointError, ConfigError: see :func:`resolve_weights`, :func:`read_weights`, ``describe``.
    """
    return read_weights(resolve_weights(name), describe(cfg) if cfg else None)


def _read_ours(path: Path) -> Weights:
    tensors, values = decode_tensors(read_whole(path), str(path))
    if HEADER not in values:
        raise CheckpointError(
            f"{path} is a training state, not weights",
            hint="use weights/best.safetensors of its run, or --resume",
        )
    header = WeightsHeader.from_dict(values[HEADER], source=str(path))
    check_fit(tensors, header.description, header.nc, str(path))
    check_values(tensors, str(path))
    return Weights({name: as_fp32(t) for name, t in tensors.items()}, header)
