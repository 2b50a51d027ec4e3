"""Read the authors' ``.pth`` and DINOv2's weights; read and write folders of Hugging Face's transformers.

transformers writes such folders with the authors' names of tensors, so both have one table of names. The files are untrusted,
and nothing in them is executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.networks.checked import MAX_CLASSES
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.rfdetr.backbone import DEVIATION, MEAN, cubic, resized
from yolofleet.families.rfdetr.description import PRESETS, RfdetrDescription
from yolofleet.families.rtdetr.weights_files import (
    OURS,
    coco_names,
    first_state,
    holds_state,
    json_beside,
    own_description,
    write_parts,
)
from yolofleet.families.weights.format import read_plain
from yolofleet.families.weights.pickle_machine import PickledObject
from yolofleet.families.weights.pickles import StoredTensor, TorchFile
from yolofleet.families.weights.reader import check_values, misfits, safetensors_header
from yolofleet.families.weights.value import ASSUMED, Weights, WeightsHeader, as_fp32, class_names
from yolofleet.support.errors import CheckpointError

POSITIONS, PATCH = (f"backbone.embeddings.{name}" for name in ("position_embeddings", "projection.weight"))
MARK = "refpoint_embed.weight"  # a tensor that every file of RF-DETR has
# COCO's identifiers of its classes
COCO_ROWS = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]
UNUSED = ("_kp_active_mask",)  # of the authors' networks, without a meaning for boxes and masks
VIT = "backbone.0.encoder.encoder."
# our name and the authors' of the beginning or a part of a tensor's name; the first that fits counts
BEGINNINGS = (
    ("backbone.embeddings.projection.", f"{VIT}embeddings.patch_embeddings.projection."),
    ("backbone.embeddings.", f"{VIT}embeddings."),
    ("backbone.layers.", f"{VIT}encoder.layer."),
    ("backbone.norm.", f"{VIT}layernorm."),
    ("encoder.norm.", "backbone.0.projector.stages.0.1."),
    ("encoder.", "backbone.0.projector.stages.0.0."),
    *((f"decoder.{part}", f"transformer.decoder.{part}") for part in ("layers.", "norm.", "ref_point_head.")),
    ("decoder.enc_", "transformer.enc_"),
    *(
        (f"decoder.{part}", part)
        for part in ("refpoint_embed.", "query_feat.", "class_embed.", "bbox_embed.")
    ),
    ("masks.norm.", "segmentation_head.query_features_block.norm_in."),
    ("masks.linear1.", "segmentation_head.query_features_block.layers.0."),
    ("masks.linear2.", "segmentation_head.query_features_block.layers.2."),
    ("masks.vectors.", "segmentation_head.query_features_proj."),
    ("masks.mix.", "segmentation_head.spatial_features_proj."),
    ("masks.", "segmentation_head."),
)
PARTS = (  # of names that begin with the first
    ("backbone.layers.", ".attention.out_proj.", ".attention.output.dense."),
    ("backbone.layers.", ".attention.in_proj_", ".attention.attention.query."),  # of three tensors the first
    *(("backbone.layers.", f".scale{i}", f".layer_scale{i}.lambda1") for i in (1, 2)),
    *(("backbone.layers.", f".linear{i}.", f".mlp.fc{i}.") for i in (1, 2)),
    ("encoder.", ".norm.", ".bn."),
    ("masks.blocks.", ".conv.", ".dwconv."),
    ("masks.blocks.", ".linear.", ".pwconv1."),
)
THIRDS = ("query", "key", "value")
META = (  # DINOv2's own names and those of transformers
    (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    (r"^pos_embed$", "embeddings.position_embeddings"),
    (r"^(cls_token|mask_token)$", r"embeddings.\1"),
    (r"^blocks\.", "encoder.layer."),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.ls([12])\.gamma$", r".layer_scale\1.lambda1"),
    (r"^norm\.", "layernorm."),
)


def authors_name(name: str) -> str:
    """Return the authors' name of one of our tensors; of a joint projection the name of its first third."""
    for ours, theirs in BEGINNINGS:
        if name.startswith(ours):
            found = theirs + name.removeprefix(ours)
            for owner, part, other in PARTS:
                if name.startswith(owner) and part in name and not name.startswith("encoder.norm."):
                    found = found.replace(part, other)
            return found
    raise AssertionError(name)


def recognises_pth(path: Path) -> bool:
    return holds_state(path, _state)


def recognises_safetensors(path: Path) -> bool:
    return _is_ours(safetensors_header(path))


def read_pth(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read the moving average if there is one, else the model; or a state dict. Shapes identify the network.

    Raises:
        CheckpointError: the file is damaged or unsafe, belongs to another network, or has values that are not finite.
    """
    with TorchFile(path) as file:
        state = {name: file.tensor(t) for name, t in _state(file.root).items()}
        options = file.root if isinstance(file.root, dict) else {}
    args = options.get("args", options.get("hyper_parameters"))
    if isinstance(args, PickledObject):  # argparse's Namespace
        args = args.state
    known = dict(args) if isinstance(args, dict) else {}
    if isinstance(more := options.get("model_config"), dict):
        known = {**more, **known}
    return _weights(state, description, path, known, known.get("class_names"))


def read_safetensors(path: Path, description: ModelDescription | None = None) -> Weights:
    """Read such weights with a ``config.json`` beside them, or without.

    Raises:
        CheckpointError: see :func:`read_pth`; or the configuration is damaged, or describes another network.
    """
    config = json_beside(path.with_name("config.json"))
    labels, backbone = config.get("id2label"), config.get("backbone_config")
    known = dict(backbone) if isinstance(backbone, dict) else {}
    description = description or own_description(config, str(path))
    _check_config(config, path.with_name("config.json"))
    names = [labels.get(str(i)) for i in range(len(labels))] if isinstance(labels, dict) else None
    return _weights(read_plain(path), description, path, known, names)


def _is_ours(names: Collection[str]) -> bool:
    """Return whether the names of tensors are those of RF-DETR or DINOv2."""
    return any(name.endswith((MARK, "blocks.0.ls1.gamma", "layer.0.layer_scale1.lambda1")) for name in names)


def _state(root: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a pickled checkpoint; none if it is of another family."""
    parts = root if isinstance(root, dict) else {}
    candidates = (parts.get("ema_model"), parts.get("model"), parts.get("state_dict"), parts)
    return first_state(candidates, r"(model\.)?(_orig_mod\.)?(module\.)?", _is_ours)


def _weights(
    state: Mapping[str, Tensor],
    description: ModelDescription | None,
    path: Path,
    known: Mapping[str, Any],
    names: Any,
) -> Weights:
    """Return the weights of tensors with the authors' names, with patches and positions of ``description``.

    Args:
        known: options of the training or of the backbone, of which ``num_windows`` and ``num_classes`` count.
        names: of the classes, of which the head may have one more, that of the background.
    """
    source = str(path)
    tensors = _with_our_names(state, source)
    if f"decoder.{MARK}" not in tensors:
        return _dinov2(tensors, description, source)
    head = tensors.get("decoder.class_embed.bias")
    if head is None or head.dim() != 1 or not 1 <= len(head) <= MAX_CLASSES:
        raise CheckpointError(f"{source} is no RF-DETR: it has no class predictions")
    assumed: dict[str, str] = {}
    names = names if isinstance(names, (list, tuple)) else None
    # the heads have rows of COCO's identifiers, or before or after the classes one of a background that nothing reads
    of_coco = len(head) == 91 and (names is None or len(names) < 80 or names[1] == "person")
    rows: Sequence[int] = COCO_ROWS if of_coco else range(len(head))
    if names and not of_coco and len(rows) == len(names) + 1:
        count = known.get("num_classes")  # before version 1.6 with row 0, which was that of no class
        first = int(count == len(rows))
        rows = rows[first : first + len(names)]
        if count not in (len(names), len(head)):
            assumed["names"] = (
                f"{path.name} does not state which row is no class: the last one is taken for it"
            )
    elif names and len(names) != len(rows):
        assumed["names"] = f"{path.name} has {len(names)} names for {len(rows)} classes: numbers are taken"
    tensors = {
        n: t[list(rows)] if "class_embed" in n and t.shape[:1] == head.shape else t
        for n, t in tensors.items()
    }
    if of_coco:
        assumed["names"] = f"{path.name} has the 91 identifiers of COCO as classes: its 80 classes are kept"
        names = [*coco_names().values()]
    nc = len(rows)
    wanted = description if isinstance(description, RfdetrDescription) else None
    if wanted is not None and not misfits(tensors, wanted, nc):
        network = wanted
    else:
        network = _by_shapes(tensors, nc, known.get("num_windows"), source)
    check_values(tensors, source)
    if wanted is not None:
        network = replace(network, patch=wanted.patch, positions=wanted.positions)
        tensors = _for_patches(tensors, network)
    extra = {ASSUMED: assumed} if assumed else {}
    return Weights(
        tensors, WeightsHeader(network, nc, class_names(names, nc), (network.stride,), network.px, extra)
    )


def _with_our_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return the tensors as fp32 with our names, projections joined."""
    tensors: dict[str, Tensor] = {}
    thirds: dict[str, dict[str, Tensor]] = {}
    for name, t in state.items():
        if name in UNUSED:
            continue
        ours, value = _our_name(name), as_fp32(t)
        if match := re.search(r"\.attention\.attention\.(query|key|value)\.(weight|bias)$", name):
            joint = f"{_our_name(name[: match.start()] + '.')}attention.in_proj_{match[2]}"
            thirds.setdefault(joint, {})[match[1]] = value
        elif match := re.search(r"\.attn\.qkv\.(weight|bias)$", name):
            tensors[f"{_our_name(name[: match.start()] + '.')}attention.in_proj_{match[1]}"] = value
        else:
            tensors[ours] = value.flatten(1) if ours == "masks.mix.weight" and value.dim() == 4 else value
    for joint, parts in thirds.items():
        if parts.keys() != set(THIRDS) or len({part.shape for part in parts.values()}) > 1:
            raise CheckpointError(
                f"{source}: the parts of {joint} do not belong together", hint="use another copy"
            )
        tensors[joint] = torch.cat([parts[part] for part in THIRDS])
    return tensors


def _our_name(name: str) -> str:
    """Return our name of the authors' tensor, or of one of DINOv2's; an unknown name stays."""
    if not name.startswith(
        ("backbone.", "transformer.", "segmentation_head.", "refpoint", "query_", "class_", "bbox_")
    ):
        for pattern, other in META:
            name = re.sub(pattern, other, name)
        name = VIT + name.removeprefix("dinov2.")
    for ours, theirs in BEGINNINGS:
        if name.startswith(theirs):
            found = ours + name.removeprefix(theirs)
            for owner, part, other in PARTS:
                if found.startswith(owner) and not found.startswith("encoder.norm."):
                    found = found.replace(other, part)
            return found
    return name


def _by_shapes(tensors: Mapping[str, Tensor], nc: int, windows: Any, source: str) -> RfdetrDescription:
    """Return the built-in network whose shapes the tensors have; positions, queries and groups may be others."""
    groups = sum(bool(re.fullmatch(r"decoder\.enc_output\.\d+\.bias", name)) for name in tensors)
    places, queries = (tensors.get(name) for name in (POSITIONS, f"decoder.{MARK}"))
    sizes = [0 if t is None or t.dim() != dims else t.numel() for t, dims in ((places, 3), (queries, 2))]
    if places is None or queries is None or not groups or not all(sizes):
        raise CheckpointError(f"{source} is no RF-DETR that can be read: parts of it are missing")
    side: dict[str, Any] = {"positions": math.isqrt(max(places.shape[1] - 1, 1))}
    side |= {"queries": max(len(queries) // groups, 1), "groups": groups}
    by_distance = sorted(PRESETS.values(), key=lambda d: abs(d.positions - side["positions"]))
    wrong = {d.name: misfits(tensors, replace(d, **side), nc) for d in by_distance}
    nearest = min(by_distance, key=lambda d: len(wrong[d.name]))
    if problems := wrong[nearest.name]:
        raise CheckpointError(
            f"{source} fits none of the models {', '.join(wrong)}; {len(problems)} tensors differ from {nearest.name}: "
            f"{'; '.join(problems[:3])}",
            hint="other sizes of RF-DETR, and those for poses, cannot be read",
        )
    known = windows if type(windows) is int and 1 <= windows <= 16 else nearest.windows
    return replace(nearest, windows=known, **side)


def _dinov2(tensors: Mapping[str, Tensor], description: ModelDescription | None, source: str) -> Weights:
    """Return the weights of a backbone alone, for the start of a training."""
    network = description if isinstance(description, RfdetrDescription) else PRESETS["rfdetr-n"]
    expected = {n: t for n, t in outline(network, 1).state_dict().items() if n.startswith("backbone.")}
    kept = {n: tensors[n] for n in expected if n in tensors}
    with suppress(KeyError, IndexError, ValueError, RuntimeError):  # of tensors with other dimensions
        kept = _for_patches(kept, network)
    if wrong := [n for n, t in expected.items() if n not in kept or kept[n].shape != t.shape]:
        raise CheckpointError(
            f"{source} does not fit the backbone of RF-DETR: {', '.join(wrong[:3])}",
            hint="the backbone is DINOv2 ViT-S/14 without registers (dinov2-small)",
        )
    check_values(kept, source)
    extra = {"partial": f"{source} holds the backbone of RF-DETR alone"}
    return Weights(
        kept, WeightsHeader(network, 1, class_names(None, 1), (network.stride,), network.px, extra)
    )


def _for_patches(tensors: Mapping[str, Tensor], network: RfdetrDescription) -> dict[str, Tensor]:
    """Return the tensors with positions and a patch of the network's sizes, resampled as images are.

    A larger patch sums more pixels, so its weights become smaller.
    """
    positions, patch = tensors[POSITIONS], tensors[PATCH]
    side, before = math.isqrt(positions.shape[1] - 1), patch.shape[2]
    if side != network.positions:
        grid = positions[:, 1:].unflatten(1, (side, side))
        new = resized(grid, network.positions, network.positions, cubic).flatten(1, 2)
        positions = torch.cat([positions[:, :1], new], 1)
    if before != network.patch:
        new = resized(patch.permute(0, 2, 3, 1), network.patch, network.patch, cubic).permute(0, 3, 1, 2)
        patch = (new * (before / network.patch) ** 2).contiguous()
    return {**tensors, POSITIONS: positions, PATCH: patch}


# -- configuration of transformers, and writing ----------------------------------------------------------

CONSTANTS = {"decoder_activation_function": "relu", "activation_function": "silu", "c2f_num_blocks": 3}
CONSTANTS |= {"decoder_n_points": 2, "decoder_self_attention_heads": 8, "decoder_cross_attention_heads": 16}
CONSTANTS |= {"hidden_expansion": 0.5, "attention_bias": True, "num_feature_levels": 1}


def config_of(d: RfdetrDescription, nc: int) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the network."""
    stages = {"out_indices": list(d.taps), "out_features": [f"stage{tap}" for tap in d.taps]}
    backbone = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": d.backbone_width,
        "num_hidden_layers": d.blocks,
    }
    backbone |= {"num_attention_heads": d.backbone_heads, "image_size": d.px, "patch_size": d.patch}
    own = {"model_type": "rf_detr", "d_model": d.decoder_width, "decoder_ffn_dim": d.decoder_feedforward}
    own |= {"decoder_layers": d.layers, "num_queries": d.queries, "group_detr": d.groups, "dropout": 0.0}
    own |= {"intermediate_size": 4 * d.decoder_width, "num_labels": nc, "layer_norm_eps": 1e-6}
    return {**CONSTANTS, **own, "backbone_config": {**backbone, **stages, "num_windows": d.windows}}


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    for name, wanted in CONSTANTS.items():
        if name in config and config[name] != wanted:
            raise CheckpointError(
                f"{path}: {name} is {str(config[name])[:40]}, expected {wanted}",
                hint="networks of transformers can be read if they are built-in ones here",
            )


def write_folder(path: Path, weights: Weights) -> None:
    """Write a folder for ``from_pretrained`` of transformers.

    Raises:
        CheckpointError: the weights are those of a backbone alone.
        StorageError: the folder cannot be written; ``path`` does not exist then.
    """
    d, header = weights.description, weights.header
    assert isinstance(d, RfdetrDescription)
    if "partial" in header.extra:
        raise CheckpointError(str(header.extra["partial"]), hint="use them to start a training")
    tensors: dict[str, Tensor] = {}
    for name, value in weights.tensors.items():
        theirs, t = authors_name(name), as_fp32(value.detach()).contiguous()
        if ".attention.in_proj_" in name:
            for part, third in zip(THIRDS, t.chunk(3), strict=True):
                tensors[theirs.replace(".query.", f".{part}.")] = third.clone()
        else:
            tensors[theirs] = t[:, :, None, None].clone() if name == "masks.mix.weight" else t.clone()
    kind = "InstanceSegmentation" if d.mask_width else "ObjectDetection"
    config = config_of(d, header.nc) | {"architectures": [f"RfDetrFor{kind}"], OURS: d.to_dict()}
    image: dict[str, Any] = {"image_processor_type": "RfDetrImageProcessor", "do_normalize": True}
    image |= {"image_mean": list(MEAN), "image_std": list(DEVIATION)}
    write_parts(path, header, config, image, tensors)
