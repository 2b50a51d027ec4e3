"""Names of tensors in Hugging Face's files of both families. No torch here."""

from __future__ import annotations

import re

_LETTERS = "abc"
_EVERYWHERE = (  # pattern and replacement, one after the other
    (r"^model\.", ""),
    (r"^(class|bbox)_embed\.", r"decoder.\1_embed."),  # of the same values as those of the decoder
    (r"^(en|de)coder_input_proj\.(\d+)\.0\.", r"\1coder.input_proj.\2.conv."),
    (r"^(en|de)coder_input_proj\.(\d+)\.1\.", r"\1coder.input_proj.\2.norm."),
    (r"^(denoising_class_embed|enc_)", r"decoder.\1"),
    (r"enc_output\.0\.", "enc_output.proj."),
    (r"enc_output\.1\.", "enc_output.norm."),
    (r"^encoder\.aifi\.", "encoder.encoder."),
    (r"^decoder\.(layers|lqe_layers)\.", r"decoder.decoder.\1."),
    (r"\.class_embed\.", ".dec_score_head."),
    (r"\.bbox_embed\.", ".dec_bbox_head."),
    (r"\.(?:mlp\.layers\.0|(?:mlp\.)?fc1)\.", ".linear1."),
    (r"\.(?:mlp\.layers\.1|(?:mlp\.)?fc2)\.", ".linear2."),
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"^(encoder.*)\.final_layer_norm\.", r"\1.norm2."),
    (r"\.final_layer_norm\.", ".norm3."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.self_attn\.[qkv]_proj\.", ".self_attn.in_proj_"),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"^backbone\.model\.", "backbone."),
    (r"^(backbone\..*)\.convolution\.", r"\1.conv."),
)
_OF_FAMILY = {
    "rtdetr": (
        (r"^(backbone\..*)\.normalization\.", r"\1.norm."),
        (
            r"^backbone\.embedder\.embedder\.(\d)\.",
            lambda match: f"backbone.conv1.conv1_{int(match[1]) + 1}.",
        ),
        (r"^backbone\.encoder\.stages\.(\d+)\.layers\.", r"backbone.res_layers.\1.blocks."),
        (r"^(backbone\..*)\.layer\.(\d)\.", lambda match: f"{match[1]}.branch2{_LETTERS[int(match[2])]}."),
        (r"\.shortcut\.1\.", ".short.conv."),
        (r"\.shortcut\.", ".short."),
    ),
    "dfine": (
        (r"^(backbone\..*)\.normalization\.", r"\1.bn."),
        (r"^backbone\.embedder\.", "backbone.stem."),
        (r"^backbone\.encoder\.", "backbone."),
        (r"^(encoder\.\w+_blocks\.\d+)\.conv([14])\.", r"\1.cv\2."),
        (r"^(encoder\.\w+_blocks\.\d+)\.conv([23])\.", r"\1.cv\2.1."),
        (r"^(encoder\.\w+_blocks\.\d+)\.csp_rep1\.", r"\1.cv2.0."),
        (r"^(encoder\.\w+_blocks\.\d+)\.csp_rep2\.", r"\1.cv3.0."),
        (r"^encoder\.downsample_convs\.(\d+)\.conv", r"encoder.downsample_convs.\1.0.cv"),
    ),
}


def published_name(hf_name: str, family: str) -> str:
    """Return the authors' name of a tensor of Hugging Face's, which is ours too; "" for a constant.

    The three projections of an attention (``q_proj``, ``k_proj``, ``v_proj``) get one name: join them in that order. The heads
    of the decoder get one name for their two names.

    Args:
        hf_name: as in files on the hub, or as in a model of today's transformers.
        family: ``rtdetr`` or ``dfine``.
    """
    if hf_name.endswith(("points_scale", "num_batches_tracked")):
        return ""
    name = hf_name
    for pattern, replacement in (*_EVERYWHERE, *_OF_FAMILY[family]):
        name = re.sub(pattern, replacement, name)
    return name
