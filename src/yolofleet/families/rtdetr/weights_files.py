"""Read the authors' ``.pth``; read and write Hugging Face's files. They are untrusted, and nothing in them is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from yolofleet.data.datasets.built_in import BUILT_IN
from yolofleet.families.build import outline
from yolofleet.families.family import load
from yolofleet.families.networks.checked import MAX_CLASSES
from yolofleet.families.networks.description import ModelDescription, description_from_dict
from yolofleet.families.networks.detector import UNSTATED_PX
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.hugging_face import check_config, config_of, hub_name, published_name
from yolofleet.families.table import FAMILIES
from yolofleet.families.weights.format import read_plain
from yolofleet.families.weights.pickles import StoredTensor, TorchFile
from yolofleet.families.weights.reader import check_fit, check_values, misfits, safetensors_header
from yolofleet.families.weights.value import (
    ASSUMED,
    UNCOUNTED,
    UNSTATED,
    Weights,
    WeightsHeader,
    as_fp32,
    class_names,
)
from yolofleet.storage.atomic import whole_folder, write_bytes, write_json, writing
from yolofleet.storage.foreign import read_foreign_text, reading
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.support.text import inform

MARK = "enc_score_head.bias"  # ends the name of a tensor that every such file has
OURS = "yolofleet"  # key of our description in a config.json that we have written
MAX_CONFIG_BYTES = 16 << 20  # names of 100,000 classes fit


def recognises_pth(path: Path) -> bool:
    return holds_state(path, _state)


def recognises_safetensors(path: Path) -> bool:
    return any(name.endswith(MARK) for name in safetensors_header(path))


def read_pth(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read the moving average if there is one, else the model; or a state dict. The shapes identify the network.

    Raises:
        CheckpointError: the file is damaged or unsafe, belongs to another network, or has values that are not finite.
    """
    with TorchFile(path) as file:
        state = {name: file.tensor(t) for name, t in _state(file.root).items()}
    return _weights(state, description, path, {}, {})


def read_safetensors(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read such weights with the names of Hugging Face or the authors.

    A ``config.json`` and a ``preprocessor_config.json`` beside the file state the network, the class names and the image size.

    Raises:
        CheckpointError: see :func:`read_pth`; or the configuration is damaged, or describes another network.
    """
    files = [json_beside(path.with_name(name)) for name in ("config.json", "preprocessor_config.json")]
    return _weights(read_plain(path), description, path, *files)


def _state(root: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a pickled checkpoint; none if it is not one of these families."""
    parts = root if isinstance(root, dict) else {}
    average = parts.get("ema")
    average = average.get("module") if isinstance(average, dict) else None
    return first_state(
        (average, parts.get("model"), parts), r"module\.", lambda names: f"decoder.{MARK}" in names
    )


def first_state(
    candidates: Iterable[Any], prefix: str, is_ours: Callable[[Collection[str]], bool]
) -> dict[str, StoredTensor]:
    """Return the tensors of the first dict whose names, without a prefix (a regular expression), are ours; none without one."""
    for found in candidates:
        if isinstance(found, dict):
            state = {
                re.sub(f"^{prefix}", "", name): t
                for name, t in found.items()
                if isinstance(name, str) and isinstance(t, StoredTensor)
            }
            if is_ours(state):
                return state
    return {}


def holds_state(path: Path, state_of: Callable[[Any], Mapping[str, StoredTensor]]) -> bool:
    """Return whether ``state_of`` finds tensors in a pickled checkpoint; False for a damaged file, which the next reader reports."""
    try:
        with TorchFile(path) as file:
            return bool(state_of(file.root))
    except CheckpointError:
        return False


def own_description(config: Mapping[str, Any], source: str) -> ModelDescription | None:
    """Return the description in a ``config.json`` that yolofleet has written; None for another one. Raises CheckpointError."""
    if OURS not in config:
        return None
    try:
        return description_from_dict(config[OURS], source=source)
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}", hint=problem.hint) from None


def coco_names() -> dict[int, str]:
    """Return the names of COCO's 80 classes by number."""
    names: dict[int, str] = yaml.safe_load(read_foreign_text(BUILT_IN / "coco.yaml", limit_bytes=1 << 20))[
        "names"
    ]
    return names


def json_beside(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; nothing if there is no such file."""
    if not path.exists():
        return {}
    try:
        with reading(path, CheckpointError):
            values = json.loads(read_foreign_text(path, limit_bytes=MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint="use another copy")
    return values


def _weights(
    state: Mapping[str, Tensor], description: ModelDescription | None, path: Path, config: Any, processor: Any
) -> Weights:
    layout = "dfine" if any("pre_bbox_head" in name for name in state) else "rtdetr"
    source, tensors = str(path), _with_our_names(state, layout, str(path))
    bias = tensors.get(f"decoder.{MARK}")
    if bias is None or bias.dim() != 1 or not 1 <= len(bias) <= MAX_CLASSES:
        raise CheckpointError(f"{source} is no RT-DETRv2 or D-FINE: it has no class predictions")
    nc, names, size = len(bias), config.get("id2label"), processor.get("size")
    description = description or own_description(config, source)
    assumed: dict[str, str] = {}
    if description is None:
        family, assumption = _trained_as(state, path) if layout == "dfine" else (layout, "")
        description = _by_shapes(tensors, nc, family, source)
        if assumption:
            what = f"{path.name} does not state the activation of its decoder"
            assumed["activation"] = f"{what}: {assumption}-{description.name[-1]}"
    check_fit(tensors, description, nc, source)
    assert isinstance(description, DetrDescription)
    if config:
        queries = config.get("num_queries", description.queries)
        if type(queries) is int and 1 <= queries <= 10_000:
            description = replace(description, queries=queries, used_layers=description.layers)
        check_config(config, description, str(path.with_name("config.json")))
    if processor.get("do_normalize"):
        raise CheckpointError(
            f"{source} expects images normalised by mean and deviation (do_normalize)",
            hint="the networks here take colours in 0..1, as the published ones do",
        )
    check_values(tensors, source)
    if isinstance(names, dict):
        if len(names) != nc:
            has = f"id2label of config.json has {len(names)} names for {nc} classes"
            assumed["names"] = f"{has}: the first ones are assumed, or numbers if one is missing"
        names = {i: names.get(str(i)) for i in range(nc)}
    elif nc == 80:
        assumed["names"] = f"{path.name} does not name its 80 classes: the names of COCO are assumed"
        names = coco_names()
    px = size.get("height") if isinstance(size, dict) else None
    stated = px if type(px) is int and 32 <= px <= 10_000 else None
    strides, extra = outline(description, nc).strides, dict[str, Any]({} if stated else UNSTATED)
    if assumed:
        extra[ASSUMED] = assumed
    header = WeightsHeader(description, nc, class_names(names, nc), strides, stated or UNSTATED_PX, extra)
    return Weights(tensors, header)


def _with_our_names(state: Mapping[str, Tensor], family: str, source: str) -> dict[str, Tensor]:
    """Return the tensors as fp32 with our names: projections joined, constants left out."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, t in state.items():
        if ours := published_name(name, family):
            part = re.search(r"self_attn\.([qkv])_proj\.", name)
            found.setdefault(ours, {})[part[1] if part else name] = as_fp32(t)
    tensors = {}
    for name, parts in found.items():
        first, *others = parts.values()
        if parts.keys() == {"q", "k", "v"} and all(t.shape == first.shape and t.dim() for t in others):
            tensors[name] = torch.cat([parts[part] for part in "qkv"])
        elif len(parts) == 1 or all(torch.equal(t, first) for t in others):
            tensors[name] = first
        else:
            raise CheckpointError(
                f"{source}: {', '.join(sorted(parts))} do not belong together", hint="use another copy"
            )
    return tensors


def _trained_as(state: Mapping[str, Tensor], path: Path) -> tuple[str, str]:
    """Return the family of a file with D-FINE's parts, and what that assumes; "": nothing.

    DEIM's decoder has SiLU where D-FINE's has ReLU, and no tensor shows it. Names of transformers, which has ReLU, or the name
    of the file decide; else the name of its folder, or that D-FINE is more likely.
    """
    file, folder = path.name.lower(), path.absolute().parent.name.lower()
    if any(".encoder_attn." in name for name in state):
        return "dfine", ""
    if re.search("deim|d-?fine", file):
        return ("deim" if "deim" in file else "dfine"), ""
    if "deim" in folder:
        return "deim", "SiLU, as its folder has DEIM's name, is assumed; if D-FINE trained it: --cfg dfine"
    said = "" if re.search("d-?fine", folder) else "ReLU (D-FINE) is assumed; if DEIM trained it: --cfg deim"
    return "dfine", said


def _by_shapes(tensors: Mapping[str, Tensor], nc: int, family: str, source: str) -> DetrDescription:
    preset, names = load(FAMILIES[family].preset), load(FAMILIES[family].preset_names)()
    boxes = [name for name in names if not preset(name).mask_width]  # no other project has these with masks
    wrong = {name: misfits(tensors, preset(name), nc) for name in boxes}
    nearest = min(boxes, key=lambda name: len(wrong[name]))
    if problems := wrong[nearest]:
        raise CheckpointError(
            f"{source} fits none of the models {', '.join(wrong)}; {len(problems)} tensors differ from {nearest}: "
            f"{'; '.join(problems[:3])}",
            hint="RT-DETRv2 as DEIM trains it has layers that are not supported"
            if family == "rtdetr" and "deim" in Path(source).name.lower()
            else "files after deploy() lack what only the training needs; for another network keep config.json beside "
            "model.safetensors",
        )
    found: DetrDescription = preset(nearest)
    return found


# -- writing ---------------------------------------------------------------------------------------------


def write_folder(path: Path, weights: Weights) -> None:
    """Write a folder for ``from_pretrained`` of transformers. Decoder layers that no prediction needs are left out.

    Raises:
        CheckpointError: the weights are not those of these families, or transformers has no such network.
        StorageError: the folder cannot be written; ``path`` does not exist then.
    """
    d, header = weights.description, weights.header
    if not isinstance(d, DetrDescription):
        raise CheckpointError(
            f"cannot write {d.name} as a folder of transformers: it is no RT-DETRv2 or D-FINE",
            hint="write .safetensors",
        )
    kind, config = "DFine" if d.layout == "dfine" else "RTDetrV2", config_of(replace(d, layers=d.used_layers))
    tensors: dict[str, Tensor] = {}
    unused = re.compile(r"decoder\.(?:decoder\.(?:lqe_)?layers|dec_\w+_head)\.(\d+)\.")
    counters = (name for name in outline(d, header.nc).state_dict() if name.endswith(UNCOUNTED))
    for name, t in (dict.fromkeys(counters, torch.tensor(0)) | weights.tensors).items():
        layer = unused.match(name)
        if layer and int(layer[1]) >= d.used_layers:
            continue
        theirs, t = hub_name(name, d.layout), as_fp32(t.detach()).contiguous()
        split = ".in_proj_" in theirs
        parts = zip("qkv", t.chunk(3), strict=True) if split else (("", t),)
        tensors |= {theirs.replace(".in_proj_", f".{part}_proj."): value.clone() for part, value in parts}
    prefix = "num" if d.layout == "dfine" else "n"
    scale = torch.tensor([1 / n for n in d.points for _ in range(n)])
    for i in range(d.used_layers):
        tensors[f"model.decoder.layers.{i}.encoder_attn.{prefix}_points_scale"] = scale.clone()
    cells = sum((-(-header.img // header.strides[-1]) * header.strides[-1] // s) ** 2 for s in header.strides)
    if cells < d.queries:
        inform(
            f"note: num_queries is {cells} instead of {d.queries}, because images of {header.img} px have no more cells and "
            "transformers fails then"
        )
        config["num_queries"] = cells
    config |= {
        "architectures": [f"{kind}ForObjectDetection"],
        OURS: replace(d, layers=d.used_layers).to_dict(),
    }
    image = {"image_processor_type": "RTDetrImageProcessor", "do_normalize": False}
    write_parts(path, header, config, image, tensors)


def write_parts(path: Path, header: WeightsHeader, config: Any, image: Any, tensors: Any) -> None:
    """Write a folder that transformers loads. ``config`` gets the class names, and ``image``, the preprocessor, the image size."""
    config["id2label"] = dict(enumerate(header.names))
    config["label2id"] = {name: i for i, name in enumerate(header.names)}
    image |= {"do_rescale": True, "do_resize": True, "size": {"height": header.img, "width": header.img}}
    with writing(path), whole_folder(path) as folder:
        write_json(folder / "config.json", config)
        write_json(folder / "preprocessor_config.json", image)
        write_bytes(folder / "model.safetensors", save(tensors, {"format": "pt"}))
