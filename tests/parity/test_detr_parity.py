"""RT-DETRv2 and D-FINE: numbers of parameters, names, and outputs against Hugging Face's transformers on random weights."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from yolofleet.families.build import build_model, outline
from yolofleet.families.dfine.description import PRESETS as DFINE
from yolofleet.families.networks.description import preset
from yolofleet.families.networks.detector import fuse
from yolofleet.families.rtdetr.blocks import FrozenNorm
from yolofleet.families.rtdetr.description import PRESETS as RTDETR
from yolofleet.families.rtdetr.hugging_face import published_name

# parameters, and of them those that are trained, of the authors' networks for 80 classes
PARAMETERS = {
    "dfine-n": (3_782_693, 3_782_691),
    "dfine-s": (10_321_877, 10_321_875),
    "dfine-m": (19_590_064, 19_590_062),
    "dfine-l": (31_244_152, 31_219_222),
    "dfine-x": (62_621_560, 62_596_118),
    "rtdetrv2-r18": (20_184_464, 20_184_464),
    "rtdetrv2-r34": (31_441_668, 31_441_668),
    "rtdetrv2-r50m": (36_593_772, 36_565_260),
    "rtdetrv2-r50": (42_891_372, 42_862_860),
    "rtdetrv2-r101": (76_556_268, 76_527_756),
}
CLASSES, LABELS, GROUPS = 7, 3, 2
SEED = 82  # of weights that give the queries clearly different scores, so that rounding does not change their order
SMALL: dict[str, Any] = {
    "dfine": replace(DFINE["dfine-s"], stem=(8, 12), inner_widths=(4, 8, 12, 16), outer_widths=(16, 24, 32, 40), stage_layers=2,
        width=32, feedforward=40, decoder_width=48, decoder_feedforward=56, queries=8,
    ),
    "frozen dfine": replace(DFINE["dfine-l"], stem=(8, 12), inner_widths=(4, 8, 12, 16), outer_widths=(16, 24, 32, 40), stage_layers=2,
        stage_blocks=(1, 1, 2, 1), width=32, feedforward=40, decoder_width=32, decoder_feedforward=56, layers=2, queries=8,
        used_layers=2,
    ),
    "rtdetr": replace(RTDETR["rtdetrv2-r18"], stage_widths=(8, 12, 16, 20), width=32, feedforward=40, decoder_width=48,
        decoder_feedforward=56, queries=8,
    ),
    "frozen rtdetr": replace(RTDETR["rtdetrv2-r50"], stage_widths=(8, 12, 16, 20), stage_blocks=(1, 2, 1, 1), width=32, feedforward=40,
        decoder_width=32, decoder_feedforward=56, layers=2, used_layers=2, queries=8,
    ),
    "dfine-n": replace(DFINE["dfine-n"], queries=8),
    "rtdetrv2-r18": replace(RTDETR["rtdetrv2-r18"], queries=8),
}  # fmt: skip
SIZES_HW = ((64, 64), (96, 128), (128, 64))


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_parameters_of_the_originals(name):
    model = outline(preset(name), 80)
    every = [(p.numel(), p.requires_grad) for p in model.parameters()]
    assert (sum(n for n, _ in every), sum(n for n, trained in every if trained)) == PARAMETERS[name]


# of the authors' networks for inference: convolutions and matrix products of one image of 640 px, a multiply-add counts 2
@pytest.mark.parametrize(("name", "gflops"), [("dfine-n", 7.31), ("dfine-s", 25.50), ("dfine-m", 57.03)])
def test_folded_networks_have_the_operations_of_the_originals(name, gflops):
    model = fuse(build_model(preset(name), 80)).to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 640, 640, device="meta"))
    assert round(counter.get_total_flops() / 1e9, 2) == gflops


def theirs(description, nc):
    """A network of transformers without weights."""
    transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
    d: Any
    d, levels = description, len(description.points)
    shared = {
        "freeze_backbone_batch_norms": d.is_frozen,
        "encoder_hidden_dim": d.width,
        "encoder_ffn_dim": d.feedforward,
        "encode_proj_layers": [levels - 1],
        "feat_strides": [8, 16, 32][-levels:],
        "hidden_expansion": d.expansion,
        "d_model": d.decoder_width,
        "decoder_in_channels": [d.width] * levels,
        "decoder_ffn_dim": d.decoder_feedforward,
        "decoder_layers": d.layers,
        "num_queries": d.queries,
        "num_labels": nc,
    }
    if d.family == "dfine":
        backbone = transformers.HGNetV2Config(
            stem_channels=[3, *d.stem],
            stage_in_channels=[d.stem[1], *d.outer_widths[:3]],
            stage_mid_channels=list(d.inner_widths),
            stage_out_channels=list(d.outer_widths),
            stage_num_blocks=list(d.stage_blocks),
            stage_numb_of_layers=[d.stage_layers] * 4,
            use_learnable_affine_block=d.has_affine,
            hidden_sizes=list(d.outer_widths),
            out_indices=[2, 3, 4][-levels:],
        )
        config = transformers.DFineConfig(
            backbone_config=backbone,
            encoder_in_channels=list(d.outer_widths[-levels:]),
            depth_mult=d.depth_multiple,
            num_feature_levels=levels,
            decoder_n_points=list(d.points),
            reg_scale=d.reg_scale,
            **shared,
        )
        return transformers.DFineForObjectDetection(config)
    widths = [4 * w if d.has_bottlenecks else w for w in d.stage_widths]
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=d.stage_widths[0],
        hidden_sizes=widths,
        depths=list(d.stage_blocks),
        layer_type="bottleneck" if d.has_bottlenecks else "basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrV2Config(
        backbone_config=backbone, encoder_in_channels=widths[1:], decoder_n_points=d.points[0], **shared
    )
    return transformers.RTDetrV2ForObjectDetection(config)


@torch.no_grad()
def ours_with_random_weights(description, nc):
    """Our network with values that let all its parts change the result, and keep its signals of the size of 1."""
    model: Any = build_model(description, nc)
    generator = torch.Generator().manual_seed(SEED)

    def draw(tensor, low, high):
        tensor.uniform_(low, high, generator=generator)

    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, FrozenNorm)):
            draw(module.weight, 0.8, 1.2)
            draw(module.bias, -0.2, 0.2)
            draw(module.running_mean, -0.2, 0.2)
            draw(module.running_var, 0.8, 1.2)
        elif isinstance(module, nn.LayerNorm):
            draw(module.weight, 0.8, 1.2)
            draw(module.bias, -0.2, 0.2)
        elif isinstance(module, nn.Linear) and not module.weight.any():
            draw(module.weight, -0.1, 0.1)
            if not module.bias.any():
                draw(module.bias, -0.1, 0.1)
    for name, parameter in model.named_parameters():
        if ".lab." in name:
            draw(parameter, 0.5, 1.5)
    model.decoder.enc_score_head.weight.mul_(10)
    return perturbed(model)


def names_in(reference):
    """Names of the reference's tensors by our names; the projections of an attention in the order q, k, v."""
    family = "dfine" if "DFine" in type(reference).__name__ else "rtdetr"
    found: dict[str, list[str]] = {}
    for name in reference.state_dict():
        if ours := published_name(name, family):
            found.setdefault(ours, []).append(name)
    return {ours: sorted(names, key=lambda n: "kqv".index(n.rsplit("_proj", 1)[0][-1]) if "in_proj" in ours else 0)
            for ours, names in found.items()}  # fmt: skip


def with_weights_of(reference, model):
    """Give the reference our values."""
    values = model.state_dict()
    renamed: dict[str, Any] = {}
    for ours, names in names_in(reference).items():
        if "in_proj_" in ours:
            named = {name.rsplit("_proj", 1)[0][-1]: name for name in names}
            renamed |= {named[part]: value for part, value in zip("qkv", values[ours].chunk(3), strict=True)}
        else:
            renamed |= dict.fromkeys(names, values[ours])
    missing, unexpected = reference.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert all(name.endswith(("points_scale", "num_batches_tracked")) for name in missing), missing
    return reference


def images(height, width, n=2):
    flat = np.random.default_rng(height).random((n, 3, height // 8, width // 8), dtype=np.float32)
    return perturbed(torch.from_numpy(flat.repeat(8, 2).repeat(8, 3)))


def pair(name):
    description = SMALL[name]
    reference = theirs(description, CLASSES)
    model = ours_with_random_weights(description, CLASSES)
    return model, with_weights_of(reference, model)


def check(ours, reference, name, largest):
    largest[name] = float((ours - reference).abs().max())
    # logits in training depend on statistics of few pixels, and those of the encoder are ten times as large as usual
    atol = 1e-4 if "boxes" in name or "predicted" in name else 2e-2 if "encoder" in name else 5e-3
    compare(ours, reference, atol=atol, name=name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_and_shapes_are_those_of_transformers(name):
    with torch.device("meta"):
        reference = theirs(preset(name), 80)
    ours, shapes = outline(preset(name), 80).state_dict(), reference.state_dict()
    ours = {n: tuple(t.shape) for n, t in ours.items() if not n.endswith("num_batches_tracked")}
    found: dict[str, Any] = {}
    for published, names in names_in(reference).items():
        first, *rest = shapes[names[0]].shape
        found[published] = (3 * first if "in_proj_" in published else first, *rest)
    assert found == ours


@pytest.mark.parametrize("name", SMALL)
def test_predictions_are_those_of_transformers(name):
    model, reference = pair(name)
    model.eval(), reference.eval()
    largest: dict[str, float] = {}
    with torch.no_grad():
        for size_hw in SIZES_HW:
            x = images(*size_hw)
            raws, expected = model(x), reference(x)
            check(raws.boxes, expected.pred_boxes, f"boxes {size_hw}", largest)
            check(raws.logits, expected.logits, f"predicted logits {size_hw}", largest)
    print(f"largest differences of {name}: {largest}")


def noise(nc, rng):
    """Denoising queries of images with equal numbers of labels, which the reference does not pad."""
    shape = (4, 2 * GROUPS * LABELS)
    centres, sides = rng.uniform(0.2, 0.8, (*shape, 2)), rng.uniform(0.05, 0.4, (*shape, 2))
    return SimpleNamespace(
        noisy_boxes=np.concatenate([centres, sides], 2).astype(np.float32),
        noisy_classes=rng.integers(0, nc, shape),
        noise_group=np.tile(np.repeat(np.arange(GROUPS), 2 * LABELS), (4, 1)),
    )


def given_noise(targets, queries):
    """A replacement for the function of transformers that draws noise."""
    boxes = torch.from_numpy(targets.noisy_boxes)
    group = torch.from_numpy(targets.noise_group[0])
    d = len(group)
    mask = torch.zeros(d + queries, d + queries)
    mask[d:, :d] = -torch.inf
    mask[:d, :d] = torch.where(group[:, None] == group, 0.0, -torch.inf)

    def draw(*args, class_embed, **kwargs):
        content = class_embed(torch.from_numpy(targets.noisy_classes))
        return content, torch.log(boxes / (1 - boxes)), mask, {"dn_num_split": [d, queries]}

    return draw


@pytest.mark.parametrize("name", SMALL)
def test_results_in_training_are_those_of_transformers(name, monkeypatch):
    """Boxes and logits of all layers, also of the denoising queries, with statistics of the batch."""
    model, reference = pair(name)
    model.train(), reference.train()
    targets, queries = noise(CLASSES, np.random.default_rng(1)), SMALL[name].queries
    module = __import__(type(reference).__module__, fromlist=["x"])
    monkeypatch.setattr(module, "get_contrastive_denoising_training_group", given_noise(targets, queries))
    x = images(160, 192, 4)  # enough pixels of the coarsest map for statistics that rounding does not move
    with torch.no_grad():
        raws, expected = model(x, targets), reference.model(x, labels=[{}])
    assert torch.equal(raws.boxes, raws.all_boxes[:, -1])
    assert torch.equal(raws.logits, raws.all_logits[:, -1])
    results = [
        ("noisy_boxes", "all_boxes", expected.intermediate_reference_points),
        ("noisy_logits", "all_logits", expected.intermediate_logits),
    ]
    if SMALL[name].family == "dfine":
        results.append(("noisy_corners", "corners", expected.intermediate_predicted_corners))
        results.append(("noisy_references", "references", expected.initial_reference_points))
    largest: dict[str, float] = {}
    d = targets.noise_group.shape[1]
    for noisy, normal, value in results:
        check(getattr(raws, noisy), value[:, :, :d], noisy, largest)
        check(getattr(raws, normal), value[:, :, d:], normal, largest)
    check(raws.cell_boxes, expected.enc_topk_bboxes, "encoder boxes", largest)
    check(raws.cell_logits, expected.enc_topk_logits, "encoder logits", largest)
    print(f"largest differences of {name}: {largest}")
