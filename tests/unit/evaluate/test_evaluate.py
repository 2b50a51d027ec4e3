"""Evaluation from image files to figures, with a network that finds red and blue rectangles."""

import json
import threading
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from detection_sets import run_cocoeval
from label_rows import rows_of

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.families.build import build_model
from yolofleet.families.networks import index_limit
from yolofleet.families.networks.combined import CombinedNetwork
from yolofleet.families.networks.description import describe
from yolofleet.inference.evaluate.batches import val_batches
from yolofleet.inference.evaluate.run import EvaluationSettings, Validation
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.coco import FIGURES
from yolofleet.tasks.boxes.files import detections_as_coco_json, detections_as_yolo_txt
from yolofleet.tasks.boxes.matching import labels_of
from yolofleet.training.parallel.world import World

SIZES_WH = [(96, 64), (64, 96), (64, 64), (40, 30), (200, 110), (96, 64), (33, 90)]


class RectangleFinder:
    """One box per class: the extent of what is red (class 0) or blue (class 1), scored by its width."""

    task, nc, needs_nms = "boxes", 2, True
    strides: tuple[int, ...] = (8, 16, 32)
    training = False

    def __call__(self, images):
        red, green, blue = images.unbind(1)
        rows = []
        for mask in ((red > 0.6) & (blue < 0.4), (blue > 0.6) & (red < 0.4)):
            assert not (mask & (green > 0.4)).any()
            x = torch.arange(images.shape[3])
            y = torch.arange(images.shape[2])
            wide, high = mask.any(1), mask.any(2)  # [N, W], [N, H]
            x1, x2 = (torch.where(wide, x, 999).amin(1), torch.where(wide, x, -1).amax(1) + 1)
            y1, y2 = (torch.where(high, y, 999).amin(1), torch.where(high, y, -1).amax(1) + 1)
            rows.append(torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], 1))
        boxes = torch.stack(rows, 1).float()  # [N, 2, 4]
        objectness = (0.3 + boxes[..., 2:3] / 200).clamp(min=0) * (boxes[..., 2:3] > 0)
        return [torch.cat([boxes, objectness, torch.eye(2).expand(len(images), 2, 2)], 2)]

    def decode(self, raws):
        return Decoded(raws[0])


class CentreLoss:
    """Distance of found and labelled centres, as fractions of the image: tells whether labels moved along."""

    terms: tuple[str, ...] = ("box/0", "obj/0", "obj/1")
    gains = torch.tensor([1.0, 0.5, 0.5])
    times_images, predicted_divisor = True, False

    def at(self, progress):
        return self

    def match(self, labels, images, size_hw, keys=()):
        return SimpleNamespace(
            labels=labels, size_hw=size_hw, counts=np.array([len(labels), images, images], np.int64)
        )

    def sums(self, raws, targets):
        h, w = targets.size_hw
        labels = targets.labels
        found = raws[0][labels.image, labels.classes, :4].numpy() / np.array([w, h, w, h])
        away = torch.tensor(np.abs(found - labels.boxes).sum())
        return torch.stack([away, raws[0][..., 4].sum() * 0.1, raws[0].new_tensor(len(raws[0]))]).float()


@dataclass
class ThreadWorld:
    """A rank of a world whose ranks are threads."""

    rank: int
    size: int
    meeting: threading.Barrier
    board: list

    def all_gather_bytes(self, payload):
        self.board[self.rank] = payload
        self.meeting.wait(900)
        return list(self.board)


def on_ranks(size, work):
    """``work(world)`` of every rank, in rank order.

    One rank runs in this thread. A thread that has used OpenCV locks a mutex of it while it ends, after ``join``; loader
    processes that are forked at that moment find it locked for ever.
    """
    if size == 1:
        return [work(ThreadWorld(0, 1, threading.Barrier(1), [b""]))]
    meeting, board, done = threading.Barrier(size), [b""] * size, [None] * size

    def run(rank):
        done[rank] = work(ThreadWorld(rank, size, meeting, board))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in done)
    return done


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Seven images of several shapes; image 3 has no rectangle and no label."""
    root = tmp_path_factory.mktemp("rectangles")
    (root / "images").mkdir()
    (root / "labels").mkdir()
    for i, (w, h) in enumerate(SIZES_WH):
        image = np.full((h, w, 3), 114, np.uint8)
        lines = []
        for c, bgr in enumerate([(0, 0, 255), (255, 0, 0)] if i != 3 else []):
            x1, x2 = c * (w // 2), c * (w // 2) + w // 2 - 3 - i
            y1, y2 = (3 * i + 5 * c) % (h // 2), (3 * i + 5 * c) % (h // 2) + h // 2
            image[y1:y2, x1:x2] = bgr
            lines.append(f"{c} {(x1 + x2) / 2 / w} {(y1 + y2) / 2 / h} {(x2 - x1) / w} {(y2 - y1) / h}")
        name = f"{(i * 5) % 7:03d}"  # ids not in the order of anything
        cv2.imwrite(str(root / "images" / f"{name}.png"), image)
        (root / "labels" / f"{name}.txt").write_text("\n".join(lines))
    (root / "data.yaml").write_text("train: images\nval: images\nnames: [red, blue]\n")
    return build_index(load_dataset(str(root / "data.yaml")), "val")


def settings_of(gather_detections=True, size_hw=None, classes=None, **more):
    return EvaluationSettings(
        ValConfig(**more), size_hw=size_hw, classes=classes, gather_detections=gather_detections
    )


def evaluated(index, world, **more):
    settings = settings_of(**{"img": 96, "batch": 2} | more)
    cpu = torch.device("cpu")
    return Validation(
        RectangleFinder(), index, settings, world=world, device=cpu, loss=CentreLoss()
    ).evaluate()


def test_boxes_come_back_to_native_pixels_and_match_the_labels(index):
    (result,) = on_ranks(1, lambda world: evaluated(index, world))
    assert result.metrics.figures["mAP50"] == pytest.approx(1.0, abs=1e-12)
    assert result.metrics.figures["P"] == result.metrics.figures["R"] == 1.0
    assert result.images == 7 and result.candidates_cut == 0
    assert result.metrics.confusion.tolist() == [[6, 0, 0], [0, 6, 0], [0, 0, 0]]
    assert result.losses["box"] < 0.05  # four fractions, half a pixel each
    assert result.images_per_s > 0 and result.seconds["wall"] >= result.seconds["load"]
    assert {name: row["labels"] for name, row in result.metrics.per_class.items()} == {"red": 6, "blue": 6}


@pytest.mark.parametrize("size", [2, 3, 11])
def test_every_rank_of_any_world_gets_the_figures_of_one(index, size):
    (alone,) = on_ranks(1, lambda world: evaluated(index, world))
    for result in on_ranks(size, lambda world: evaluated(index, world)):
        assert result.metrics.figures == alone.metrics.figures
        assert result.metrics.per_class == alone.metrics.per_class
        assert result.losses == alone.losses  # the same floats, added in the same order
        assert (result.metrics.confusion == alone.metrics.confusion).all()
        for name in ("image", "classes", "boxes_xywh_px", "scores"):
            assert (getattr(result.detections, name) == getattr(alone.detections, name)).all()


def test_without_gathering_each_rank_keeps_its_own_detections(index):
    results = on_ranks(2, lambda world: evaluated(index, world, gather_detections=False))
    mine, theirs = (set(result.detections.image.tolist()) for result in results)
    assert not mine & theirs and mine | theirs == {i for i in range(7) if len(index.labels(i))}
    assert results[0].metrics.figures == results[1].metrics.figures


def test_figures_do_not_depend_on_the_batch(index):
    (small,) = on_ranks(1, lambda world: evaluated(index, world, batch=1))
    (large,) = on_ranks(1, lambda world: evaluated(index, world, batch=7))
    assert small.metrics.figures == large.metrics.figures


def test_written_json_gives_pycocotools_the_same_figures(index):
    pycocotools = pytest.importorskip("pycocotools.coco")
    from pycocotools.cocoeval import COCOeval

    (result,) = on_ranks(1, lambda world: evaluated(index, world))
    labels = labels_of(index, np.arange(len(index)))
    ids = index.image_ids.tolist()
    truth = {
        "images": [{"id": i} for i in ids],
        "categories": [{"id": c} for c in range(2)],
        "annotations": [
            {"id": k + 1, "image_id": ids[i], "category_id": c, "bbox": box, "area": area, "iscrowd": 0}
            for k, (i, c, box, area) in enumerate(
                zip(
                    labels.image.tolist(),
                    labels.classes.tolist(),
                    labels.boxes_xywh_px.tolist(),
                    labels.area_px.tolist(),
                    strict=True,
                )
            )
        ],
    }
    rows = json.loads(json.dumps(detections_as_coco_json(result.detections, ids)))
    figures, _ = run_cocoeval(pycocotools.COCO, COCOeval, truth, rows)
    np.testing.assert_allclose(
        [result.metrics.figures[name] for name in FIGURES], figures, rtol=0, atol=1e-12
    )
    assert {row["category_id"] for row in detections_as_coco_json(result.detections, ids, [7, 9])} == {7, 9}


def test_written_text_is_near_the_labels(index):
    (result,) = on_ranks(1, lambda world: evaluated(index, world))
    texts = detections_as_yolo_txt(result.detections, index, scores=True)
    assert set(texts) == {i for i in range(7) if len(index.labels(i))}
    for image, text in texts.items():
        found = sorted([float(value) for value in line.split()] for line in text.splitlines())
        for line, label in zip(found, sorted(rows_of(index.labels(image)).tolist()), strict=True):
            assert line[:5] == pytest.approx(label, abs=0.03) and 0 < line[5] <= 1


def test_another_number_of_classes_is_refused(index):
    model = RectangleFinder()
    model.nc = 3
    with pytest.raises(ConfigError, match="3 classes, the data set 2"):
        Validation(
            model,
            index,
            EvaluationSettings(ValConfig()),
            world=ThreadWorld(0, 1, threading.Barrier(1), [b""]),
            device=torch.device("cpu"),
        ).evaluate()


class NamedFinder(RectangleFinder):
    names, pads_to_square, anchors_px, assumed = ("red", "blue"), False, None, ()


def test_an_ensemble_of_views_has_equal_figures_on_every_fleet(index):
    network = CombinedNetwork([NamedFinder(), NamedFinder()], augment=True, merge="wbf")  # type: ignore[list-item]

    def evaluate(world):
        settings = EvaluationSettings(ValConfig(img=96, batch=2), gather_detections=True)
        return Validation(network, index, settings, world=world, device=torch.device("cpu")).evaluate()

    (alone,) = on_ranks(1, evaluate)
    assert alone.metrics.figures["mAP50"] > 0.9
    for result in on_ranks(3, evaluate):
        assert result.metrics.figures == alone.metrics.figures
        assert (result.detections.boxes_xywh_px == alone.detections.boxes_xywh_px).all()


def test_classes_leave_out_labels_and_detections_of_the_others(index):
    (only,) = on_ranks(1, lambda world: evaluated(index, world, classes=(1,)))
    assert set(only.detections.classes.tolist()) == {1}
    assert only.metrics.figures["mAP50"] == pytest.approx(1.0)
    assert only.metrics.per_class["red"]["labels"] == 0


def test_batches_that_share_a_shape_are_sorted_by_aspect_ratio(index):
    batches = val_batches(index, 96, 3, 32, shares_shape=True)
    assert sorted(i for batch in batches for i in batch.image_idx) == list(range(7))
    ratios = [[SIZES_WH[i][1] / SIZES_WH[i][0] for i in order_of(index, batch)] for batch in batches]
    assert all(max(a) <= min(b) for a, b in pairwise(ratios))
    alone = {b.image_idx[0]: b.size_hw for b in val_batches(index, 96, 1, 32)}
    for batch in batches:
        assert batch.size_hw == tuple(np.max([alone[i] for i in batch.image_idx], axis=0))


def order_of(index, batch):
    """Numbers in ``SIZES_WH`` of a batch's images, which have other names."""
    return [next(k for k in range(7) if f"{(k * 5) % 7:03d}" in index.path(i)) for i in batch.image_idx]


def test_a_batch_has_no_tensor_that_kernels_cannot_index(index, monkeypatch):
    """The images are the largest tensor: 3 x 96 x 96; the same figures come from smaller batches."""
    model = build_model(describe("yolov5n"), 2).eval()
    sizes = []
    model.register_forward_pre_hook(
        lambda _, inputs: sizes.append(len(inputs[0])) if inputs[0].device.type == "cpu" else None
    )

    def figures():
        sizes.clear()
        settings = EvaluationSettings(ValConfig(img=96, batch=7, conf=0.0), size_hw=(96, 96))
        found = Validation(
            model, index, settings, world=World.single(), device=torch.device("cpu")
        ).evaluate()
        return found.metrics.figures, max(sizes)

    whole, most = figures()  # four images have one shape
    assert most > 3
    largest = index_limit.INDEX_LIMIT // index_limit.images_within_index(model, 96)
    monkeypatch.setattr(index_limit, "INDEX_LIMIT", 3 * (largest + 1))
    parts, most = figures()
    assert most == 3
    assert parts == pytest.approx(whole)
