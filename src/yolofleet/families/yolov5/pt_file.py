"""Read YOLOv5's files as data: checkpoints (``.pt`` of v4.0 to v7.0, also of Ultralytics' YOLOv3) and state dicts.

The shapes of a state dict identify its description.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.networks.checked import MAX_CLASSES
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.networks.detector import UNSTATED_PX
from yolofleet.families.weights.format import read_plain
from yolofleet.families.weights.pickle_machine import PickledObject
from yolofleet.families.weights.pickles import StoredTensor, TorchFile, options_of
from yolofleet.families.weights.reader import check_fit, check_values, misfits
from yolofleet.families.weights.value import UNSTATED, Weights, WeightsHeader, as_fp32, class_names
from yolofleet.families.yolov5.presets import preset, preset_names
from yolofleet.families.yolov5.rows import RowDescription, from_yolov5_mapping, layers
from yolofleet.support.errors import CheckpointError, ConfigError

MAX_VISITS = 100_000  # of modules and their tensors; yolov5x6 has 3,000
MAX_NAME = 1000  # characters of a tensor's name
UNUSED = ("anchor_grid",)  # a buffer of YOLOv5 up to v6.0: the anchors in pixels
READABLE = (
    "readable are YOLOv5 v4.0 to v7.0, YOLOv3 in that form, Darknet, PP-YOLOE, RT-DETRv2, D-FINE and RF-DETR (docs/models.md); use such "
    "weights, or start from scratch with --model yolov5s"
)
OTHERS = {  # part of a class, of a key or of a tensor's name in files of other projects -> what they are, a way out
    "ultralytics.nn.": ("YOLOv8, YOLO11 or another model of Ultralytics' package", ""),
    ".dfl.conv.weight": ("YOLOv8, YOLO11 or another model of Ultralytics' package", ""),
    "pytorch-lightning_version": ("PyTorch Lightning's, around a network", "save its state_dict alone; "),
    "refpoint_embed.": ("RF-DETR or another DETR", ""),
    "bbox_head.": ("a model of MMDetection", ""),
    "model.enc_score_head.": ("transformers' without its folder", "save_pretrained writes a readable one; "),
}


def read(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read the moving average if there is one, else the model; from a module object or a state dict.

    Raises:
        CheckpointError: the file is damaged or unsafe, belongs to another family, or has values that are not finite.
    """
    with TorchFile(path) as file:
        return from_torch_file(file, description)


def read_state_dict(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read a state dict from a safetensors file, as :func:`read`."""
    return from_state_dict(read_plain(path), {}, description, str(path))


def from_torch_file(file: TorchFile, description: ModelDescription | None = None) -> Weights:
    """Read weights from an open file, as :func:`read`."""
    root, source = file.root, str(file.path)
    found = _model_of(root)
    if isinstance(found, PickledObject):
        tensors, values = _module_tensors(found, source)
        mapping = values.get("yaml")
        if isinstance(mapping, dict):
            origin = values.get("yaml_file")
            name = Path(origin).stem[:100] if isinstance(origin, str) else "model"
            try:
                description = from_yolov5_mapping(mapping, name=name, source=source)
            except ConfigError as problem:
                check_origin([found.class_path], source)
                raise CheckpointError(
                    f"{source}: cannot build its model: {problem.what}", hint=READABLE
                ) from None
    elif isinstance(found, dict):
        tensors = {str(name): t for name, t in found.items() if isinstance(t, StoredTensor)}
        values = {}
    else:
        keys = (
            ", ".join(str(key)[:30] for key in list(root)[:8])
            if isinstance(root, dict)
            else type(root).__name__
        )
        raise CheckpointError(
            f"{source} has no model (found: {keys})", hint="expected a checkpoint or a state dict of YOLOv5"
        )
    options = options_of(root)
    values = {
        **values,
        "keys": list(root) if isinstance(root, dict) else [],
        "img": options.get("imgsz", options.get("img_size")),
    }
    return from_state_dict(tensors, values, description, source, file)


def check_origin(names: Iterable[str], source: str) -> None:
    """Raise CheckpointError if a class, keys or names of tensors show which other project wrote the file."""
    known = next((part for part in OTHERS for name in names if part in name), "")
    if known:
        raise CheckpointError(f"{source} is {OTHERS[known][0]}", hint=OTHERS[known][1] + READABLE)


def _model_of(root: Any) -> PickledObject | dict[Any, Any] | None:
    """Return the first of moving average, model and state dict that is a module or has tensors."""
    candidates = [root]
    if isinstance(root, dict):
        candidates = [*(root.get(key) for key in ("ema", "model", "state_dict")), root]
    for found in candidates:
        if isinstance(found, tuple) and found:  # early in 2021: (moving average, updates)
            found = found[0]
        if isinstance(found, PickledObject):
            return found
        if isinstance(found, dict) and any(isinstance(v, StoredTensor) for v in found.values()):
            return found
    return None


def _module_tensors(root: PickledObject, source: str) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return parameters and buffers of a pickled module tree by dotted name, and the root's attributes."""
    tensors: dict[str, StoredTensor] = {}
    waiting: list[tuple[str, PickledObject]] = [("", root)]
    visited = 0
    while waiting:
        prefix, module = waiting.pop()
        state = module.state
        groups = map(state.get, ("_parameters", "_buffers", "_modules")) if isinstance(state, dict) else ()
        visited += 1 + sum(len(group) for group in groups if isinstance(group, dict))
        if visited > MAX_VISITS or len(prefix) > MAX_NAME or not isinstance(state, dict):
            raise CheckpointError(f"{source} has no network: its modules have no state or are endless")
        kind = module.class_path.rsplit(".", 1)[-1]
        if prefix.endswith("act.") and kind != "SiLU":
            raise CheckpointError(
                f"{source} uses the activation {kind[:40]}; YOLOv5 from v4.0 on uses SiLU", hint=READABLE
            )
        non_persistent = state.get("_non_persistent_buffers_set")
        for group in ("_parameters", "_buffers"):
            for name, value in named(state.get(group)):
                if isinstance(value, StoredTensor) and not (
                    isinstance(non_persistent, set) and name in non_persistent
                ):
                    tensors[prefix + name] = value
        children = [
            (f"{prefix}{n}.", m) for n, m in named(state.get("_modules")) if isinstance(m, PickledObject)
        ]
        waiting += children[::-1]
    return tensors, root.state


def named(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a pickled dict whose keys are texts of a possible length for a name."""
    if isinstance(group, dict):
        yield from (
            (name, value) for name, value in group.items() if isinstance(name, str) and len(name) < 100
        )


def from_state_dict(
    given: Mapping[str, Tensor | StoredTensor],
    values: Mapping[str, Any],
    description: ModelDescription | None,
    source: str,
    file: TorchFile | None = None,
) -> Weights:
    """Return weights from tensors with official names; ``values``: class names, img and keys of the file if known."""
    if given and all(name.startswith("module.") for name in given):  # saved through DataParallel
        given = {name.removeprefix("module."): t for name, t in given.items()}
    given = {name: t for name, t in given.items() if name.rsplit(".", 1)[-1] not in UNUSED}
    if description is None:
        description = description_by_shapes(given)
    if description is None:
        check_origin([*map(str, values.get("keys", ())), *given], source)
        raise CheckpointError(
            f"{source} has tensors without a description, and they fit no built-in model",
            hint="describe the model with --cfg FILE",
        )
    if not isinstance(description, RowDescription):
        raise CheckpointError(
            f"{source} has a network of YOLOv5's family, but {description.name} belongs to another family",
            hint="remove --model and --cfg, or use other weights",
        )
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
    check_values(tensors, source)
    model = outline(description, nc)
    last = len(description.rows) - 1
    grid = tensors[f"model.{last}.anchors"]
    anchors = grid * torch.tensor(model.strides, dtype=grid.dtype).view(-1, 1, 1)
    try:
        description = description.with_anchors(anchors.tolist())
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}") from None
    img = values.get("img")
    stated_px = img if type(img) is int and 32 <= img <= 100_000 else None
    header = WeightsHeader(
        description,
        nc,
        class_names(values.get("names"), nc),
        model.strides,
        stated_px or UNSTATED_PX,
        {} if stated_px else UNSTATED,
    )
    return Weights(tensors, header)


def _classes_by_shapes(given: Mapping[str, Tensor | StoredTensor], description: RowDescription) -> int | None:
    bias = given.get(f"model.{len(description.rows) - 1}.m.0.bias")
    if bias is None or len(bias.shape) != 1:
        return None
    values, remainder = divmod(int(bias.shape[0]), len(description.anchors_px[0]))
    nc = values - 5 - description.prototypes
    return nc if remainder == 0 and 0 < nc <= MAX_CLASSES else None


def description_by_shapes(given: Mapping[str, Tensor | StoredTensor]) -> RowDescription | None:
    """Return the built-in model with these tensors, or None."""
    for name in preset_names():
        description = preset(name)
        nc = _classes_by_shapes(given, description)
        if (
            nc is not None
            and _has_its_convolutions(given, description)
            and not misfits(given, description, nc)
        ):
            return description
    return None


def _has_its_convolutions(given: Mapping[str, Tensor | StoredTensor], description: RowDescription) -> bool:
    """Return whether all rows of one convolution have tensors of the right shape.

    These shapes identify a built-in model, and the check costs a hundredth of comparing all tensors.
    """
    for i, layer in enumerate(layers(description)):
        if layer.module == "Conv" and layer.repeats == 1:
            out, kernel, _stride, _padding, groups = layer.args
            weight = given.get(f"model.{i}.conv.weight")
            if weight is None or tuple(weight.shape) != (out, layer.in_channels[0] // groups, kernel, kernel):
                return False
    return True
