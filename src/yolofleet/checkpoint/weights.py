"""Trained weights: our files, and strangers' YOLOv5 files read as data.

Ours is a safetensors file under the official tensor names, fp32, whose header carries what is needed to use
them: description, class names, strides, anchors, image size, and a SHA-256 over all of it (``format.py``).

Foreign files: YOLOv5 v5.0 ... v7.0 checkpoints (``.pt``, official or a user's best.pt and last.pt), and state
dicts as ``.pt`` or ``.safetensors`` whose description is then found by their shapes. Every tensor is checked
against the description's network before memory is taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from yolofleet.checkpoint.format import DIGEST, decode_tensors, write_tensors
from yolofleet.checkpoint.pickles import PickledObject, StoredTensor, TorchFile
from yolofleet.data.arrayfile import cache_root
from yolofleet.errors import CheckpointError, ConfigError
from yolofleet.models.description import (
    MAX_CLASSES,
    ModelDescription,
    from_yolov5_mapping,
    preset,
    preset_names,
)
from yolofleet.models.detection import DetectionModel, outline

HEADER = "weights"  # key of the header in a file of ours
FORMAT_VERSION = 1
DEFAULT_IMG = 640
MAX_MODULES = 100_000
SUFFIXES = (".safetensors", ".pt")
UNUSED = ("anchor_grid",)  # a buffer of YOLOv5 up to v6.0: the anchors in pixels
UNCOUNTED = "num_batches_tracked"  # may be absent: nothing reads it


@dataclass(frozen=True)
class WeightsHeader:
    """What a weights file says beside its tensors.

    Attributes:
        img: image size in training, pixels.
        extra: JSON values, such as epoch and step.
    """

    description: ModelDescription
    nc: int
    names: tuple[str, ...]
    strides: tuple[int, ...]
    img: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: DetectionModel, *, img: int, extra: Mapping[str, Any] | None = None) -> WeightsHeader:
        return cls(model.description, model.nc, model.names, model.strides, img, extra or {})

    @property
    def family(self) -> str:
        return self.description.family

    @property
    def anchors_px(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """[L][A] width, height."""
        return self.description.anchors_px

    def to_dict(self) -> dict[str, Any]:
        return {  # family and anchors again at the top, for other programs
            "version": FORMAT_VERSION,
            "family": self.family,
            "description": self.description.to_dict(),
            "nc": self.nc,
            "names": list(self.names),
            "strides": list(self.strides),
            "anchors_px": [[list(a) for a in level] for level in self.anchors_px],
            "img": self.img,
            "extra": dict(self.extra),
        }

    @classmethod
    def from_dict(cls, values: Any, *, source: str) -> WeightsHeader:
        """Check a header from a file.

        Raises:
            CheckpointError: it is not one of ours.
        """
        if not isinstance(values, dict) or values.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{source} has a header of an unknown version",
                hint="a newer yolofleet wrote it; update this one",
            )
        try:
            description = ModelDescription.from_dict(values["description"], source=source)
            nc, names, strides, img = (values[key] for key in ("nc", "names", "strides", "img"))
            model = outline(description, whole_number(nc))
            extra = values.get("extra", {})
            if tuple(strides) != model.strides or len(names) != nc or not isinstance(extra, dict):
                raise ValueError("its strides, names or extra do not fit its model")
            return cls(description, nc, class_names(names, nc), model.strides, whole_number(img), extra)
        except ConfigError as problem:
            raise CheckpointError(f"{source}: {problem.what}", hint=problem.hint) from None
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"{source} has a wrong header: {problem}") from None


@dataclass(frozen=True)
class Weights:
    """Tensors by official name (CPU; floats are fp32), and the header that belongs to them."""

    tensors: dict[str, Tensor]
    header: WeightsHeader

    @property
    def description(self) -> ModelDescription:
        return self.header.description


@dataclass(frozen=True)
class TransferReport:
    """What :func:`transfer` did.

    Attributes:
        loaded: names of the tensors taken over.
        skipped: (name, reason) of the model's other tensors.
    """

    loaded: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """One line."""
        total = len(self.loaded) + len(self.skipped)
        text = f"{len(self.loaded)} of {total} tensors taken over"
        if self.skipped:
            shown = "; ".join(f"{name} ({reason})" for name, reason in self.skipped[:6])
            more = f"; and {len(self.skipped) - 6} more" if len(self.skipped) > 6 else ""
            text += f"; freshly initialised: {shown}{more}"
        return text


# -- finding, reading, writing ------------------------------------------------------------------------------


def resolve_weights(name: str) -> Path:
    """A path, or a bare file name in the cache's ``weights`` folder (with or without its suffix).

    Raises:
        CheckpointError: nothing there; says where to put the file.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise CheckpointError(
            f"{name} is a folder", hint=f"name a file, such as {path / 'weights' / 'best.safetensors'}"
        )
    if path.name != name:
        raise CheckpointError(f"weights file {name} does not exist", hint="check the path")
    folder = cache_root() / "weights"
    for candidate in (folder / name, *(folder / f"{name}{suffix}" for suffix in SUFFIXES)):
        if candidate.is_file():
            return candidate
    known = f"; or start from scratch with --model {path.stem}" if path.stem in preset_names() else ""
    raise CheckpointError(
        f"weights {name} are neither here nor in {folder}",
        hint=f"this version downloads nothing: put the file into {folder}, or give its path{known}",
    )


def read_weights(path: Path, description: ModelDescription | None = None) -> Weights:
    """Ours or YOLOv5's, by content and not by name. Of a training checkpoint: the moving average.

    Args:
        description: for a plain state dict of a model that is not built in.

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
    with TorchFile(path) as file:
        return _from_torch_file(file, description)


def write_weights(path: Path, weights: Weights) -> str:
    """Atomically; returns the SHA-256 that the header carries.

    Raises:
        StorageError: the disk refused; ``path`` is as it was.
    """
    tensors = {name: as_fp32(t.detach()) for name, t in weights.tensors.items()}
    return write_tensors(path, tensors, {HEADER: weights.header.to_dict()})


def model_from_weights(weights: Weights) -> DetectionModel:
    """A network with these weights and names, in evaluation mode, sharing no memory with ``weights``."""
    header = weights.header
    model = outline(header.description, header.nc).to_empty(device="cpu")
    state = model.state_dict()
    for name, t in state.items():
        if name in weights.tensors:
            t.copy_(weights.tensors[name])
        else:
            assert name.endswith(UNCOUNTED), name
            t.zero_()
    model.names = header.names
    return model.eval()


@torch.no_grad()
def transfer(model: DetectionModel, weights: Weights) -> TransferReport:
    """Copy into ``model`` what fits by name and shape; anchors stay the model's own.

    Raises:
        CheckpointError: no convolution fits.
    """
    loaded, skipped = [], []
    for name, t in model.state_dict().items():
        given = weights.tensors.get(name)
        if name.endswith((".anchors", UNCOUNTED)):
            continue
        if given is None:
            skipped.append((name, "not in the file"))
        elif given.shape != t.shape:
            skipped.append((name, f"{shape_text(given)} in the file, {shape_text(t)} here"))
        else:
            t.copy_(given)
            loaded.append(name)
    if all(weights.tensors[name].dim() < 2 for name in loaded):  # biases may agree by chance
        raise CheckpointError(
            f"no layer of the weights ({weights.description.name}) fits the model {model.description.name}",
            hint=f"leave out --model and --cfg, or use --model {weights.description.name}",
        )
    return TransferReport(tuple(loaded), tuple(skipped))


# -- safetensors --------------------------------------------------------------------------------------------


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
    return _from_state_dict(tensors, {}, description, str(path))


# -- YOLOv5's .pt -------------------------------------------------------------------------------------------


def _from_torch_file(file: TorchFile, description: ModelDescription | None) -> Weights:
    """The moving average if there is one, else the model; as a module object or as a state dict."""
    root, source = file.root, str(file.path)
    candidates = [root]
    if isinstance(root, dict):
        candidates = [root[key] for key in ("ema", "model", "state_dict") if root.get(key) is not None] or [
            root
        ]
    found = candidates[0]
    if isinstance(found, PickledObject):
        tensors, values = _module_tensors(found, source)
        mapping = values.get("yaml")
        if isinstance(mapping, dict):
            origin = values.get("yaml_file")
            name = Path(origin).stem[:100] if isinstance(origin, str) else "model"
            try:
                description = from_yolov5_mapping(mapping, name=name, source=source)
            except ConfigError as problem:
                raise CheckpointError(
                    f"{source}: its model cannot be built: {problem.what}", hint=problem.hint
                ) from None
    elif isinstance(found, dict) and any(isinstance(v, StoredTensor) for v in found.values()):
        tensors = {str(name): t for name, t in found.items() if isinstance(t, StoredTensor)}
        values = {}
    else:
        keys = (
            ", ".join(str(key)[:30] for key in list(root)[:8])
            if isinstance(root, dict)
            else type(root).__name__
        )
        raise CheckpointError(
            f"{source} holds no model (found: {keys})", hint="expected a checkpoint or a state dict of YOLOv5"
        )
    options = root.get("opt") if isinstance(root, dict) else None
    if isinstance(options, PickledObject):  # argparse's Namespace
        options = options.state
    img = options.get("imgsz", options.get("img_size")) if isinstance(options, dict) else None
    values = {**values, "img": img}
    return _from_state_dict(tensors, values, description, source, file)


def _module_tensors(root: PickledObject, source: str) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Parameters and buffers of a pickled module tree by dotted name, and the root's attributes."""
    tensors: dict[str, StoredTensor] = {}
    waiting: list[tuple[str, PickledObject]] = [("", root)]
    visited = 0
    while waiting:
        prefix, module = waiting.pop()
        visited += 1
        state = module.state
        if visited > MAX_MODULES or prefix.count(".") > 32 or not isinstance(state, dict):
            raise CheckpointError(f"{source} holds no network: its modules have no state or no end")
        kind = module.class_path.rsplit(".", 1)[-1]
        if prefix.endswith("act.") and kind != "SiLU":
            raise CheckpointError(
                f"{source} uses the activation {kind}; YOLOv5 from v5.0 on uses SiLU",
                hint="weights of older releases cannot be used",
            )
        passing = state.get("_non_persistent_buffers_set")
        for group in ("_parameters", "_buffers"):
            for name, value in named(state.get(group)):
                if isinstance(value, StoredTensor) and not (isinstance(passing, set) and name in passing):
                    tensors[prefix + name] = value
        children = [
            (f"{prefix}{n}.", m) for n, m in named(state.get("_modules")) if isinstance(m, PickledObject)
        ]
        waiting += children[::-1]
    return tensors, root.state


def named(group: Any) -> Iterator[tuple[str, Any]]:
    """Items of a pickled dict under names short enough to be some."""
    if isinstance(group, dict):
        yield from (
            (name, value) for name, value in group.items() if isinstance(name, str) and len(name) < 100
        )


def _from_state_dict(
    given: Mapping[str, Tensor | StoredTensor],
    values: Mapping[str, Any],
    description: ModelDescription | None,
    source: str,
    file: TorchFile | None = None,
) -> Weights:
    """Weights from official names; ``values``: names and img if known."""
    if given and all(name.startswith("module.") for name in given):  # saved through DataParallel
        given = {name.removeprefix("module."): t for name, t in given.items()}
    given = {name: t for name, t in given.items() if name.rsplit(".", 1)[-1] not in UNUSED}
    if description is None:
        description = _description_by_shapes(given, source)
    nc = _classes_by_shapes(given, description)
    if nc is None:
        raise CheckpointError(f"{source}: its detection layer does not fit the model {description.name}")
    check_fit(given, description, nc, source)
    tensors = {}
    for name, t in given.items():
        if isinstance(t, StoredTensor):
            assert file is not None
            t = file.tensor(t)
        tensors[name] = as_fp32(t)
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(
                f"{source}: {name} is not finite", hint="the training diverged; use other weights"
            )
    model = outline(description, nc)
    last = len(description.rows) - 1
    grid = tensors[f"model.{last}.anchors"]
    anchors = grid * torch.tensor(model.strides, dtype=grid.dtype).view(-1, 1, 1)
    try:
        description = description.with_anchors(anchors.tolist())
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}") from None
    img = values.get("img")
    img = img if type(img) is int and 32 <= img <= 100_000 else DEFAULT_IMG
    header = WeightsHeader(description, nc, class_names(values.get("names"), nc), model.strides, img)
    return Weights(tensors, header)


def _classes_by_shapes(
    given: Mapping[str, Tensor | StoredTensor], description: ModelDescription
) -> int | None:
    bias = given.get(f"model.{len(description.rows) - 1}.m.0.bias")
    if bias is None or len(bias.shape) != 1:
        return None
    values, remainder = divmod(int(bias.shape[0]), len(description.anchors_px[0]))
    return values - 5 if remainder == 0 and 5 < values <= MAX_CLASSES else None


def _description_by_shapes(given: Mapping[str, Tensor | StoredTensor], source: str) -> ModelDescription:
    for name in preset_names():
        description = preset(name)
        nc = _classes_by_shapes(given, description)
        if nc is not None and not misfits(given, description, nc):
            return description
    raise CheckpointError(
        f"{source} holds tensors without a description, and they are of no built-in model",
        hint="describe the model with --cfg FILE",
    )


# -- checks -------------------------------------------------------------------------------------------------


def misfits(given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int) -> list[str]:
    """What is missing, too much or of another shape, against the description's network."""
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
    """
    Raises:
        CheckpointError: names or shapes differ from the description's network.
    """
    try:
        problems = misfits(given, description, nc)
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}") from None
    if not problems:
        return
    folded = "model.0.conv.bias" in given and "model.0.bn.weight" not in given
    raise CheckpointError(
        f"{source}: {len(problems)} tensors do not fit the model {description.name}: {'; '.join(problems[:3])}",
        hint="its batch normalisation is folded in; use the file that training wrote"
        if folded
        else "the file belongs to another model",
    )


def class_names(value: Any, nc: int) -> tuple[str, ...]:
    """Names from a list or a {number: name}, without characters that a terminal would obey; numbers when
    there are none."""
    if isinstance(value, dict):
        value = [value.get(i) for i in range(nc)]
    if not isinstance(value, (list, tuple)) or len(value) != nc or not all(isinstance(v, str) for v in value):
        return tuple(str(i) for i in range(nc))
    return tuple("".join(c if c.isprintable() else "?" for c in v[:200]) for v in value)


def whole_number(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise ValueError(f"a number is {str(value)[:40]}")
    return value


def as_fp32(t: Tensor) -> Tensor:
    """Floats of any width to fp32 on the CPU; whole numbers as they are."""
    return t.to("cpu", torch.float32) if t.is_floating_point() else t.cpu()


def shape_text(t: Tensor) -> str:
    return "x".join(str(n) for n in t.shape) or "one number"
