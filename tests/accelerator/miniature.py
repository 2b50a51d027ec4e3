"""A functional accelerator in miniature: devices ``mini:0`` and ``mini:1`` whose memory is the host's.

Tensors of the accelerator are a subclass that holds a CPU tensor. PyTorch dispatches their operations to
:meth:`Accelerator.run`, which behaves where a GPU behaves differently from a CPU:

- Operations that mix devices raise an error. A CPU tensor without dimensions may take part, as on CUDA.
- The host waits for the device when it reads a value or copies without ``non_blocking``. The accelerator records
  every such wait with the line of the package that caused it, and raises :class:`UnexpectedWait` on request.
- A ``non_blocking`` copy to the host arrives when the host waits for the device, not earlier. Until then its target
  holds what it held before. The source of a ``non_blocking`` copy to the device must not change until then.
- Memory from ``empty`` holds garbage: NaN, or large integers.
- Each device has a memory limit. Beyond it an allocation raises ``torch.OutOfMemoryError``. Freed memory stays in the
  pool of the stream that allocated it. Another stream gets it only after all pools were emptied, which happens when the
  device has no other memory.
- A thread begins with device 0 as its current device, and in the default streams. ``torch.Event`` ignores the index of
  its device: it records in the current stream of the current device unless it is given a stream.
- A device gets a context (some hundred MB on a GPU) when a thread selects it, also if a function of torch only returns
  to it. ``torch.mini.device`` returns to a device without making one.
- Fused optimizers skip the update when ``found_inf`` is set, and need all their tensors on one device.
- Operations are counted (``launches``) by the file of the package that started them.

PyTorch offers one Python-made device type with one index. The second device is therefore index 0 for PyTorch's C++
code, and its Python attribute ``device`` says ``mini:1``. Kernels run at once on the CPU, whatever their stream, so
results are bit for bit those of the CPU. Only copies are late, and each arrives with its own stream. Memory is not
fragmented: a pool joins its blocks.

A process that installs the accelerator keeps it to its end; see ``test_miniature_accelerator.py``.
Needs ``_setup_privateuseone_for_python_backend`` (torch 2.10 or newer).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import yolofleet

NAME = "mini"
NAME_KEY = "PrivateUse1"
GARBAGE = {torch.bool: True, torch.uint8: 0xA5}
WHOLE_GARBAGE = 0x5A5A5A  # of other integers
SWEEP_BYTES = 2**28
PACKAGE = Path(yolofleet.__file__).parent

# operations whose result has a size that depends on values: CUDA's kernels wait for it
SIZED_BY_VALUES = {
    *("aten::nonzero", "aten::masked_select", "aten::equal", "aten::_local_scalar_dense", "aten::is_nonzero"),
    *("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount"),
}
ALLOCATES_GARBAGE = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
}
HALF = (torch.float16, torch.bfloat16)
CONVOLUTIONS = {
    *("aten::convolution", "aten::convolution_backward"),
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
}


class UnexpectedWait(Exception):
    """The host waited for the device where the test does not allow it."""


class ChangedTooEarly(Exception):
    """The host changed memory that a ``non_blocking`` copy to the device was still reading."""


@dataclass(frozen=True)
class Wait:
    """A place where the host waited for the device.

    Attributes:
        what: the operation.
        where: ``file.py:function`` of the package.
        behind: operations that the device was given after those that the host waits for. A wait for work that is
            a whole step old costs nothing; one for the latest work (0) drains the device.
    """

    what: str
    where: str
    behind: int = field(default=0, compare=False)


@dataclass
class Copy:
    """A copy under way: of a device's values to the host, or of the host's to a device.

    Attributes:
        ticket: its place among the work of the device.
        stream: number of its stream.
        memory: the host's.
        host: view of the memory as the copy sees it; kept only for copies to the host.
        values: what arrives at the host, or what the device has read.
    """

    ticket: int
    stream: int
    memory: StorageWeakRef
    host: Tensor | None
    values: Tensor


@dataclass
class Device:
    """One device of the accelerator."""

    limit_bytes: int = 2**34
    blocks: dict[int, tuple[StorageWeakRef, int, int]] = field(default_factory=dict)  # memory, bytes, stream
    pools: Counter[int] = field(default_factory=Counter)  # freed bytes that a stream keeps for itself
    swept_bytes: int = 0
    held_bytes: int = 0  # the sum over all blocks, including freed ones that were not swept yet
    peak_bytes: int = 0  # the largest value of held_bytes since the last reset
    peak_reserved_bytes: int = 0  # the same with the pools
    has_context: bool = False
    tickets: int = 0
    operations: int = 0
    streams: int = 0  # made so far, without the default one
    after: dict[int, dict[int, int]] = field(default_factory=dict)  # the work that a stream has waited for
    copies: list[Copy] = field(default_factory=list)

    def used_bytes(self) -> int:
        """Return the bytes in use; give the freed ones to the pools of their streams."""
        for key, (memory, size, stream) in [*self.blocks.items()]:
            if memory.expired():
                self.pools[stream] += size
                del self.blocks[key]
        self.held_bytes = sum(size for _, size, _ in self.blocks.values())
        return self.held_bytes

    def reserved_bytes(self) -> int:
        return self.used_bytes() + self.pools.total()

    def empty_cache(self) -> None:
        self.used_bytes()
        self.pools.clear()

    def take(self, storage: torch.UntypedStorage, stream: int) -> bool:
        """Count a new block of memory; False when the device has less than that."""
        key, size = storage._cdata, storage.nbytes()
        known = self.blocks.get(key)
        if known is not None:
            if not known[0].expired():
                return True
            self.used_bytes()
        # asking all blocks whether they are still in use is slow: only when it matters
        if self.held_bytes + self.pools.total() + size > min(
            self.limit_bytes, 2 * self.swept_bytes + SWEEP_BYTES
        ):
            self.swept_bytes = self.used_bytes()
            if self.held_bytes + self.pools.total() + max(size - self.pools[stream], 0) > self.limit_bytes:
                self.empty_cache()  # as torch does before it gives up
        if self.held_bytes + size > self.limit_bytes:
            return False
        self.pools[stream] -= min(size, self.pools[stream])
        self.blocks[key] = (StorageWeakRef(storage), size, stream)
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.held_bytes + self.pools.total())
        self.has_context = True
        return True

    def done_with(self, stream: int) -> dict[int, int]:
        """Return what has happened when ``stream`` has done its present work: the last ticket of each stream."""
        return self.after.get(stream, {}) | {stream: self.tickets}


class HostThread(threading.local):
    """What each thread of the host has for itself: its current device, and its current stream on each device."""

    device = 0

    def __init__(self) -> None:
        self.streams: Counter[int] = Counter()


class Accelerator:
    """What the devices do and what they have seen.

    Attributes:
        launches: operations by (file of the package, operation).
        waits: of the host for a device.
        unpinned: places that copied pageable memory although they asked for ``non_blocking``.
        seen_dtypes: (operation, element type of its first tensor) of convolutions and matrix products.
        doubles: places that computed in float64, which Metal and some of Intel's GPUs lack.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = [Device() for _ in range(devices)]
        self.thread = HostThread()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.waits: list[Wait] = []
        self.unpinned: list[Wait] = []
        self.seen_dtypes: set[tuple[str, torch.dtype]] = set()
        self.doubles: set[str] = set()
        self.allowed: Callable[[Wait], bool] | None = None
        self.lock = threading.RLock()
        self.pinned: dict[int, StorageWeakRef] = {}
        self.last: dict[int, int] = {}  # the device of the last operation of each backward pass or thread
        self.deferred: list[Exception] = []  # errors of a backward pass under way

    # -- what tests ask ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what was counted and recorded; restore the memory limits."""
        self.launches.clear()
        self.waits.clear()
        self.unpinned.clear()
        self.seen_dtypes.clear()
        self.doubles.clear()
        for device in self.devices:
            device.limit_bytes, device.has_context = Device.limit_bytes, False

    def begin(self) -> None:
        """Forget earlier tests, and exempt what they left from garbage collection: hooks of buckets keep their networks, which
        each allocation and each collection of a trial would visit."""
        torch.set_num_threads(1)
        self.reset()
        for device in self.devices:
            device.blocks.clear()
            device.pools.clear()
            device.held_bytes = device.swept_bytes = 0
        gc.collect()
        gc.freeze()

    @property
    def current(self) -> int:
        """The current device of this thread."""
        return self.thread.device

    def select(self, index: int) -> None:
        """Make a device the current one of this thread; it gets a context, as from CUDA 12 on."""
        if index != self.current:
            self.thread.device, self.devices[index].has_context = index, True

    @contextmanager
    def only_waits(self, *allowed: str, behind: int = sys.maxsize) -> Iterator[None]:
        """Raise :class:`UnexpectedWait` at any wait but those in ``allowed`` (``file.py:function``) and those for
        work that is at least ``behind`` operations old."""
        self.allowed = lambda wait: wait.where in allowed or wait.behind >= behind
        try:
            yield
        finally:
            self.allowed = None

    def launched(self, *files: str) -> int:
        """Operations that these files of the package started; without arguments all."""
        return sum(count for (file, _), count in self.launches.items() if not files or file in files)

    def fail(self, error: Exception) -> None:
        """Raise the error; inside a backward pass, raise it when the pass has ended.

        PyTorch aborts the process when an operation of a Python-made device raises in a backward pass: its
        ``PythonDeviceGuard::exchangeStream`` fails while the exception passes through.
        """
        if not in_backward():
            raise error
        self.deferred.append(error)

    # -- memory of the host --------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy, or the tensor itself if it is page-locked."""
        if self.is_pinned(tensor):
            return tensor
        if not any(device.has_context for device in self.devices):
            self.devices[self.current].has_context = True
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        copy.copy_(tensor)
        return self.mark_pinned(copy)

    def mark_pinned(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.pinned = {key: memory for key, memory in self.pinned.items() if not memory.expired()}
        self.pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        memory = self.pinned.get(tensor.untyped_storage()._cdata)
        return memory is not None and not memory.expired()

    # -- time ----------------------------------------------------------------------------------------

    def wait(self, index: int, what: str, until: dict[int, int] | None = None, behind: int = 0) -> None:
        """Let the host wait for all that the device was given, or for its streams up to a ticket of each."""
        wait = Wait(what, place(), behind)
        with self.lock:
            self.waits.append(wait)
            if self.allowed is not None and not self.allowed(wait):
                self.fail(UnexpectedWait(f"the host waits for {NAME}:{index}: {wait.what} in {wait.where}"))
            self.arrive(index, until)

    def wait_for_stream(self, index: int, what: str) -> None:
        """Let the host wait for the current stream of the device."""
        self.wait(index, what, self.devices[index].done_with(self.thread.streams[index]))

    def arrive(self, index: int, until: dict[int, int] | None = None) -> None:
        """Finish the copies of the device, or those of its streams up to a ticket of each."""
        device = self.devices[index]
        done = [copy for copy in device.copies if until is None or copy.ticket <= until.get(copy.stream, -1)]
        device.copies = [copy for copy in device.copies if copy not in done]
        for copy in done:
            if copy.host is not None:
                torch.ops.aten.copy_(copy.host, copy.values)
            elif not copy.memory.expired() and changed(copy):
                raise ChangedTooEarly("memory changed while a non_blocking copy to the device was reading it")

    def to_host(self, index: int, source: Tensor, target: Tensor) -> None:
        """Deliver ``source``, memory of the device, to the page-locked ``target`` when the host waits next."""
        device = self.devices[index]
        device.tickets += 1
        memory = StorageWeakRef(target.untyped_storage())
        stream, values = self.thread.streams[index], source.detach().clone()
        device.copies.append(Copy(device.tickets, stream, memory, target.detach(), values))

    def from_host(self, index: int, source: Tensor) -> None:
        """Remember what a ``non_blocking`` copy reads, so that a change before it has ended shows."""
        device = self.devices[index]
        device.tickets += 1
        device.copies = [copy for copy in device.copies if copy.host is not None or not copy.memory.expired()]
        storage = source.untyped_storage()
        values = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        stream = self.thread.streams[index]
        device.copies.append(Copy(device.tickets, stream, StorageWeakRef(storage), None, values))

    # -- operations ----------------------------------------------------------------------------------

    def allocate(self, index: int, tensor: Tensor) -> None:
        """Count the memory of a new tensor.

        Raises:
            torch.OutOfMemoryError: the device has less.
        """
        storage, device = tensor.untyped_storage(), self.devices[index]
        with self.lock:
            if not device.take(storage, self.thread.streams[index]):
                left = device.limit_bytes - device.held_bytes
                self.fail(
                    torch.OutOfMemoryError(
                        f"{NAME} out of memory. Tried to allocate {storage.nbytes()} bytes on {NAME}:{index}, "
                        f"which has {left} of {device.limit_bytes} bytes left."
                    )
                )

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operation of a device."""
        name, is_view = func._schema.name, func.is_view
        if is_composite(func) and not is_view:
            return func.decompose(*args, **kwargs)
        tensors = flat_tensors((*args, *kwargs.values()))
        ours = [t for t in tensors if isinstance(t, DeviceTensor)]
        index = self.device_of(func, ours, kwargs)
        self.last[stretch()] = index
        if name in ("aten::_to_copy", "aten::copy_") and (moved := self.move(func, args, kwargs)) is not None:
            return moved
        self.check_devices(name, tensors, ours)
        if not is_view:
            with self.lock:
                self.launches[place().partition(":")[0], name] += 1
                self.devices[index].operations += 1
        if name in CONVOLUTIONS:
            self.seen_dtypes.add((name, ours[0].dtype))
        if name in SIZED_BY_VALUES or has_boolean_index(name, args):
            self.wait_for_stream(index, name)
        inner_args, inner_kwargs = unwrapped(args), unwrapped(kwargs)
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        inner_kwargs.pop("pin_memory", None)
        wide = name in CONVOLUTIONS and ours[0].dtype in HALF
        if wide:  # the CPU's kernels of halves depend on its type; a GPU's sum in float32
            inner_args = widened(inner_args)
        out = func(*inner_args, **inner_kwargs)
        if wide:
            out = narrowed(out, ours[0].dtype)
        if any(t.dtype == torch.float64 for t in flat_tensors((out,))):
            self.doubles.add(place())
        if name in ALLOCATES_GARBAGE:
            fill_with_garbage(out)
        known = {id(t.inner): t for t in ours}
        if is_view and torch.is_inference_mode_enabled() and not ours[0].is_inference():
            with torch.inference_mode(False):  # a view is an inference tensor only if its base is one
                return self.rewrapped(out, known, index)
        return self.rewrapped(out, known, index)

    def device_of(self, func: Any, ours: Sequence[DeviceTensor], kwargs: dict[str, Any]) -> int:
        """The device that executes an operation."""
        if ours:
            return ours[0].index
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        named = (target.index or 0) if target is not None else 0
        # C++ code that makes a tensor like another one knows index 0 only, see the module's text
        return self.last.get(stretch(), named) if in_backward() else named

    def check_devices(self, name: str, tensors: Sequence[Tensor], ours: Sequence[DeviceTensor]) -> None:
        """Raise if the operation mixes devices."""
        may_mix = not name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp"))
        if len(ours) == len(tensors) and len({t.index for t in ours}) == 1:
            return  # the names of devices take longer than an operation
        strangers = {
            str(t.device) for t in tensors if not isinstance(t, DeviceTensor) and (t.dim() or not may_mix)
        }
        devices = sorted({str(t.device) for t in ours} | strangers)
        if len(devices) > 1:
            self.fail(
                RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, "
                    f"{' and '.join(devices)}! ({name} in {place()})"
                )
            )

    def move(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``_to_copy`` and ``copy_`` between devices; None when the operation stays on one."""
        is_new = func._schema.name == "aten::_to_copy"
        source: Tensor = args[0] if is_new else args[1]
        if is_new:
            if kwargs.get("device") is None:
                return None
            target = torch.device(kwargs["device"])
            target = torch.device(target.type, target.index or 0) if target.type == NAME else target
            if in_backward() and target.type == source.device.type == NAME:
                return None  # the gradient of a change of type: C++ code names index 0
        else:
            target = args[0].device
        if target == source.device:
            return None
        non_blocking = bool(kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2]))
        with self.lock:
            self.launches[place().partition(":")[0], "copy between devices"] += 1
        raw = source.inner if isinstance(source, DeviceTensor) else source
        if is_new:
            options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
            made = torch.ops.aten._to_copy.default(raw, **options)
        if target.type == NAME and source.device.type == NAME:  # between devices: ordered by their streams
            if is_new:
                return self.wrap(made, target.index)
            args[0].inner.copy_(raw)
            return args[0]
        if target.type == NAME:
            self.host_to_device(source, target.index, non_blocking)
            if is_new:
                return self.wrap(made, target.index)
            args[0].inner.copy_(raw)
            return args[0]
        assert isinstance(source, DeviceTensor)
        place_of_result = made if is_new else args[0]
        if is_new and non_blocking:  # PyTorch takes page-locked memory for the result
            values = made.clone()
            fill_with_garbage(made)
            self.to_host(source.index, values, self.mark_pinned(made))
        elif non_blocking and self.is_pinned(args[0]):
            self.to_host(source.index, raw, args[0])
        else:
            self.wait_for_stream(source.index, "copy to the host")
            if not is_new:
                args[0].copy_(raw)
        return place_of_result

    def host_to_device(self, source: Tensor, index: int, non_blocking: bool) -> None:
        if non_blocking and self.is_pinned(source):
            self.from_host(index, source)
            return
        if non_blocking:
            self.unpinned.append(Wait("copy of pageable memory", place()))
        self.wait_for_stream(index, "copy of pageable memory" if non_blocking else "copy to the device")

    def wrap(self, inner: Tensor, index: int) -> DeviceTensor:
        self.allocate(index, inner)
        return DeviceTensor(inner, index)

    def rewrapped(self, value: Any, given: dict[int, DeviceTensor], index: int) -> Any:
        """Results as tensors of the device; a tensor that was changed in place as the argument that it was."""
        if isinstance(value, (list, tuple)):
            return tuple(self.rewrapped(part, given, index) for part in value)
        if not isinstance(value, Tensor):
            return value
        known = given.get(id(value))
        return self.wrap(value, index) if known is None else known


ACCELERATOR = Accelerator()


class DeviceTensor(torch.Tensor):
    """A tensor of the accelerator."""

    inner: Tensor
    index: int

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )
        made.inner, made.index = inner, index
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ACCELERATOR.run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Makes ``nn.Module.to`` exchange parameters instead of their data."""
        return ["inner"], self.index

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], index: int, size: Any, stride: Any) -> DeviceTensor:
        return DeviceTensor(parts["inner"], index)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, self.index)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        more = {} if memory_format is None else {"memory_format": memory_format}
        if device is None or normal(device) == self.device:
            if not copy and dtype in (None, self.dtype) and memory_format is None:
                return self
            return super().to(dtype or self.dtype, copy=copy, **more)
        return torch.ops.aten._to_copy.default(
            self, dtype=dtype, device=normal(device), non_blocking=non_blocking, **more
        )

    def backward(self, *args: Any, **kwargs: Any) -> None:
        hook = self.register_hook(lambda _: ACCELERATOR.last.update({stretch(): self.index}))
        super().backward(*args, **kwargs)
        hook.remove()
        with ACCELERATOR.lock:
            errors, ACCELERATOR.deferred = ACCELERATOR.deferred, []
        if errors:
            raise errors[0]

    def cpu(self, memory_format: Any = None) -> Any:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def new_tensor(
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Any:
        made = torch.tensor(data, dtype=dtype or self.dtype).to(device or self.device)
        return made.requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        with torch.no_grad():
            copy = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner}, device={self.device})"


# -- parts ---------------------------------------------------------------------------------------------------


def place() -> str:
    """``file.py:function`` of the package's innermost frame; in a backward pass ``backward``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if found := place_of(frame.f_code):
            return found
        frame = frame.f_back
    return "backward" if in_backward() else "test"


@cache
def place_of(code: CodeType) -> str:
    """``file.py:function``; "" outside of the package, and for a comprehension, which newer Pythons inline."""
    file, name = Path(code.co_filename), code.co_name
    return "" if name.startswith("<") or PACKAGE not in file.parents else f"{file.name}:{name}"


def stretch() -> int:
    """A number for what this thread does: its backward pass, else the thread itself."""
    task: int = torch._C._current_graph_task_id()
    return task if task != -1 else -threading.get_ident()


def in_backward() -> bool:
    """Whether this thread executes a node of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def normal(device: Any) -> torch.device:
    device = torch.device(device) if not isinstance(device, int) else torch.device(NAME, device)
    return torch.device(NAME, ACCELERATOR.current) if device == torch.device(NAME) else device


def flat_tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += flat_tensors(value)
    return found


def unwrapped(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    if isinstance(value, (list, tuple)):
        return [unwrapped(v) for v in value]
    if isinstance(value, dict):
        return {k: unwrapped(v) for k, v in value.items()}
    return value


def widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in HALF:
        return value.float()
    return [widened(v) for v in value] if isinstance(value, (list, tuple)) else value


def narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return tuple(narrowed(v, dtype) for v in value) if isinstance(value, (list, tuple)) else value


def fill_with_garbage(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(GARBAGE.get(tensor.dtype, WHOLE_GARBAGE if tensor.dtype.itemsize > 2 else 0x5A))


@cache
def is_composite(func: Any) -> bool:
    """Whether the operation is only a sequence of others, so that no device has a kernel for it.

    Autograd takes it apart before a device sees it. In inference mode the device has to, else the accelerator would
    miss the parts: ``conv2d`` is a ``convolution``, and ``where(mask)`` is a ``nonzero``.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # type: ignore[attr-defined]
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


def has_boolean_index(name: str, args: Sequence[Any]) -> bool:
    """Whether an index is a mask, whose number of elements the host must know."""
    if name not in ("aten::index", "aten::index_put", "aten::index_put_"):
        return False
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    filled = name != "aten::index" and args[2].numel() == 1  # a kernel of its own: masked_fill
    return bool(masks) and not filled


def changed(copy: Copy) -> bool:
    now = torch.UntypedStorage._new_with_weak_ptr(copy.memory.cdata)  # type: ignore[attr-defined]
    if now is None:
        return False
    return not torch.equal(torch.empty(0, dtype=torch.uint8).set_(now), copy.values)


# -- PyTorch's functions of a device -------------------------------------------------------------------------


class Stream:
    """A stream of a device: a new one, or the one of that number."""

    def __init__(self, device: Any = None, number: int | None = None) -> None:
        self.device = normal(NAME if device is None else device)
        there = ACCELERATOR.devices[self.device.index]
        if number is None:
            there.streams += 1
            there.has_context = True
        self.number = there.streams if number is None else number

    def synchronize(self) -> None:
        there = ACCELERATOR.devices[self.device.index]
        ACCELERATOR.wait(self.device.index, "synchronize", there.done_with(self.number))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Begin the later work of this stream after the event."""
        if event.device == self.device:
            after = ACCELERATOR.devices[self.device.index].after.setdefault(self.number, {})
            for stream, ticket in event.covers.items():
                after[stream] = max(after.get(stream, -1), ticket)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """``torch.mini.Event``: a mark in a stream; the host may wait for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.device, self.blocking = torch.device(NAME, ACCELERATOR.current), blocking
        self.covers: dict[int, int] = {}
        self.operations = 0
        self.asked = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Module.current_stream()
        self.device = stream.device
        device = ACCELERATOR.devices[self.device.index]
        self.covers, self.operations = device.done_with(stream.number), device.operations
        device.has_context = True

    def query(self) -> bool:
        """False when it is asked first, as on a device that is behind the host."""
        if self.asked:
            ACCELERATOR.arrive(self.device.index, self.covers)
        self.asked = True
        copies = ACCELERATOR.devices[self.device.index].copies
        return not any(copy.ticket <= self.covers.get(copy.stream, -1) for copy in copies)

    def synchronize(self) -> None:
        behind = ACCELERATOR.devices[self.device.index].operations - self.operations
        ACCELERATOR.wait(self.device.index, "event", self.covers, behind)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Module.current_stream()).wait_event(self)


class GenericEvent(Event):
    """``torch.Event``: it keeps the type of its device only, and selects the device of the stream meanwhile."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False) -> None:
        super().__init__()

    def record(self, stream: Stream | None = None) -> None:
        before = ACCELERATOR.current
        super().record(stream)
        ACCELERATOR.select(self.device.index)
        ACCELERATOR.select(before)


class Module:
    """``torch.mini``."""

    Stream, Event = Stream, Event

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The accelerator draws no random numbers."""

    manual_seed = manual_seed_all

    @staticmethod
    def device_count() -> int:
        return len(ACCELERATOR.devices)

    @staticmethod
    def current_device() -> int:
        return ACCELERATOR.current

    @staticmethod
    def set_device(device: Any) -> None:
        ACCELERATOR.select(normal(device).index)

    @staticmethod
    def device(device: Any) -> AbstractContextManager[None]:
        return device_index(normal(device).index)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        ACCELERATOR.wait(normal(NAME if device is None else device).index, "synchronize")

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        place = normal(NAME if device is None else device)
        return Stream(place, ACCELERATOR.thread.streams[place.index])

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        """Make the stream, and its device, the current one; return to both before."""
        streams, device, index = ACCELERATOR.thread.streams, ACCELERATOR.current, stream.device.index
        before = streams[index]
        streams[index] = stream.number
        ACCELERATOR.select(index)
        try:
            yield
        finally:
            streams[index] = before
            ACCELERATOR.select(device)

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return ACCELERATOR.devices[normal(NAME if device is None else device).index].peak_bytes

    @staticmethod
    def max_memory_reserved(device: Any = None) -> int:
        return ACCELERATOR.devices[normal(NAME if device is None else device).index].peak_reserved_bytes

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        found = ACCELERATOR.devices[normal(NAME if device is None else device).index]
        found.peak_bytes, found.peak_reserved_bytes = found.used_bytes(), found.reserved_bytes()

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return ACCELERATOR.devices[normal(NAME if device is None else device).index].used_bytes()

    @staticmethod
    def get_memory_info(device: Any = None) -> tuple[int, int]:
        found = ACCELERATOR.devices[normal(NAME if device is None else device).index]
        return found.limit_bytes - found.reserved_bytes(), found.limit_bytes

    mem_get_info = get_memory_info

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "Miniature"

    @staticmethod
    def empty_cache() -> None:
        for device in ACCELERATOR.devices:
            device.empty_cache()

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return list(HALF)

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return True


@contextmanager
def device_index(index: int | None) -> Iterator[None]:
    before = ACCELERATOR.current
    ACCELERATOR.select(before if index is None else index)
    try:
        yield
    finally:
        ACCELERATOR.thread.device = before  # without making a context there


def synchronize_generic(device: Any = None) -> None:
    """``torch.accelerator.synchronize``: it selects the device, and then the one before."""
    before, index = ACCELERATOR.current, normal(NAME if device is None else device).index
    ACCELERATOR.select(index)
    Module.synchronize(device)
    ACCELERATOR.select(before)


_LIBRARIES: list[torch.library.Library] = []  # a library that is collected takes its kernels with it


def install() -> Accelerator:
    """Make the accelerator this process's device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if _LIBRARIES:
        return ACCELERATOR
    _setup_privateuseone_for_python_backend(NAME, Module())
    every = torch.library.Library("_", "IMPL")
    every.fallback(lambda func, *args, **kwargs: ACCELERATOR.run(func, args, kwargs), NAME_KEY)
    casts = torch.library.Library("_", "IMPL")
    casts.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in ("conv2d", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):
        aten.impl(name, autocast_kernel(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    # PyTorch would compose it of other operations here; CUDA has a kernel for it
    aten.impl(
        "silu_backward",
        lambda *args: ACCELERATOR.run(torch.ops.aten.silu_backward.default, args, {}),
        NAME_KEY,
    )
    _LIBRARIES.extend((every, casts, aten))
    replace_functions()
    return ACCELERATOR


def register(folder: Path) -> None:
    """Put a package of a device outside of PyTorch into ``folder``, so that only torch can count the devices."""
    package = folder / "mini-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mini\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nmini = mini:start\n")


def autocast_kernel(packet: Any) -> Callable[..., Any]:
    """An operation that casts its float32 tensors first, as ``torch.autocast`` does it for CUDA."""
    op = packet.default
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(key):
            cast = [a.to(dtype) if isinstance(a, DeviceTensor) and a.is_floating_point() else a for a in args]
            return op(*cast, **kwargs)

    return kernel


def replace_functions() -> None:
    """Put the accelerator behind functions that PyTorch's Python-made devices lack."""
    memory = ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "memory_allocated")
    for name in ("current_stream", "empty_cache", *memory):
        setattr(torch.accelerator, name, getattr(Module, name))
    torch.accelerator.synchronize = synchronize_generic
    torch.accelerator.get_memory_info = Module.get_memory_info
    torch.accelerator.current_device_index = Module.current_device
    torch.accelerator.set_device_index = Module.set_device
    torch.accelerator.device_index = device_index  # type: ignore[assignment, misc]
    torch.Event, torch.Stream = GenericEvent, Stream  # type: ignore[misc, assignment]
    optimizers: Any = sys.modules["torch.optim.optimizer"]  # torch.optim.optimizer hides it
    optimizers._group_tensors_by_device_and_dtype = grouping(optimizers._group_tensors_by_device_and_dtype)
    torch.Tensor.pin_memory = lambda self, device=None: ACCELERATOR.pin(self)  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda self, device=None: ACCELERATOR.is_pinned(self)  # type: ignore[method-assign, assignment]
    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "empty_like",
        "zeros_like",
        "empty_strided",
        "tensor",
        "as_tensor",
    ):
        setattr(torch, name, factory(getattr(torch, name), is_data=name in ("tensor", "as_tensor")))


def grouping(group: Callable[..., Any]) -> Callable[..., Any]:
    """The C++ function that groups an optimizer's tensors by device, told about the second device."""

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices)
        return {
            (next(t for part in value[0] for t in part if t is not None).device, dtype): value
            for (_, dtype), value in found.items()
        }

    return grouped


def factory(make: Callable[..., Any], *, is_data: bool) -> Callable[..., Any]:
    """A factory that knows ``pin_memory``; one that takes data makes the tensor on the CPU and copies it."""

    def made(*args: Any, **kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if is_data and device is not None and torch.device(device).type == NAME:
            return make(*args, **{**kwargs, "device": "cpu"}).to(normal(device))
        if is_data and args and isinstance(args[0], DeviceTensor):
            return args[0].to(kwargs.get("dtype") or args[0].dtype)
        tensor = make(*args, **kwargs)
        return ACCELERATOR.mark_pinned(tensor) if pinned else tensor

    return made
