"""The published yolov5n on 128 images of COCO val2017: figures of the original's detections."""

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from detection_sets import DetectionSet, pycocotools_figures
from reference import reference

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.families.networks.detector import fuse
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.inference.evaluate.run import EvaluationSettings, Validation
from yolofleet.tasks.boxes.coco import FIGURES
from yolofleet.tasks.boxes.matching import labels_of
from yolofleet.training.parallel.world import World

# pycocotools on the detections of the original's val.py (640, batch 8, conf 0.001, iou 0.6, 300 boxes).
# Ours pads each image by itself and not to the widest of its batch, which moves the figures by 0.003.
MAP50_95, MAP50 = 0.345, 0.530


@pytest.mark.slow
def test_published_weights_reach_their_figures_and_pycocotools_agrees(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path))
    weights, data = reference("weights/yolov5n.pt"), reference("data/coco128val/data.yaml")
    model = fuse(perturbed(model_from_weights(read_weights(weights))).eval())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks memory_format
    index = build_index(load_dataset(str(data)), "val")
    result = Validation(
        model, index, EvaluationSettings(ValConfig(batch=8)), world=World.single(), device=torch.device("cpu")
    ).evaluate()
    assert result.images == 128 and result.candidates_cut == 0
    compare(
        (result.metrics.figures["mAP50-95"], result.metrics.figures["mAP50"]), (MAP50_95, MAP50), atol=0.005
    )

    pytest.importorskip("pycocotools")
    assert (np.diff(index.image_ids) > 0).all()  # so positions can stand for ids below
    positions = np.arange(len(index))
    everything = DetectionSet(80, positions, labels_of(index, positions), result.detections)
    figures, _ = pycocotools_figures(everything)
    ours = [result.metrics.figures[name] for name in FIGURES]
    compare(np.subtract(ours, figures), np.zeros(len(ours)), atol=1e-12)  # both move with the weights
