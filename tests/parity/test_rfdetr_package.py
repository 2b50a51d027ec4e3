"""RF-DETR: outputs, losses, gradients and names against the authors' package rfdetr 1.11.2, beside the numbers of transformers.

As in ``of_transformers.py``, weights and images follow from formulas, and ``data/detr`` has the results. To store them again,
run this file with ``YOLOFLEET_RECORD=1`` where rfdetr and transformers are installed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from conditioning import compare
from detr_raws import CLASSES, labels
from of_transformers import each_result, labels_of, some
from safetensors.torch import load_file
from test_rfdetr_parity import (
    COUNTS,
    DEVIATION,
    MEAN,
    SMALL,
    images,
    loss_of,
    ours_by_formula,
    predicted,
    sizes_of,
)

from yolofleet.families.rfdetr.weights_files import read_pth, write_folder
from yolofleet.families.weights.value import Weights, WeightsHeader

INSTALLED = find_spec("rfdetr") is not None
UNUSED = {"_kp_active_mask": torch.zeros(0, 0, dtype=torch.bool)}  # a constant of networks for poses
TOLERANCES = {"boxes": 1e-5, "logits": 1e-4, "masks": 2e-3}  # logits of masks reach 50


def results(key, ask):
    return each_result(f"rfdetr-package-{key}", ask, INSTALLED)


def state_of(model):
    """Our values by the names of the package's state dict."""
    folder = Path(mkdtemp()) / "folder"
    write_folder(folder, Weights(model.state_dict(), WeightsHeader.of(model, img=96)))
    return load_file(folder / "model.safetensors") | UNUSED


def theirs(model):
    """Return the package's network with our values, and its criterion.

    The package has one width and depth of its backbone, so its tables get those of ``model``. It adds a row of a background to
    the classes. A name of weights keeps it from a download.
    """
    from rfdetr import config
    from rfdetr.models import lwdetr
    from rfdetr.models._defaults import MODEL_DEFAULTS
    from rfdetr.models.backbone import dinov2

    d, table = model.description, dinov2.get_config
    width = {"hidden_size": d.backbone_width, "num_attention_heads": d.backbone_heads}
    kind = config.RFDETRSegNanoConfig if d.mask_width else config.RFDETRNanoConfig
    network = kind(
        num_classes=CLASSES - 1, hidden_dim=d.decoder_width, num_queries=d.queries, group_detr=d.groups,
        patch_size=d.patch, num_windows=d.windows, positional_encoding_size=d.positions, resolution=d.px,
        out_feature_indexes=list(d.taps), dec_layers=d.layers, pretrain_weights="/none.pth", device="cpu",
    )  # fmt: skip
    training = config.TrainConfig(dataset_dir=".", output_dir=".")
    defaults = replace(MODEL_DEFAULTS, dim_feedforward=d.decoder_feedforward, vit_encoder_num_layers=d.blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dinov2, "get_config", lambda *size: {**table(*size), **width, "num_hidden_layers": d.blocks}
        )
        patch.setitem(dinov2.size_to_width, "small", d.backbone_width)
        reference = lwdetr.build_model_from_config(network, training, defaults)
    reference.load_state_dict(state_of(model))
    criterion, _ = lwdetr.build_criterion_from_config(network, training, defaults)
    return reference.train(model.training), criterion.train(model.training)


@pytest.mark.parametrize("name", SMALL)
def test_predictions_are_those_of_the_package(name):
    model = ours_by_formula(SMALL[name]).eval()
    inputs = {px: images(px) for px in sizes_of(SMALL[name])}

    @torch.no_grad()
    def ask():
        reference, found = theirs(model)[0], dict[str, Any]()
        for px, x in inputs.items():
            expected = reference((x - MEAN) / DEVIATION)
            found |= {f"{part[5:]} {px}": some(values) for part, values in expected.items() if "pred" in part}
        return found

    found = predicted(model, inputs)
    for result in results(f"predictions-{name}", ask):
        assert result.keys() == found.keys()
        for key, values in result.items():
            compare(some(found[key]), values, atol=TOLERANCES[key.split()[0]], rtol=1e-5, name=key)


def test_masks_of_a_training_pass_are_those_of_the_package():
    """Those of the encoder's queries and of every layer, for which transformers has another last convolution."""
    model, x = ours_by_formula(SMALL["masks"]).train(), images(96)

    @torch.no_grad()
    def ask():
        out = theirs(model)[0]((x - MEAN) / DEVIATION)
        outputs = [out["enc_outputs"], *out["aux_outputs"], out]
        masks = [
            torch.einsum("nqc,nchw->nqhw", part["query_features"], part["spatial_features"]) + part["bias"]
            for part in (output["pred_masks"] for output in outputs)
        ]
        return {f"masks {i}": some(of_output) for i, of_output in enumerate(masks)}

    with torch.no_grad():
        raws = model(x, loss_of(model).boxes.match(labels(2, 2), 2, (96, 96)))
    for result in results("training-masks", ask):
        assert len(result) == len(raws.prototypes) == 1 + SMALL["masks"].layers
        for i, values in enumerate(result.values()):
            coefficients = raws.coefficients[:, i]
            found = torch.einsum("nqc,nchw->nqhw", coefficients[..., :-1], raws.prototypes[i])
            masks = some(found + coefficients[..., -1, None, None])
            compare(masks, values, atol=TOLERANCES["masks"], rtol=1e-5, name=f"masks {i}")


@pytest.mark.parametrize("counts", COUNTS)
def test_losses_and_gradients_of_a_training_pass_are_those_of_the_package(counts):
    """Of a whole network, with the package's own matching."""
    n, d = len(COUNTS[counts]), SMALL["boxes"]
    model = ours_by_formula(d).train()
    loss, x = loss_of(model), images(96, n)
    targets = loss.match(labels(*COUNTS[counts]), n, (96, 96))
    total = sum(COUNTS[counts])

    def ask():
        reference, criterion = theirs(model)
        wanted = [{"labels": of.pop("class_labels"), **of} for of in labels_of(targets, torch.float32)]
        losses = criterion(reference((x - MEAN) / DEVIATION, wanted), wanted)
        weighed = {
            key: value * criterion.weight_dict[key]
            for key, value in losses.items()
            if key in criterion.weight_dict
        }
        # it divides by labels and groups, or by 1 if there is no label
        scale = total or 1 / d.groups
        (sum(weighed.values()) * scale).backward()
        terms = {"cls": losses["loss_ce"], "box": losses["loss_bbox"], "giou": losses["loss_giou"]}
        terms["aux"] = sum(value for key, value in weighed.items() if key.count("_") == 2)
        found = {term: np.float64((value * scale).detach()) for term, value in terms.items()}
        joined: dict[str, float] = {}  # query, key and value are one matrix here
        for name, p in reference.named_parameters():
            part = name.replace(".query.", ".").replace(".key.", ".").replace(".value.", ".")
            if p.grad is not None:
                joined[part] = joined.get(part, 0) + float(p.grad.square().sum())
        return {**found, "norms": np.sqrt(sorted(joined.values()))}

    sums = loss.sums(model(x, targets), targets)
    (sums * loss.gains).sum().backward()
    norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    found = {term: np.float64(value.detach()) for term, value in zip(loss.terms, sums, strict=True)}
    for result in results(f"training-{counts}", ask):
        compare(np.sort(norms), result.pop("norms"), rtol=2e-4, atol=1e-6, name="norms")
        assert result.keys() == found.keys()
        for term, value in result.items():
            compare(found[term], value, rtol=2e-5, atol=1e-6, name=term)


@pytest.mark.parametrize("name", ["boxes", "masks"])
def test_a_file_of_the_package_is_read(name, tmp_path):
    model = ours_by_formula(SMALL[name])
    own = state_of(model)

    def ask():
        state = theirs(model)[0].state_dict()
        assert all(torch.equal(state[key], t) for key, t in own.items())
        return {"shapes": {key: list(t.shape) for key, t in state.items()}}

    for result in results(f"names-{name}", ask):
        assert {key: list(t.shape) for key, t in own.items()} == result["shapes"]
    torch.save({"model": own}, tmp_path / "a.pth")
    read = read_pth(tmp_path / "a.pth", model.description)
    assert read.description == model.description
    assert all(torch.equal(read.tensors[key], t) for key, t in model.state_dict().items())
