"""Read rank, world size and the address of rank 0 from the launcher's environment variables. No torch.

torchrun and compatible launchers give everything. ``mpirun`` and ``srun`` give ranks; the address and port of rank 0
are derived from their variables about hosts and jobs. The pods of a PyTorchJob have no ``LOCAL_RANK``: one process each. The
innermost launcher wins: torchrun under srun counts as torchrun. ``MASTER_ADDR`` and ``MASTER_PORT`` override derived values.

Variables that say "one of several" and do not say which are refused: each process would train the whole data set alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from yolofleet.support.errors import ConfigError
from yolofleet.support.listener import LOOPBACK

RUN_ID = "yolofleet"  # of torchrun's agents that our launchers start
MOST_RANKS = 100_000  # a larger number is a mistake, and would allocate gigabytes before any check fails
PORTS = range(15000, 30000)  # below Linux' ephemeral ports (32768) and the node ports of Kubernetes (30000)


@dataclass(frozen=True)
class Place:
    """The position of one process among ``size``."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    source: str = "alone"  # the launcher
    # address, port: of rank 0's rendezvous store, or of that of torchrun's agent
    address: str = ""
    port: int = 0
    # the one device that the launcher makes visible to this process, if the machine runs several processes;
    # else ""
    only_device: str = ""
    restarts: int = 0  # how often all processes were started again after a failure


def place_from_environment(environment: Mapping[str, str]) -> Place:
    """Return the place that the innermost launcher gave; the default without a launcher, or if it started one process.

    A single variable of torchrun (only ``RANK``, for example) is ignored.

    Raises:
        ConfigError: the variables contradict each other, or a launcher's are incomplete.
    """
    place = _place(environment)
    return replace(place, only_device=_only_device(environment)) if place.local_size > 1 else place


def _place(environment: Mapping[str, str]) -> Place:
    torchrun = _torchrun(environment)
    if torchrun and "TORCHELASTIC_RUN_ID" in environment:
        return torchrun
    scheduled = _mpirun(environment) or _srun(environment) if torchrun else scheduled_place(environment)
    if scheduled is None or scheduled.size == 1:
        return torchrun or _pod(environment) or Place()
    if torchrun is None:
        return scheduled
    if (torchrun.rank, torchrun.size) != (scheduled.rank, scheduled.size):
        raise ConfigError(
            f"RANK={torchrun.rank} WORLD_SIZE={torchrun.size}, but {scheduled.source} says rank {scheduled.rank} of "
            f"{scheduled.size}",
            source="environment",
            hint=f"unset RANK and WORLD_SIZE, because {scheduled.source} started this process",
        )
    return torchrun


def scheduled_place(environment: Mapping[str, str]) -> Place:
    """Return the place that ``mpirun`` or ``srun`` gave, without torchrun's variables. Raises as :func:`place_from_environment`."""
    return _mpirun(environment) or _srun(environment) or _unplaced(environment) or Place()


def is_first(environment: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0 or alone, from its rank variable only."""
    names = ("RANK", *(launcher.rank for launcher in MPI_LAUNCHERS), "SLURM_PROCID")
    return next((environment[name] for name in names if name in environment), "0") == "0"


# -- torchrun ------------------------------------------------------------------------------------------------


ENV = "env://"  # as PyTorch calls a start by these variables, without LOCAL_RANK
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if any(name not in environment for name in TORCHRUN):
        return None
    rank, size, local_rank = (_number(environment, name) for name in TORCHRUN[:3])
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size
    address, port = environment["MASTER_ADDR"], _port(environment, 0)
    again = "TORCHELASTIC_RESTART_COUNT"
    restarts = _number(environment, again) if again in environment else 0
    return _checked(Place(rank, size, local_rank, local_size, "torchrun", address, port, restarts=restarts))


def _pod(environment: Mapping[str, str]) -> Place | None:
    """Return the place of the only process of a machine, from an incomplete set of torchrun's variables; None if it is alone.

    Raises:
        ConfigError: more than one variable says that this is one of several processes, and one that is needed is missing.
    """
    names = [name for name in TORCHRUN if name in environment]
    is_several = any(_says_several(environment, *pair) for pair in PAIRS[:2]) and len(names) > 1
    alone_here = environment.get("LOCAL_WORLD_SIZE", "1") == "1"
    if not is_several and alone_here and environment.get("PET_NNODES", "1") in ("1", "1:1"):
        return None
    for name in TORCHRUN:
        if name not in names and not (name == "LOCAL_RANK" and alone_here):
            raise _missing(name)
    place = _torchrun({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **environment})
    return replace(place, source=ENV) if place else None


# -- mpirun --------------------------------------------------------------------------------------------------


class MpiLauncher(NamedTuple):
    """An MPI launcher and the names of its variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


MPI_LAUNCHERS = (
    MpiLauncher("Open MPI", *(f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    MpiLauncher("MVAPICH", *(f"MV2_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    MpiLauncher("PALS", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    MpiLauncher("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)  # fmt: skip


def _mpirun(environment: Mapping[str, str]) -> Place | None:
    """Return the place that mpirun gave, or None. ``srun --mpi=pmi2`` sets PMI_RANK but no local rank, so it gives None."""
    for launcher in MPI_LAUNCHERS:
        if launcher.rank in environment and launcher.local_rank in environment:
            rank, size, local_rank, local_size = (_number(environment, name) for name in launcher[1:])
            if size == 1:
                return Place()
            address = environment.get("MASTER_ADDR") or (
                LOOPBACK if local_size == size else _mpi_host(launcher, environment, rank)
            )
            job = environment.get("PMIX_NAMESPACE", "")  # Hydra gives its processes no job number
            port = _port(environment, zlib.crc32(job.encode()))
            source = f"mpirun ({launcher.name})"
            return _checked(Place(rank, size, local_rank, local_size, source, address, port))
    return None


def _mpi_host(launcher: MpiLauncher, environment: Mapping[str, str], rank: int) -> str:
    """Return the address of rank 0 from Open MPI 4's address of mpirun, which usually runs on the host of rank 0.

    Raises:
        ConfigError: no variable has that address, or rank 0 runs on another host.
    """
    mpirun = environment.get("OMPI_MCA_orte_hnp_uri", "")  # 123.0;tcp://10.0.0.1,192.168.0.1:41234;tcp6://...
    match = re.search(r";tcp://([0-9.]+)", mpirun)
    if match and (rank or environment.get("OMPI_MCA_orte_local_daemon_uri") == mpirun):
        return match[1]
    where = ", and rank 0 is not on the machine of mpirun" if match else ""
    raise ConfigError(
        f"mpirun ({launcher.name}) does not say where rank 0 is{where}",
        source="environment",
        hint="mpirun -x MASTER_ADDR=HOST (Open MPI), mpirun -genv MASTER_ADDR HOST (others); HOST runs rank 0",
    )


PAIRS = (  # variables of a rank and of the number of ranks; the last ones are those of jsrun and blaunch (LSF), pbsdsh, aprun
    ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *((launcher.rank, launcher.size) for launcher in MPI_LAUNCHERS[:3]), ("PMIX_RANK", "PMIX_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), ("LSF_PM_TASKID", ""), ("PBS_NODENUM", ""), ("ALPS_APP_PE", ""),
)  # fmt: skip
MAY_BE_ALONE = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "PBS_NODENUM")  # rank 0 is also the script of a job


def _says_several(environment: Mapping[str, str], rank: str, size: str) -> bool:
    """Return whether a launcher's variables say that this is one of several processes."""
    if size in environment:
        return environment[size] not in ("1", "-1", "")
    return environment.get(rank, "0") not in ("0", "-1", "") or (
        rank in environment and rank not in MAY_BE_ALONE
    )


def _unplaced(environment: Mapping[str, str]) -> Place | None:
    """Raise if a process manager says that this is one of several processes, and too few of its variables are there."""
    for rank, size in PAIRS[2:]:
        if _says_several(environment, rank, size):
            known = rank if rank in environment else size
            raise ConfigError(
                f"{known}={environment[known]} says that this is one of several processes, and other variables are missing",
                source="environment",
                hint="start with srun, torchrun, or the mpirun of Open MPI, MPICH or Intel MPI",
            )
    return None


# -- srun ----------------------------------------------------------------------------------------------------


def _srun(environment: Mapping[str, str]) -> Place | None:
    """Return the place that srun gave, or None in the script of sbatch or the shell of salloc, which run one process."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size == 1:
        return Place()
    job, step = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID"), _number(environment, "SLURM_STEP_ID")
    node_list = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR", "")
    if not address:
        if not node_list:
            raise _missing("SLURM_STEP_NODELIST")
        address = first_node(node_list)
    place = Place(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=_tasks_here(environment),
        source="srun",
        address=address,
        port=_port(environment, job + 1009 * step),
    )
    return _checked(place)


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the tasks on this node, from a list such as ``2(x3),1``: three nodes with two tasks, then one with one."""
    name = (
        "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environment else "SLURM_TASKS_PER_NODE"
    )
    if name not in environment:
        raise _missing(name)
    node = _number(environment, "SLURM_NODEID")
    for part in environment[name].split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if not match:
            break
        count = int(match[2] or 1)
        if node < count:
            return int(match[1])
        node -= count
    raise ConfigError(
        f"{name}={environment[name]} has no entry for node {environment['SLURM_NODEID']}",
        source="environment",
    )


def _only_device(environment: Mapping[str, str]) -> str:
    """Return the only visible device, if the launcher set one (``srun --gpus-per-task``, wrappers of mpirun), else "".

    yolofleet's own agent sets none: what its workers see is the user's choice for all of them.
    """
    if environment.get("TORCHELASTIC_RUN_ID") == RUN_ID:
        return ""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    visible = next((environment[name] for name in names if environment.get(name)), "")
    return "" if "," in visible else visible


_RANGES = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_ENTRY = rf"(?:[A-Za-z0-9_.-]+|{_RANGES})+"


def first_node(node_list: str) -> str:
    """Return the first host of a SLURM node list: n07-ib for ``n[07-12,2]-ib,gpu3``. Raise ConfigError if it is no list."""
    if not re.fullmatch(rf"{_ENTRY}(?:,{_ENTRY})*", node_list):
        raise ConfigError("cannot parse SLURM's node list", source=node_list[:200] or "empty")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", re.findall(_ENTRY, node_list)[0])


# -- parts ---------------------------------------------------------------------------------------------------


def _checked(place: Place) -> Place:
    if 0 <= place.rank < place.size <= MOST_RANKS and 0 <= place.local_rank < place.local_size <= place.size:
        return place
    most = f" (at most {MOST_RANKS:,})" if place.size > MOST_RANKS else ""
    raise ConfigError(
        f"{place.source} gives impossible numbers: rank {place.rank} of {place.size}{most}, local rank "
        f"{place.local_rank} of {place.local_size}",
        source="environment",
        hint="start with yolofleet, torchrun, srun or mpirun, or unset these variables",
    )


def _port(environment: Mapping[str, str], job: int) -> int:
    """Return ``MASTER_PORT``, or a port derived from the job number, so that jobs on one machine use different ports."""
    if "MASTER_PORT" not in environment:
        return PORTS[job % len(PORTS)]
    port = _number(environment, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ConfigError(
            f"MASTER_PORT={port} is not a port", source="environment", hint="use 1024 to 65535, or unset it"
        )
    return port


def _number(environment: Mapping[str, str], *names: str) -> int:
    """Return the number in the first of the variables ``names`` that is set."""
    name = next((name for name in names if name in environment), None)
    if name is None:
        raise _missing(names[0])
    if not re.fullmatch(r"[0-9]{1,12}", environment[name]):
        raise ConfigError(
            f"{name}={environment[name][:40]!r} is not a number",
            source="environment",
            hint=f"unset {name}, or start with yolofleet, torchrun, srun or mpirun",
        )
    return int(environment[name])


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is missing, but other variables say that this is one of several processes",
        source="environment",
        hint="start all processes with one srun, mpirun or torchrun, and let it pass its variables on; or unset all of them",
    )
