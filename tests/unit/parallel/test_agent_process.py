"""The process that serves attempts of a run does not outlive its host agent."""

import os
import signal
import subprocess
import sys
import time

import pytest

# Like a process that waits for the store of a lost host: it does not react to SIGTERM.
STUCK = """
import os, signal, subprocess, sys, threading
child = '''
import os, signal, threading
from yolofleet.training.parallel import torchrun_agent
torchrun_agent.END_S = 0.5
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=torchrun_agent.end_after, args=(os.getppid(), 0.0), daemon=True).start()
print(os.getpid(), flush=True)
threading.Event().wait()
'''
subprocess.Popen([sys.executable, "-c", child])
threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent of an orphan is another process")
def test_a_stuck_agent_ends_after_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    agent = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    os.kill(agent, signal.SIGTERM)
    parent.stdout.read()  # returns when the last process that holds the pipe has ended
    parent.stdout.close()
    gives_up_at_s = time.monotonic() + 900
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < gives_up_at_s:
            os.kill(agent, 0)
            time.sleep(0.1)
