"""A cluster of SLURM on machines in miniature: slurmctld and a slurmd on the first, a slurmd on each of the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machines import Lab, Machine

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "memory", "cpuset", "cpu", "devices")
READY_S = 900


def missing() -> str:
    """Why there can be no cluster here; empty when there can."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"{', '.join(absent)} missing (apt-get install slurm-wlm munge)" if absent else ""


@dataclass(frozen=True)
class Slurm:
    """Attributes:
    login: where jobs are submitted.
    """

    login: Machine
    environment: Mapping[str, str]

    def run(self, *command: str | Path, cwd: Path, check: bool = True) -> str:
        """A command of SLURM's, or ours, on the login node; its standard output."""
        argv = self.login.argv(*command)
        argv = [f"--wdns={cwd}" if word.startswith("--wdns=") else word for word in argv]
        done = subprocess.run(
            argv, env=dict(self.environment), capture_output=True, text=True, timeout=900, check=False
        )
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout


@contextmanager
def slurm(lab: Lab, folder: Path, environment: Mapping[str, str]) -> Iterator[Slurm]:
    """SLURM on all hosts of ``lab``, with two fake GPUs each; gone when the block is left.

    Where there are cgroups of version 1, steps are tracked by them, as is usual: signals then go to a step's tasks
    alone, not to all its processes.

    Args:
        folder: for its files; its path must have no spaces.
        environment: of its commands, and so of jobs.
    """
    tracking = "cgroup" if (CGROUPS / "freezer").is_dir() else "linuxproc"
    for part in ("munge", "state", "log"):
        (folder / part).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    names = [host.name for host in lab.hosts]
    (folder / "slurm.conf").write_text(_configuration(folder, names, tracking))
    (folder / "gres.conf").write_text(
        f"NodeName={','.join(names)} Name=gpu Count=2 File=/dev/null,/dev/zero\n"
    )
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    settings = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = folder / "munge"
    daemons = [
        subprocess.Popen(
            ["munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
             f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
    ]  # fmt: skip
    try:
        _wait_for(lambda: (munge / "socket").exists(), "munged", munge)
        for host in lab.hosts if tracking == "cgroup" else ():
            _mount_controllers(host)
        starts = [lab.hosts[0].argv("slurmctld", "-D")]
        starts += [host.argv("slurmd", "-D", "-N", host.name) for host in lab.hosts]
        for argv in starts:
            log = (folder / "log" / f"{len(daemons)}.err").open("wb")
            daemons.append(
                subprocess.Popen(argv, env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        cluster = Slurm(lab.hosts[0], settings)
        _wait_for(
            lambda: (
                cluster.run("sinfo", "-h", "-o", "%D %t", cwd=folder, check=False) == f"{len(names)} idle\n"
            ),
            "slurmctld and slurmd",
            folder / "log",
        )
        yield cluster
        cluster.run("scancel", "--user=root", cwd=folder, check=False)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(900)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _wait_for(ready: Callable[[], bool], what: str, logs: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not ready():
        if time.monotonic() > deadline:
            said = "\n".join(
                f"{p}:\n{p.read_text(errors='replace')[-1500:]}" for p in logs.iterdir() if p.is_file()
            )
            raise AssertionError(f"{what} not ready\n{said}")
        time.sleep(0.1)


def _mount_controllers(host: Machine) -> None:
    """A new network namespace hides them, and slurmd wants them."""
    host.run("mount", "-t", "tmpfs", "tmpfs", CGROUPS)
    for name in (*CONTROLLERS, "systemd"):
        host.run("mkdir", CGROUPS / name)
        what = "none,name=systemd" if name == "systemd" else name
        host.run("mount", "-t", "cgroup", "-o", what, "cgroup", CGROUPS / name)


def _configuration(folder: Path, names: list[str], tracking: str) -> str:
    return f"""ClusterName=lab
SlurmctldHost={names[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/state/slurmd.%n.pid
SlurmdSpoolDir={folder}/state/spool.%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
MessageTimeout=5
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
UnkillableStepTimeout=900
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
JobRequeue=1
CompleteWait=0
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName={",".join(names)} CPUs=4 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
