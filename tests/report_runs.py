"""Run folders as a training leaves them, made in a second: for the tests of reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from small_data import picture, write_picture

from yolofleet.config.load import resolve_train
from yolofleet.config.stored.job import dump_config
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.inference.evaluate.figures import shared_sample, write_figures
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.run import PARTS
from yolofleet.runs.report.clock import PHASES
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import ResultsTable
from yolofleet.storage.atomic import write_bytes, write_json, write_text
from yolofleet.tasks.boxes.matching import ScoredBoxes, labels_of
from yolofleet.tasks.boxes.task import BOXES

__all__ = ["evaluated", "made_run", "picture", "split_of"]


def split_of(root: Path, names: Sequence[str], images: int = 6, *, side_px: int = 96) -> DataIndex:
    """The index of images with two labels each; ``YOLOFLEET_CACHE`` must be a temporary folder."""
    rng = np.random.default_rng(0)
    for number in range(images):
        write_picture(root / "images" / "train" / f"{number}.jpg", side_px, side_px * 3 // 4, seed=number)
        rows = [
            f"{rng.integers(len(names))} {x:.3f} {y:.3f} {w:.3f} {h:.3f}"
            for x, y, w, h in np.hstack([rng.uniform(0.3, 0.7, (2, 2)), rng.uniform(0.1, 0.5, (2, 2))])
        ]
        path = root / "labels" / "train" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(rows) + "\n")
    yaml = root / "data.yaml"
    text = json.dumps({"train": "images/train", "val": "images/train", "names": list(names)})
    yaml.write_text(text, encoding="utf-8")
    return build_index(load_dataset(str(yaml)), "val")


def evaluated(index: DataIndex, seed: int = 0, noise: float = 0.15) -> Evaluation:
    """A validation whose detections are the labels, moved at random, with some wrong classes and some too many."""
    rng = np.random.default_rng(seed)
    labels = labels_of(index, np.arange(len(index)))
    chosen = np.sort(rng.integers(0, len(labels.image), 2 * len(labels.image)))
    boxes = labels.boxes_xywh_px[chosen]
    boxes = boxes + rng.normal(0, noise, boxes.shape) * boxes[:, [2, 3, 2, 3]]
    boxes[:, 2:] = np.maximum(boxes[:, 2:], 1)
    wrong = rng.random(len(chosen)) < 0.2
    classes = np.where(wrong, rng.integers(0, len(index.names), len(chosen)), labels.classes[chosen])
    found = ScoredBoxes(labels.image[chosen], classes, rng.random(len(chosen)), boxes)
    judged = BOXES.judged(index, np.arange(len(index)), found, None)
    return Evaluation(
        task=BOXES,
        metrics=BOXES.metrics([judged], index.names),
        losses={"box": 0.1, "obj": 0.2, "cls": 0.3},
        detections=found,
        images=len(index),
        candidates_cut=0,
        seconds=dict.fromkeys(PARTS, 0.5),
    )


def made_run(
    path: Path,
    index: DataIndex | None,
    *,
    hosts: Sequence[str] = ("node-a", "node-b"),
    epochs: int = 6,
    seed: int = 0,
    finished: bool = True,
    settings: Sequence[str] = (),
) -> RunFolder:
    """A run on one process for each of ``hosts``, which was started again after half of its epochs.

    Args:
        index: of the validation; None: of a run that has not validated.
        settings: more settings as name=value.
    """
    folder, rng = RunFolder(path), np.random.default_rng(seed)
    folder.make_tree()
    given = {"data": "data.yaml", "model": "yolov5n", "epochs": str(epochs), "seed": str(seed)}
    given |= dict(text.split("=", 1) for text in settings)
    write_text(folder.config, dump_config(*resolve_train(given)))
    table, at_s, lines = ResultsTable(folder.results_csv, ("box", "obj", "cls")), 1e9, []

    def event(kind: str, **fields: object) -> None:
        lines.append(json.dumps({"time": at_s, "rank": 0, "host": hosts[0], "kind": kind, **fields}))

    at_s += 5
    event("start", start_s=5.0, world=len(hosts), restarts=0, step=0, versions={"torch": "2.9"})
    for epoch in range(1, epochs + 1):
        if epoch == epochs // 2 + 1:
            at_s += 12
            lost = {
                "time": at_s - 10,
                "kind": "restart",
                "step": 10 * (epoch - 1),
                "why": "rank 1 was killed",
            }
            write_text(folder.launcher_events, json.dumps(lost) + "\n")
            event("start", start_s=4.0, world=len(hosts), restarts=1, step=10 * (epoch - 1), versions={})
        compute = [6 + 2 * (rank == 1) + rng.random() for rank in range(len(hosts))]
        seconds = [[0.0, 0.5, own, max(compute) - own, 1.5, 0.2] for own in compute]
        at_s += max(map(sum, seconds))
        event("phases", epoch=epoch, hosts=list(hosts), seconds=seconds)
        accuracy = 1 - 0.9**epoch
        row = {"epoch": epoch, "step": 10 * epoch, "images": 160 * epoch, "lr": 0.01 / epoch, "seconds": 10.0}
        row |= {f"train/{kind}_loss": rng.random() * 0.01 + 1 / epoch for kind in ("box", "obj", "cls")}
        row |= {f"val/{kind}_loss": rng.random() * 0.02 + 1.1 / epoch for kind in ("box", "obj", "cls")}
        row |= {"metrics/mAP50": accuracy, "metrics/mAP50-95": accuracy / 2, "metrics/precision": accuracy}
        row |= {"metrics/recall": accuracy * 0.9, "images_per_s": 100 + rng.random(), "val_seconds": 1.5}
        row |= {"data_share": 0.1, "compute_share": 0.8, "comm_share": 0.1}
        table.write(row)
    if finished:
        event("end", step=10 * epochs, seconds={})
    write_text(folder.events(0), "".join(f"{line}\n" for line in lines))
    if index is None:
        return folder
    evaluation = evaluated(index, seed)
    write_figures(folder, {"train": index, "val": index}, evaluation, shared_sample(evaluation, None))
    write_bytes(folder.plots / "train_step0.jpg", Path(index.path(0)).read_bytes())
    if finished:
        results = {
            "metrics": dict(evaluation.metrics.figures),
            "weights_sha256": f"{seed:064x}",
            "best": {"epoch": epochs, "fitness": 0.4},
            "steps": 10 * epochs,
            "images_seen": 160 * epochs,
            "fleet": {"processes": len(hosts), "device": "cpu", "hosts": list(hosts)},
            "versions": {"yolofleet": "0.1.0", "torch": "2.9"},
            "seconds": dict.fromkeys(PHASES, 10.0),
        }
        write_json(folder.results_json, results)
    return folder
