"""Validation on all ranks: each rank evaluates batches of a fixed list, and one gather gives equal figures everywhere.

The list of batches and the shape of each image depend only on the data (``val_batches``). The gathered records are sorted
by image before they are summed. So the figures do not depend on the number of ranks or on the rank of a batch.

Legend: N images of a batch, D detections, C classes, T loss terms, B batches of a rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor

from yolofleet import devices
from yolofleet.config.schema import ValConfig
from yolofleet.datasets.index import DataIndex
from yolofleet.errors import ConfigError
from yolofleet.evaluate.coco import CocoMetrics, summarize
from yolofleet.evaluate.matching import (
    Labels,
    MatchRecords,
    ScoredBoxes,
    confusion_matrix,
    joined,
    match_detections,
    merge,
    rows,
)
from yolofleet.geometry.letterbox import Letterbox
from yolofleet.geometry.nms import detections as decoded_to_detections
from yolofleet.geometry.tiles import check_tiles, merged_tiles, parts_of
from yolofleet.input.cache import ImageCache
from yolofleet.input.loader import (
    ValBatch,
    tile_batches,
    tile_loader,
    tile_parts,
    val_batches,
    val_loader,
)
from yolofleet.losses.loss import DetectionLoss
from yolofleet.models.cost import images_within_index, may_exceed_index
from yolofleet.models.detector import Detector
from yolofleet.models.precision import autocast

_DETECTION_FIELDS = tuple(field.name for field in fields(ScoredBoxes))
Item = TypeVar("Item")
Done = TypeVar("Done")
Loaded = tuple[ValBatch, Tensor, list[Letterbox]]  # as of ``data.loader.val_loader``
OnBatch = Callable[[int, int], None]  # (batches done, batches of this rank)


class ValidationStopped(Exception):
    """A rank stopped the validation before its last batch, so there are no figures; raised on every rank alike."""


PARTS = ("load", "forward", "nms", "match", "wall")


class Ranks(Protocol):
    """The part of ``parallel.world.World`` that evaluation uses."""

    rank: int
    size: int

    def all_gather_bytes(self, payload: bytes, /) -> list[bytes]: ...


class Network(Protocol):
    """The part of ``models.detector.Detector`` that evaluation uses; an exported file has it too."""

    training: bool
    nc: int
    strides: tuple[int, ...]

    def __call__(self, images: Tensor, /) -> Any: ...

    def decode(self, raws: Any, /) -> Tensor | list[Tensor]: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of a validation; equal on every rank, except ``detections``.

    Attributes:
        confusion: int64 [C + 1, C + 1], rows predicted, columns true, the last is background.
        losses: mean validation loss by kind (box, obj, cls); None if no loss was given.
        detections: this rank's, or all ranks' if gathered; ``image`` is the position in the index.
        images: of the whole split.
        candidates_cut: boxes left out because an image had more than the limit of non-maximum suppression.
        seconds: by part, of the slowest rank in it: load (waiting for images), forward (copy, network, decoding,
            loss), nms, match; wall is the total.
    """

    metrics: CocoMetrics
    confusion: NDArray[np.int64]
    losses: Mapping[str, float] | None
    detections: ScoredBoxes
    images: int
    candidates_cut: int
    seconds: Mapping[str, float]

    @property
    def images_per_s(self) -> float:
        """Images of all ranks per second of the slowest rank."""
        return self.images / max(self.seconds["wall"], 1e-9)


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings that affect the figures of an evaluation.

    Attributes:
        config: settings of ``yolofleet val``, of which those of the data, the weights and the output have no effect here.
        precision: fp32 | fp16 | bf16 of the forward pass; boxes and losses are float32.
        size_hw: pad every image to this shape, pixels; None: each to the next multiple of the stride.
        classes: leave out labels and detections of other classes; None: none.
        gather_detections: give every rank all detections.
    """

    config: ValConfig
    precision: str = "fp32"
    size_hw: tuple[int, int] | None = None
    classes: tuple[int, ...] | None = None
    gather_detections: bool = False

    @property
    def img(self) -> int:
        """Longest side of an image, pixels."""
        return max(self.size_hw) if self.size_hw else self.config.img


class Validation:
    """One validation of this rank: :meth:`run` detects and matches, :meth:`gathered` merges the parts of all ranks.

    Args:
        model: on ``device``, in eval mode, fused or not.
        workers: loader processes; the constructor starts them. cache: of decoded images.
        loss: computes validation losses; None: no losses.
        on_batch: called after each batch.
        stops: asked after each batch: whether to leave out the rest. It may differ between ranks.

    Raises:
        ConfigError: the model and the data have different numbers of classes.
    """

    def __init__(
        self,
        model: Network,
        index: DataIndex,
        settings: EvaluationSettings,
        *,
        world: Ranks,
        device: torch.device,
        workers: int = 0,
        cache: ImageCache | None = None,
        loss: DetectionLoss | None = None,
        on_batch: OnBatch | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        assert not model.training, "evaluate in eval mode"
        if not settings.config.single_cls and model.nc != len(index.names):
            raise ConfigError(
                f"the model has {model.nc} classes, the data set {len(index.names)}",
                hint="validate with the data set that the model was trained on",
            )
        stride = max(model.strides)
        config = settings.config
        batch = min(config.batch, _most_images(model, settings, stride))
        if config.tile:
            assert loss is None, "there is no loss on tiles"
            for (width, height), image in zip(
                *np.unique(index.sizes_wh, axis=0, return_index=True), strict=True
            ):
                check_tiles(height, width, config.tile, config.overlap, source=index.path(image))
            every = tile_batches(index)
        else:
            every = val_batches(index, settings.img, batch, stride, shares_shape=config.fit == "batch")
            if settings.size_hw is not None:
                every = [replace(b, size_hw=settings.size_hw) for b in every]
        self._index, self._settings, self._world, self._loss = index, settings, world, loss
        self._config, self._batch = config, batch
        self._on_batch, self._stops = on_batch, stops
        self._share = _shares(every, world.size)[world.rank]
        self._detect = _Detect(model, index, settings, device, loss)
        self._watch = _Stopwatch()
        pin_memory = devices.can_pin(device)
        if config.tile:
            self._loader = tile_loader(index, self._share, workers=workers)
        else:
            self._loader = val_loader(
                index, self._share, settings.img, workers=workers, cache=cache, pin_memory=pin_memory
            )
        self._left_out = False
        self._found = _Shard().detections()
        self._payload = b""  # empty: this rank left out batches

    def evaluate(self) -> Evaluation:
        """Detect on every image once, match the detections, and return the figures.

        Collective: every rank, once, with the same arguments, even without work. One gather at the end.

        Raises:
            ValidationStopped: a rank left out batches.
        """
        self.run()
        return self.gathered()

    def run(self) -> None:
        """Compute this rank's part, without collectives, in any thread."""
        index, share, watch, shard = self._index, self._share, self._watch, _Shard()
        with self._loader as batches, _Threads(self._detect.device) as threads:
            done, tile = 0, self._config.tile
            loaded = watch.each("load", self._cut(batches) if tile else batches)
            found = threads.map(self._detect, loaded)
            for done, detected in enumerate(self._whole(found) if tile else found, 1):
                shard.add(detected)
                watch.add("forward", detected.forward_s / threads.count)
                watch.add("nms", detected.nms_s / threads.count)
                if self._on_batch is not None:
                    self._on_batch(done, len(share))
                if self._left_out or self._stops():
                    break
        if done < len(share):
            return
        with watch("match"):
            positions = np.sort(np.array([i for b in share for i in b.image_idx], np.int64))
            labels, self._found = labels_of(index, positions, self._settings.classes), shard.detections()
            # position -> order of ids
            place = np.argsort(np.argsort(np.asarray(index.image_ids), kind="stable"))
            records = match_detections(
                replace(labels, image=place[labels.image]),
                replace(self._found, image=place[self._found.image]),
                classes=len(index.names),
                images_seen=len(positions),
            )
            confusion = confusion_matrix(labels, self._found, len(index.names))
        self._payload = shard.to_bytes(records, confusion, watch.seconds(), self._settings.gather_detections)

    def _cut(self, images: Iterable[Loaded]) -> Iterator[Loaded]:
        """Yield the parts of each image, a few at a time."""
        settings, config, stride = self._settings, self._config, max(self._detect.model.strides)
        for batch, pixels, _ in images:
            places = parts_of(*batch.size_hw, config.tile, config.overlap)
            if settings.size_hw:
                yield from tile_parts(pixels.numpy(), places, settings.size_hw, None, self._batch)
            else:
                side = -(-settings.img // stride) * stride
                yield from tile_parts(pixels.numpy(), places, side, stride, self._batch)

    def _whole(self, found: Iterator[_Detected]) -> Iterator[_Detected]:
        """Yield the merged detections of each image of this rank, from those of its parts."""
        config = self._config
        for batch in self._share:
            places = parts_of(*batch.size_hw, config.tile, config.overlap)
            parts = list(islice(found, 1 + -(-(len(places) - 1) // self._batch)))
            began_s = time.perf_counter()
            boxes = joined([part.found for part in parts])  # their images are the numbers of the parts
            xy, wh = boxes.boxes_xywh_px[:, :2], boxes.boxes_xywh_px[:, 2:]
            xyxy = np.concatenate([xy, xy + wh], axis=1)
            ends = np.searchsorted(boxes.image, np.arange(len(places) + 1)).tolist()
            merged, scores, classes = merged_tiles(
                [
                    (xyxy[start:stop], boxes.score[start:stop], boxes.class_idx[start:stop], place)
                    for (start, stop), place in zip(pairwise(ends), places, strict=True)
                ],
                iou=config.iou,
                max_det=config.max_det,
                agnostic=config.agnostic_nms or config.single_cls,
                fuse=config.merge == "wbf",
            )
            merged = merged.astype(np.float64)
            yield _Detected(
                ScoredBoxes(
                    image=np.full(len(merged), batch.image_idx[0], np.int64),
                    class_idx=classes,
                    boxes_xywh_px=np.concatenate([merged[:, :2], merged[:, 2:] - merged[:, :2]], axis=1),
                    score=scores.astype(np.float64),
                ),
                sum(part.candidates_cut for part in parts),
                batch.ordinal,
                None,
                None,
                sum(part.forward_s for part in parts),
                sum(part.nms_s for part in parts) + time.perf_counter() - began_s,
            )

    def leave_out_rest(self) -> None:
        """End :meth:`run`, which another thread executes, after its current batch."""
        self._left_out = True

    def gathered(self) -> Evaluation:
        """Return the figures of all ranks. Collective: every rank, once, after :meth:`run`.

        Raises:
            ValidationStopped: a rank left out batches.
        """
        payloads = self._world.all_gather_bytes(self._payload)
        if not all(payloads):
            raise ValidationStopped
        own = None if self._settings.gather_detections else self._found
        return _merged(payloads, self._index, self._loss, own)


def _most_images(model: Network, settings: EvaluationSettings, stride: int) -> int:
    """Return the images that a batch may have by ``images_within_index``: equal on all devices, as the batches must be."""
    side = -(-settings.img // stride) * stride
    if not may_exceed_index(settings.config.batch, side, model.nc):
        return settings.config.batch
    networks = [one for one in getattr(model, "networks", (model,)) if isinstance(one, Detector)]
    return max(min((images_within_index(one, side) for one in networks), default=settings.config.batch), 1)


def labels_of(index: DataIndex, positions: NDArray[np.int64], classes: Sequence[int] | None = None) -> Labels:
    """Return the true boxes of some images of an index, of some classes or all; ``image`` is the position."""
    first, last = index.offsets[positions], index.offsets[positions + 1]
    picked = np.concatenate(
        [np.arange(a, b) for a, b in zip(first, last, strict=True)] or [np.zeros(0, np.int64)]
    )
    image = np.repeat(positions, last - first)
    unit = np.asarray(index.boxes_cxcywh_unit[picked], np.float64)
    size = np.asarray(index.sizes_wh, np.float64)[image]
    wh = unit[:, 2:] * size
    labels = Labels(
        image=image,
        class_idx=np.asarray(index.classes[picked], np.int64),
        boxes_xywh_px=np.concatenate([unit[:, :2] * size - wh / 2, wh], axis=1),
        area_px=np.asarray(index.area_px[picked], np.float64),
        crowd=np.asarray(index.crowd[picked], bool),
    )
    return labels if classes is None else rows(labels, np.isin(labels.class_idx, classes))


def _shares(batches: Sequence[ValBatch], ranks: int) -> list[list[ValBatch]]:
    """Return the batches of each rank: the largest batch first, to the rank with the fewest pixels so far."""
    shares: list[list[ValBatch]] = [[] for _ in range(ranks)]
    pixels = [0] * ranks
    sizes = [len(b.image_idx) * b.size_hw[0] * b.size_hw[1] for b in batches]
    for i in sorted(range(len(batches)), key=lambda i: -sizes[i]):
        rank = pixels.index(min(pixels))
        shares[rank].append(batches[i])
        pixels[rank] += sizes[i]
    return shares


def _letterboxed_labels(index: DataIndex, batch: ValBatch, letterboxes: Sequence[Letterbox]) -> np.ndarray:
    """Return float32 [n, 6] image in the batch, class, cx, cy, w, h as fractions of the padded image; no crowds."""
    labels = labels_of(index, np.array(batch.image_idx, np.int64))
    labels = rows(labels, ~labels.crowd)
    slot = np.searchsorted(np.array(batch.image_idx), labels.image)
    ratio = np.array([back.ratio for back in letterboxes])[slot, None]
    pad = np.array([(back.pad_left, back.pad_top) for back in letterboxes])[slot]
    size = np.array([(w, h) for h, w in (back.size_hw for back in letterboxes)])[slot]
    xy, wh = labels.boxes_xywh_px[:, :2], labels.boxes_xywh_px[:, 2:]
    centre = ((xy + wh / 2) * ratio + pad) / size
    return np.column_stack([slot, labels.class_idx, centre, wh * ratio / size]).astype(np.float32)


def _native_detections(
    batch: ValBatch, per_image: Sequence[Tensor], letterboxes: Sequence[Letterbox], single_cls: bool
) -> ScoredBoxes:
    """Return detections in native pixels, from [n, 6] per image: xyxy px of the network's image, score, class."""
    counts = [len(found) for found in per_image]
    every = torch.cat(list(per_image)).cpu().numpy().astype(np.float64)  # one copy from the device
    parts = np.split(every[:, :4], np.cumsum(counts)[:-1])
    xyxy = np.concatenate([back.to_native(part) for back, part in zip(letterboxes, parts, strict=True)])
    return ScoredBoxes(
        image=np.repeat(np.array(batch.image_idx, np.int64), counts),
        class_idx=np.zeros(len(every), np.int64) if single_cls else every[:, 5].astype(np.int64),
        boxes_xywh_px=np.concatenate([xyxy[:, :2], xyxy[:, 2:] - xyxy[:, :2]], axis=1),
        score=every[:, 4],
    )


@dataclass(frozen=True)
class _Detected:
    """The results of one batch."""

    found: ScoredBoxes
    candidates_cut: int
    ordinal: int
    loss_sums: NDArray[np.float64] | None  # [T]
    loss_divisors: NDArray[np.float64] | None  # [T]
    forward_s: float
    nms_s: float


@dataclass(frozen=True)
class _Detect:
    """Computes the detections of a batch in native pixels; several threads may call it."""

    model: Network
    index: DataIndex
    settings: EvaluationSettings
    device: torch.device
    loss: DetectionLoss | None

    @torch.inference_mode()
    def __call__(self, loaded: Loaded) -> _Detected:
        batch, images_u8, letterboxes = loaded
        began_s = time.perf_counter()
        labels = _letterboxed_labels(self.index, batch, letterboxes) if self.loss is not None else None
        decoded, sums, divisors = predictions(
            self.model, images_u8, labels, self.loss, self.settings.precision, self.device
        )
        devices.wait_for(self.device)  # NMS waits for it anyway
        forward_s = time.perf_counter() - began_s
        per_image, cut = suppressed(decoded, self.settings)
        found = _native_detections(batch, per_image, letterboxes, self.settings.config.single_cls)
        nms_s = time.perf_counter() - began_s - forward_s
        return _Detected(found, cut, batch.ordinal, sums, divisors, forward_s, nms_s)


def predictions(
    model: Network,
    images_u8: Tensor,
    labels: NDArray[np.float32] | None,
    loss: DetectionLoss | None,
    precision: str,
    device: torch.device,
) -> tuple[Tensor | list[Tensor], NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Return decoded predictions, and the sums [T] and the divisors [T] of the loss, if there is one.

    Args:
        images_u8: [N, 3, H, W].
        labels: as for ``loss.match``.
    """
    images = images_u8.to(device, non_blocking=True).float().div_(255)
    with autocast(precision, device):
        raws = model(images)
    sums = divisors = None
    if loss is not None and labels is not None:
        height, width = images_u8.shape[2:]
        targets = loss.match(labels, len(images_u8), (height, width))  # while the device computes
        sums = loss.sums(raws, targets).double().cpu().numpy()
        divisors = targets.counts.astype(np.float64)
        if loss.predicted_divisor:
            sums, divisors = sums[:-1], np.full(len(sums) - 1, sums[-1])
    return model.decode(raws), sums, divisors


def suppressed(decoded: Tensor | list[Tensor], settings: EvaluationSettings) -> tuple[list[Tensor], int]:
    """Return the boxes of each image, and how many candidates were left out; see ``geometry.nms.detections``."""
    config = settings.config
    return decoded_to_detections(
        decoded,
        conf=config.conf,
        iou=config.iou,
        max_det=config.max_det,
        multi_label=True,
        agnostic=config.agnostic_nms or config.single_cls,
        classes=settings.classes,
    )


class _Threads:
    """Processes whole batches on the CPU in parallel, on threads of one core each.

    The last bits of a convolution depend on its number of threads. With one thread per batch, results do not depend on
    the number of cores.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.get_num_threads() if devices.is_host(device) else 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> _Threads:
        if self.count > 1:
            self._pool = ThreadPoolExecutor(self.count, "evaluate", torch.set_num_threads, (1,))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.count)

    def map(self, work: Callable[[Item], Done], items: Iterable[Item]) -> Iterator[Done]:
        """Yield results in order; work on a few items ahead at most, because each keeps its images in memory."""
        if self._pool is None:
            yield from map(work, items)
            return
        waiting: deque[Future[Done]] = deque()
        for item in items:
            waiting.append(self._pool.submit(work, item))
            if len(waiting) > self.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Stopwatch:
    """Measures seconds by part."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._began_s = time.perf_counter()

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.add(part, time.perf_counter() - began_s)

    def each(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; add the time of waiting for each to ``part``."""
        iterator = iter(items)
        while True:
            with self(part):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def seconds(self) -> NDArray[np.float64]:
        """Return the seconds in the order of ``PARTS``."""
        self._seconds["wall"] = time.perf_counter() - self._began_s
        return np.array([self._seconds[part] for part in PARTS])


# gather ---------------------------------------------------------------------------------------------------


class _Shard:
    """Collects the results of one rank's batches."""

    def __init__(self) -> None:
        none = np.zeros(0, np.int64)
        self.found = [ScoredBoxes(none, none, np.zeros((0, 4)), np.zeros(0))]
        self.candidates_cut = 0
        self._ordinals: list[int] = []
        self._sums: list[NDArray[np.float64]] = []
        self._divisors: list[NDArray[np.float64]] = []

    def add(self, detected: _Detected) -> None:
        self.found.append(detected.found)
        self.candidates_cut += detected.candidates_cut
        if detected.loss_sums is not None and detected.loss_divisors is not None:
            self._ordinals.append(detected.ordinal)
            self._sums.append(detected.loss_sums)
            self._divisors.append(detected.loss_divisors)

    def detections(self) -> ScoredBoxes:
        """Return the detections sorted by image position; the order within an image stays."""
        found = joined(self.found)
        return rows(found, np.argsort(found.image, kind="stable"))

    def to_bytes(
        self,
        records: MatchRecords,
        confusion: NDArray[np.int64],
        seconds: NDArray[np.float64],
        with_detections: bool,
    ) -> bytes:
        arrays: dict[str, NDArray[Any]] = {
            **{f"records/{name}": array for name, array in vars(records).items()},
            "confusion": confusion,
            "seconds": seconds,
            "candidates_cut": np.array([self.candidates_cut], np.int64),
        }
        if self._ordinals:
            arrays["loss_ordinals"] = np.array(self._ordinals, np.int64)
            arrays["loss_sums"] = np.stack(self._sums)  # [B, T]
            arrays["loss_divisors"] = np.stack(self._divisors)
        if with_detections:
            found = self.detections()
            arrays |= {name: getattr(found, name) for name in _DETECTION_FIELDS}
        return save_arrays(arrays)


def _merged(
    payloads: Sequence[bytes], index: DataIndex, loss: DetectionLoss | None, own: ScoredBoxes | None
) -> Evaluation:
    """Return the evaluation from every rank's bytes; with ``own`` detections, or those in the bytes."""
    shards = [load_arrays(payload) for payload in payloads]
    records = merge(
        [
            MatchRecords(*(shard[f"records/{field.name}"] for field in fields(MatchRecords)))
            for shard in shards
        ]
    )
    images = int(records.images_seen[0])
    assert images == len(index), f"{images} of {len(index)} images were evaluated"
    if own is None:
        own = joined([ScoredBoxes(*(shard[name] for name in _DETECTION_FIELDS)) for shard in shards])
        own = rows(own, np.argsort(own.image, kind="stable"))
    return Evaluation(
        metrics=summarize(records, index.names),
        confusion=np.sum([shard["confusion"] for shard in shards], axis=0),
        losses=None if loss is None else _mean_losses(loss, shards),
        detections=own,
        images=images,
        candidates_cut=int(sum(shard["candidates_cut"][0] for shard in shards)),
        seconds=dict(
            zip(PARTS, np.max([shard["seconds"] for shard in shards], axis=0).tolist(), strict=True)
        ),
    )


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
