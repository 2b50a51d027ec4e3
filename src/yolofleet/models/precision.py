"""Number formats of the forward pass, and loss scaling for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from yolofleet.errors import ConfigError


def resolve_precision(asked: str, device: torch.device) -> str:
    """``auto`` -> fp16 on CUDA, fp32 elsewhere.

    Raises:
        ConfigError: the device cannot do it.
    """
    if asked == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if asked == "fp16" and device.type == "cpu":
        raise ConfigError(
            "--precision fp16 needs a GPU; this process runs on the CPU", hint="--precision fp32"
        )
    if asked == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("--precision bf16: this GPU has no bfloat16", hint="--precision fp16")
    return asked


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of the forward pass. ``cache_enabled`` stays on: weights are cast once per pass."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16)


def loss_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss by a power of two under fp16; does nothing otherwise."""
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    # it makes its tensors at first use; the threads of several lanes would race for that
    scaler.scale(torch.zeros((), device=device))
    return scaler
