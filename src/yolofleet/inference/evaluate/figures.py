"""The figures of a validation as values of ``report.json``.

Rank 0 writes the file once, at the end of a run, so that the page can be made again and runs can be compared without
the data set. What depends on single images is of a part of them, the same on every fleet, so the time does not grow with
the data set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.listing import overlap_notes
from yolofleet.data.datasets.scan import Ranks
from yolofleet.inference.evaluate.gather import Evaluation, by_image
from yolofleet.inference.evaluate.summary import evaluation_figures
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import jsonable, write_text
from yolofleet.tasks.boxes.page import label_figures
from yolofleet.tasks.task import sampled

MOST_OF_IMAGE = 100  # found objects in the file


def shared_sample(evaluation: Evaluation, ranks: Ranks | None) -> Any:
    """Return what all ranks found in the sampled images, by image and falling score, at most ``MOST_OF_IMAGE`` of each.

    Collective: every rank, unless ``ranks`` is None because the evaluation has gathered all of them already.
    """
    found = evaluation.detections
    found = found.rows(np.isin(found.image, sampled(evaluation.images)))
    found = found.rows(np.lexsort((-found.scores, found.image)))
    first = np.searchsorted(found.image, found.image)
    found = found.rows(np.arange(len(first)) - first < MOST_OF_IMAGE)
    if ranks is None:
        return found
    mine = save_arrays({name: np.ascontiguousarray(values) for name, values in vars(found).items()})
    parts = [type(found)(**load_arrays(packed)) for packed in ranks.all_gather_bytes(mine)]
    return by_image(found.joined(parts))


def write_figures(
    folder: RunFolder,
    splits: Mapping[str, DataIndex],
    evaluation: Evaluation | None = None,
    found: Any = None,
) -> None:
    """Write ``report.json``: the label statistics and, if there is a validation, its figures.

    Args:
        splits: by name; the last one is that of ``evaluation``.
        found: of :func:`shared_sample`.
    Raises:
        StorageError: the file cannot be written.
    """
    index = list(splits.values())[-1]
    labels = {name: label_figures(split) for name, split in splits.items()}
    values: dict[str, Any] = {"names": list(index.names), "labels": labels}
    values |= {"notes": notes} if (notes := overlap_notes(list(splits.values()))) else {}
    if evaluation is not None and found is not None:
        figures = evaluation_figures(evaluation)
        values |= {"metrics": figures["metrics"], "per_class": figures["per_class"]}
        values |= {"losses": dict(evaluation.losses or {})}
        values |= evaluation.task.page(evaluation.metrics, found, index)
    write_text(folder.report_json, json.dumps(jsonable(values), separators=(",", ":")) + "\n")
