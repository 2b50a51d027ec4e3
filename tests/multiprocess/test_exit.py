"""A process that has done its work ends cleanly: no thread of its process group outlives the group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import yolofleet.training.rank.worker

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports torch._dynamo, and that much else
dist.all_reduce(torch.zeros(1))
assert threads() > before
dist.destroy_process_group()
assert threads() == before, f"{threads()} threads are left, {before} were there before"
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_no_thread_of_a_process_group_is_left(tmp_path: Path) -> None:
    # one that is left takes Python's lock while the process exits, and aborts it (exit code -6) now and then
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "meet")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
