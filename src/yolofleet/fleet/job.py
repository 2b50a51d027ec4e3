"""What to start, as a value: rendered to argv lists here, watched in ``local.py``."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yolofleet.system.children import module_argv

# seconds from a SIGTERM until the agent kills its workers; torch's own 30 may be too few to save in (older ones know
# no other)
SAVING_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass(frozen=True)
class Meeting:
    """This host's place among the hosts of a run.

    Attributes:
        node: number of this host, of ``nodes``.
        address, port: where the host ``store_node`` lets the other hosts reach the run's store.
        card: name of this host's network interface that the other hosts reach.
        secret: hexadecimal; whoever knows it may use the store. Empty for a command, which has no store.
        store_node: number of the host that runs the store; any host can.
    """

    node: int
    nodes: int
    address: str
    port: int
    card: str
    secret: str = field(default="", repr=False)
    store_node: int = 0


@dataclass(frozen=True)
class StoreEnd:
    """This host's end of the run's store, always on 127.0.0.1.

    Attributes:
        port: of the store, or of the relay that leads to it.
        listener: file descriptor of the socket that listens on ``port``, if the agent of this host owns the store.
    """

    port: int = 0
    listener: int | None = None


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


def agent_argv(job: JobSpec, store: StoreEnd = StoreEnd()) -> list[str]:
    """Return the command of torchrun's agent for this host.

    Args:
        store: by default the agent opens a store for this host alone, on a free port.
    """
    node, nodes = (job.meeting.node, job.meeting.nodes) if job.meeting else (0, 1)
    options = f"node={node}" + ("" if store.listener is None else f",listener={store.listener}")
    return [
        *module_argv("yolofleet.parallel.agent"),  # torchrun with a rendezvous that needs no open port
        f"--nnodes={nodes}",
        "--rdzv-backend=loopback",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        f"--rdzv-conf={options}",
        "--local-addr=127.0.0.1",  # not the host name, which may not resolve
        f"--nproc-per-node={job.processes}",
        "--rdzv-id=yolofleet",
        "--max-restarts=0",  # restarts are left to --resume
        f"--log-dir={os.devnull}",  # else every start leaves an empty folder in TMPDIR
        *worker_argv(str(job.folder), *([str(job.job)] if job.job else [])),
    ]


def worker_argv(*words: str) -> list[str]:
    """Return torchrun's arguments that start a worker: forked from a process that has loaded torch, on Linux.

    Elsewhere a new interpreter runs it: macOS's libraries do not survive a fork, Windows has none.
    """
    if sys.platform == "linux":
        return [
            "--start-method=forkserver",
            "--run-path",
            str(Path(__file__).parents[1] / "worker.py"),
            *words,
        ]
    # torchrun's own `python -m` would import from the working folder
    return ["--no-python", *module_argv("yolofleet.worker", *words)]


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


LOOPBACK_INTERFACES = ("lo", "lo0")  # of Linux, of macOS


def loopback_interface() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on loopback, for a run on one machine."""
    here = {name for _, name in socket.if_nameindex()}
    name = next((name for name in LOOPBACK_INTERFACES if name in here), None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def agent_environment(base: Mapping[str, str], card: str = "") -> dict[str, str]:
    """Return the agent's environment: the caller's without its place in another fleet, plus missing defaults.

    Args:
        card: network interface for gloo and NCCL, whatever the caller's environment says; "" = loopback, for a run
            on one machine.
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
    else:
        env |= loopback_interface()
    if sys.platform == "win32":
        env.setdefault("USE_LIBUV", "0")  # the Windows wheels of torch have no libuv
    return env
