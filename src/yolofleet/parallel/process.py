"""What one process sets up before its first operation, and says of itself to the others."""

from __future__ import annotations

import os
import platform
from typing import Any

import cv2
import numpy as np
import torch

from yolofleet import __version__, devices
from yolofleet.config.device import processes_of
from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.errors import ClusterError, ConfigError
from yolofleet.models.precision import resolve_precision
from yolofleet.parallel.place import Place
from yolofleet.parallel.world import World


def prepare_process(where: TrainConfig | ValConfig, place: Place) -> torch.device:
    """Settings of torch that must come before its first operation; returns this process's device."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read once
    # the last bits of a kernel depend on its threads, so exact sums want a fixed number
    exact = where.reduce == "exact"
    share = 1 if exact else max(1, usable_cores() // place.local_size)
    torch.set_num_threads(where.threads or share)
    cv2.setNumThreads(0)
    return devices.device_of(where.device, 0 if place.only_device else place.local_rank)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_kernels(config: TrainConfig, *, sizes_vary: bool = False, tf32: bool = False) -> None:
    """``--deterministic`` and ``--cudnn-benchmark``; exact sums need equal kernels.

    Args:
        sizes_vary: images differ in size from step to step.
        tf32: TensorFloat-32 is allowed.
    """
    deterministic = config.deterministic or config.reduce == "exact"
    if deterministic:
        torch.use_deterministic_algorithms(True)
        kernels: Any = torch.utils.deterministic  # its stub is empty
        kernels.fill_uninitialized_memory = False  # 1 to 5 % of a step on CPUs
    benchmark = config.cudnn_benchmark == "on" or (
        config.cudnn_benchmark == "auto" and not deterministic and not sizes_vary
    )
    devices.choose_kernels(deterministic=deterministic, benchmark=benchmark, tf32=tf32)


def replica_devices(config: TrainConfig, world: World) -> list[torch.device]:
    """Devices of this process: one, or with ``--parallel dp`` all that ``--device`` names.

    Raises:
        ConfigError: several processes and several devices each.
    """
    if config.parallel == "ddp":
        return [world.device]
    if world.size > 1:
        raise ConfigError(
            f"--parallel dp is one process for all devices, and this is one of {world.size}",
            hint="start it without torchrun, or use --parallel ddp",
        )
    return [devices.device_of(config.device, replica) for replica in range(processes_of(config.device))]


def loader_processes(asked: int, world: World) -> int:
    """``--workers``; by default none on CPUs (the cores compute), else this process's share of the cores."""
    if asked >= 0:
        return asked
    if devices.is_host(world.device):
        return 0
    return max(1, min(8, usable_cores() // world.local_size))


def agree(world: World, what: str, mine: str) -> None:
    """Every rank must have the same text. Collective: every rank.

    Raises:
        ClusterError: names the ranks that differ.
    """
    every = [text.decode() for text in world.all_gather_bytes(f"{world.host}\n{mine}".encode())]
    texts = [text.split("\n", 1) for text in every]
    odd = [f"{rank} ({host})" for rank, (host, text) in enumerate(texts) if text != texts[0][1]]
    if odd:
        raise ClusterError(
            f"{what} of rank {', '.join(odd)} differs from rank 0's ({texts[0][0]})",
            hint="all machines need the same data set, configuration and version of yolofleet",
        )


def fleet_precision(asked: str, world: World) -> str:
    """Return the number format of all ranks; ``auto`` is fp32 unless all their devices have the same default.

    Sums of gradients need one loss scale on every rank. Collective: every rank.

    Raises:
        ConfigError: this rank's device cannot do it.
    """
    mine = resolve_precision(asked, world.device)
    every = set(world.all_gather_bytes(mine.encode()))
    return mine if len(every) == 1 else "fp32"


def versions() -> dict[str, str]:
    found = {"yolofleet": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found |= {"numpy": np.__version__, "opencv": cv2.__version__}
    return found | devices.versions()


def place_text(world: World, count: int = 1) -> str:
    """``2 processes (torchrun) on cpu, 1 thread each``, or ``1 process with 2 devices on cpu, 1 thread``."""
    kind = devices.name_of(world.device)
    threads = torch.get_num_threads()
    processes = "1 process" if world.size == 1 else f"{world.size} processes ({world.source})"
    processes += f" with {count} devices" if count > 1 else ""
    return f"{processes} on {kind}, {threads} thread{'s' if threads > 1 else ''}" + (
        " each" if world.size > 1 else ""
    )
