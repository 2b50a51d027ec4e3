"""Neither launcher nor environment decides what the bits of a result depend on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

ASK = """
import json, sys, torch
from yolofleet.config.schema import TrainConfig
from yolofleet.training.parallel.process import prepare_process, set_kernels
from yolofleet.support.place import Place
config = TrainConfig(**json.loads(sys.argv[1]))
prepare_process(config, Place(0, 1, 0, int(sys.argv[2])))
set_kernels(config)
print(json.dumps([torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]))
"""


def asked(settings: dict, omp_threads: str, local_size: int = 1) -> list:
    """[threads, deterministic] of a fresh process."""
    env = {**os.environ, "OMP_NUM_THREADS": omp_threads}
    command = [sys.executable, "-c", ASK, json.dumps(settings), str(local_size)]
    return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


# torchrun sets 1 for several processes and nothing for one
@pytest.mark.parametrize("omp_threads", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_exact_mode_has_one_thread_and_deterministic_kernels_whatever_the_environment(
    omp_threads: str,
) -> None:
    assert asked({"device": "cpu", "reduce": "exact"}, omp_threads) == [1, True]


def test_threads_are_a_setting() -> None:
    assert asked({"device": "cpu", "threads": 3}, "1")[0] == 3
    assert asked({"device": "cpu"}, "7", local_size=10_000) == [1, False]


ASK_DEVICE = """
from yolofleet.support import devices
from yolofleet.config.schema import TrainConfig
from yolofleet.support.place import Place
from yolofleet.training.parallel.process import prepare_process
devices.accelerator, devices.device_count = lambda: "cuda", lambda: 1
print(prepare_process(TrainConfig(device="auto"), Place(1, 2, 1, 2, only_device="1")))
"""


ASK_SHARED = """
import os
from yolofleet.support import devices
from yolofleet.config.schema import TrainConfig
from yolofleet.support.place import Place
from yolofleet.training.parallel.process import prepare_process
devices.accelerator, devices.device_count = lambda: "cuda", lambda: 2
for rank in range(3):
    os.environ.pop("NCCL_HOSTID", None)
    device = prepare_process(TrainConfig(device="1:2,0"), Place(rank, 3, rank, 3))
    print(device, os.environ["NCCL_HOSTID"].split()[-1])
for rank in range(2):  # a wrapper of torchrun gave each rank a MIG instance
    os.environ.pop("NCCL_HOSTID", None)
    device = prepare_process(TrainConfig(device="auto"), Place(rank, 2, rank, 2, only_device=f"MIG-{rank}"))
    print(device, os.environ["NCCL_HOSTID"].split()[-1])
os.environ.pop("NCCL_HOSTID", None)
prepare_process(TrainConfig(device="cpu:3"), Place(0, 3, 0, 3))
prepare_process(TrainConfig(device="0,1"), Place(0, 2, 0, 2))
assert "NCCL_HOSTID" not in os.environ
"""


def test_processes_that_share_a_gpu_are_hosts_of_their_own_for_nccl() -> None:
    done = subprocess.run([sys.executable, "-c", ASK_SHARED], capture_output=True, text=True)
    assert done.stdout == "cuda:1 0\ncuda:1 1\ncuda:0 2\ncuda:0 0\ncuda:0 1\n", done.stderr


def test_the_second_process_of_a_machine_takes_the_only_device_that_it_sees() -> None:
    """srun and others show each process one GPU: its number is 0 there, whatever the process's own number."""
    done = subprocess.run([sys.executable, "-c", ASK_DEVICE], capture_output=True, text=True)
    assert done.stdout == "cuda:0\n", done.stderr
