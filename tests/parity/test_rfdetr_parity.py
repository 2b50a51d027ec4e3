"""RF-DETR: numbers of parameters, folders, outputs, losses and gradients against Hugging Face's transformers.

transformers reads a folder that yolofleet wrote, so names and configuration are compared with it as well.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from detr_raws import CLASSES, labels
from of_transformers import each_result, labels_of, some, transformers

from yolofleet.families.build import build_model, family_loss, outline
from yolofleet.families.rfdetr.description import PRESETS, RfdetrDescription
from yolofleet.families.rfdetr.weights_files import authors_name, write_folder
from yolofleet.families.rtdetr.hyperparameters import DetrGains
from yolofleet.families.rtdetr.raws import RtdetrTrainingRaws
from yolofleet.families.weights.value import Weights, WeightsHeader

# with 91 rows of classes, as in the authors' files; their package has 200 queries for rfdetr-l-seg, whose published count,
# 36.2 M, is that of 300 queries
PARAMETERS = {
    "rfdetr-n": 30_467_298,
    "rfdetr-s": 32_111_170,
    "rfdetr-m": 33_687_458,
    "rfdetr-l": 33_933_218,
    "rfdetr-n-seg": 33_577_475,
    "rfdetr-s-seg": 33_711_107,
    "rfdetr-m-seg": 35_694_259,
    "rfdetr-l-seg": 35_873_971,
}


def small(base: str, **changes: Any) -> RfdetrDescription:
    shared: dict[str, Any] = {
        "blocks": 4,
        "taps": (1, 2, 3, 4),
        "backbone_width": 24,
        "backbone_heads": 2,
        "decoder_width": 32,
    }
    sizes: dict[str, Any] = {
        "positions": 4,
        "decoder_feedforward": 48,
        "layers": 2,
        "queries": 6,
        "groups": 3,
    }
    made = replace(PRESETS[base], **(shared | sizes | changes))
    return replace(made, mask_width=made.decoder_width) if made.mask_width else made


SMALL = {
    "boxes": small("rfdetr-n"),
    "one window": small("rfdetr-s", windows=1, positions=3, taps=(1, 3)),
    "masks": small("rfdetr-s-seg", layers=3),
}
SIZES_PX = (48, 96, 192)  # multiples of each stride or left out; positions are resampled in both directions
MEAN, DEVIATION = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_parameters_of_the_originals(name):
    assert sum(p.numel() for p in outline(PRESETS[name], 91).parameters()) == PARAMETERS[name]


def test_the_published_number_of_the_largest_masks_is_that_of_300_queries():
    network = outline(replace(PRESETS["rfdetr-l-seg"], queries=300), 91)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == 36.2


@torch.no_grad()
def ours_by_formula(description):
    """Our network with values that let all its parts change the result, and keep its signals of the size of 1."""
    model: Any = build_model(description, CLASSES)
    for name, tensor in model.state_dict().items():
        values = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1, 1, tuple(tensor.shape))
        if (name.endswith(".weight") and tensor.dim() == 1) or ".scale" in name:
            values = 1 + 0.2 * values
        elif tensor.dim() == 1:
            values = tensor.numpy() + 0.2 * values
        elif "refpoint" in name:
            values *= 0.3
        elif not name.endswith(("position_embeddings", "cls_token", "mask_token", "query_feat.weight")):
            values *= np.sqrt(3 / np.prod(tensor.shape[1:]))
        tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    return perturbed(model)


def with_weights_of(model):
    """The network of transformers that reads a folder of ours."""
    folder = Path(mkdtemp()) / "folder"
    write_folder(folder, Weights(model.state_dict(), WeightsHeader.of(model, img=96)))
    kind = "InstanceSegmentation" if model.description.mask_width else "ObjectDetection"
    cls = getattr(transformers(), f"RfDetrFor{kind}")
    reference, loading = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert reference.config.id2label[2] == model.names[2]
    return reference.train(model.training)


def images(px, n=2):
    flat = np.random.default_rng(px).random((n, 3, px // 8, px // 8), dtype=np.float32)
    return perturbed(torch.from_numpy(flat.repeat(8, 2).repeat(8, 3)))


def sizes_of(description):
    return [px for px in SIZES_PX if px % description.stride == 0]


def masks_of(raws):
    coefficients, prototypes = raws.coefficients, raws.prototypes
    found = torch.einsum("nqc,nchw->nqhw", coefficients[..., :-1], prototypes)
    return found + coefficients[..., -1][..., None, None]


@torch.no_grad()
def predicted(model, inputs):
    """Boxes, logits and masks of images of each size."""
    found = dict[str, Any]()
    for px, x in inputs.items():
        raws = model(x)
        found |= {f"boxes {px}": raws.boxes, f"logits {px}": raws.logits}
        if model.task == "masks":
            found[f"masks {px}"] = masks_of(raws)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_predictions_are_those_of_transformers(name):
    model = ours_by_formula(SMALL[name]).eval()
    inputs = {px: images(px) for px in sizes_of(SMALL[name])}

    @torch.no_grad()
    def ask():
        reference, found = with_weights_of(model), dict[str, Any]()
        for px, x in inputs.items():
            expected = reference(pixel_values=(x - MEAN) / DEVIATION)
            found |= {f"boxes {px}": some(expected.pred_boxes), f"logits {px}": some(expected.logits)}
            if model.task == "masks":
                found[f"masks {px}"] = some(expected.pred_masks)
        return found

    found = predicted(model, inputs)
    assert len(inputs) >= 2
    for result in each_result(f"rfdetr-predictions-{name}", ask):
        assert result.keys() == found.keys()
        for key, values in result.items():
            atol = 2e-4 if key.startswith("boxes") else 2e-2 if key.startswith("masks") else 5e-3
            compare(some(found[key])[:-1], values[:-1], atol=atol, name=key)
            compare(some(found[key])[-1], values[-1], rtol=2e-4, name=f"{key} (norm)")


def loss_of(model):
    return family_loss(model, DetrGains(), 96)


COUNTS = {"equal": (3, 3), "crowded": (9, 1), "one without": (3, 0, 2), "none": (0, 0)}


@pytest.mark.parametrize("counts", COUNTS)
def test_terms_and_gradients_are_those_of_transformers(counts):
    """Of random predictions, in float64; each group has as many matches as labels, or as queries."""
    d, drawn = SMALL["boxes"], np.random.default_rng(3)
    loss, n = loss_of(build_model(d, CLASSES)), len(COUNTS[counts])
    targets = loss.match(labels(*COUNTS[counts]), n, (96, 96))
    total, queries = max(sum(COUNTS[counts]), 1), d.groups * d.queries

    def leaf(*shape, kind="logits"):
        values = drawn.normal(0, 1.5, shape) if kind == "logits" else drawn.uniform(0.1, 0.5, shape)
        return perturbed(torch.from_numpy(values))

    boxes, logits = leaf(n, d.layers, queries, 4, kind="boxes"), leaf(n, d.layers, queries, CLASSES)
    parts = {
        "all_boxes": boxes,
        "all_logits": logits,
        "cell_boxes": leaf(n, queries, 4, kind="boxes"),
        "cell_logits": leaf(n, queries, CLASSES),
    }
    mine, theirs = ({key: t.clone().requires_grad_() for key, t in parts.items()} for _ in range(2))
    one = {key: mine[f"all_{key}"][:, -1, : d.queries] for key in ("boxes", "logits")}
    none = {key: mine[f"all_{key}"][:, :, :0] for key in ("boxes", "logits")}
    tensors: Any = (*one.values(), torch.ones(n, 4), *mine.values(), *none.values())
    raws = RtdetrTrainingRaws(*tensors)
    sums = loss.sums(raws, targets)
    gradients = torch.autograd.grad((sums * loss.gains).sum(), list(mine.values()), allow_unused=True)

    def found_in(terms, gradients):
        values = {term: np.float64(value.detach()) for term, value in terms.items()}
        for key, gradient in zip(mine, gradients, strict=True):
            values[f"gradient of {key}"] = some(torch.zeros_like(mine[key]) if gradient is None else gradient)
        return values

    def ask():
        from transformers.loss.loss_lw_detr import LwDetrForObjectDetectionLoss

        config = SimpleNamespace(
            class_cost=2, bbox_cost=5, giou_cost=2, num_labels=CLASSES, focal_alpha=0.25, group_detr=d.groups,
            auxiliary_loss=True, class_loss_coefficient=1, bbox_loss_coefficient=5, giou_loss_coefficient=2,
            decoder_layers=d.layers,
        )  # fmt: skip
        layers = [theirs[key].transpose(0, 1) for key in ("all_logits", "all_boxes")]
        whole, losses, _ = LwDetrForObjectDetectionLoss(
            layers[0][-1], labels_of(targets), "cpu", layers[1][-1], config, *layers,
            theirs["cell_logits"], theirs["cell_boxes"],
        )  # fmt: skip
        groups = d.groups if sum(COUNTS[counts]) else 1  # it divides by at least 1, whatever the groups
        scale = total if groups > 1 else 1 / d.groups
        gains = {"ce": 1, "bbox": 5, "giou": 2}
        aux = sum(
            gains[key.split("_")[1]] * value
            for key, value in losses.items()
            if key.startswith("loss_") and key.count("_") == 2
        )
        terms = {
            "cls": losses["loss_ce"],
            "box": losses["loss_bbox"],
            "giou": losses["loss_giou"],
            "aux": aux,
        }
        found = torch.autograd.grad(whole * scale, list(theirs.values()), allow_unused=True)
        return found_in({term: value * scale for term, value in terms.items()}, found)

    found = found_in(dict(zip(loss.terms, sums.unbind(), strict=True)), gradients)
    for result in each_result(f"rfdetr-loss-{counts}", ask):
        assert result.keys() == found.keys()
        for key, values in result.items():
            highest = float(np.abs(values).max())
            compare(
                found[key], values, rtol=3e-5, atol=5e-5 * highest if "gradient" in key else 1e-6, name=key
            )


def test_gradients_of_all_parameters_are_those_of_transformers():
    model = ours_by_formula(SMALL["boxes"]).train()
    loss, x = loss_of(model), images(96)
    targets = loss.match(labels(3, 2), 2, (96, 96))

    def ask():
        reference = with_weights_of(model)
        whole = reference(pixel_values=(x - MEAN) / DEVIATION, labels=labels_of(targets, torch.float32)).loss
        (whole * 5).backward()
        theirs = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        groups: dict[str, list[float]] = {}
        for name, gradient in theirs.items():
            part = name.replace(".q_proj.", ".").replace(".k_proj.", ".").replace(".v_proj.", ".")
            groups.setdefault(part, []).append(float(gradient.square().sum()))
        norms = sorted(sum(values) ** 0.5 for values in groups.values())
        return {"loss": np.float64(whole.detach() * 5), "norms": np.array(norms)}

    sums = loss.sums(model(x, targets), targets)
    whole = (sums * loss.gains).sum()
    whole.backward()
    norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())
    for result in each_result("rfdetr-gradients", ask):
        compare(np.float64(whole.detach()), result["loss"], rtol=1e-4, name="loss")
        compare(np.array(sorted(norms)), result["norms"], rtol=2e-3, atol=1e-5, name="norms")


def test_every_tensor_has_a_name_of_the_authors():
    for name in ("rfdetr-n", "rfdetr-l-seg"):
        names = [authors_name(ours) for ours in outline(PRESETS[name], 2).state_dict()]
        assert len(set(names)) == len(names)
        assert json.dumps(names).count("backbone.0.encoder.encoder.") > 100
