"""How images come from loader processes: in buffers of shared memory that are filled again once they are released.

A new buffer costs more than its content, because the kernel clears each of its pages: half of the CPU time of an image.
Sending a buffer costs both processes more time than all else that is sent, so it is sent once, and then stays mapped.

A value has its images in ``images``: a micro-batch, or a batch of a validation. Legend: m images of a value, H x W pixels.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

Made = TypeVar("Made")


def image_buffer(images: int, height: int, width: int) -> tuple[Tensor, np.ndarray]:
    """Return an uninitialised buffer as a tensor uint8 [m, 3, H, W] (channels-last) and as an array [m, H, W, 3].

    It is in shared memory if this is a loader process.
    """
    shape = images, height, width, 3
    buffer = _filled.take(math.prod(shape)) if _filled else _allocated(math.prod(shape))
    return buffer.view(shape).permute(0, 3, 1, 2), buffer.view(shape).numpy()


def _allocated(size: int) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        # Take shared memory here and not in the queue's thread: there, a full /dev/shm loses the batch and the run hangs.
        buffer.share_memory_()
    return buffer


class FilledBuffers:
    """The buffers that a loader process fills.

    Args:
        in_use: uint8 [n], shared with the main process: 1 for each buffer that it may still read. It sets zeros.
        owner: numbers of the loader and of this process.
    """

    def __init__(self, in_use: np.ndarray, owner: tuple[int, int]) -> None:
        self.in_use = in_use
        self.owner = owner
        self.buffers: list[Tensor] = [_allocated(0)] * len(in_use)
        self.taken: int | None = None  # for the value that is being made
        self.sent: dict[int, Tensor] = {}  # buffers that the main process has

    def take(self, size: int) -> Tensor:
        """Return an uninitialised tensor uint8 [size]; a value has at most one."""
        free = np.flatnonzero(self.in_use == 0).tolist()
        if not free:
            return _allocated(size)
        self.taken = slot = max(free, key=lambda slot: len(self.buffers[slot]))
        self.in_use[slot] = 1
        if len(self.buffers[slot]) < size:
            self.buffers[slot] = _allocated(size)
        part: Tensor = self.buffers[slot][:size]
        return part

    def place(self, made: Any) -> _Place | None:
        """Return where the images of a value are, if they are in the buffer that was taken since the last call."""
        slot, self.taken = self.taken, None
        if slot is None:
            return None
        images, buffer = made.images, self.buffers[slot]
        is_known = self.sent.get(slot) is buffer
        self.sent[slot] = buffer
        return _Place((*self.owner, slot), images.size(), images.stride(), None if is_known else buffer)


_filled: FilledBuffers | None = None  # of this loader process


def fill_buffers(in_use: np.ndarray, owner: tuple[int, int]) -> None:
    """Take the images of this loader process from ``FilledBuffers`` from now on."""
    global _filled
    _filled = FilledBuffers(in_use, owner)


@dataclass(frozen=True)
class _Place:
    """Images in a shared buffer.

    Attributes:
        address: numbers of the loader, of its process and of the buffer.
        size, stride: of the images; they begin where the buffer does.
        buffer: uint8 [bytes], the first time; from then on the main process has it mapped.
    """

    address: tuple[int, int, int]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    buffer: Tensor | None

    def images(self) -> Tensor:
        """Return the images, in a storage of their own that shares the buffer."""
        if self.buffer is not None:
            mapped[self.address] = self.buffer
        return torch.from_numpy(mapped[self.address].numpy()).as_strided(self.size, self.stride)


mapped: dict[tuple[int, int, int], Tensor] = {}  # buffers of the loaders of this process, by their addresses


@dataclass(frozen=True)
class Sent(Generic[Made]):
    """What a loader process sends.

    Attributes:
        made: the value; without images if there is a place.
        place: of its images in a shared buffer.
        is_copied: ``made`` has the images, and they are no longer there.
    """

    made: Made
    place: _Place | None = None
    is_copied: bool = False

    @classmethod
    def of(cls, made: Any) -> Sent[Any]:
        """Return what sends a value of this loader process."""
        place = _filled.place(made) if _filled else None
        return cls(_with_images(made, None) if place else made, place)

    def whole(self) -> Made:
        """Return the value with its images."""
        return self.made if not self.place or self.is_copied else _with_images(self.made, self.place.images())

    def pin_memory(self) -> Sent[Made]:
        """Return the value with page-locked images; DataLoader's pinning thread calls this."""
        return replace(self, made=pinned(self.whole()), is_copied=True)


def pinned(made: Any) -> Any:
    """Return a value with page-locked images."""
    return _with_images(made, made.images.pin_memory())


def _with_images(made: Any, images: Tensor | None) -> Any:
    """Return a copy of a value with other images, or with none."""
    if isinstance(made, tuple):
        return cast(Any, made)._replace(images=images)
    return replace(made, images=images)


class ReceivedBuffers:
    """The buffers of the processes of one loader, in the main process.

    Attributes:
        number: of the loader.
        in_use: uint8 [processes, n]; see ``FilledBuffers``.
    """

    _numbers = itertools.count()  # of the loaders of this process

    def __init__(self, processes: int, each: int) -> None:
        self.number, self._owner = next(self._numbers), os.getpid()
        self.in_use = np.frombuffer(mmap.mmap(-1, processes * each), np.uint8).reshape(processes, each)

    def received(self, sent: Sent[Made]) -> Made:
        """Return a value; its loader process may fill the buffer again once the memory is released here."""
        made = sent.whole()
        if sent.place is not None:
            release = partial(self._release, sent.place.address[1:])
            if sent.is_copied:
                release()
            else:  # a copy of pageable memory to a GPU has read it when it returns
                weakref.finalize(cast(Any, made).images.untyped_storage(), release).atexit = False
        return made

    def _release(self, buffer: tuple[int, int]) -> None:
        if os.getpid() == self._owner:  # a forked process has copies of the values
            self.in_use[buffer] = 0

    def close(self) -> None:
        """Release the mappings; images that were received stay valid."""
        for address in [address for address in mapped if address[0] == self.number]:
            del mapped[address]
