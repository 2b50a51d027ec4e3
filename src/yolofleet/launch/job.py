"""What to start, as a value: rendered to argv lists here, watched in ``local.py``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JobSpec:
    """One run on this machine: ``processes`` workers that read the job of the run ``folder``."""

    folder: Path
    processes: int


def agent_argv(job: JobSpec) -> list[str]:
    """The command of torchrun's agent for this machine.

    The agent chooses a free port itself (endpoint port 0), on loopback; restarts are left to ``--resume``.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={job.processes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-id=yolofleet",
        "--local-addr=127.0.0.1",  # not the host name, which may not resolve
        "--max-restarts=0",
        "-m",
        "yolofleet.worker",
        str(job.folder),
    ]


def agent_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment: the caller's, less a place in another fleet, plus defaults that are missing."""
    strays = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
    )
    env = {name: value for name, value in base.items() if name not in strays}
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # ids as nvidia-smi shows them
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads steal the cores of other processes
    env.setdefault("OMP_NUM_THREADS", "1")  # torchrun would warn; the worker sets its own count (--threads)
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif sys.platform == "darwin":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    elif sys.platform == "win32":
        env.setdefault("USE_LIBUV", "0")  # the Windows wheels of torch have no libuv
    return env
