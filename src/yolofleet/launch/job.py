"""What to start, as a value: rendered to argv lists here, watched in ``local.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# seconds from a SIGTERM until the agent kills its workers; torch's own 30 may be too few to save in (older ones know
# no other)
SAVING_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass(frozen=True)
class Meeting:
    """Where this machine stands among several.

    Attributes:
        node: number of this machine, of ``nodes``.
        address, port: of the first machine, where all agents and workers meet.
        card: the network card of this machine that the others reach.
    """

    node: int
    nodes: int
    address: str
    port: int
    card: str


@dataclass(frozen=True)
class JobSpec:
    """What one machine does for a run: ``processes`` workers that read the job of the run ``folder``.

    Attributes:
        job: the configuration, when it is not the folder's own ``logs/job.yaml``.
        meeting: None: there is no other machine.
    """

    folder: Path
    processes: int
    job: Path | None = None
    meeting: Meeting | None = None


def agent_argv(job: JobSpec) -> list[str]:
    """The command of torchrun's agent for this machine.

    Alone, the agent chooses a free port itself (endpoint port 0), on loopback. Restarts are left to ``--resume``.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *(_alone() if job.meeting is None else _among(job.meeting)),
        f"--nproc-per-node={job.processes}",
        "--rdzv-id=yolofleet",
        "--max-restarts=0",
        f"--log-dir={os.devnull}",  # else every start leaves an empty folder in TMPDIR
        "-m",
        "yolofleet.worker",
        str(job.folder),
        *([str(job.job)] if job.job else []),
    ]


def _alone() -> list[str]:
    return [
        "--nnodes=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",  # not the host name, which may not resolve
    ]


def _among(meeting: Meeting) -> list[str]:
    return [
        f"--nnodes={meeting.nodes}",
        f"--node-rank={meeting.node}",
        "--rdzv-backend=static",
        f"--master-addr={meeting.address}",
        f"--master-port={meeting.port}",
    ]


def meeting_environment(meeting: Meeting, processes: int) -> dict[str, str]:
    """What torchrun reads instead of options: ``torchrun SCRIPT`` on every machine is then one job."""
    return {
        "PET_NNODES": str(meeting.nodes),
        "PET_NODE_RANK": str(meeting.node),
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MASTER_ADDR": meeting.address,
        "PET_MASTER_PORT": str(meeting.port),
    }


AGENT_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # ids as nvidia-smi shows them
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads steal the cores of other processes
    "OMP_NUM_THREADS": "1",  # torchrun would warn; the worker sets its own count (--threads)
    SAVING_S: "300",
}


def agent_environment(base: Mapping[str, str], card: str = "") -> dict[str, str]:
    """The agent's environment: the caller's, less a place in another fleet, plus defaults that are missing.

    Args:
        card: gloo and NCCL talk through this one, whatever the caller's environment says.
    """
    strays = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
    )
    env = AGENT_DEFAULTS | {name: value for name, value in base.items() if name not in strays}
    if card:
        env["GLOO_SOCKET_IFNAME"] = card
        env["NCCL_SOCKET_IFNAME"] = f"={card}"  # this name, not names that begin so
    elif sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif sys.platform == "darwin":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    elif sys.platform == "win32":
        env.setdefault("USE_LIBUV", "0")  # the Windows wheels of torch have no libuv
    return env
