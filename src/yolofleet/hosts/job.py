"""A job as a value, and its command. ``launch/local.py`` and ``hosts/host_agent.py`` run it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yolofleet.parallel.place import RUN_ID
from yolofleet.report.folder import RunFolder
from yolofleet.system.children import module_argv

# Seconds from SIGTERM until torchrun's agent kills its workers. torch's default of 30 may be too short to save a
# checkpoint, and older versions have no other.
SAVING_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass(frozen=True)
class Rendezvous:
    """This host's place among the hosts of a run.

    Attributes:
        node: number of this host, of ``nodes``.
        address, port: where the host ``store_node`` lets the other hosts reach the run's store.
        interface: name of this host's network interface that the other hosts reach.
        secret: hexadecimal key of the store. Empty for a command, which has no store.
        store_node: number of the host that runs the store; any host can.
    """

    node: int
    nodes: int
    address: str
    port: int
    interface: str
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
    """What one machine runs: ``processes`` workers, which read the job in the run ``folder``.

    Attributes:
        job: file of the configuration; None = ``logs/job.yaml`` of the folder.
        rendezvous: None if there is no other machine.
        restarts: how often the run was started again after a failure.
        resume_options: of the command that resumes the run.
    """

    folder: Path
    processes: int
    job: Path | None = None
    rendezvous: Rendezvous | None = None
    restarts: int = 0
    resume_options: tuple[str, ...] = ()


def agent_argv(job: JobSpec) -> list[str]:
    """Return the command of torchrun's agent for a run on this machine alone."""
    return [*module_argv("yolofleet.parallel.torchrun_agent"), *agent_arguments(job)]


def agent_arguments(job: JobSpec, store_port: int = 0) -> list[str]:
    """Return the arguments of torchrun's agent for this host.

    Args:
        store_port: of the run's store, or of the relay to it; 0: the agent opens a store for this host alone.
    """
    node, nodes = (job.rendezvous.node, job.rendezvous.nodes) if job.rendezvous else (0, 1)
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=loopback",  # a rendezvous that opens no port
        f"--rdzv-endpoint=127.0.0.1:{store_port}",
        f"--rdzv-conf=node={node}",
        "--local-addr=127.0.0.1",  # not the host name, which may not resolve
        f"--nproc-per-node={job.processes}",
        f"--rdzv-id={RUN_ID}",
        "--max-restarts=0",  # the launcher starts a run again, on the hosts that are left
        f"--log-dir={os.devnull}",  # else every start leaves an empty folder in TMPDIR
        *worker_argv(str(job.folder), str(job.job or RunFolder(job.folder).job), str(job.restarts)),
    ]


def worker_argv(*words: str) -> list[str]:
    """Return torchrun's arguments that start a worker.

    On Linux a process that has loaded torch forks it. Elsewhere a new interpreter runs it: macOS's libraries do not
    survive a fork, and Windows has none.
    """
    if sys.platform == "linux":
        worker = str(Path(__file__).parents[1] / "rank/worker.py")
        return ["--start-method=forkserver", "--run-path", worker, *words]
    # torchrun's own `python -m` would import from the working folder
    return ["--no-python", *module_argv("yolofleet.rank.worker", *words)]


def rendezvous_environment(rendezvous: Rendezvous, processes: int) -> dict[str, str]:
    """Return the variables that torchrun reads as options, so that ``torchrun SCRIPT`` on every host is one job."""
    return {
        "PET_NNODES": str(rendezvous.nodes),
        "PET_NODE_RANK": str(rendezvous.node),
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MASTER_ADDR": rendezvous.address,
        "PET_MASTER_PORT": str(rendezvous.port),
    }


# A thread of OpenMP that sleeps at every barrier halves the speed of a process with two threads, and one that spins for
# milliseconds (libgomp's default) takes the cores of other processes. libgomp reads both variables, others the first one.
OPENMP_WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}

AGENT_DEFAULTS = {
    **OPENMP_WAITS,
    "OMP_NUM_THREADS": "1",  # torchrun would warn; the worker sets its own count (--threads)
    SAVING_S: "300",
}


LOOPBACK_INTERFACES = ("lo", "lo0")  # of Linux, of macOS


def loopback_interface() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on loopback, for a run on one machine."""
    here = {name for _, name in socket.if_nameindex()}
    name = next((name for name in LOOPBACK_INTERFACES if name in here), None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def agent_environment(base: Mapping[str, str], interface: str = "") -> dict[str, str]:
    """Return the agent's environment: the caller's, without variables of another launcher, and with our defaults.

    Args:
        interface: network interface for gloo and NCCL, which overrides the caller's environment; "" = loopback, for
            a run on one machine.
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
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
        env["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=" means the whole name, not a prefix
    else:
        env |= loopback_interface()
    if sys.platform == "win32":
        env.setdefault("USE_LIBUV", "0")  # the Windows wheels of torch have no libuv
    return env
