"""Names of tensors and the configuration in Hugging Face's files of both families. No torch here.

tests/parity/test_detr_weights.py reads and writes such files with transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any

from yolofleet.families.networks.checked import short
from yolofleet.families.rtdetr.description import HEADS, DetrDescription
from yolofleet.support.errors import CheckpointError

# constants, also those of the authors' files
FIXED = re.compile(
    r"(points_scale|num_batches_tracked|anchors|valid_mask|^decoder\.decoder\.(up|reg_scale))$"
)
_ALIASES = (  # names of heads that exist twice, and names in models of today's transformers
    (r"^model\.", ""),
    (r"^(class|bbox)_embed\.", r"decoder.\1_embed."),
    (r"\.mlp\.(?:layers\.0|fc1)\.", ".fc1."),
    (r"\.mlp\.(?:layers\.1|fc2)\.", ".fc2."),
    (r"^encoder\.aifi\.", "encoder.encoder."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.self_attn\.[qkv]_proj\.", ".self_attn.in_proj_"),
)
# Hugging Face's name and ours, one rule after the other; # is a number and * any text
_OF_FAMILY = {
    "rtdetr": (
        *((f"^backbone.embedder.embedder.{i}.", f"^backbone.conv1.conv1_{i + 1}.") for i in range(3)),
        ("^backbone.encoder.stages.#.layers.", "^backbone.res_layers.#.blocks."),
        *((f".layer.{i}.", f".branch2{letter}.") for i, letter in enumerate("abc")),
        (".shortcut.", ".short."),
        (".short.1.", ".short.conv."),
        ("^backbone.*.normalization.", "^backbone.*.norm."),
    ),
    "dfine": (
        ("^backbone.embedder.", "^backbone.stem."),
        ("^backbone.encoder.stages.", "^backbone.stages."),
        *((f"^encoder.*_blocks.#.conv{i}.", f"^encoder.*_blocks.#.cv{i}.") for i in (1, 4)),
        *((f"^encoder.*_blocks.#.conv{i}.", f"^encoder.*_blocks.#.cv{i}.1.") for i in (2, 3)),
        *((f"^encoder.*_blocks.#.csp_rep{i}.", f"^encoder.*_blocks.#.cv{i + 1}.0.") for i in (1, 2)),
        ("^encoder.downsample_convs.#.conv", "^encoder.downsample_convs.#.0.cv"),
        ("^backbone.*.normalization.", "^backbone.*.bn."),
    ),
}
_EVERYWHERE = (
    ("^backbone.*.convolution.weight", "^backbone.*.conv.weight"),
    ("^*coder_input_proj.#.0.", "^*coder.input_proj.#.conv."),
    ("^*coder_input_proj.#.1.", "^*coder.input_proj.#.norm."),
    *((f"^{name}", f"^decoder.{name}") for name in ("denoising_class_embed", "enc_")),
    ("^decoder.enc_output.0.", "^decoder.enc_output.proj."),
    ("^decoder.enc_output.1.", "^decoder.enc_output.norm."),
    *((f"^decoder.{name}.", f"^decoder.decoder.{name}.") for name in ("layers", "lqe_layers")),
    ("^decoder.class_embed.", "^decoder.dec_score_head."),
    ("^decoder.bbox_embed.", "^decoder.dec_bbox_head."),
    *((f".fc{i}.", f".linear{i}.") for i in (1, 2)),
    (".self_attn_layer_norm.", ".norm1."),
    (".encoder_attn_layer_norm.", ".norm2."),
    ("^encoder.*.final_layer_norm.", "^encoder.*.norm2."),
    (".final_layer_norm.", ".norm3."),
    (".encoder_attn.", ".cross_attn."),
)


@cache
def _rules(family: str, *, to_ours: bool) -> list[tuple[re.Pattern[str], str]]:
    rules = (("^backbone.model.", "^backbone."), *_OF_FAMILY[family], *_EVERYWHERE)
    compiled = []
    for given, wanted in rules if to_ours else ((ours, theirs) for theirs, ours in reversed(rules)):
        pattern = re.escape(given).replace(r"\^", "^").replace(r"\*", "(.*)").replace(r"\#", r"(\d+)")
        numbers = count(1)
        template = re.sub(r"[*#]", lambda _, n=numbers: rf"\g<{next(n)}>", wanted.removeprefix("^"))  # type: ignore[misc]
        compiled.append((re.compile(pattern), template))
    return compiled


def published_name(name: str, family: str) -> str:
    """Return the authors' name of a tensor of Hugging Face's, which is ours too; "" for a constant.

    The three projections of an attention (``q_proj``, ``k_proj``, ``v_proj``) get one name: join them in that order. The heads
    of the decoder get one name for their two names. The authors' own names stay.

    Args:
        name: as in files on the hub, or as in a model of today's transformers.
    """
    for pattern, replacement in _ALIASES:
        name = re.sub(pattern, replacement, name)
    if FIXED.search(name):
        return ""
    for rule, replacement in _rules(family, to_ours=True):
        name = rule.sub(replacement, name)
    return name


def hub_name(name: str, family: str) -> str:
    """Return the name of one of our tensors in files on the hub; joint projections keep ``in_proj_``."""
    for rule, replacement in _rules(family, to_ours=False):
        name = rule.sub(replacement, name)
    return f"model.{name}"


# -- configuration ---------------------------------------------------------------------------------------

CONSTANTS = {  # what all these networks have; these are transformers' defaults too
    **{"encoder_activation_function": "gelu", "activation_function": "silu"},
    **{"decoder_activation_function": "relu", "decoder_method": "default", "decoder_offset_scale": 0.5},
    **{"encoder_layers": 1, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS},
    **{"normalize_before": False, "learn_initial_query": False, "with_box_refine": True},
    **{"layer_norm_eps": 1e-5, "batch_norm_eps": 1e-5, "positional_encoding_temperature": 10000},
}
HGNET = {  # the same of D-FINE's backbone
    **{"stem_strides": [2, 1, 1, 2, 1], "stage_downsample": [False, True, True, True]},
    **{"stage_downsample_strides": [2, 2, 2, 2], "stage_kernel_size": [3, 3, 5, 5]},
    **{"stage_light_block": [False, False, True, True]},
}
# the first concerns the training only, and published files leave the second at its default: the shapes of tensors say it
UNCHECKED = {"freeze_backbone_batch_norms", "hidden_sizes"}


def config_of(description: DetrDescription) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the network. All its decoder layers predict.

    Raises:
        CheckpointError: transformers has no such network.
    """
    d: Any = description
    if d.mask_width:
        raise CheckpointError(
            f"transformers has no {d.name}: its {'D-FINE' if d.layout == 'dfine' else 'RT-DETRv2'} finds no masks",
            hint="write .safetensors, or: yolofleet export --format onnx",
        )
    if d.activation != CONSTANTS["decoder_activation_function"]:
        raise CheckpointError(
            f"transformers has no {d.name}: its heads have ReLU, and those of {d.name} have {d.activation}",
            hint="write .safetensors, or: yolofleet export --format onnx",
        )
    levels, widths = len(d.points), d.outer_widths
    if d.layout == "dfine":
        backbone = {"model_type": "hgnet_v2", "stem_channels": [3, *d.stem], **HGNET}
        backbone |= {"stage_in_channels": [d.stem[1], *widths[:3]], "stage_mid_channels": d.inner_widths}
        backbone |= {"stage_out_channels": widths, "stage_num_blocks": d.stage_blocks}
        backbone |= {"stage_numb_of_layers": [d.stage_layers] * 4, "use_learnable_affine_block": d.has_affine}
        own = {"model_type": "d_fine", "depth_mult": d.depth_multiple, "reg_scale": d.reg_scale}
        own |= {"max_num_bins": 32, "top_prob_values": 4, "lqe_hidden_dim": 64, "lqe_layers": 2}
    else:
        backbone = {"model_type": "rt_detr_resnet", "embedding_size": d.stage_widths[0]}
        backbone |= {"depths": d.stage_blocks, "layer_type": "bottleneck" if d.has_bottlenecks else "basic"}
        backbone |= {"downsample_in_first_stage": False, "downsample_in_bottleneck": False}
        own = {"model_type": "rt_detr_v2", "decoder_n_levels": levels}
    own |= {"decoder_n_points": d.points if len({*d.points}) > 1 else d.points[0]}
    own |= {"encoder_hidden_dim": d.width, "encoder_ffn_dim": d.feedforward, "hidden_expansion": d.expansion}
    own |= {"d_model": d.decoder_width, "decoder_ffn_dim": d.decoder_feedforward, "decoder_layers": d.layers}
    own |= {"num_queries": d.queries, "num_feature_levels": levels}
    own |= {"encode_proj_layers": [levels - 1], "feat_strides": [8, 16, 32][-levels:]}
    own |= {"encoder_in_channels": widths[-levels:], "decoder_in_channels": [d.width] * levels}
    stages = {"out_indices": [2, 3, 4][-levels:], "out_features": ["stage2", "stage3", "stage4"][-levels:]}
    stages |= {"hidden_sizes": widths, "hidden_act": "relu"}
    own |= {"freeze_backbone_batch_norms": d.is_frozen}
    every = {**CONSTANTS, **own, "backbone_config": {**backbone, **stages}}
    plain: dict[str, Any] = json.loads(json.dumps(every))  # lists instead of tuples
    return plain


def check_config(config: Mapping[str, Any], description: DetrDescription, source: str) -> None:
    """Raise CheckpointError if a ``config.json`` describes another network; the message has what differs."""
    expected, inner = config_of(description), config.get("backbone_config")
    pairs = [(config, expected), (inner if isinstance(inner, dict) else {}, expected.pop("backbone_config"))]
    for given, wanted in pairs:
        for name in wanted.keys() & given.keys() - UNCHECKED:
            if given[name] not in (wanted[name], [wanted[name]] * len(description.points)):
                raise CheckpointError(
                    f"{source}: {name} is {short(given[name])}, expected {short(wanted[name])} as in {description.name}",
                    hint="networks of transformers can be read if they are built-in ones here",
                )
