"""Launchers render, watch, and nothing else: what is rendered."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import yolofleet.training.rank.worker
from yolofleet.config.load import resolve_train
from yolofleet.fleet.hosts.agent_process import (
    JobSpec,
    Rendezvous,
    agent_arguments,
    agent_environment,
    loopback_interface,
    worker_argv,
)
from yolofleet.fleet.hosts.endings import exit_text
from yolofleet.fleet.launch.local import explain
from yolofleet.fleet.launch.machines import fleet_of
from yolofleet.fleet.launch.plan import plan_run, start
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.device_names import processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.cgroup import OomKills
from yolofleet.support.system.children import START


def test_the_agents_command_is_exactly_this() -> None:
    assert agent_arguments(JobSpec(Path("/r/my run"), 3)) == [
        "--nnodes=1", "--rdzv-backend=loopback", "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-conf=node=0", "--local-addr=127.0.0.1", "--nproc-per-node=3", "--rdzv-id=yolofleet", "--max-restarts=0",
        f"--log-dir={os.devnull}", *worker_argv("/r/my run", "/r/my run/logs/job.yaml", "0"),
    ]  # fmt: skip


def test_processes_are_announced_also_where_this_one_has_loaded_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "torch" in sys.modules  # as in a notebook
    monkeypatch.setattr("yolofleet.fleet.launch.local.run_processes", lambda *_: (0, RunFolder(tmp_path)))
    config, recipe = resolve_train({"data": "shapes", "model": "yolov5n", "device": "cpu:2"})
    start(plan_run(config, recipe))
    assert "starting 2 processes (yolov5n, shapes): loading PyTorch" in capfd.readouterr().err


def test_workers_are_forked_on_linux_and_started_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert worker_argv("/r/e") == [
        "--start-method=forkserver",
        "--run-path",
        yolofleet.training.rank.worker.__file__,
        "/r/e",
    ]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert worker_argv("/r/e") == [
        "--no-python",
        sys.executable,
        "-c",
        START,
        "yolofleet.training.rank.worker",
        "/r/e",
    ]


def test_the_agents_arguments_among_several_hosts_are_exactly_these() -> None:
    hosts = ["m1", "root@m2", "10.0.0.3"]
    meeting = Rendezvous(1, 3, "10.0.0.1", 29501, "eth1", "5ec2e7", hosts=hosts, timeout_s=60)
    job = JobSpec(Path("/r/exp"), 2, Path("/r/exp/logs/job-1.yaml"), meeting, restarts=4)
    assert agent_arguments(job, 4711) == [
        "--nnodes=3", "--rdzv-backend=loopback", "--rdzv-endpoint=127.0.0.1:4711",
        "--rdzv-conf=node=1,timeout_s=60,hosts=m1/root@m2/10.0.0.3",
        "--local-addr=127.0.0.1", "--nproc-per-node=2", "--rdzv-id=yolofleet", "--max-restarts=0",
        f"--log-dir={os.devnull}", *worker_argv("/r/exp", "/r/exp/logs/job-1.yaml", "4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("card", "chosen"), [("eth1", "eth1"), ("", loopback_interface().get("GLOO_SOCKET_IFNAME"))]
)
def test_gloo_and_nccl_use_the_chosen_interface_and_loopback_on_one_machine(
    card: str, chosen: str | None
) -> None:
    env = agent_environment({"NCCL_SOCKET_IFNAME": "docker0", "GLOO_SOCKET_IFNAME": "docker0"}, card)
    if chosen:
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == (chosen, f"={chosen}")


def test_threads_spin_for_a_short_time_unless_the_caller_says_otherwise() -> None:
    assert agent_environment({})["GOMP_SPINCOUNT"] == "5000"
    assert agent_environment({"GOMP_SPINCOUNT": "0"})["GOMP_SPINCOUNT"] == "0"


@pytest.mark.parametrize("device", ["0,1", "cpu:2", "auto"])
def test_a_detached_run_without_hosts_has_this_machine_as_its_host(device: str) -> None:
    given = {"data": "d.yaml", "model": "yolov5n", "device": device}
    assert fleet_of(resolve_train(given)[0]) is None
    fleet = fleet_of(resolve_train(given | {"detach": True})[0])
    assert fleet is not None and [(host.name, host.device) for host in fleet.hosts] == [("localhost", device)]
    others = {"detach": True, "hosts": "localhost:1,a:1"}
    with pytest.raises(ConfigError, match="the other hosts cannot log in to localhost"):
        fleet_of(resolve_train({"data": "d.yaml", "model": "yolov5n"} | others)[0])


def test_a_place_in_another_fleet_is_not_inherited() -> None:
    env = agent_environment({"RANK": "3", "MASTER_ADDR": "elsewhere", "HOME": "/h", "OMP_NUM_THREADS": "2"})
    assert "RANK" not in env and "MASTER_ADDR" not in env
    assert env["HOME"] == "/h" and env["OMP_NUM_THREADS"] == "2"
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300", "a state on a slow disk takes longer than 30 s"


@pytest.mark.parametrize(
    ("device", "count"),
    [("auto", 1), ("cpu", 1), ("cpu:4", 4), ("2", 1), ("0,1,3", 3), ("0:2", 2), ("1:2,0", 3), ("mps", 1)],
)
def test_processes_of_a_device(device: str, count: int) -> None:
    assert processes_of(device) == count


@pytest.mark.parametrize(
    "device", ["cpu:0", "gpu", "0,0", "0:2,0", "0:0", "0:2:2", "0:300", "0,", "cpu:x", "-1"]
)
def test_no_device_is_an_error_that_shows_some(device: str) -> None:
    with pytest.raises(ConfigError):
        processes_of(device)


def words(folder: Path, rank: int, **fields: object) -> None:
    path = RunFolder(folder).failure(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rank": rank, "host": "h", "time": 1.0, "exit_code": 4, **fields}))


def test_the_cause_is_said_before_its_echo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words(tmp_path, 0, message="ClusterError: lost the others", secondary=True, time=1.0)
    words(tmp_path, 1, message="DataError: image x.jpg is cut", exit_code=3, time=2.0)
    assert explain(tmp_path, 1, 0) == 3
    said = capsys.readouterr().err
    assert "x.jpg" in said and "rank 1, host h" in said and "lost" not in said


@pytest.mark.parametrize("broken", ["null", "[3]", "{", '{"rank": 1, "message": 3}', "[" * 100_000])
def test_last_words_that_are_none_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    words(tmp_path, 1, message="DataError: image x.jpg is cut", exit_code=3)
    RunFolder(tmp_path).failure(0).write_text(broken)
    assert explain(tmp_path, 1, 0) == 3
    assert "x.jpg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (-9, "most likely the kernel's out-of-memory"),
        (-7, "/dev/shm"),
        (-11, "segmentation"),
        (-15, "SIGTERM"),
    ],
)
def test_exit_codes_of_a_silent_worker_are_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exit_code: int, cause: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent.log").write_text(
        f"E1121 api.py:1002] failed (exitcode: {exit_code}) local_rank: 0 (pid: 7) of binary: python\nRoot Cause:\n[0]:\n  time      : x\n  rank      : 1 (local_rank: 1)\n  exitcode  : {exit_code} (pid: 7)\n"
    )
    assert explain(tmp_path, 1, 0) == 4
    said = capsys.readouterr().err
    assert "rank 1" in said and cause in said


@pytest.mark.parametrize(
    ("group", "machine", "says", "says_not"),
    [
        (2, 5, "(SIGKILL) by the kernel's out-of-memory killer: the machine, or its control group", "by a user"),
        (0, 0, "by a user, or by a memory guard such as systemd-oomd; the kernel's own", "most likely"),
        (None, 0, "by a user, or by a memory guard such as systemd-oomd; the kernel's own", "most likely"),
        (0, 5, "killer: it killed 5 on this machine meanwhile, but none in the control group", "most likely"),
        (None, 5, "most likely the kernel's out-of-memory killer: it killed 5 on this machine", "by a user"),
        (None, None, "most likely the kernel's out-of-memory killer", "by a user"),
    ],
)  # fmt: skip
def test_a_kill_is_the_kernels_only_where_it_counts_one(
    group: int | None, machine: int | None, says: str, says_not: str
) -> None:
    killed = OomKills(group, machine)
    assert says in exit_text(-9, killed) and says_not not in exit_text(-9, killed)
    assert exit_text(-7, killed) == exit_text(-7, OomKills())


def test_the_own_traceback_of_a_process_that_crashed_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    own = 'Traceback (most recent call last):\n  File "training/rank/worker.py", line 30\nImportError: libGL.so.1: cannot open'
    agents = 'Traceback (most recent call last):\n  File "torch/distributed/run.py"\nChildFailedError:'
    failed = "E1121 14:18:52.714000 11682 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    (tmp_path / "logs" / "agent.log").write_text(
        f"a warning\n{own}\n{failed}\n{agents}\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n"
    )
    assert explain(tmp_path, 1, 0) == 4
    said = capsys.readouterr().err
    assert said.startswith(own + "\nClusterError: rank 1 ended with exit code 1") and "run.py" not in said
