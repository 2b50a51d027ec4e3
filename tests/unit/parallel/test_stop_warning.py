"""The agent that schedulers start: a warning reaches the workers, whenever it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="schedulers run Linux here")

AGENT = """
import os, signal, subprocess, sys, time
from yolofleet.fleet.launch.schedulers.agent import StopWarning

warning = StopWarning()
if sys.argv[1] == "early":  # the machines have not met
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.5)
worker = subprocess.Popen(["sh", "-c", "trap 'exit 7' USR1; echo; while :; do sleep 0.1; done"], stdout=subprocess.PIPE)
worker.stdout.readline()
if sys.argv[1] == "late":
    os.kill(os.getpid(), signal.SIGUSR1)
print(warning.received, worker.wait())
"""


@pytest.mark.parametrize("moment", ["early", "late"])
def test_a_warning_reaches_workers_that_run_and_those_that_do_not_run_yet(moment: str) -> None:
    argv = [sys.executable, "-c", AGENT, moment]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout in ("True 7\n", "True -10\n"), "it ends, by itself or before it can listen"
