import math

import pytest
import torch

from yolofleet.data.geometry.boxes import ciou_pairs_cxcywh, iou_matrix


def test_ciou_of_hand_worked_boxes():
    pred = torch.tensor(
        [[2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 4.0, 2.0], [1.0, 1.0, 2.0, 2.0]]
    )
    true = torch.tensor(
        [[2.0, 2.0, 2.0, 2.0], [2.0, 1.0, 2.0, 2.0], [2.0, 2.0, 2.0, 4.0], [5.0, 1.0, 2.0, 2.0]]
    )
    # 1: same box. 2: overlap 2 of 6, centres 1 apart, hull 3 x 2 (diagonal^2 13).
    # 3: overlap 4 of 12, same centre, aspects 1/2 and 2. 4: no overlap, centres 4 apart, hull 6 x 2 (40).
    aspect = 4 / math.pi**2 * (math.atan(0.5) - math.atan(2)) ** 2
    expected = [1.0, 1 / 3 - 1 / 13, 1 / 3 - aspect**2 / (1 - 1 / 3 + aspect), -16 / 40]
    torch.testing.assert_close(ciou_pairs_cxcywh(pred, true), torch.tensor(expected))


def test_ciou_of_random_boxes_against_float64_finite_differences_of_everything_but_alpha():
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(20, 4, generator=generator, dtype=torch.float64) + 0.5
    same_aspect = torch.cat(
        (true[:, :2] + 0.1, true[:, 2:] * 1.3), 1
    ).requires_grad_()  # alpha has no slope here
    assert torch.autograd.gradcheck(lambda pred: ciou_pairs_cxcywh(pred, true), (same_aspect,), atol=1e-4)


def test_iou_matrix_of_hand_worked_boxes():
    a = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 2.0]])
    b = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]])
    # areas 4 and 4 against 4, 1, 1; overlaps 4 1 0 / 2 1 0
    torch.testing.assert_close(iou_matrix(a, b), torch.tensor([[1.0, 1 / 4, 0.0], [2 / 6, 1 / 4, 0.0]]))


@pytest.mark.parametrize("count", [0, 3])
def test_iou_matrix_of_no_boxes(count):
    assert iou_matrix(torch.zeros(count, 4), torch.zeros(0, 4)).shape == (count, 0)
