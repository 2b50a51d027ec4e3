"""Test-time augmentation and ensembles on 128 images of COCO val2017, against YOLOv5's own figures.

The figures are those of fixtures/tta/README.md: YOLOv5's ``val.py --img 640 --batch 16``, judged by pycocotools.
"""

import pytest
import torch
from reference import reference

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.families.networks.combined import inference_network
from yolofleet.families.networks.detector import square_of
from yolofleet.families.weights.reader import load_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.inference.evaluate.run import EvaluationSettings, Validation
from yolofleet.training.parallel.world import World

pytestmark = pytest.mark.slow
YOLOV5N, OLDER = "weights/yolov5n.pt", "weights/yolov5n-v6.0.pt"
TINY, TINY_CFG = "weights/yolov3-tiny.weights", "weights/yolov3-tiny.mask123.cfg"
FIGURES = [  # weights, --augment, mAP50-95 and mAP50 of YOLOv5
    ((YOLOV5N,), True, 0.36336, 0.54367),
    ((OLDER,), True, 0.34267, 0.50863),
    ((YOLOV5N, OLDER), False, 0.35962, 0.53214),
    ((YOLOV5N, OLDER), True, 0.36326, 0.53786),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOFLEET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield build_index(load_dataset(str(reference("data/coco128val/data.yaml"))), "val")


def evaluated(index, names, *, augment=False, merge="nms", fit="auto"):
    networks = [
        model_from_weights(load_weights(str(reference(name)), str(reference(TINY_CFG)) * (name == TINY)))
        for name in names
    ]
    network = inference_network(networks, torch.device("cpu"), augment=augment, merge=merge)
    settings = EvaluationSettings(ValConfig(batch=16, fit=fit), size_hw=square_of(network, 640, fit))
    world, device = World.single(), torch.device("cpu")
    return Validation(network, index, settings, world=world, device=device).evaluate()


@pytest.mark.parametrize(("names", "augment", "map50_95", "map50"), FIGURES)
def test_figures_are_those_of_yolov5_with_its_padding(index, names, augment, map50_95, map50):
    metrics = evaluated(index, names, augment=augment, fit="batch").metrics
    assert metrics.figures["mAP50-95"] == pytest.approx(map50_95, abs=0.003)
    # Images of equal aspect ratio fall into batches of other shapes than the original's, whose sort is not stable.
    assert metrics.figures["mAP50"] == pytest.approx(map50, abs=0.006)


def test_weighted_box_fusion_of_two_networks_and_three_views_beats_each_of_them(index):
    fused = evaluated(index, (YOLOV5N, OLDER), augment=True, merge="wbf").metrics.figures["mAP50-95"]
    assert fused > evaluated(index, (YOLOV5N,)).metrics.figures["mAP50-95"] + 0.01


def test_views_of_yolov3_tiny_and_an_ensemble_with_another_family(index):
    alone = evaluated(index, (TINY,)).metrics.figures["mAP50-95"]
    assert alone == pytest.approx(0.2237, abs=0.003)  # our own, benchmarks/README.md
    assert evaluated(index, (TINY,), augment=True).metrics.figures["mAP50-95"] > alone + 0.02
    both = evaluated(index, (TINY, YOLOV5N), augment=True, merge="wbf").metrics.figures["mAP50-95"]
    assert both > evaluated(index, (YOLOV5N,)).metrics.figures["mAP50-95"] + 0.01
