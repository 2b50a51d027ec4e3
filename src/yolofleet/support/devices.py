"""All code that depends on the type of device; other modules work with any ``torch.device``.

Functions prefer ``torch.accelerator``, which covers CUDA, ROCm, XPU, MPS and devices outside of PyTorch. If it lacks a
function (torch 2.6 has none for memory, name or context), they use the device's own module, such as ``torch.xpu``. The
*accelerator* is the one type of device besides the CPU that this process can use.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yolofleet.support.device_names import ALL, MIG_INSTEAD, NO_GPU, gpu_ids, mig_reason, numbered
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.proc import entries_of, release_heap
from yolofleet.support.text import listed

HALF_BY_DEFAULT = ("cuda",)  # fp16 with a loss scale is tested there
ONLY_WHEN_NAMED = ("mps",)  # ``auto`` does not choose it, because several operations fall back to the CPU
WITH_SLEEPING_EVENTS = ("cuda",)  # ROCm too
WITH_TRITON = ("cuda", "xpu")  # ROCm too
WITH_GRAPHS = ("cuda",)  # ROCm too
WITHOUT_PINNING = ("mps",)  # it shares the memory of the host
NVIDIA_GPUS = Path(
    "/proc/driver/nvidia/gpus"
)  # those of the machine, also in a container that has none of them


def accelerator() -> str:
    """Return the type of the accelerator, as ``cuda`` (ROCm too), ``xpu`` or ``mps``; "" if there is none."""
    if not torch.accelerator.is_available():
        return ""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else ""


def device_count() -> int:
    """Return how many accelerator devices this process can use."""
    return torch.accelerator.device_count() if accelerator() else 0


def all_devices() -> str:
    """Return the ``--device`` that names every accelerator device of this process. Raise ConfigError if torch finds none."""
    kind, have = accelerator(), device_count()
    if not have:
        raise ConfigError("--device all: torch finds no GPU on this machine", hint=NO_GPU)
    return kind if kind in ONLY_WHEN_NAMED else numbered(range(have))


def unused_note(spec: str, processes: int) -> str:
    """Return the note that ``--device auto`` leaves devices of this machine unused, and what to type; "" if it does not."""
    have = device_count()
    if spec == "auto" and not have and "CUDA_VISIBLE_DEVICES" not in os.environ:
        there = len(entries_of(NVIDIA_GPUS))
        gpus = f"the {there} NVIDIA GPU{'s' * (there > 1)}"
        why = f"torch {torch.__version__} cannot use {gpus} of this machine; yolofleet doctor says why"
        return f"this run uses the CPU, because {why}" if there else ""
    if spec != "auto" or processes > 1 or have < 2:
        return ""
    others = f"GPU{'s' * (have > 2)} {listed([str(i) for i in range(1, have)])}"
    return f"this run uses GPU 0 and leaves {others} unused; --device {ALL} uses all {have}"


def device_of(spec: str, local_rank: int) -> torch.device:
    """Return the device of process ``local_rank`` of this machine for ``--device SPEC``. Raise ConfigError if it does not exist."""
    kind, have = accelerator(), device_count()
    if spec == "auto":
        usable = kind and kind not in ONLY_WHEN_NAMED
        spec = numbered(range(have)) if usable else "cpu"
    if spec == ALL:
        spec = all_devices()
    if spec.startswith("cpu"):
        return torch.device("cpu")
    if spec == "mps":
        if kind != "mps":
            raise ConfigError("--device mps: torch finds no Metal device", hint="--device cpu")
        return torch.device("mps")
    ids = gpu_ids(spec)
    missing = [i for i in ids if i >= have]
    if missing:
        only_one = mig_reason(os.environ.get("CUDA_VISIBLE_DEVICES"))
        known = f"ids 0 to {have - 1}, or {MIG_INSTEAD if only_one else 'check CUDA_VISIBLE_DEVICES'}"
        raise ConfigError(
            f"--device {spec}: no {kind.upper() or 'CUDA'} device {missing[0]}; torch sees {have}"
            + (f": {only_one}" if only_one else ""),
            hint=known if have else "--device cpu",
        )
    if local_rank >= len(ids):
        raise ConfigError(
            f"process {local_rank} of this machine has no device: --device {spec} names {len(ids)}",
            hint="--nproc_per_node must not exceed the number of devices",
        )
    return torch.device(kind, ids[local_rank])


def is_host(device: torch.device) -> bool:
    """Return whether the host can read tensors of ``device`` without waiting."""
    return device.type == "cpu"


def select(device: torch.device) -> None:
    """Make ``device`` the current one of this thread, for libraries that use the current device (NCCL)."""
    if not is_host(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def selected(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one of this thread inside the block; no effect for the CPU."""
    # torch.accelerator.set_device_index would make a context on the device to which the block returns (CUDA 12)
    guard = None if is_host(device) or device.index is None else _function(device, "device")
    return nullcontext() if guard is None else guard(device)


# -- waiting and copying -------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all work of this process."""
    if not is_host(device):
        with selected(device):
            torch.accelerator.synchronize(device)


def completion(device: torch.device, *, sleeps: bool = False) -> Any:
    """Record and return an event in the current stream of ``device``; not for the CPU.

    Args:
        sleeps: the host sleeps while it waits for the event, where the platform can do that. Waking up takes longer than
            the usual wait, which occupies a core.
    """
    module = torch.get_device_module(device.type)
    if hasattr(module, "current_stream"):
        # torch.Event ignores the index of its device, cannot sleep, and makes a context on the current device
        options = {"blocking": True} if sleeps and device.type in WITH_SLEEPING_EVENTS else {}
        event, stream = module.Event(**options), module.current_stream(device)
    else:
        event, stream = torch.Event(device), torch.accelerator.current_stream(device)
    event.record(stream)
    return event


def wait_for(device: torch.device) -> None:
    """Wait for the current stream of ``device`` only, not for other streams (NCCL's)."""
    if not is_host(device):
        completion(device).synchronize()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Queue the block's work for ``device`` beside that of the default stream; no effect without streams.

    The block's work begins after all work that is queued now.
    """
    module = None if is_host(device) else torch.get_device_module(device.type)
    if module is None or not hasattr(module, "Stream"):
        yield
        return
    with selected(device):  # the current device of a new thread is 0
        synchronize(device)
        with module.stream(module.Stream(device)):
            yield


def can_pin(device: torch.device) -> bool:
    """Return whether page-locked memory makes copies to ``device`` faster and asynchronous."""
    return not is_host(device) and device.type not in WITHOUT_PINNING and device.type == accelerator()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; copy a CPU tensor without waiting for work queued on the device."""
    if is_host(tensor.device) and can_pin(device):
        tensor = tensor.pin_memory()  # the allocator keeps the memory until the copy has finished
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of a device tensor to the host: the constructor starts it, :meth:`read` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        # torch chooses page-locked memory for such a copy
        self._host = tensor.detach().to("cpu", non_blocking=True, copy=True)
        self._event = None if is_host(tensor.device) else completion(tensor.device, sleeps=True)

    def read(self) -> Tensor:
        """Return the CPU tensor; wait for the copy and the work queued before it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


# -- number formats and kernels ------------------------------------------------------------------------------


def half_by_default(device: torch.device) -> bool:
    """Return whether ``--precision auto`` is fp16 on ``device``."""
    return device.type in HALF_BY_DEFAULT


def has_bfloat16(device: torch.device) -> bool:
    """Return whether ``device`` has bfloat16 in hardware; emulation (V100, T4) is slower than float32."""
    ask = _function(device, "is_bf16_supported")
    if ask is None:
        return True
    with selected(device):
        return bool(ask(including_emulation=False) if device.type == "cuda" else ask())


def has_tf32(device: torch.device) -> bool:
    """Return whether ``device`` can multiply float32 numbers as TensorFloat-32 (NVIDIA, from Ampere on)."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 8
    )


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute as in a new process, whatever a notebook has set: autocast, gradients, and the type and device of new tensors.

    A setting of the caller would change results, or end them with an error of torch.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield


def kept_random_numbers() -> AbstractContextManager[None]:
    """Restore torch's random numbers at the end of the block, also on the accelerator if this process has used it."""
    kind = accelerator() or "cuda"
    own = getattr(torch, kind)  # of some types it cannot tell whether it is used, or has no random numbers
    is_used = hasattr(own, "get_rng_state") and getattr(own, "is_initialized", bool)()
    return torch.random.fork_rng(range(device_count()) if is_used else (), device_type=kind)


@contextmanager
def float32_products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Compute float32 convolutions and matrix products inside the block in float32, or in TensorFloat-32 if allowed.

    torch's default for convolutions is TensorFloat-32 (10 mantissa bits instead of 23).
    """
    with nullcontext() if is_host(device) else kept_kernels():
        if not is_host(device):
            allow_tf32(tf32, tf32)
        yield


@contextmanager
def kept_kernels() -> Iterator[None]:
    """Restore, at the end of the block, which kernels a process chooses, and where it allows TensorFloat-32."""
    cudnn = torch.backends.cudnn
    before: list[tuple[Callable[[Any], None], Any]] = [
        (partial(setattr, cudnn, name), getattr(cudnn, name)) for name in ("benchmark", "deterministic")
    ]
    with suppress(RuntimeError):  # the process has set the new interface to what the old one cannot express
        before.append((partial(setattr, cudnn, "allow_tf32"), cudnn.allow_tf32))
    with suppress(RuntimeError):
        before.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    before += [(partial(setattr, op, "fp32_precision"), op.fp32_precision) for op in _float32_operations()]
    try:
        yield
    finally:
        for restore, value in before:
            restore(value)


def allow_tf32(convolutions: bool, products: bool) -> None:
    """Allow or forbid TensorFloat-32 on NVIDIA GPUs, in this process.

    The old interface first: it also sets the new one, but to "as torch.backends.fp32_precision says" instead of "never".
    """
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products
    for operation, allowed in zip(
        _float32_operations()[:3], (convolutions, convolutions, products), strict=False
    ):
        operation.fp32_precision = "tf32" if allowed else "ieee"


def _float32_operations() -> list[Any]:
    """Return the operations that have torch's new interface to TensorFloat-32; [] before torch 2.9.

    They are convolutions, recurrent layers and products on GPUs, and products on CPUs, which the old interface sets too.
    """
    on: Any = torch.backends
    if not hasattr(on.cudnn, "conv"):
        return []
    return [on.cudnn.conv, on.cudnn.rnn, on.cuda.matmul, on.mkldnn.matmul]


def choose_kernels(*, deterministic: bool, benchmark: bool, tf32: bool) -> None:
    """Make cuDNN and MIOpen choose kernels by measured time (``benchmark``), or only deterministic ones."""
    allow_tf32(tf32, tf32)
    if deterministic:
        torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = benchmark


@contextmanager
def untimed_kernels() -> Iterator[None]:
    """Do not choose kernels by measured time inside the block: each new image shape would time every convolution."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def kernel_versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of results on an accelerator depend on, as values for JSON."""
    found: dict[str, Any] = {"device": name_of(device)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
        if operations := _float32_operations():
            found["tf32"] = [op.fp32_precision == "tf32" for op in operations[:3:2]]
        else:
            found["tf32"] = [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
    return found


def has_triton(device: torch.device) -> bool:
    """Return whether Triton, which comes with torch for Linux, has kernels for this type of device."""
    return device.type in WITH_TRITON and find_spec("triton") is not None


def has_graphs(device: torch.device) -> bool:
    """Return whether torch captures the work of ``device`` as a graph."""
    return device.type in WITH_GRAPHS


def graphed(function: Callable[..., Any], samples: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Return ``function`` as a graph of its work, with another one of its backward pass.

    Args:
        samples: arguments of the function. Later ones have the same shapes, and are copied if their memory is another.

    Raises:
        RuntimeError: torch cannot capture the work; or the device has too little memory.
    """
    with selected(samples[0].device), warnings.catch_warnings():
        # torch keeps the results of its trials, and warns that their streams are others
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)
        found: Callable[..., Any] = torch.cuda.make_graphed_callables(
            function, samples, allow_unused_input=True
        )
    return found


def has_fused(optimizer: Callable[..., torch.optim.Optimizer], device: torch.device) -> bool:
    """Return whether ``optimizer(parameters, fused=True)`` works on ``device``, by trying one step."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer([parameter], fused=True).step()
    except RuntimeError:
        return False
    return True


# -- names, memory and versions ------------------------------------------------------------------------------


def name_of(device: torch.device) -> str:
    """Return the product name of ``device``, or its type."""
    ask = _function(device, "get_device_name")
    return device.type if ask is None else str(ask(device))


def uuid_of(device: torch.device) -> str:
    """Return the UUID of ``device``, which no other GPU or MIG instance has; "" if torch does not know it."""
    return str(getattr(_called(device, "get_device_properties"), "uuid", ""))


_held: WeakKeyDictionary[object, tuple[torch.device, int]] = WeakKeyDictionary()


def count_as_held(owner: object, device: torch.device, held_bytes: int) -> None:
    """Count memory that torch reserves for ``owner``, but does not count as that of tensors, until ``owner`` is gone."""
    _held[owner] = device, held_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on ``device`` since :func:`reset_peak_memory`, bytes; 0 if torch does not count it."""
    held = sum(held_bytes for place, held_bytes in _held.values() if place == device)
    return int(_called(device, "max_memory_allocated") or 0) + held


def reserved_bytes(device: torch.device) -> int:
    """Return the memory that torch holds on ``device`` now, bytes; 0 if torch does not count it."""
    return int(_called(device, "memory_reserved") or 0)


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the peak of the memory that torch held on ``device``, with blocks it keeps for later; see :func:`peak_memory_bytes`."""
    return max(int(_called(device, "max_memory_reserved") or 0), peak_memory_bytes(device))


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total memory of ``device``, bytes; None if torch does not know them."""
    found = _called(device, "get_memory_info") or _called(device, "mem_get_info")
    return (int(found[0]), int(found[1])) if found else None


def temperature_c(device: torch.device) -> float:
    """Return the temperature of ``device``, degrees Celsius; 0 if torch cannot read it.

    torch asks NVIDIA's driver through the package nvidia-ml-py, and AMD's through amdsmi. The host does not wait for
    the device.
    """
    with suppress(ImportError, AttributeError):
        return float(_called(device, "temperature") or 0)
    return 0.0


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak of :func:`peak_memory_bytes` at the memory in use now. The host does not wait for the device."""
    _called(device, "reset_peak_memory_stats")


def release_memory(device: torch.device) -> None:
    """Return the unused memory that torch or the heap keeps for ``device``, so that one large block can be allocated from it."""
    gc.collect()  # a pass that ran out of memory leaves reference cycles that hold its tensors
    if is_host(device):
        return release_heap()
    release = _function(device, "empty_cache")
    if release is not None:
        with selected(device), suppress(RuntimeError):  # torch.accelerator has it, but not for every device
            release()


def versions() -> dict[str, str]:
    """Return the versions of the platforms that torch was built for, by name."""
    found = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "xpu": getattr(torch.version, "xpu", None),
    }
    return {name: version for name, version in found.items() if version}


def collective_backend(device: torch.device) -> str:
    """Return torch's name of the backend: gloo with the device's own backend, or gloo alone."""
    of_device = dist.Backend.default_device_backend_map.get(device.type)
    if is_host(device) or of_device is None or not dist.is_backend_available(of_device):
        return "gloo"  # NCCL does not exist on Windows
    return f"cpu:gloo,{device.type}:{of_device}"


def _called(device: torch.device, name: str) -> Any:
    """Return the result of :func:`_function` for ``device``; None for the CPU, or if torch cannot say."""
    function = None if is_host(device) else _function(device, name)
    with suppress(RuntimeError):  # torch.accelerator has functions that do not work for every device
        return None if function is None else function(device)
    return None


def _function(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a function of ``torch.accelerator``, or else of the device's module; None if neither has it."""
    homes = [torch.accelerator]
    with suppress(RuntimeError, AttributeError):
        homes.append(torch.get_device_module(device.type))
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def is_out_of_memory(problem: Exception) -> bool:
    """Return whether an allocation of CUDA or its libraries, the CPU allocator, Python, NumPy or OpenCV failed."""
    # oneDNN says "create a ..." when it gets no memory on a CPU; then OpenCV's words. The last ones end a status of cuBLAS,
    # cuSOLVER or cuDNN: their handles and workspaces are outside of torch's allocator.
    words = (
        *("out of memory", "allocate memory", "not enough memory"),
        *("create a primitive", "create a memory", "Insufficient memory"),
        *("_ALLOC_FAILED", "_ALLOCATION_FAILED"),
    )
    return isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or any(
        word in str(problem) for word in words
    )
