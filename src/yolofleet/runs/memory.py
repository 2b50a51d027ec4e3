"""Recognise an out-of-memory error, and suggest smaller settings."""

from __future__ import annotations

import torch

from yolofleet.config.checks import divisors, micro_batch_of
from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.errors import ConfigError


def is_out_of_memory(problem: Exception) -> bool:
    """Return whether an allocation of CUDA, the CPU allocator, Python or NumPy failed."""
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or any(
        word in str(problem) for word in words
    )


def out_of_memory(problem: Exception, settings: TrainConfig | ValConfig, device: torch.device) -> ConfigError:
    """Return the error that suggests smaller settings."""
    if isinstance(settings, TrainConfig):
        micro_batch = micro_batch_of(settings)
        smaller = [str(d) for d in divisors(settings.batch) if d < micro_batch]
        at_once = f"--micro-batch {micro_batch}, --img {settings.img}"
        hint = f"--micro-batch {smaller[-1]}" if smaller else "a smaller --img or --model"
        hint += ", or a smaller --val-batch if the run was validating"
    else:
        at_once = f"--batch {settings.batch}, --img {settings.img}"
        hint = f"--batch {max(1, settings.batch // 2)}: it does not change the figures"
    return ConfigError(
        f"{device} has too little memory for {at_once}",
        source=" ".join(str(problem).split())[:300] or type(problem).__name__,
        hint=hint,
    )
