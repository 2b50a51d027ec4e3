"""Validation on all ranks: each rank evaluates batches of a fixed list, and one gather gives equal figures everywhere.

The list of batches and the shape of each image depend only on the data (``batches.py``); ``gather.py`` merges the
results of the ranks.

Legend: N images of a batch, T loss terms.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.scan import Ranks
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.cache import ImageCache
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.detector import UNSTATED_PX, Detector
from yolofleet.families.networks.index_limit import images_within_index, may_exceed_index
from yolofleet.families.networks.precision import autocast
from yolofleet.inference.evaluate.batches import (
    Loaded,
    letterboxed_labels,
    shares_of,
    val_batches,
    val_loader,
)
from yolofleet.inference.evaluate.gather import PARTS, Detected, Evaluation, Shard, merged
from yolofleet.support import devices
from yolofleet.support.closing import Closing
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.table import task_of
from yolofleet.tasks.task import Limits, Task

Item = TypeVar("Item")
Done = TypeVar("Done")
OnBatch = Callable[[int, int], None]  # (batches done, batches of this rank)


class ValidationStopped(Exception):
    """A rank stopped the validation before its last batch, so there are no figures; raised on every rank alike."""


class Network(Protocol):
    """The part of ``families.networks.detector.Detector`` that evaluation uses; an exported file has it too."""

    training: bool
    task: str
    nc: int
    strides: tuple[int, ...]
    needs_nms: bool

    def __call__(self, images: Tensor, /) -> Any: ...

    def decode(self, raws: Any, /) -> Any: ...


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings that affect the figures of an evaluation.

    Attributes:
        config: settings of ``yolofleet val``, of which those of the data, the weights and the output have no effect here.
        precision: fp32 | fp16 | bf16 of the forward pass; boxes and losses are float32.
        size_hw: pad every image to this shape, pixels; None: each to the next multiple of the stride.
        classes: leave out labels and detections of other classes; None: none.
    """

    config: ValConfig
    precision: str = "fp32"
    size_hw: tuple[int, int] | None = None
    classes: tuple[int, ...] | None = None
    gather_detections: bool = False

    @property
    def img(self) -> int:
        """Longest side of an image, pixels."""
        return max(self.size_hw) if self.size_hw else self.config.img or UNSTATED_PX

    def limits(self, model: Network) -> Limits:
        """Return which predictions of a network count."""
        config = self.config
        return Limits(
            conf=config.conf,
            iou=config.iou if model.needs_nms else None,
            max_det=config.max_det,
            multi_label=True,
            agnostic=config.agnostic_nms or config.single_cls,
            classes=self.classes,
        )


class Validation:
    """One validation of this rank: :meth:`run` detects and matches, :meth:`gathered` merges the parts of all ranks.

    Args:
        model: on ``device``, in eval mode, fused or not.
        workers: loader processes; the constructor starts them. cache: of decoded images.
        loss: computes validation losses; None: no losses.
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
        self._index, self._settings, self._world, self._loss = index, settings, world, loss
        self._task = task_of(model)
        self._on_batch, self._stops = on_batch, stops
        self._detect = _Detect(model, self._task, index, settings, device, loss)
        self._began_s = time.perf_counter()
        self._left_out = False
        self._found = Shard(self._task).detections()
        self._payload = b""  # empty: this rank left out batches
        stride, size_hw, config = max(model.strides), settings.size_hw, settings.config
        batch = min(config.batch, _most_images(model, settings, stride))
        every = val_batches(index, settings.img, batch, stride, shares_shape=config.fit == "batch")
        if size_hw is not None:
            every = [replace(b, size_hw=size_hw) for b in every]
        self._share = shares_of(every, world.size)[world.rank]
        pin_memory = devices.can_pin(device)
        self._loader = val_loader(
            index, self._share, settings.img, workers=workers, cache=cache, pin_memory=pin_memory
        )

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
        index, share, shard, seconds = self._index, self._share, Shard(self._task), dict.fromkeys(PARTS, 0.0)
        with self._loader as batches, _Threads(self._detect.device) as threads:
            done, found = 0, threads.map(self._detect, _waited(batches, seconds))
            for done, detected in enumerate(found, 1):
                shard.add(detected)
                seconds["forward"] += detected.forward_s / threads.count
                seconds["nms"] += detected.nms_s / threads.count
                if self._on_batch is not None:
                    self._on_batch(done, len(share))
                if self._left_out or self._stops():
                    break
        if done < len(share):
            return
        began_s = time.perf_counter()
        positions = np.sort(np.array([i for b in share for i in b.image_idx], np.int64))
        self._found = shard.detections()
        judged = self._task.judged(index, positions, self._found, self._settings.classes)
        ended_s = time.perf_counter()
        seconds["match"], seconds["wall"] = ended_s - began_s, ended_s - self._began_s
        self._payload = shard.to_bytes(judged, len(positions), seconds, self._settings.gather_detections)

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
        return merged(payloads, self._task, self._index, self._loss, own)


def _most_images(model: Network, settings: EvaluationSettings, stride: int) -> int:
    """Return the images that a batch may have by ``images_within_index``: equal on all devices, as the batches must be."""
    side = -(-settings.img // stride) * stride
    if not may_exceed_index(settings.config.batch, side, model.nc):
        return settings.config.batch
    networks = [one for one in getattr(model, "networks", (model,)) if isinstance(one, Detector)]
    return max(min((images_within_index(one, side) for one in networks), default=settings.config.batch), 1)


@dataclass(frozen=True)
class _Detect:
    """Computes the detections of a batch in native pixels; several threads may call it."""

    model: Network
    task: Task
    index: DataIndex
    settings: EvaluationSettings
    device: torch.device
    loss: DetectionLoss | None

    @torch.inference_mode()
    def __call__(self, loaded: Loaded) -> Detected:
        batch, images_u8, letterboxes = loaded
        began_s = time.perf_counter()
        labels = None
        if self.loss is not None:
            labels = letterboxed_labels(self.task, self.index, batch, letterboxes)
        decoded, loss = predictions(
            self.model, images_u8, labels, self.loss, self.settings.precision, self.device
        )
        devices.wait_for(self.device)  # NMS waits for it anyway
        forward_s = time.perf_counter() - began_s
        per_image, cut = self.task.found(decoded, self.settings.limits(self.model))
        one_class = self.settings.config.single_cls
        found = self.task.collected(batch.image_idx, per_image, letterboxes, one_class)
        nms_s = time.perf_counter() - began_s - forward_s
        return Detected(found, cut, batch.ordinal, loss, forward_s, nms_s)


def predictions(
    model: Network,
    images_u8: Tensor,
    labels: Shapes | None,
    loss: DetectionLoss | None,
    precision: str,
    device: torch.device,
) -> tuple[Any, tuple[np.ndarray, np.ndarray] | None]:
    """Return decoded predictions, and the sums [T] and the divisors [T] of the loss, if there is one.

    Args:
        images_u8: [N, 3, H, W].
    """
    images = images_u8.to(device, non_blocking=True).float().div_(255)
    with autocast(precision, device):
        raws = model(images)
    found = None
    if loss is not None and labels is not None:
        height, width = images_u8.shape[2:]
        targets = loss.match(labels, len(images_u8), (height, width))  # while the device computes
        sums = loss.sums(raws, targets).cpu().double().numpy()  # MPS has no float64
        divisors = targets.counts.astype(np.float64)
        if loss.predicted_divisor:
            sums, divisors = sums[:-1], np.full(len(sums) - 1, sums[-1])
        found = sums, divisors
    return model.decode(raws), found


class _Threads(Closing):
    """Processes whole batches on the CPU in parallel, on threads of one core each.

    The last bits of a convolution depend on its number of threads. With one thread per batch, results do not depend on
    the number of cores.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.get_num_threads() if devices.is_host(device) else 1
        self._pool: ThreadPoolExecutor | None = None
        if self.count > 1:
            self._pool = ThreadPoolExecutor(self.count, "evaluate", torch.set_num_threads, (1,))

    def close(self) -> None:
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


def _waited(items: Iterable[Item], seconds: dict[str, float]) -> Iterator[Item]:
    """Yield the items; add the time of waiting for each to ``load``."""
    iterator = iter(items)
    while True:
        began_s = time.perf_counter()
        item = next(iterator, None)
        seconds["load"] += time.perf_counter() - began_s
        if item is None:
            return
        yield item
