"""COCO figures of masks equal pycocotools', on any number of ranks."""

import numpy as np
import pytest
from conditioning import compare
from mask_sets import coco_files, pycocotools_figures, random_masks
from walks import sampled

from yolofleet.tasks.boxes.coco import FIGURES
from yolofleet.tasks.masks.task import MASK, MASKS


def figures_of(index, found, ranks):
    """As that many ranks compute them, each of its own images."""
    owners = np.arange(len(index)) % ranks
    parts = []
    for rank in range(ranks):
        images = np.flatnonzero(owners == rank)
        parts.append(MASKS.judged(index, images, found.rows(np.isin(found.image, images)), None))
    return MASKS.metrics(parts, index.names)


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_random_masks_have_the_figures_of_pycocotools(seed):
    pytest.importorskip("pycocotools")
    rng = np.random.default_rng(1000 + seed)
    index, found = random_masks(
        seed,
        images=int(rng.integers(2, 14)),
        classes=int(rng.integers(1, 5)),
        most_labels=int(rng.choice([2, 12])),
        most_found=300 if seed % 5 == 0 else int(rng.choice([4, 40])),
    )
    assert len(found), "pycocotools needs a result"
    truth, results = coco_files(index, found)
    ours = figures_of(index, found, 1)
    for kind, of_kind, metrics in (("segm", MASK, ours.masks), ("bbox", "", ours)):
        figures, per_class = pycocotools_figures(truth, _of_kind(results, found, kind), kind)
        compare([ours.figures[of_kind + name] for name in FIGURES], figures, rtol=0, atol=1e-12)
        compare(
            [[row["AP"], row["AP50"]] for row in list(metrics.per_class.values())],
            per_class,
            rtol=0,
            atol=1e-12,
        )
    for ranks in (2, 3):
        other = figures_of(index, found, ranks)
        assert (other.figures, other.per_class) == (ours.figures, ours.per_class)
        assert (other.masks.confusion == ours.masks.confusion).all()


def _of_kind(results, found, kind):
    if kind == "segm":
        return results
    boxes = found.boxes_xywh_px.tolist()
    return [{**row, "bbox": box, "segmentation": []} for row, box in zip(results, boxes, strict=True)]
