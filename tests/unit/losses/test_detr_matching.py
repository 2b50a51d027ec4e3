"""Matching of predictions to labels: against a search through all assignments, ties, bad numbers, crowded images."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from yolofleet.families.rtdetr import matching
from yolofleet.families.rtdetr.matching import Matching, Pairs, costs


def random_case(seed: int, counts: list[int], outputs: int, queries: int, classes: int = 3):
    rng = np.random.default_rng(seed)
    most = max(counts, default=0)

    def boxes(*shape: int) -> torch.Tensor:
        centre, size = rng.uniform(0.3, 0.7, (*shape, 2)), rng.uniform(0.05, 0.4, (*shape, 2))
        return torch.from_numpy(np.concatenate([centre, size], -1).astype(np.float32))

    names = np.full((len(counts), most), -1)
    for i, count in enumerate(counts):
        names[i, :count] = rng.integers(0, classes, count)
    logits = torch.from_numpy(rng.normal(size=(len(counts), outputs, queries, classes)).astype(np.float32))
    return boxes(len(counts), outputs, queries), logits, boxes(len(counts), most), names


def matched(
    boxes: torch.Tensor, logits: torch.Tensor, true_boxes: torch.Tensor, names: np.ndarray
) -> tuple[Pairs, torch.Tensor]:
    matching = Matching(boxes, logits, true_boxes, names)
    return matching.pairs(), matching.factor


def pairs_of(pairs: Pairs, output: int, image: int) -> set[tuple[int, int]]:
    mine = (pairs.output == output) & (pairs.image == image)
    return set(zip(pairs.query[mine].tolist(), pairs.label[mine].tolist(), strict=True))


@pytest.mark.parametrize("queries", [3, 6])
def test_the_sum_of_costs_is_the_least_of_all_assignments(queries: int) -> None:
    counts = [4, 0, 1, 3]  # four labels and three queries: one label is left out
    boxes, logits, true_boxes, names = random_case(1, counts, 2, queries)
    pairs, factor = matched(boxes, logits, true_boxes, names)
    assert factor == 1
    for output, (image, count) in itertools.product(range(2), enumerate(counts)):
        found = pairs_of(pairs, output, image)
        size = min(count, queries)
        assert len(found) == size == len({query for query, _ in found}) == len({label for _, label in found})
        table = {
            (query, label): float(
                costs(
                    boxes[image, output, query],
                    logits[image, output, query, names[image, label]],
                    true_boxes[image, label],
                )
            )
            for query in range(queries)
            for label in range(count)
        }
        chosen = itertools.product(
            itertools.permutations(range(queries), size), itertools.combinations(range(count), size)
        )
        least = min(sum(table[pair] for pair in zip(q, t, strict=True)) for q, t in chosen)
        assert sum(table[pair] for pair in found) == pytest.approx(least, abs=1e-6)


def test_costs_worked_by_hand() -> None:
    """A prediction of half the label's width, at probability 0.5."""
    cost = costs(torch.tensor([0.5, 0.5, 0.1, 0.2]), torch.tensor(0.0), torch.tensor([0.5, 0.5, 0.2, 0.2]))
    # 2 (0.25 - 0.75) 0.25 ln 2 + 5 x 0.1 - 2 x 0.5; the hull is the label
    assert float(cost) == pytest.approx(-0.25 * np.log(2) + 0.5 - 1.0, abs=1e-6)


def test_equal_costs_have_one_answer_in_any_company() -> None:
    boxes, logits, true_boxes, names = random_case(2, [3], 1, 8)
    boxes[:], logits[:], true_boxes[:], names[:] = boxes[0, 0, 0], 0.0, true_boxes[0, 0], 1
    alone, _ = matched(boxes, logits, true_boxes, names)
    assert pairs_of(alone, 0, 0) == {(0, 0), (1, 1), (2, 2)}
    others = random_case(3, [5, 2], 1, 8)
    padding = torch.zeros(1, 2, 4), np.full((1, 2), -1)
    joint, _ = matched(
        torch.cat([others[0], boxes]),
        torch.cat([others[1], logits]),
        torch.cat([others[2], torch.cat([true_boxes, padding[0]], 1)]),
        np.concatenate([others[3], np.concatenate([names, padding[1]], 1)]),
    )
    assert pairs_of(joint, 0, 2) == pairs_of(alone, 0, 0)


def test_threads_and_parts_do_not_change_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(4, [7, 0, 12, 1, 9], 3, 20)
    whole, _ = matched(*case)
    monkeypatch.setattr(matching, "THREADED", 0)
    monkeypatch.setattr(matching, "COSTED", 2)
    parts, _ = matched(*case)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(whole, parts, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cost_that_is_not_finite_makes_the_factor_nan(bad: float) -> None:
    boxes, logits, true_boxes, names = random_case(5, [2, 1], 2, 4)
    boxes[1, 0, 3, 0] = bad
    pairs, factor = matched(boxes, logits, true_boxes, names)
    assert factor.isnan()
    assert len(pairs.query) == 6, "it matches all the same"


def test_images_without_labels_have_no_matches() -> None:
    for counts in ([], [0], [0, 0]):
        pairs, factor = matched(*random_case(6, counts, 2, 4))
        assert factor == 1
        assert [len(part) for part in pairs] == [0] * 5
        assert pairs.sums(torch.zeros(0, 2), 2).tolist() == [[0, 0], [0, 0]]
