from functools import partial

import pytest
import torch

from yolofleet.data.geometry import nms as nms_module
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.nms import detections, nms


def naive(boxes, scores, iou, groups):
    """Greedy suppression as the textbook says it, one pair at a time."""
    kept: list[int] = []
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        for j in kept:
            a, b = boxes[i], boxes[j]
            width, height = (min(a[k + 2], b[k + 2]) - max(a[k], b[k]) for k in (0, 1))
            shared = max(width, 0) * max(height, 0)
            union = sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)) - shared
            if groups[i] == groups[j] and shared / union > iou:
                break
        else:
            kept.append(i)
    return kept


def random_boxes(count, groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 2, generator=generator) * 100
    half = torch.rand(count, 2, generator=generator) * 15 + 2
    scores = (torch.rand(count, generator=generator) * 50).round() / 50  # many ties
    return (
        torch.cat((centre - half, centre + half), 1),
        scores,
        torch.randint(groups, (count,), generator=generator),
    )


@pytest.fixture(params=["compiled", "in torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to suppress."""
    if request.param == "compiled" and not nms_module.COMPILED:
        pytest.skip("installed without a C compiler")
    monkeypatch.setattr(nms_module, "COMPILED", request.param == "compiled")


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("block", [1, 7, 256])
def test_result_is_the_textbooks_for_any_block(groups, block, monkeypatch):
    monkeypatch.setattr(nms_module, "BLOCK_CPU", block)
    boxes, scores, group = random_boxes(400, groups)
    expected = naive(boxes.tolist(), scores.tolist(), 0.4, group.tolist())
    assert nms(boxes, scores, 0.4, groups=group).tolist() == expected
    assert nms(boxes, scores, 0.4, groups=group, max_det=20).tolist() == expected[:20]


def test_a_suppressed_box_suppresses_nothing():
    # 4 px steps of 10 px boxes: neighbours overlap 6 / 14 = 0.43, next but one 2 / 18 = 0.11
    boxes = torch.tensor([[x, 0.0, x + 10, 10] for x in (0.0, 4, 8, 12)])
    assert nms(boxes, torch.tensor([0.9, 0.8, 0.7, 0.6]), 0.4).tolist() == [0, 2]


def test_all_boxes_count_without_a_limit(monkeypatch):
    monkeypatch.setattr(nms_module, "MAX_CANDIDATES", 3)
    boxes = torch.tensor([[20.0 * x, 0, 20 * x + 9, 9] for x in range(8)])
    assert nms(boxes, torch.tensor([-0.0, 0.1, 0.0, -3, 0.1, 2, -1, 1e-42]), 0.5).tolist() == [
        *(5, 1, 4, 7, 0, 2, 6, 3)
    ]


def test_no_boxes_give_no_boxes():
    assert detections(Decoded(torch.zeros(0, 10, 8)), conf=0.1, iou=0.5, max_det=5, multi_label=True) == (
        [],
        0,
    )
    assert nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []
    found, capped = detections(
        Decoded(torch.zeros(2, 10, 8)), conf=0.1, iou=0.5, max_det=5, multi_label=True, classes=[1]
    )
    assert [tuple(boxes.shape) for boxes in found] == [(0, 6), (0, 6)] and capped == 0


def test_one_place_may_be_two_classes_only_with_multi_label():
    place = torch.tensor([[[50.0, 50, 20, 10, 0.5, 0.8, 0.6, 0.1]]])  # scores 0.4, 0.3, 0.05
    found = partial(detections, Decoded(place), conf=0.1, iou=0.5, max_det=10)
    (several,), _ = found(multi_label=True)
    (single,), _ = found(multi_label=False)
    (agnostic,), _ = found(multi_label=True, agnostic=True)
    torch.testing.assert_close(
        several, torch.tensor([[40.0, 45, 60, 55, 0.4, 0], [40.0, 45, 60, 55, 0.3, 1]])
    )
    assert torch.equal(single, several[:1]) and torch.equal(agnostic, several[:1])


def random_decoded(images, places, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    boxes = torch.rand(images, places, 4, generator=generator) * 60 + 4
    return torch.cat((boxes, torch.rand(images, places, 1 + classes, generator=generator)), 2)


def test_an_image_gives_the_same_alone_and_in_a_batch():
    decoded = random_decoded(3, 300, 4)
    found = partial(detections, conf=0.01, iou=0.6, max_det=100, multi_label=True)
    together, _ = found(Decoded(decoded))
    alone = [found(Decoded(image[None]))[0][0] for image in decoded]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("max_det", [1, 20, 1000])
def test_images_suppressed_together_are_those_suppressed_one_by_one(block, multi_label, max_det, monkeypatch):
    """As a GPU does it, with images of few, many and no candidates."""
    monkeypatch.setattr(nms_module, "BLOCK_CPU", block)
    monkeypatch.setattr(nms_module, "MAX_CANDIDATES", 150)
    decoded = random_decoded(4, 120, 3)
    decoded[0, :, 4] = 0
    decoded[2, 5:, 4] = 0
    options = (0.2, 0.5, max_det, multi_label, False, None, True)
    together, capped = nms_module._detections(decoded, *options)
    alone = [nms_module._detections(image[None], *options) for image in decoded]
    assert len(together[0]) == 0
    for ours, (theirs, _) in zip(together, alone, strict=True):
        assert torch.equal(ours, theirs[0])
    assert capped == sum(left_out for _, left_out in alone)
    for rows, of_image in zip(together, decoded, strict=True):
        _, _, _, _, score, class_idx, number = rows.T
        scores = of_image[:, 5:] * of_image[:, 4:5]
        assert torch.equal(scores[number.long(), class_idx.long()], score)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_detections_on_cuda_are_the_cpus():
    decoded = random_decoded(2, 3000, 4)
    found = partial(detections, conf=0.01, iou=0.6, max_det=300, multi_label=True)
    for ours, cuda in zip(found(Decoded(decoded))[0], found(Decoded(decoded.cuda()))[0], strict=True):
        torch.testing.assert_close(cuda.cpu(), ours)


def test_more_candidates_than_the_limit_are_cut_by_score_and_counted(monkeypatch):
    monkeypatch.setattr(nms_module, "MAX_CANDIDATES", 50)
    decoded = random_decoded(1, 40, 4)
    scores = (decoded[0, :, 5:] * decoded[0, :, 4:5]).flatten()
    candidates = int((scores > 0.01).sum())
    (boxes,), capped = detections(Decoded(decoded), conf=0.01, iou=1.0, max_det=1000, multi_label=True)
    assert capped == candidates - 50
    torch.testing.assert_close(boxes[:, 4], scores.sort(descending=True).values[:50])


def test_of_equal_scores_at_the_limit_the_first_stay(monkeypatch):
    monkeypatch.setattr(nms_module, "MAX_CANDIDATES", 2)
    decoded = torch.tensor(
        [[[x, 5.0, 4, 4, 1.0, s] for x, s in ((10.0, 0.5), (30, 0.5), (50, 0.5), (70, 0.9))]]
    )
    (boxes,), capped = detections(Decoded(decoded), conf=0.1, iou=0.5, max_det=10, multi_label=True)
    assert boxes[:, 0].tolist() == [68, 8] and capped == 2


def test_without_suppression_the_highest_scores_are_kept_also_of_equal_boxes():
    row = [8.0, 8.0, 4.0, 4.0, 1.0]
    decoded = torch.tensor([[[*row, 0.6, 0.1], [*row, 0.9, 0.2], [*row, 0.3, 0.7]]] * 2)  # [2, 3, 7]
    for images in (decoded, decoded[:1]):
        found, _ = detections(Decoded(images), conf=0.25, iou=None, max_det=3, multi_label=True)
        for boxes in found:  # the fourth, 0.3, is above max_det
            assert boxes[:, 4:].tolist() == torch.tensor([[0.9, 0], [0.7, 1], [0.6, 0]]).tolist()
