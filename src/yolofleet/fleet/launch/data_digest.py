"""``python -m yolofleet.fleet.launch.data_digest``: print digests of a data set, for the doctor, which compares hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.listing import files_digest
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.fleet.doctor.subprocess_probes import answer
from yolofleet.support.errors import YolofleetError


def digests(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a digest of every split: equal on two hosts if names, image sizes, sizes of files and labels are equal.

    Args:
        arguments: ``data``: the data set; ``single_cls``: all its classes are one.
    Returns:
        ``splits``: digest, number of images and number of labels of each; ``problem``: why the data set cannot be
        read, else "".
    """
    splits: dict[str, Any] = {}
    try:
        spec = load_dataset(str(arguments["data"]))
        for split in ("train", "val"):
            if split in spec.splits:
                index = build_index(spec, split, single_cls=bool(arguments.get("single_cls")))
                splits[split] = {
                    "digest": files_digest(index),
                    "images": len(index),
                    "labels": len(index.classes),
                }
    except YolofleetError as problem:
        return {"splits": splits, "problem": problem.what}
    return {"splits": splits, "problem": ""}


if __name__ == "__main__":
    answer(digests)
