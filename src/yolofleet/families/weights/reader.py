"""Read weights from a file of any supported format, found by name and recognised by content, and check that they fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.family import load
from yolofleet.families.networks.description import ModelDescription, describe
from yolofleet.families.table import FAMILIES, weights_files
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.families.weights.format import DIGEST, decode_tensors, non_finite, read_whole
from yolofleet.families.weights.value import HEADER, UNCOUNTED, Weights, WeightsHeader, as_fp32
from yolofleet.storage.foreign import open_foreign, reading
from yolofleet.support.errors import CheckpointError, ConfigError, NonFiniteError
from yolofleet.support.text import screen_line

if TYPE_CHECKING:
    from yolofleet.families.weights.pickles import StoredTensor
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
    """Return the kind of a file, from its first bytes, else from its name. Raise CheckpointError if it is missing or empty."""
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
    found = (
        file
        for file in weights_files()
        if suffix in file.suffixes or (file.pattern and re.search(file.pattern, path.name))
    )
    return next((file.kind for file in found), TORCH)


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


def misfits(given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int) -> list[str]:
    """Return texts about missing, extra and differently shaped tensors, compared with the description's network."""
    expected = {name: tuple(t.shape) for name, t in outline(description, nc).state_dict().items()}
    found = {name: tuple(t.shape) for name, t in given.items()}
    missing = [f"{n} is missing" for n in expected if n not in found and not n.endswith(UNCOUNTED)]
    surplus = [f"{n} is unknown" for n in found if n not in expected]
    wrong = [
        f"{n} is {found[n]} instead of {shape}"
        for n, shape in expected.items()
        if n in found and found[n] != shape
    ]
    return missing + surplus + wrong


def check_fit(
    given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int, source: str
) -> None:
    """Raise CheckpointError if names or shapes differ from the description's network."""
    try:
        problems = misfits(given, description, nc)
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}") from None
    if not problems:
        return
    folded = "model.0.conv.bias" in given and "model.0.bn.weight" not in given
    raise CheckpointError(
        f"{source}: {len(problems)} tensors do not fit the model {description.name}: {'; '.join(problems[:3])}",
        hint="its batch normalisation is folded; use the file that training wrote"
        if folded
        else "the file belongs to another model",
    )


def check_values(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise on values that no training gives, because they would make every prediction wrong without an error.

    Raises:
        NonFiniteError: a tensor has NaN or infinity.
        CheckpointError: a tensor has values that are not real numbers, or is a negative variance.
    """
    for name, t in tensors.items():
        if name.endswith(UNCOUNTED):
            continue
        if not t.is_floating_point():
            raise CheckpointError(f"{source}: {screen_line(name)} has {t.dtype}, expected real numbers")
        if non_finite({name: t}):
            raise NonFiniteError(f"{source}: {screen_line(name)} is not finite")
        if name.endswith("running_var") and t.numel() and t.min() < 0:
            raise CheckpointError(
                f"{source}: the variance {screen_line(name)} has negative values",
                hint="the file is damaged, or belongs to another model; use another copy",
            )
