"""The private members of CPython's multiprocessing by which torchrun's agent ends its fork server."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import pytest

PYTHONS = {(3, minor) for minor in range(10, 15)}  # whose sources have these members with this meaning


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork server")
def test_this_python_has_the_private_members_that_the_agent_calls() -> None:
    assert sys.version_info[:2] in PYTHONS, (
        f"Python {sys.version_info[0]}.{sys.version_info[1]} is unknown here: compare start_fork_server and "
        "stop_fork_server (training/parallel/torchrun_agent.py) with its Lib/multiprocessing, then add it to PYTHONS"
    )
    assert isinstance(vars(util)["abstract_sockets_supported"], bool)
    assert callable(vars(forkserver)["_forkserver"]._stop)
    assert callable(vars(util)["_exit_function"])
    assert callable(vars(util)["spawnv_passfds"]) and "spawnv_passfds(" in inspect.getsource(forkserver)
    assert set(inspect.signature(vars(forkserver)["main"]).parameters) >= {
        "listener_fd",
        "alive_r",
        "preload",
    }
    assert callable(vars(resource_tracker)["_resource_tracker"]._stop)


@pytest.mark.skipif(sys.platform != "linux", reason="the agent has a fork server on Linux only")
def test_the_fork_server_has_what_the_agent_has_loaded_none_of_its_files_and_ends() -> None:
    code = (
        "import multiprocessing, os, sys\n"
        "from yolofleet.support.system.proc import descendants\n"
        "from yolofleet.training.parallel.torchrun_agent import nothing, start_fork_server, stop_fork_server\n"
        "ours = os.open(sys.executable, os.O_RDONLY)\n"
        "start_fork_server('yolofleet.support.text')\n"
        "trial = multiprocessing.get_context('forkserver').Process(target=nothing)\n"
        "trial.start(); trial.join()\n"
        "server = multiprocessing.forkserver._forkserver._forkserver_pid\n"
        "assert open(f'/proc/{server}/cmdline').read() == open('/proc/self/cmdline').read()\n"
        "links = [os.readlink(f'/proc/{server}/fd/{name}') for name in os.listdir(f'/proc/{server}/fd')]\n"
        "assert sys.executable not in links, links\n"
        "stop_fork_server(); assert not descendants(os.getpid()); sys.exit(trial.exitcode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the agent has a fork server on Linux only")
def test_the_folder_of_sockets_of_a_killed_agent_is_removed_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, sys\n"
        "from yolofleet.training.parallel.torchrun_agent import nothing, start_fork_server, stop_fork_server\n"
        "start_fork_server(); print('up', flush=True); sys.stdin.read()\n"
        "trial = multiprocessing.get_context('forkserver').Process(target=nothing)\n"
        "trial.start(); trial.join(); stop_fork_server(); sys.exit(trial.exitcode)\n"
    )

    def agent() -> subprocess.Popen[str]:
        one = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"TMPDIR": str(short)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert one.stdout and one.stdout.readline() == "up\n"
        return one

    def end(one: subprocess.Popen[str]) -> None:
        one.communicate()

    def folders() -> list[Path]:
        return sorted(short.rglob("pymp-*"))

    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # a socket's path has at most 107 letters
        short = Path(made)
        killed, alive = agent(), agent()
        killed.kill()
        end(killed)
        left = folders()
        assert len(left) == 2 and not list(short.glob("pymp-*")), "in the folder of yolofleet"
        for folder in left:
            os.utime(folder, (0, 0))
        end(agent())
        (kept,) = folders()
        assert kept in left
        end(alive)
        assert alive.returncode == 0, "its fork server still makes processes"
        assert folders() == []
