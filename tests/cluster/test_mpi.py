"""Open MPI's mpirun on two machines: its processes find their ranks, and rank 0, by themselves."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import environment, results, small_shapes, yolofleet
from machines import CARD, machines

pytestmark = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="mpirun missing (apt-get install openmpi-bin)"
)
TRAIN = ["train", *SMALL, "--epochs", "1", "--val-period", "0", "--threads", "1", "--device", "cpu",
         "--reduce", "exact"]  # fmt: skip


def test_two_machines_train_what_one_process_trains(tmp_path: Path) -> None:
    data = small_shapes(tmp_path, images=16)
    variables = environment(tmp_path) | {"GLOO_SOCKET_IFNAME": CARD}
    passed_on = [
        word for name in ("YOLOFLEET_CACHE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME") for word in ("-x", name)
    ]
    with machines(2) as lab:
        argv = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--bind-to", "none", "-np", "2",
                "--host", "m1:1,m2:1", "--mca", "oob_tcp_if_include", CARD, "--mca", "btl_tcp_if_include", CARD,
                "-wdir", str(tmp_path), *passed_on]  # fmt: skip
        said = lab.hosts[0].run(
            *argv, sys.executable, "-m", "yolofleet", *TRAIN, "--data", data, "--name", "two",
            env=variables, timeout_s=900,
        )  # fmt: skip
        assert "2 processes (mpirun (Open MPI))" in said.stdout
        assert lab.left_behind() == {}
    yolofleet(tmp_path, *TRAIN, "--data", data, "--name", "one")
    two, one = (results(tmp_path / "runs" / "train" / name)["weights_sha256"] for name in ("two", "one"))
    assert two == one


def test_two_ranks_on_one_machine(tmp_path: Path) -> None:
    program = (
        "import os; from yolofleet.support.place import place_from_environment as place;"
        "p = place(os.environ); line = f'{p.rank} {p.size} {p.local_rank} {p.local_size} {p.address} {p.port > 0}';"
        "open(f'rank{p.rank}', 'w').write(line)"  # mpirun mixes what its processes print
    )
    with machines(1) as lab:
        lab.hosts[0].run(
            *("mpirun", "--allow-run-as-root", "--oversubscribe", "--wdir", str(tmp_path), "-np", "2"),
            *(sys.executable, "-c", program),
        )
    assert (tmp_path / "rank0").read_text() == "0 2 0 2 127.0.0.1 True"
    assert (tmp_path / "rank1").read_text() == "1 2 1 2 127.0.0.1 True"
