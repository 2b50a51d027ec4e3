"""Set up one process of a run before its first operation, and compare it with the other ranks."""

from __future__ import annotations

import os
import platform
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import cv2
import numpy as np
import torch

from yolofleet import __version__
from yolofleet.config.schema import MOST_LOADERS, TrainConfig, ValConfig
from yolofleet.data.images.decode import set_opencv_threads
from yolofleet.families.networks.precision import resolve_precision
from yolofleet.support import devices
from yolofleet.support.device_names import ALL, processes_of
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.place import ENV, Place
from yolofleet.training.parallel.world import World

_RUNS: list[ExitStack] = []  # of this process; the first has what restores the caller's settings
_LENDING = threading.Lock()


@contextmanager
def lent_process() -> Iterator[None]:
    """Run as in a new process, and give this one back as it was: a notebook that called ``Model.train`` goes on with it.

    Runs of several threads end in any order: the last one restores what was there before the first.
    """
    with _LENDING:
        _RUNS.append(ExitStack())
        if len(_RUNS) == 1:
            _RUNS[0].enter_context(_kept_settings())
    try:
        with devices.torch_defaults():
            yield
    finally:
        with _LENDING:
            _RUNS.pop().close()


@contextmanager
def _kept_settings() -> Iterator[None]:
    """Restore random numbers, threads, kernels, and whether torch demands deterministic functions."""
    filling: Any = torch.utils.deterministic  # its stub is empty
    with devices.kept_random_numbers(), devices.kept_kernels(), ExitStack() as back:
        back.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        back.callback(setattr, filling, "fill_uninitialized_memory", filling.fill_uninitialized_memory)
        back.callback(random.setstate, random.getstate())
        back.callback(torch.set_num_threads, torch.get_num_threads())
        back.callback(set_opencv_threads, cv2.getNumThreads())
        yield


def prepare_process(where: TrainConfig | ValConfig, place: Place) -> torch.device:
    """Apply the settings that torch needs before its first operation; return this process's device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read once
    # The last bits of a kernel's result depend on its threads, so exact sums need a fixed number.
    exact = where.reduce == "exact"
    share = 1 if exact else max(1, usable_cores() // place.local_size)
    torch.set_num_threads(where.threads or share)
    set_opencv_threads(1)
    here = devices.device_count() if where.device in ("auto", ALL) else processes_of(where.device)
    if place.source == ENV and here > 1 and not where.device.startswith("cpu"):
        raise ConfigError(
            f"LOCAL_RANK is missing, and nothing else says which of the {here} devices here rank {place.rank} uses",
            hint="name one: --device 0; or start one process for each device with torchrun",
        )
    shares_gpu = place.only_device.startswith("MIG-") or (not place.only_device and ":" in where.device)
    if place.local_size > 1 and shares_gpu and not where.device.startswith("cpu"):
        # NCCL refuses two ranks on one GPU of one host, so each rank is a host of its own and uses sockets
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()} {place.local_rank}"
    return devices.device_of(where.device, 0 if place.only_device else place.local_rank)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_kernels(config: TrainConfig, *, sizes_vary: bool = False, tf32: bool = False) -> None:
    """Apply ``--deterministic``; exact sums imply deterministic kernels.

    Args:
        sizes_vary: the image size changes from step to step.
    """
    deterministic = config.deterministic or config.reduce == "exact"
    if deterministic:
        torch.use_deterministic_algorithms(True)
        kernels: Any = torch.utils.deterministic  # its stub is empty
        kernels.fill_uninitialized_memory = False  # 1 to 5 % of a step on CPUs
    benchmark = not deterministic and not sizes_vary
    devices.choose_kernels(deterministic=deterministic, benchmark=benchmark, tf32=tf32)


def replica_devices(config: TrainConfig, world: World) -> list[torch.device]:
    """Return the devices of this process: one, or with ``--parallel dp`` all that ``--device`` names.

    Raises:
        ConfigError: ``--parallel dp`` in one of several processes.
    """
    if config.parallel == "ddp":
        return [world.device]
    if world.size > 1:
        raise ConfigError(
            f"--parallel dp needs one process for all devices, and this is one of {world.size} processes",
            hint="start it without torchrun, or use --parallel ddp",
        )
    return [devices.device_of(config.device, replica) for replica in range(processes_of(config.device))]


def loader_processes(asked: int, world: World, *, beside_training: bool = False) -> int:
    """Return the number of loader processes: ``asked`` if it is not negative, else a default.

    A validation beside the training has a quarter of that, because the training's own processes go on and need the cores. It
    has the time of an epoch.

    The default is 0 on CPUs, whose cores are busy with training. With GPUs it is this process's share of the cores, less
    one for the process itself, at most ``MOST_LOADERS``.
    """
    if asked < 0:
        share = min(MOST_LOADERS, usable_cores() // world.local_size - 1)
        asked = 0 if devices.is_host(world.device) else max(1, share)
    return -(-asked // 4) if beside_training else asked


def check_equal(world: World, what: str, mine: str) -> None:
    """Raise unless all ranks have the same text ``mine`` and the same version of yolofleet. Collective: every rank.

    Raises:
        ClusterError: names the ranks that differ from rank 0.
    """
    texts = world.gather((world.host, f"{__version__} {mine}"))
    odd = [f"{rank} ({host})" for rank, (host, text) in enumerate(texts) if text != texts[0][1]]
    if odd:
        raise ClusterError(
            f"{what} of rank {', '.join(odd)} differs from rank 0's ({texts[0][0]})",
            hint="all machines need the same data set, configuration and version of yolofleet",
        )


def fleet_precision(asked: str, world: World) -> str:
    """Return the precision of all ranks; ``auto`` is fp32 unless all their devices have the same default.

    All ranks need the same loss scale, because they sum scaled gradients. Collective: every rank.

    Raises:
        ConfigError: this rank's device does not support the precision.
    """
    mine = resolve_precision(asked, world.device)
    return mine if len(set(world.gather(mine))) == 1 else "fp32"


def versions() -> dict[str, str]:
    found = {"yolofleet": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found |= {"numpy": np.__version__, "opencv": cv2.__version__}
    return found | devices.versions()


def place_text(world: World, count: int = 1) -> str:
    """Return a text such as ``2 processes (torchrun) on cpu, 1 thread each``; ``count``: devices of a process."""
    kind = devices.name_of(world.device)
    threads = torch.get_num_threads()
    processes = "1 process" if world.size == 1 else f"{world.size} processes ({world.source})"
    processes += f" with {count} devices" if count > 1 else ""
    return f"{processes} on {kind}, {threads} thread{'s' if threads > 1 else ''}" + (
        " each" if world.size > 1 else ""
    )
