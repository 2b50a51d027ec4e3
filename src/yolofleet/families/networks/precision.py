"""Number formats of the forward pass, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from yolofleet.support import devices
from yolofleet.support.errors import ConfigError


def resolve_precision(asked: str, device: torch.device) -> str:
    """Return the precision; ``auto`` is fp16 on CUDA, fp32 elsewhere. Raise ConfigError if the device does not support it."""
    if asked == "auto":
        return "fp16" if devices.half_by_default(device) else "fp32"
    if asked == "fp16" and devices.is_host(device):
        raise ConfigError(
            "--precision fp16 needs a GPU; this process runs on the CPU", hint="--precision fp32"
        )
    if asked == "tf32" and not devices.has_tf32(device):
        raise ConfigError(
            f"--precision tf32: {devices.name_of(device)} does not support TensorFloat-32",
            hint="--precision fp32; NVIDIA GPUs support it from the Ampere generation on",
        )
    if asked == "bf16" and not devices.is_host(device) and not devices.has_bfloat16(device):
        raise ConfigError(
            f"--precision bf16: {devices.name_of(device)} cannot compute in bfloat16",
            hint="--precision fp16, or fp32",
        )
    return asked


def inference_precision(asked: str, device: torch.device) -> str:
    """Return the precision as :func:`resolve_precision`, but fp32 for fp16 on the CPU, which computes no faster in it.

    Raises:
        ConfigError: the device does not support the precision.
    """
    return resolve_precision("fp32" if asked == "fp16" and devices.is_host(device) else asked, device)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass, which casts a weight at each use.

    torch's cache of casts belongs to all threads, and the first replica whose pass ends empties it. A weight that a network
    uses twice would then be cast once or twice by chance, and its gradient would be rounded once or twice.
    """
    if precision in ("fp32", "tf32"):
        return devices.float32_products(device, tf32=precision == "tf32")
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, cache_enabled=False)


class LossScaler:
    """A power of two that keeps fp16 gradients in range: halved after an overflow, doubled after 2000 good steps.

    The algorithm of ``torch.amp.GradScaler`` (arXiv:1710.03740), without host reads. A step is good if its gradient norm,
    which is equal on every rank, is finite.
    """

    START = 65536.0
    GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000

    def __init__(self, precision: str, device: torch.device) -> None:
        self.enabled = precision == "fp16"  # else it has no effect
        self._scale = torch.tensor(self.START if self.enabled else 1.0, device=device)
        self._good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for the backward pass."""
        return loss * self._scale.to(loss.device, non_blocking=True) if self.enabled else loss

    def factor(self) -> Tensor:
        """Return the factor that undoes the scale; exact, since the scale is a power of two."""
        return self._scale.reciprocal()

    def update(self, finite: Tensor) -> None:
        """Adapt the scale after a step; ``finite`` (bool, on the device): its gradients were finite."""
        if not self.enabled:
            return
        good = torch.where(finite, self._good_steps + 1, 0)
        grows = good == self.GROWTH_INTERVAL
        grown = torch.where(grows, self._scale * self.GROWTH, self._scale)
        grown = torch.where(torch.isfinite(grown), grown, self._scale)
        self._scale.copy_(torch.where(finite, grown, self._scale * self.BACKOFF))
        self._good_steps.copy_(torch.where(grows, 0, good))

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, with the keys of ``torch.amp.GradScaler``; empty if disabled."""
        if not self.enabled:
            return {}
        return {
            "scale": float(self._scale),
            "growth_factor": self.GROWTH,
            "backoff_factor": self.BACKOFF,
            "growth_interval": self.GROWTH_INTERVAL,
            "_growth_tracker": int(self._good_steps),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a stored scale; the empty state of a run without fp16 changes nothing."""
        if self.enabled and state:
            self._scale.fill_(state["scale"])
            self._good_steps.fill_(int(state["_growth_tracker"]))
