"""Anchors: the two figures by hand, and the search for better ones."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from yolofleet.families.networks import anchors as anchors_module
from yolofleet.families.networks.anchor_fit import CHUNK, anchor_fit
from yolofleet.families.networks.anchors import anchor_fitness, better_anchors
from yolofleet.families.yolov5.presets import preset

pytestmark = pytest.mark.long

P5 = np.array(preset("yolov5n").anchors_px)


def lognormal_sizes(count, seed=0, middle=(20.0, 25.0)):
    """[count, 2] sizes between 1 and 640 pixels."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(np.log(middle), 1.0, (count, 2))).clip(1, 640)


def test_figures_by_hand():
    sizes = np.array([[10.0, 20.0], [40.0, 40.0], [100.0, 5.0]])
    anchors = np.array([[20.0, 20.0], [80.0, 40.0]])
    # label 0: ratios 0.5 and 0.125; label 1: 0.5 and 0.5; label 2: 0.2 and 0.125. Threshold 4: above 0.25.
    assert anchor_fit(sizes, anchors, 4.0) == (2 / 3, 3 / 3)
    assert anchor_fitness(sizes, anchors, 4.0) == pytest.approx((0.5 + 0.5) / 3, abs=1e-5)
    assert anchor_fit(sizes, anchors, 6.0) == (1.0, 4 / 3)
    assert anchor_fit(sizes[:0], anchors, 4.0) == (0.0, 0.0)
    assert anchor_fitness(sizes[:0], anchors, 4.0) == 0.0


def test_figures_do_not_depend_on_how_labels_are_cut():
    sizes = lognormal_sizes(2 * CHUNK + 5)
    whole = anchor_fit(sizes, P5[0], 4.0)
    parts = [anchor_fit(part, P5[0], 4.0) for part in (sizes[:7], sizes[7:])]
    assert whole == pytest.approx((np.array(parts) * [[7], [len(sizes) - 7]]).sum(0) / len(sizes), rel=1e-12)


def test_labels_of_few_sizes_get_exactly_those():
    wanted = np.array([[8.0, 16.0], [30.0, 20.0], [70.0, 90.0], [200.0, 100.0]])
    sizes = np.repeat(wanted, 50, axis=0)
    given = np.array([[[10.0, 10.0], [20.0, 20.0]], [[50.0, 50.0], [300.0, 300.0]]])
    found = better_anchors(sizes, given, 4.0, seed=0)
    assert found.tolist() == wanted.reshape(2, 2, 2).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_search_never_makes_it_worse_and_mends_what_is_bad(seed):
    sizes = lognormal_sizes(3000, seed, middle=(6.0, 5.0))
    found = better_anchors(sizes, P5, 4.0, seed)
    assert found.shape == P5.shape
    assert (np.diff(found.prod(2).reshape(-1)) >= 0).all() and found.min() >= 2
    before, after = (anchor_fit(sizes, anchors.reshape(-1, 2), 4.0)[0] for anchors in (P5, found))
    assert before < 0.9 and after > 0.98
    again = better_anchors(sizes, found, 4.0, seed)
    assert anchor_fitness(sizes, again.reshape(-1, 2), 4.0) >= anchor_fitness(
        sizes, found.reshape(-1, 2), 4.0
    )
    assert anchor_fit(sizes, again.reshape(-1, 2), 4.0)[0] >= after


def test_anchors_that_cannot_be_bettered_stay_as_they_are():
    assert better_anchors(np.empty((0, 2)), P5, 4.0, 0) is P5
    assert better_anchors(np.full((5, 2), 0.5), P5, 4.0, 0) is P5  # too small to be looked for
    assert better_anchors(P5.reshape(-1, 2), P5, 4.0, 0) is P5


@pytest.mark.parametrize("labels", [1, 2, 5])
def test_fewer_labels_than_anchors(labels):
    sizes = lognormal_sizes(labels)
    found = better_anchors(sizes, P5, 4.0, 0).reshape(-1, 2)
    assert np.isfinite(found).all() and anchor_fit(sizes, found, 4.0)[0] == 1


def test_levels_keep_their_order():
    sizes = lognormal_sizes(500, middle=(8.0, 8.0))
    coarse_first = better_anchors(sizes, P5[::-1], 4.0, 0)
    areas = coarse_first.prod(2).mean(1)
    assert areas[0] > areas[1] > areas[2]


def test_the_search_is_repeatable_in_another_process_and_changes_with_the_seed():
    sizes = lognormal_sizes(6000)
    first = better_anchors(sizes, P5, 4.0, seed=1)
    assert np.array_equal(first, better_anchors(sizes, P5, 4.0, seed=1))
    assert not np.array_equal(first, better_anchors(sizes, P5, 4.0, seed=2))
    program = (
        "import sys, numpy as np\n"
        "from yolofleet.families.networks.anchors import better_anchors\n"
        "rng = np.random.default_rng(0)\n"
        "sizes = np.exp(rng.normal(np.log((20.0, 25.0)), 1.0, (6000, 2))).clip(1, 640)\n"
        f"print(better_anchors(sizes, np.array({P5.tolist()}), 4.0, 1).tobytes().hex())\n"
        "assert 'torch' not in sys.modules\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == first.tobytes().hex()


def test_the_search_looks_at_a_sample_of_many_labels(monkeypatch: pytest.MonkeyPatch):
    searched, refined = list[int](), anchors_module._refined

    def counted(sizes: np.ndarray, *more: Any) -> Any:
        searched.append(len(sizes))
        return refined(sizes, *more)

    monkeypatch.setattr(anchors_module, "_refined", counted)
    better_anchors(lognormal_sizes(100_000), P5, 4.0, 0)
    assert searched == [anchors_module.SAMPLE] * 2
