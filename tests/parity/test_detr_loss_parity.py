"""Terms and gradients of the losses of RT-DETR and D-FINE against ``transformers``, in float64 where
it can, on random predictions.

Where it departs from the papers, the test takes its functions with the matches that the paper asks for: it has no union of
matches (D-FINE, section 4.2) and no prediction before the first layer, it counts padding among the denoising queries, and
the distillation of denoising queries takes the numbers of their own matches instead of the normal queries'.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from detr_raws import BINS, CLASSES, LAYERS, QUERIES, REG_SCALE, labels, raws
from of_transformers import each_result, labels_of, some

from yolofleet.families.dfine.decoder import bin_values
from yolofleet.families.dfine.hyperparameters import DfineHyperparameters
from yolofleet.families.dfine.loss import DfineLoss
from yolofleet.families.rtdetr.loss import RtdetrLoss
from yolofleet.families.rtdetr.matching import Matching

SIZE_HW = (64, 64)
CONFIG = SimpleNamespace(
    matcher_class_cost=2.0, matcher_bbox_cost=5.0, matcher_giou_cost=2.0, use_focal_loss=True, matcher_alpha=0.25,
    matcher_gamma=2.0, num_labels=CLASSES, weight_loss_vfl=1.0, weight_loss_bbox=5.0, weight_loss_giou=2.0,
    weight_loss_fgl=0.15, weight_loss_ddf=1.5, weight_loss_mal=1.0, eos_coefficient=1e-4, focal_loss_alpha=0.75,
    focal_loss_gamma=2.0, auxiliary_loss=True, max_num_bins=BINS - 1, reg_scale=REG_SCALE, up=0.5, mal_alpha=None,
    use_dense_one_to_one=False,
)  # fmt: skip
TOLERANCE = {"rtol": 3e-5, "atol": 1e-6}
# of the highest gradient; weights of bins are quotients of small distances
OF_HIGHEST, OF_CORNERS, OF_BINS = 5e-5, 5e-4, 1e-3


def recipe(**values):
    return DfineHyperparameters.model_validate(values)


def perturbed_raws(images, noisy, *, dfine, seed=0):
    """Raw predictions, and the same numbers as leaves of another graph: float64, but D-FINE's reference is float32 only."""
    drawn = raws(images, noisy, dfine=dfine, seed=seed)
    made = type(drawn)(*(perturbed(part.detach()).requires_grad_() for part in drawn))
    kind = torch.float32 if dfine else torch.float64
    return made, type(made)(*(part.detach().to(kind, copy=True).requires_grad_() for part in made))


def results_of(terms, weighted, raw):
    """Values of the terms, and of the gradients of their weighted sum with respect to every raw prediction."""
    gradients = torch.autograd.grad(weighted, raw, allow_unused=True)
    found = {term: torch.as_tensor(value).detach().double().numpy() for term, value in terms.items()}
    for name, part, gradient in list(zip(raw._fields, raw, gradients, strict=True))[3:]:
        if part.numel():
            values = np.zeros(part.shape, np.float32) if gradient is None else gradient.numpy()
            found |= {f"gradient of {name}": some(values).astype(np.float32)}
            found |= {f"highest of {name}": np.float32(np.abs(values).max())}
    return found


def compare_results(key, loss, predicted, targets, ask):
    """Compare terms and gradients; a gradient within a share of the highest of its raw prediction."""
    sums = loss.sums(predicted, targets)
    terms = dict(zip(loss.terms, sums.unbind(), strict=True))
    found = results_of(terms, (sums * loss.gains).sum(), predicted)
    for expected in each_result(key, ask):
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            kind, _, part = name.rpartition(" of ")
            highest = expected[f"highest of {part}"] if kind else 0
            share = OF_CORNERS if name.endswith("corners") else OF_HIGHEST
            if kind == "gradient":
                compare(found[name][:-1], values[:-1], atol=share * highest, name=name)
                compare(found[name][-1], values[-1], rtol=share, name=f"{name} (norm)")
            elif not kind:
                compare(found[name], values, **TOLERANCE, name=name)


# -- RT-DETR ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(4, 4), (25,), (3, 0, 11)])
def test_terms_and_gradients_of_rtdetr(counts):
    """With equal numbers of labels also the denoising; else the reference counts padding, so it is left out."""
    with_noise = len(set(counts)) == 1
    loss = RtdetrLoss(recipe(denoising=100 if with_noise else 0), CLASSES)
    targets = loss.match(labels(*counts), len(counts), SIZE_HW)
    noisy = targets.noisy_boxes.shape[1]
    predicted, reference = perturbed_raws(len(counts), noisy, dfine=False)
    groups, total = int(targets.noise_group.max(initial=0)) + 1, max(sum(counts), 1)
    meta = {
        "dn_positive_idx": [
            torch.from_numpy(np.flatnonzero(of_image >= 0)) for of_image in targets.noise_label
        ],
        "dn_num_group": groups,
        "dn_num_split": [noisy, QUERIES],
    }

    def ask():
        from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

        boxes, logits = reference.all_boxes, reference.all_logits
        if noisy:
            boxes = torch.cat([reference.noisy_boxes, boxes], 2)
            logits = torch.cat([reference.noisy_logits, logits], 2)
        whole, losses, _ = RTDetrForObjectDetectionLoss(
            logits[:, -1], labels_of(targets), "cpu", boxes[:, -1], CONFIG, logits, boxes,
            reference.cell_logits, reference.cell_boxes, meta if noisy else None,
        )  # fmt: skip
        expected = {
            "cls": losses["loss_vfl"],
            "box": losses["loss_bbox"] / 5,
            "giou": losses["loss_giou"] / 2,
            "aux": sum(value for name, value in losses.items() if "_aux_" in name),
            "denoise": sum(value for name, value in losses.items() if "_dn_" in name),
        }
        assert len(losses) == 3 * (1 + LAYERS + LAYERS * with_noise)
        return results_of({term: value * total for term, value in expected.items()}, whole * total, reference)

    key = f"loss-rtdetr-{'-'.join(map(str, counts))}"
    compare_results(key, loss, predicted, targets, ask)


@pytest.mark.parametrize("queries", [QUERIES, 4])
def test_matches_are_those_of_the_reference(queries):
    counts = (7, 0, 2)
    loss = RtdetrLoss(recipe(denoising=0), CLASSES)
    targets = loss.match(labels(*counts), 3, SIZE_HW)
    predicted, _ = perturbed_raws(3, 0, dfine=False)
    boxes, logits = predicted.all_boxes[:, :, :queries], predicted.all_logits[:, :, :queries]
    pairs = Matching(boxes, logits, torch.from_numpy(targets.boxes), targets.classes).pairs()

    def ask():
        from transformers.loss.loss_rt_detr import RTDetrHungarianMatcher

        found = {}
        for layer in range(LAYERS):
            outputs = {"logits": logits[:, layer].double(), "pred_boxes": boxes[:, layer].double()}
            for image, matched in enumerate(RTDetrHungarianMatcher(CONFIG)(outputs, labels_of(targets))):
                found[f"{layer} {image}"] = [part.tolist() for part in matched]
        return found

    for result in each_result(f"matches-{queries}", ask):
        for key, (query, label) in result.items():
            layer, image = map(int, key.split())
            mine = (pairs.output == layer) & (pairs.image == image)
            order = np.argsort(pairs.query[mine])
            compare(pairs.query[mine][order], np.array(query, np.int64))
            compare(pairs.label[mine][order], np.array(label, np.int64))


# -- D-FINE ----------------------------------------------------------------------------------------------------


def union_of(matches):
    """The most frequent label of each query, over all outputs; of equally many the first."""
    votes = Counter(
        (q, t) for query, label in matches for q, t in zip(query.tolist(), label.tolist(), strict=True)
    )
    best: dict[int, tuple[int, int]] = {}
    for (query, label), count in sorted(votes.items()):
        if count > best.get(query, (0, 0))[0]:
            best[query] = (count, label)
    parts = list(best), [label for _, label in best.values()]
    return [tuple(torch.tensor(part, dtype=torch.int64) for part in parts)]


def distillation(student, teacher, iou, score, matches, others, ratio):
    """The distillation of one layer of an image, from the paper: two means with weights like the roots of ``ratio``.

    Args:
        student, teacher: [Q, 4, R + 1] logits. iou, score: [Q]. matches, others: bool [Q].
    """
    teacher = (teacher.detach() / 5).softmax(-1)
    divergence = (teacher * (teacher.log() - (student / 5).log_softmax(-1))).sum(-1) * 25  # [Q, 4]
    weighted = divergence * torch.where(matches, iou, score).detach()[:, None]
    means = [weighted[mask].mean() if mask.any() else 0.0 for mask in (matches, others)]
    near, far = np.sqrt(ratio)
    return (means[0] * near + means[1] * far) / (near + far)


def image_of_dfine(criterion, raw, label, restored, groups, class_loss):
    """The terms of one image, as means over its labels (ddf: as it is); ``restored``: pairs of denoising queries."""
    n = max(len(label[0]["class_labels"]), 1)
    of_classes = getattr(criterion, f"loss_labels_{class_loss}")
    layers = [
        dict(zip(("pred_boxes", "logits"), part, strict=True))
        for part in zip(raw.all_boxes.unbind(1), raw.all_logits.unbind(1), strict=True)
    ]
    outputs = [{"pred_boxes": raw.cell_boxes, "logits": raw.cell_logits}, *layers]
    own = [criterion.matcher(output, label) for output in outputs]
    joint = union_of([pairs[0] for pairs in own])
    size = max(len(joint[0][0]), 1)
    terms = dict.fromkeys(("cls", "box", "giou", "fgl", "ddf", "aux", "denoise"), 0.0)

    def all_of(output, pairs, boxed, count, layer, corners, references):
        found = [of_classes(output, label, pairs, n if boxed is joint else count)[f"loss_{class_loss}"]]
        boxes = criterion.loss_boxes(output, label, boxed, count)
        found += [boxes["loss_bbox"], boxes["loss_giou"]]
        if layer >= 0:
            local = {
                **output,
                "pred_corners": corners[:, layer],
                "ref_points": references[:, layer],
                "teacher_corners": corners[:, -1],
                "teacher_logits": output["logits"],  # DDF is not taken from here
            }
            found.append(criterion.loss_local(local, label, boxed, count)["loss_fgl"])
        return found

    gains = [1.0, 5.0, 2.0, 0.15]
    for at, (output, pairs) in enumerate(zip(outputs, own, strict=True)):
        found = all_of(output, pairs, joint, size, at - 2, raw.corners, raw.references)
        if at == len(outputs) - 1:
            terms.update(zip(("cls", "box", "giou", "fgl"), found, strict=True))
        else:
            terms["aux"] += sum(gain * value for gain, value in zip(gains, found, strict=False))
    noisy = [
        dict(zip(("pred_boxes", "logits"), part, strict=True))
        for part in zip(raw.noisy_boxes.unbind(1), raw.noisy_logits.unbind(1), strict=True)
    ]
    for at, output in enumerate(noisy if groups else []):
        corners, references = raw.noisy_corners, raw.noisy_references
        found = all_of(output, restored, restored, n * groups, at - 1, corners, references)
        terms["denoise"] += sum(gain * value for gain, value in zip(gains, found, strict=False))

    count = len(joint[0][0])
    ratio = count, QUERIES - count
    parts = [(layers[1:], raw.corners, joint[0])]
    parts += [(noisy[1:], raw.noisy_corners, restored[0])] if groups else []
    for of_layers, corners, pairs in parts:
        is_match = torch.zeros(corners.shape[2], dtype=torch.bool)
        is_match[pairs[0]] = True
        score = of_layers[-1]["logits"][0].sigmoid().amax(-1)
        for layer in range(LAYERS - 1):
            iou = score.detach().clone()
            iou[pairs[0]] = iou_of(of_layers[layer]["pred_boxes"][0][pairs[0]], label[0]["boxes"][pairs[1]])
            student, teacher = (corners[0, at].unflatten(1, (4, BINS)) for at in (layer, LAYERS - 1))
            terms["ddf"] += distillation(student, teacher, iou, score, is_match, ~is_match, ratio)
    return terms


def iou_of(ours, theirs):
    low = torch.maximum(ours[:, :2] - ours[:, 2:] / 2, theirs[:, :2] - theirs[:, 2:] / 2)
    high = torch.minimum(ours[:, :2] + ours[:, 2:] / 2, theirs[:, :2] + theirs[:, 2:] / 2)
    shared = (high - low).clamp(min=0).prod(1)
    return (shared / (ours[:, 2:].prod(1) + theirs[:, 2:].prod(1) - shared)).detach()


@pytest.mark.parametrize("class_loss", ["vfl", "mal"])
@pytest.mark.parametrize("counts", [(4,), (3, 0, 11), (0,)])
def test_terms_and_gradients_of_dfine(counts, class_loss):
    """Image by image: each has the original's loss of a rank with that image, and labels weigh alike."""
    table = bin_values(torch.tensor([0.5]), torch.tensor([REG_SCALE]))
    loss = DfineLoss(recipe(class_loss=class_loss), CLASSES, table, REG_SCALE)
    targets = loss.match(labels(*counts), len(counts), SIZE_HW)
    predicted, reference = perturbed_raws(len(counts), targets.noisy_boxes.shape[1], dfine=True)

    def ask():
        from transformers.loss.loss_deimv2 import Deimv2Loss

        criterion = Deimv2Loss(CONFIG)
        criterion.gamma = 2.0 if class_loss == "vfl" else 1.5
        expected = dict.fromkeys(loss.terms, torch.zeros(()))
        for i, label in enumerate(labels_of(targets, torch.float32)):
            used = int((targets.noise_group[i] >= 0).sum())
            raw = SimpleNamespace(**{name: part[i : i + 1] for name, part in reference._asdict().items()})
            for name in ("noisy_boxes", "noisy_logits", "noisy_corners", "noisy_references"):
                setattr(raw, name, getattr(raw, name)[:, :, :used])
            query = np.flatnonzero(targets.noise_label[i] >= 0)
            restored = [tuple(map(torch.from_numpy, (query, targets.noise_label[i][query])))]
            groups = int(targets.noise_group[i].max(initial=-1)) + 1
            terms = image_of_dfine(criterion, raw, [label], restored, groups, class_loss)
            for term, value in terms.items():
                expected[term] = expected[term] + value * (1 if term == "ddf" else max(counts[i], 1))
        weighted = sum(gain * value for gain, value in zip(loss.gains, expected.values(), strict=True))
        return results_of(expected, weighted, reference)

    key = f"loss-dfine-{class_loss}-{'-'.join(map(str, counts))}"
    compare_results(key, loss, predicted, targets, ask)


def test_wanted_bins_are_those_of_the_reference():
    loss = DfineLoss(recipe(), CLASSES, bin_values(torch.tensor([0.5]), torch.tensor([4.0])), 4.0)
    rng = np.random.default_rng(3)
    centres, sides = rng.uniform(0.3, 0.7, (2, 200, 2)), rng.uniform(0.2, 0.6, (2, 200, 2))
    references, boxes = perturbed(torch.from_numpy(np.concatenate([centres, sides], -1)).float())
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)

    def ask():
        from transformers.loss.loss_d_fine import bbox2distance

        left, right, lower = bbox2distance(references, corners, BINS - 1, 4.0, torch.tensor([0.5]))
        return {"left": left.long().numpy(), "of left": lower.numpy(), "of next": right.numpy()}

    mine = loss.wanted_bins(references, boxes).flatten(0, 1).numpy()
    for result in each_result("bins", ask):
        wanted, rows = np.zeros((800, BINS), np.float32), np.arange(800)
        wanted[rows, result["left"]] = result["of left"]
        wanted[rows, result["left"] + 1] = result["of next"]
        compare(mine, wanted, atol=OF_BINS, name="weights of bins")
