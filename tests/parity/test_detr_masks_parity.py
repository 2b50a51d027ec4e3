"""The head and the losses of masks against RF-DETR's in ``transformers``, with weights and predictions by formula.

RF-DETR takes its losses at random points. The test takes its functions with all cells: dice with those of the map, and the cross
entropy with those that the box touches, of one mask after the other.
"""

import zlib
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from conditioning import compare, perturbed
from of_transformers import each_result, some, transformers
from torch import nn

from yolofleet.families.dfine.description import PRESETS
from yolofleet.families.rtdetr.mask_loss import mask_losses
from yolofleet.families.rtdetr.masks import MaskHead
from yolofleet.families.rtdetr.raws import DetrRaws, RtdetrTrainingRaws

LAYERS, QUERIES, SIDE_HW = 3, 7, (6, 10)
NAMES = {  # theirs and ours
    **{f"blocks.{i}.depthwise_conv": f"blocks.{i}.conv" for i in range(LAYERS)},
    **{f"blocks.{i}.layernorm": f"blocks.{i}.norm" for i in range(LAYERS)},
    **{f"blocks.{i}.pointwise_conv": f"blocks.{i}.linear" for i in range(LAYERS)},
    **{"spatial_features_proj": "mix", "query_features_block.norm": "norm"},
    **{"query_features_block.mlp.fc1": "linear1", "query_features_block.mlp.fc2": "linear2"},
    "query_features_proj": "vectors",
}


def drawn(name, *shape):
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def head_of(width):
    """A head with values by formula, whose map has its width already."""
    description = replace(PRESETS["dfine-n"], decoder_width=width, mask_width=width)
    head = MaskHead(width, description)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            fan_in = np.prod(parameter.shape[1:]) if parameter.dim() > 1 else 10
            parameter.copy_(torch.from_numpy(drawn(name, *parameter.shape) / fan_in**0.5))
            if "norm.weight" in name:
                parameter.add_(1)
        head.project.weight.copy_(torch.eye(width)[:, :, None, None])
        torch.nn.init.zeros_(cast(torch.Tensor, head.project.bias))
    return perturbed(head)


def theirs(head, width):
    """The head of transformers with our values, without the rest of its network."""
    transformers()
    from transformers.models.rf_detr import modeling_rf_detr as package

    config = package.RfDetrConfig(d_model=width, decoder_layers=LAYERS, intermediate_size=4 * width)
    kind = package.RfDetrForInstanceSegmentation
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.downsample_ratio = config.mask_downsample_ratio
    module.blocks = nn.ModuleList(package.RfDetrSegmentationBlock(config) for _ in range(LAYERS))
    module.spatial_features_proj = nn.Conv2d(width, width, 1)
    module.query_features_block = package.RfDetrSegmentationMLPBlock(config)
    module.query_features_proj = nn.Linear(width, width)
    module.segmentation_bias = nn.Parameter(torch.zeros(1))
    values = head.state_dict()
    state = {
        f"{ref}.{kind}": values[f"{own}.{kind}"] for ref, own in NAMES.items() for kind in ("weight", "bias")
    }
    state["spatial_features_proj.weight"] = state["spatial_features_proj.weight"][:, :, None, None]
    module.load_state_dict(state | {"segmentation_bias": values["bias"]})
    return module


def inputs(width):
    """A map of two images, and the queries after each layer."""
    x = perturbed(torch.from_numpy(drawn("map", 2, width, *SIDE_HW)))
    states = [perturbed(torch.from_numpy(drawn(f"layer {i}", 2, QUERIES, width))) for i in range(LAYERS)]
    return [part.requires_grad_() for part in (x, *states)]


def test_masks_of_all_layers_and_their_gradients_are_those_of_transformers():
    width = 16
    head = head_of(width)
    factors = torch.from_numpy(drawn("factors", 2, LAYERS, QUERIES, 2 * SIDE_HW[0], 2 * SIDE_HW[1]))

    def results(masks, leaves, module, names):
        gradients = torch.autograd.grad((masks * factors).mean() * 100, [*leaves, *module])
        found = {f"masks {i}": some(of_layer) for i, of_layer in enumerate(masks.unbind(1))}
        return found | {f"gradient of {n}": some(g) for n, g in zip(names, gradients, strict=True)}

    leaf_names = ["map", *(f"layer {i}" for i in range(LAYERS))]
    parameter_names = [f"{own}.{kind}" for own in NAMES.values() for kind in ("weight", "bias")]

    def ask():
        reference, (x, *states) = theirs(head, width), inputs(width)
        masks = reference.segmentation_head(x, states, (8 * SIDE_HW[0], 8 * SIDE_HW[1]))
        parameters = [
            reference.get_parameter(f"{ref}.{kind}") for ref in NAMES for kind in ("weight", "bias")
        ]
        return results(torch.stack(masks, 1), [x, *states], parameters, leaf_names + parameter_names)

    x, *states = inputs(width)
    empty = torch.zeros(2, LAYERS, 0, 4)
    raws = head(x, states, RtdetrTrainingRaws(*[empty] * 9))
    products = zip(raws.coefficients.unbind(1), raws.prototypes, strict=True)
    masks = [torch.einsum("nqd,ndhw->nqhw", c[..., :-1], p) + c[..., -1:, None] for c, p in products]
    parameters = [head.get_parameter(name) for name in parameter_names]
    found = results(torch.stack(masks, 1), [x, *states], parameters, leaf_names + parameter_names)
    for expected in each_result("masks", ask):
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            compare(found[name], values, rtol=1e-4, atol=2e-5 * np.abs(values[:-1]).max(), name=name)
    last = head(x, states[-1:], DetrRaws(*[empty] * 3))
    assert torch.equal(last.coefficients, raws.coefficients[:, -1])
    assert torch.equal(last.prototypes, raws.prototypes[-1])


def test_losses_and_their_gradients_are_those_of_transformers():
    width, masks, (h, w) = 5, 6, (9, 13)
    rng = np.random.default_rng(0)
    coefficients = perturbed(torch.from_numpy(drawn("coefficients", masks, width + 1))).requires_grad_()
    prototypes = perturbed(torch.from_numpy(drawn("prototypes", width, h, w))).requires_grad_()
    rasters = torch.from_numpy(rng.integers(0, 256, (masks, h, w), np.uint8))
    low, high = rng.integers(0, 5, (masks, 2)), rng.integers(6, 10, (masks, 2))
    windows = torch.from_numpy(np.concatenate([low, high], 1))
    windows[0] = torch.tensor([0, 0, w, h])
    number = torch.from_numpy(rng.permutation(masks))

    def results(losses, leaves):
        found = {"losses": losses.detach().double().numpy()}
        for i, term in enumerate(("entropy", "dice")):
            gradients = torch.autograd.grad(losses[:, i].sum(), leaves, retain_graph=True)
            for name, gradient in zip(("coefficients", "prototypes"), gradients, strict=True):
                found[f"gradient of {term} by {name}"] = some(gradient).astype(np.float64)
        return found

    def ask():
        transformers()
        from transformers.loss.loss_rf_detr import dice_loss, sigmoid_cross_entropy_loss

        c, p = (part.detach().double().requires_grad_() for part in (coefficients, prototypes))
        logits = torch.einsum("nd,dhw->nhw", c[:, :-1], p) + c[:, -1:, None]
        wanted = (rasters[number] / 255.0).double()
        losses = []
        for i, (left, top, right, bottom) in enumerate(windows[number].tolist()):
            box = (slice(i, i + 1), slice(top, bottom), slice(left, right))
            entropy = sigmoid_cross_entropy_loss(logits[box].flatten(1), wanted[box].flatten(1), 1)
            dice = dice_loss(logits[i : i + 1], wanted[i : i + 1].flatten(1), 1)
            losses.append(torch.stack([entropy, dice]))
        return results(torch.stack(losses), [c, p])

    found = results(
        mask_losses(coefficients, prototypes, rasters, windows, number), [coefficients, prototypes]
    )
    for expected in each_result("mask-losses", ask):
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            compare(found[name], values, rtol=2e-5, atol=2e-6, name=name)
