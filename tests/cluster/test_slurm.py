"""A real slurmctld with two nodes: tasks of srun find their place; a batch job is stopped, requeued and resumes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_lab
from commands import SMALL, environment, results, small_shapes
from machines import CARD, machines
from slurm_lab import Slurm, slurm

pytestmark = pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing())
TRAIN = ["-m", "yolofleet", "train", *SMALL, "--epochs", "4", "--max-steps", "12", "--val-period", "0", "--threads", "1",
         "--device", "cpu", "--reduce", "exact"]  # fmt: skip
DEADLINE_S = 240


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    variables = environment(folder) | {"GLOO_SOCKET_IFNAME": CARD}
    with machines(2) as lab, slurm(lab, folder / "cluster", variables) as made:
        yield made


def wait_for(what: str, ready: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, f"no {what}\n{log.read_text() if log.exists() else 'no output'}"
        time.sleep(0.1)


def test_a_job_is_stopped_requeued_and_resumes_to_the_same_weights(cluster: Slurm, tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    cluster.run(
        *("srun", "--nodes=2", "--ntasks=2", sys.executable),
        *(*TRAIN, "--data", data, "--name", "straight"),
        cwd=tmp_path,
    )
    straight = results(tmp_path / "runs" / "train" / "straight")

    said = cluster.run(
        *(sys.executable, *TRAIN, "--data", data, "--name", "it's one"),
        *("--slurm", "nodes=2,cpus=1,time=10"),
        cwd=tmp_path,
    )
    job = said.split()[1]
    log, run = tmp_path / f"slurm-{job}.out", tmp_path / "runs" / "train" / f"slurm-{job}-it's one"

    def state() -> str:
        return cluster.run(
            "squeue", "--noheader", f"--jobs={job}", "--format=%t", cwd=tmp_path, check=False
        ).strip()

    events = run / "events.jsonl"
    wait_for("first step", lambda: events.exists() and '"step"' in events.read_text(), log)
    cluster.run("scancel", "--signal=USR1", job, cwd=tmp_path)  # what --signal=USR1@180 sends
    wait_for("requeue", lambda: state() == "PD", log)
    assert "Stopped: stopped on request after step" in log.read_text()
    assert not (run / "results.json").exists()
    time.sleep(3)  # SLURM refuses to start what it is still cleaning up; hence its wait of two minutes
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now", cwd=tmp_path)
    wait_for("end", lambda: state() in ("", "CD", "F"), log)

    assert "resumed after step" in log.read_text()
    assert "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job, cwd=tmp_path)
    assert results(run)["weights_sha256"] == straight["weights_sha256"]
    assert len(list((tmp_path / "runs" / "train").iterdir())) == 2


def test_sbatch_says_why_it_refuses(cluster: Slurm, tmp_path: Path) -> None:
    argv = cluster.login.argv(
        sys.executable, *TRAIN, "--data", "shapes", "--slurm", "nodes=2,partition=elsewhere"
    )
    done = subprocess.run(argv, env=dict(cluster.environment), capture_output=True, text=True)
    assert done.returncode == 4
    assert "invalid partition specified: elsewhere" in done.stderr and "Traceback" not in done.stderr
