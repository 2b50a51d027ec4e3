"""What depends on the kind of device: all other modules work with any ``torch.device``.

Functions prefer ``torch.accelerator``, which covers CUDA, ROCm, XPU, MPS and devices outside of PyTorch. Where it
lacks one (torch 2.6 has no memory, name or context functions), they use the device's own module, such as
``torch.xpu``. The *accelerator* is the one kind of device beside the CPU that this process can use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yolofleet.errors import ConfigError

HALF_BY_DEFAULT = ("cuda",)  # fp16 with a loss scale was tried there
ONLY_WHEN_NAMED = ("mps",)  # ``auto`` does not take it: several operations fall back to the CPU
WITHOUT_PINNING = ("mps",)  # its memory is the host's


def accelerator() -> str:
    """Return the type of the accelerator, as ``cuda`` (ROCm too), ``xpu`` or ``mps``; "" if there is none."""
    if not torch.accelerator.is_available():
        return ""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else ""


def device_count() -> int:
    """Return how many accelerator devices this process can use."""
    return torch.accelerator.device_count() if accelerator() else 0


def device_of(spec: str, local_rank: int) -> torch.device:
    """Return the device of process ``local_rank`` of this machine for ``--device SPEC``.

    Raises:
        ConfigError: the device does not exist.
    """
    kind, have = accelerator(), device_count()
    if spec == "auto":
        usable = kind and kind not in ONLY_WHEN_NAMED
        spec = ",".join(str(i) for i in range(have)) if usable else "cpu"
    if spec.startswith("cpu"):
        return torch.device("cpu")
    if spec == "mps":
        if kind != "mps":
            raise ConfigError("--device mps: this torch has no Metal device", hint="--device cpu")
        return torch.device("mps")
    ids = [int(part) for part in spec.split(",")]
    missing = [i for i in ids if i >= have]
    if missing:
        raise ConfigError(
            f"--device {spec}: no {kind.upper() or 'CUDA'} device {missing[0]}; torch sees {have}",
            hint="--device cpu" if not have else f"ids 0 to {have - 1}, or check CUDA_VISIBLE_DEVICES",
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
    """Make ``device`` the current one of this thread, for libraries that ask for it (NCCL)."""
    if not is_host(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


@contextmanager
def selected(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current one inside the block; the CPU changes nothing."""
    if is_host(device) or device.index is None:
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


# -- waiting and copying -------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all work that this process gave it."""
    if not is_host(device):
        torch.accelerator.synchronize(device)


def completion(device: torch.device) -> torch.Event:
    """Return an event behind the work that this thread has given to ``device``; not for the CPU."""
    event = torch.Event(device=device)
    event.record()
    return event


def wait_for(device: torch.device) -> None:
    """Wait for the current stream of ``device``; work on other streams (NCCL's) is not waited for."""
    if not is_host(device):
        completion(device).synchronize()


def can_pin(device: torch.device) -> bool:
    """Return whether copies to ``device`` are faster, and need no wait, from page-locked memory."""
    return not is_host(device) and device.type not in WITHOUT_PINNING and device.type == accelerator()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device`` without a wait for the work that is queued there; one that is there stays."""
    if is_host(tensor.device) and can_pin(device):
        tensor = tensor.pin_memory()  # the allocator keeps the memory until the copy is done
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """A copy of a device tensor on its way to the host: started at once, waited for when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        # torch chooses page-locked memory for such a copy
        self._host = tensor.detach().to("cpu", non_blocking=True, copy=True)
        self._event = None if is_host(tensor.device) else completion(tensor.device)

    def read(self) -> Tensor:
        """Return the CPU tensor; waits only for work that was queued before the copy, and for the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


# -- numbers -------------------------------------------------------------------------------------------------


def half_by_default(device: torch.device) -> bool:
    """Return whether ``--precision auto`` is fp16 on ``device``."""
    return device.type in HALF_BY_DEFAULT


def has_bfloat16(device: torch.device) -> bool:
    """Return whether ``device`` computes in bfloat16 itself; emulation (V100, T4) is slower than float32."""
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


def float32_products(device: torch.device, *, tf32: bool) -> AbstractContextManager[object]:
    """Compute float32 convolutions and products in float32 or, if allowed, TensorFloat-32 inside the block.

    By itself torch uses TensorFloat-32 (10 bits instead of 23) for convolutions.
    """
    return nullcontext() if is_host(device) else _tf32(tf32)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    allow_tf32(allowed, allowed)
    try:
        yield
    finally:
        allow_tf32(*before)


def allow_tf32(convolutions: bool, products: bool) -> None:
    """Let NVIDIA GPUs use TensorFloat-32 for float32, in this process."""
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products


def choose_kernels(*, deterministic: bool, benchmark: bool, tf32: bool) -> None:
    """Let cuDNN and MIOpen choose kernels by time (``benchmark``), or only deterministic ones."""
    allow_tf32(tf32, tf32)
    if deterministic:
        torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = benchmark


def kernel_versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of results on an accelerator depend on; JSON."""
    found: dict[str, Any] = {"device": name_of(device)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
        found["tf32"] = [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
    return found


def has_fused(optimizer: Callable[..., torch.optim.Optimizer], device: torch.device) -> bool:
    """Return whether ``optimizer(parameters, fused=True)`` works on ``device``; found out by one step of it."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer([parameter], fused=True).step()
    except RuntimeError:
        return False
    return True


# -- facts ---------------------------------------------------------------------------------------------------


def name_of(device: torch.device) -> str:
    """Return the product name of ``device``, or its type."""
    ask = _function(device, "get_device_name")
    return device.type if ask is None else str(ask(device))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that tensors on ``device`` have had; 0 where torch does not count."""
    ask = None if is_host(device) else _function(device, "max_memory_allocated")
    with suppress(RuntimeError):  # torch.accelerator has the function, but not for every device
        return int(ask(device)) if ask is not None else 0
    return 0


def versions() -> dict[str, str]:
    """Return the version of the platform that torch was built for, by its name."""
    found = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "xpu": getattr(torch.version, "xpu", None),
    }
    return {name: version for name, version in found.items() if version}


def collective_backend(device: torch.device) -> str:
    """Return torch's name of the process group's backend: that of the device beside gloo, or gloo alone."""
    of_device = dist.Backend.default_device_backend_map.get(device.type)
    if is_host(device) or of_device is None or not dist.is_backend_available(of_device):
        return "gloo"  # NCCL does not exist on Windows
    return f"cpu:gloo,{device.type}:{of_device}"


def _function(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a function of ``torch.accelerator``, or else of the device's module; None if neither has it."""
    homes = [torch.accelerator]
    with suppress(RuntimeError, AttributeError):
        homes.append(torch.get_device_module(device.type))
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)
