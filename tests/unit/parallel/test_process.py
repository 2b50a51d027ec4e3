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
for settings, local_size in json.loads(sys.argv[1]):
    config = TrainConfig(**settings)
    prepare_process(config, Place(0, 1, 0, local_size))
    set_kernels(config)
    print(json.dumps([torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]))
"""


# torchrun sets 1 for several processes and nothing for one
@pytest.mark.parametrize("omp_threads", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_threads_and_kernels_follow_from_the_settings_whatever_the_environment(omp_threads: str) -> None:
    """Exact mode has one thread and deterministic kernels."""
    env = {**os.environ, "OMP_NUM_THREADS": omp_threads}
    cpu = {"device": "cpu"}
    asked = json.dumps([(cpu | {"threads": 3}, 1), (cpu, 10_000), (cpu | {"reduce": "exact"}, 1)])
    command = [sys.executable, "-c", ASK, asked]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[3, False], [1, False], [1, True]]


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
devices.device_count = lambda: 1  # as srun and others show it to each process, whatever the process's own number
print(prepare_process(TrainConfig(device="auto"), Place(1, 2, 1, 2, only_device="1")))
"""


def test_processes_that_share_a_gpu_are_hosts_of_their_own_for_nccl_and_one_gpu_alone_is_number_0() -> None:
    done = subprocess.run([sys.executable, "-c", ASK_SHARED], capture_output=True, text=True)
    assert done.stdout == "cuda:1 0\ncuda:1 1\ncuda:0 2\ncuda:0 0\ncuda:0 1\ncuda:0\n", done.stderr
