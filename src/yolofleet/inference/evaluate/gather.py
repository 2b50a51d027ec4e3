"""Merge the results of all ranks: one message of each rank gives every rank the same figures.

The records are sorted by image before they are summed, so figures depend neither on the number of ranks nor on the rank
of a batch.

Legend: D detections, C classes, T loss terms, B batches of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from yolofleet.data.datasets.index import DataIndex
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.tasks.task import Task

PARTS = ("load", "forward", "nms", "match", "wall")


@dataclass(frozen=True)
class Evaluation:
    """The result of a validation; equal on every rank, except ``detections``.

    Attributes:
        task: of the network. metrics: its ``Metrics``.
        losses: mean validation loss by kind (box, obj, cls); None if no loss was given.
        detections: this rank's, or all ranks' if gathered: a table such as ``task.nothing``.
        images: of the whole split.
        candidates_cut: predictions left out because an image had too many for suppression.
        seconds: by part, of the slowest rank in it: load (waiting for images), forward (copy, network, decoding,
            loss), nms, match; wall is the total.
    """

    task: Task
    metrics: Any
    losses: Mapping[str, float] | None
    detections: Any
    images: int
    candidates_cut: int
    seconds: Mapping[str, float]

    @property
    def images_per_s(self) -> float:
        """Images of all ranks per second of the slowest rank."""
        return self.images / max(self.seconds["wall"], 1e-9)


@dataclass(frozen=True)
class Detected:
    """The results of one batch."""

    found: Any
    candidates_cut: int
    ordinal: int
    loss: tuple[NDArray[np.float64], NDArray[np.float64]] | None  # its sums and divisors, each [T]
    forward_s: float
    nms_s: float


class Shard:
    """Collects the results of one rank's batches."""

    def __init__(self, task: Task) -> None:
        self._nothing = task.nothing
        self._batches: list[Detected] = []

    def add(self, detected: Detected) -> None:
        self._batches.append(detected)

    def detections(self) -> Any:
        """Return the detections sorted by image position; the order within an image stays."""
        return by_image(self._nothing.joined([self._nothing, *(batch.found for batch in self._batches)]))

    def to_bytes(
        self,
        judged: Mapping[str, NDArray[Any]],
        images: int,
        seconds: Mapping[str, float],
        with_detections: bool,
    ) -> bytes:
        arrays: dict[str, NDArray[Any]] = {
            **{f"judged/{name}": array for name, array in judged.items()},
            "images": np.array([images], np.int64),
            "seconds": np.array([seconds[part] for part in PARTS]),
            "candidates_cut": np.array([sum(batch.candidates_cut for batch in self._batches)], np.int64),
        }
        if losses := [(batch.ordinal, *batch.loss) for batch in self._batches if batch.loss is not None]:
            ordinals, sums, divisors = zip(*losses, strict=True)
            arrays["loss_ordinals"] = np.array(ordinals, np.int64)
            arrays["loss_sums"] = np.stack(sums)  # [B, T]
            arrays["loss_divisors"] = np.stack(divisors)
        if with_detections:
            arrays |= {f"found/{name}": array for name, array in vars(self.detections()).items()}
        return save_arrays(arrays)


def merged(
    payloads: Sequence[bytes], task: Task, index: DataIndex, loss: DetectionLoss | None, own: Any
) -> Evaluation:
    """Return the evaluation from every rank's bytes; with ``own`` detections, or those in the bytes."""
    shards = [load_arrays(payload) for payload in payloads]
    images = int(sum(shard["images"][0] for shard in shards))
    assert images == len(index), f"{images} of {len(index)} images were evaluated"
    if own is None:
        own = by_image(
            task.nothing.joined([type(task.nothing)(**_under("found/", shard)) for shard in shards])
        )
    return Evaluation(
        task=task,
        metrics=task.metrics([_under("judged/", shard) for shard in shards], index.names),
        losses=None if loss is None else _mean_losses(loss, shards),
        detections=own,
        images=images,
        candidates_cut=int(sum(shard["candidates_cut"][0] for shard in shards)),
        seconds=dict(
            zip(PARTS, np.max([shard["seconds"] for shard in shards], axis=0).tolist(), strict=True)
        ),
    )


def by_image(found: Any) -> Any:
    """Return a table of results sorted by image; the order within an image stays."""
    return found.rows(np.argsort(found.image, kind="stable"))


def _under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _mean_losses(loss: DetectionLoss, shards: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, float]:
    """Return mean losses: sums over divisors of all batches, each added in the order of the batches."""
    busy = [shard for shard in shards if "loss_ordinals" in shard]
    order = np.argsort(np.concatenate([shard["loss_ordinals"] for shard in busy]))
    sums, divisors = (
        np.cumsum(np.concatenate([shard[name] for shard in busy])[order], axis=0)[-1]  # cumsum adds in order
        for name in ("loss_sums", "loss_divisors")
    )
    means = loss.gains.double().cpu().numpy() * sums / np.maximum(divisors, 1)
    by_kind: dict[str, float] = {}
    for term, mean in zip(loss.terms, means.tolist(), strict=True):
        kind = term.split("/")[0]
        by_kind[kind] = by_kind.get(kind, 0.0) + mean
    return by_kind
