"""Two machines with a GPU each train what one GPU trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_devices import ONE, needs_gpu
from gpu_runs import bits

HOSTS = os.environ.get("YOLOFLEET_TEST_HOSTS", "")  # as for --hosts: two machines with one GPU each, a:1,b:1
pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not HOSTS, reason="needs YOLOFLEET_TEST_HOSTS: two machines as for --hosts"),
]


def test_two_machines_give_the_bits_of_one_gpu(tmp_path: Path) -> None:
    # every machine makes the built-in data set by itself
    there = bits(tmp_path, "there", "shapes", "--hosts", HOSTS)
    assert there == bits(tmp_path, "here", "shapes", "--device", ONE)
