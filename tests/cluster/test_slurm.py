"""A real slurmctld with two nodes: tasks of srun find their place, and a batch job goes on after a stop, after a
failure, and with the node that is left. In the end its weights are those of a run that nobody disturbed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import slurm_lab
from commands import SMALL_YOLOV5N as SMALL
from commands import environment, results, small_shapes
from desk import worker_of
from guides import ROOT
from machines import CARD, Lab, machines
from slurm_lab import Slurm, slurm

pytestmark = pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing())
STEPS = [*SMALL, "--epochs", "8", "--max-steps", "24", "--save-every", "2steps", "--val-period", "0", "--threads", "1",
         "--device", "cpu", "--reduce", "exact"]  # fmt: skip
TRAIN = ["-m", "yolofleet", "train", *STEPS]
DEADLINE_S = 900


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with machines(2) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    variables = environment(folder) | {"GLOO_SOCKET_IFNAME": CARD}
    with slurm(lab, folder / "cluster", variables) as made:
        yield made


@pytest.fixture(scope="module")
def straight_sha256(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the weights of two tasks of srun that nothing disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    argv = ["srun", "--nodes=2", "--ntasks=2", sys.executable, *TRAIN, "--data", small_shapes(folder)]
    cluster.run(*argv, "--name", "straight", cwd=folder)
    return str(results(folder / "runs" / "train" / "straight")["weights_sha256"])


@dataclass(frozen=True)
class Job:
    """A batch job, the only one of its folder."""

    cluster: Slurm
    folder: Path
    number: str

    @property
    def said(self) -> str:
        log = self.folder / f"slurm-{self.number}.out"
        return log.read_text() if log.exists() else ""

    @property
    def shown(self) -> str:
        return self.cluster.run("scontrol", "show", "job", self.number, cwd=self.folder)

    def wait_for(self, what: str, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline, f"no {what}\n{self.shown}\n{self.said}"
            time.sleep(0.1)

    def wait_for_state(self, state: str) -> None:
        self.wait_for(state, lambda: f"JobState={state}" in self.shown)

    def wait_for_checkpoint(self) -> None:
        self.wait_for("checkpoint", lambda: [*self.folder.glob("runs/train/*/checkpoints/step-*")])

    def leave_the_queue(self) -> None:
        """Without SLURM's wait of two minutes after a requeue."""
        self.wait_for_state("PENDING")
        time.sleep(3)  # SLURM refuses to start what it is still cleaning up
        self.cluster.run("scontrol", "update", f"jobid={self.number}", "StartTime=now", cwd=self.folder)

    def ended_as(self, name: str, weights_sha256: str) -> None:
        self.wait_for("end", lambda: re.search("JobState=(COMPLETED|FAILED)", self.shown))
        assert "JobState=COMPLETED" in self.shown, self.said
        assert "resumed after step" in self.said
        (run,) = (self.folder / "runs" / "train").iterdir()
        assert run.name == f"slurm-{self.number}-{name}"
        assert results(run)["weights_sha256"] == weights_sha256


def submitted(cluster: Slurm, folder: Path, *command: str | Path) -> Job:
    deadline = time.monotonic() + DEADLINE_S
    while cluster.run("sinfo", "-h", "-o", "%D %t", cwd=folder) != "2 idle\n":  # of the job before
        assert time.monotonic() < deadline, cluster.run("sinfo", "-R", cwd=folder)
        time.sleep(0.1)
    said = cluster.run(sys.executable, "-m", "yolofleet", *command, cwd=folder)
    job = Job(cluster, folder, said.split()[1])
    job.wait_for_checkpoint()
    return job


def command_of_the_page() -> list[str]:
    """The command of docs/schedulers.md that asks for a range of nodes."""
    page = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^yolofleet (train .* --slurm nodes=\d-\d.*)$", page, re.MULTILINE)
    return shlex.split(line)


def test_a_job_is_stopped_requeued_and_resumes(cluster: Slurm, tmp_path: Path, straight_sha256: str) -> None:
    argv = ["train", *STEPS, "--data", small_shapes(tmp_path), "--name", "it's one"]
    job = submitted(cluster, tmp_path, *argv, "--slurm", "nodes=2,cpus=1,time=10")
    cluster.run("scancel", "--signal=USR1", job.number, cwd=tmp_path)  # what --signal=USR1@180 sends
    job.leave_the_queue()
    assert "Stopped: stopped on request after step" in job.said and "Restarts=1" in job.shown
    job.ended_as("it's one", straight_sha256)


def test_a_killed_worker_costs_no_requeue(
    lab: Lab, cluster: Slurm, tmp_path: Path, straight_sha256: str
) -> None:
    argv = ["train", *STEPS, "--data", small_shapes(tmp_path)]
    job = submitted(cluster, tmp_path, *argv, "--slurm", "nodes=2,cpus=1")
    os.kill(worker_of(lab.hosts[1]), signal.SIGKILL)
    job.ended_as("exp", straight_sha256)
    assert "exit code 4, failure 1 within an hour: going on" in job.said and "Restarts=0" in job.shown


def test_a_cancelled_job_does_not_go_on(cluster: Slurm, tmp_path: Path) -> None:
    argv = ["train", *STEPS, "--data", small_shapes(tmp_path)]
    job = submitted(cluster, tmp_path, *argv, "--slurm", "nodes=2,cpus=1")
    cluster.run("scancel", job.number, cwd=tmp_path)
    job.wait_for("end", lambda: "JobState=CANCELLED" in job.shown and "EndTime=Unknown" not in job.shown)
    cluster.run("squeue", "--noheader", f"--jobs={job.number}", cwd=tmp_path, check=False)
    assert "Restarts=0" in job.shown and "going on" not in job.said


def test_sbatch_says_why_it_refuses(cluster: Slurm, tmp_path: Path) -> None:
    argv = cluster.login.argv(
        sys.executable, *TRAIN, "--data", "shapes", "--slurm", "nodes=2,partition=elsewhere"
    )
    done = subprocess.run(argv, env=dict(cluster.environment), capture_output=True, text=True)
    assert done.returncode == 4
    assert "invalid partition specified: elsewhere" in done.stderr and "Traceback" not in done.stderr


def test_a_job_that_loses_a_node_goes_on_with_the_other(
    lab: Lab, cluster: Slurm, tmp_path: Path, straight_sha256: str
) -> None:
    """The last test: the second node does not come back."""
    here = {"coco.yaml": str(small_shapes(tmp_path)), "nodes=2-4,gpus=4,time=2-00:00:00": "nodes=1-2,cpus=1"}
    command = command_of_the_page()
    assert here.keys() <= set(command)
    job = submitted(cluster, tmp_path, *(here.get(word, word) for word in command), *STEPS)
    assert "NumNodes=2" in job.shown
    lab.hosts[1].power_off()
    job.leave_the_queue()
    job.ended_as("exp", straight_sha256)
    assert "NumNodes=1" in job.shown and "processes was 2, is 1" in job.said
