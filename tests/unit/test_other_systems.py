"""A Python that lacks what Windows and macOS lack: everything is imported, trains, and says what it cannot do there.

No such system is at hand, so this shows what can be shown without one: no part counts on a module or function of
Linux. Libraries are imported before the platform's name changes; processes that are started see Linux again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_files import TINY

PRETEND = r"""
import builtins, importlib, io, multiprocessing, os, pkgutil, select, signal, socket, sys

system, *argv = sys.argv[1:]
HELP = "the help of every verb"
multiprocessing.set_start_method("spawn")  # as there
import click, pydantic.main, rich.live, shutil, subprocess, yaml  # noqa: E401
if argv != [HELP] and not {"--hosts", "doctor"} & {*argv}:  # these need no torch
    import cv2, matplotlib.pyplot, safetensors.torch, torch, torch._dynamo  # noqa: E401
    import torch.distributed.elastic.multiprocessing, torch.utils.data  # noqa: E401

MODULES = {"win32": ["fcntl", "resource", "termios", "pty", "pwd", "grp"], "darwin": []}[system]
SIGNALS = {"win32": ["KILL", "USR1", "USR2", "HUP", "CHLD", "STOP", "CONT", "QUIT"], "darwin": []}[system]
CALLS = {
    "win32": ["getuid", "geteuid", "killpg", "setsid", "getpgid", "sched_getaffinity", "openpty", "getloadavg", "uname",
              "pread", "mkfifo", "O_NOFOLLOW", "O_DIRECTORY"],
    "darwin": ["sched_getaffinity", "posix_fadvise", "memfd_create", "O_DIRECT"],
}[system]
open_file = open

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

class WithoutProc:  # no function: pathlib of Python 3.10 would make a method of it
  def __call__(self, file, *args, **more):
    if isinstance(file, (str, os.PathLike)) and str(file).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return open_file(file, *args, **more)

builtins.open = io.open = WithoutProc()
sys.platform = system
sys.meta_path.insert(0, Absent())
for name in MODULES:
    sys.modules.pop(name, None)
LACKING = [(signal, [f"SIG{name}" for name in SIGNALS]), (os, CALLS)]
if system == "win32" and argv == [HELP]:  # what Python's own modules need on Linux as soon as a process starts
    LACKING += [
        (os, ["fork", "waitid", "WNOHANG", "statvfs", "pwrite", "preadv", "nice", "memfd_create", "posix_fadvise"]),
        (signal, ["SIGALRM", "SIGPIPE", "pthread_sigmask", "sigwait", "setitimer", "alarm"]),
        (socket, ["AF_UNIX", "SOCK_SEQPACKET", "send_fds", "recv_fds"]),
        (select, ["poll", "epoll"]),
    ]
for owner, names in LACKING:
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
if system == "win32":
    signal.SIGBREAK = 21  # uvicorn reads it

import yolofleet
from yolofleet.cli import main

if argv == ["import everything"]:
    for module in pkgutil.walk_packages(yolofleet.__path__, "yolofleet."):
        if not module.name.endswith(("__main__", "_triton")):  # triton comes with torch for CUDA
            importlib.import_module(module.name)
    sys.exit()
if argv == [HELP]:
    from yolofleet.cli.app import APP
    sys.exit(any([main(["--version"]), main(["--help"]), *(main([verb, "--help"]) for verb in APP.members)]))
sys.exit(main(argv))
"""
TRAIN = ("train", "--data", "shapes:8", "--model", str(TINY), "--img", "64", "--batch", "8", "--nominal-batch", "8",
         "--micro-batch", "4", "--epochs", "1", "--no-plots", "--threads", "1")  # fmt: skip
SYSTEMS = ["win32", pytest.param("darwin", marks=pytest.mark.slow)]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="pretends, on Linux, to be another system"),
]


def there(system: str, folder: Path, *argv: str, code: int = 0) -> str:
    settings = {
        "YOLOFLEET_CACHE": str(folder / "cache"),
        "YOLOFLEET_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, "-c", PRETEND, system, *argv],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported(system: str, tmp_path: Path) -> None:
    there(system, tmp_path, "import everything")


def test_windows_shows_the_help_of_every_verb(tmp_path: Path) -> None:
    said = there("win32", tmp_path, "the help of every verb")
    assert "Usage: yolofleet plan" in said and "Usage: yolofleet val" in said


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_one_machine_trains_with_loader_processes_and_with_two_processes(system: str, tmp_path: Path) -> None:
    if system == "darwin":  # to spawn a loader process needs what Windows was made to lack
        said = there(system, tmp_path, *TRAIN, "--device", "cpu", "--workers", "1")
        assert "1 processes; cache" in said
    said = there(system, tmp_path, *TRAIN, "--device", "cpu:2", "--cache", "disk")
    assert "2 processes (torchrun)" in said and "trained 1 epoch" in said


def test_several_machines_cannot_be_started_from_windows(tmp_path: Path) -> None:
    said = there("win32", tmp_path, *TRAIN, "--hosts", "a:1,b:1", code=2)
    assert "several machines cannot be started from Windows" in said and "WSL" in said
    said = there("win32", tmp_path, "fleet", "ps", "--hosts", "a:1,b:1", code=2)
    assert "cannot be started from Windows" in said


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_doctor_says_that_one_machine_is_supported(system: str, tmp_path: Path) -> None:
    said = there(system, tmp_path, "doctor", "--quick")
    assert "several machines are supported on Linux; here one" in said
