"""torchrun's agent for the workers of one host: ``python -m yolofleet.training.parallel.torchrun_agent TORCHRUN-ARGUMENTS``.

Loading torch takes seconds of processor time, so one process of a host loads it once. It then forks the fork server, which
loads the modules of the workers while the agent loads torchrun, so that workers start at once when the hosts have met. The
fork server has no threads, uses no device and starts before the agent has any thread.

With ``--serve FD SECONDS`` the process stays for all attempts of a run: the host agent at the other end of the socket FD
sends the arguments of one attempt after another, and the next workers come from the same fork server. When the host agent
is lost, the workers have SECONDS to save.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from yolofleet.storage.caches import own_temporary_folder
from yolofleet.support.errors import ClusterError, YolofleetError
from yolofleet.support.system.children import safe_spawn
from yolofleet.support.text import echo

MOST_MESSAGE_BYTES = 1 << 17  # it has the names of all hosts
MOST_WORDS = 4000
END_S = 5.0
STARTING_S = 60.0  # an agent that has made its folder of sockets has locked it by then
LONGEST_OWN = 60  # letters; the path of a socket may have 107


def start_fork_server(*modules: str) -> None:
    """Start the process that workers are forked from, and let it load ``modules`` in the background.

    It is a fork of this process, with the modules that this process has loaded. multiprocessing would start an interpreter.
    """
    # Python 3.10.0 to 3.10.8 and 3.11.0 let every user of the machine talk to an abstract socket (CVE-2022-42919)
    vars(util)["abstract_sockets_supported"] = False
    # without it the folder is in the temporary folder itself, and may stay there
    with suppress(YolofleetError, OSError):
        _make_socket_folder()
    with safe_spawn():
        resource_tracker.ensure_running()  # this one has an interpreter of its own

    def fork(_python: bytes, _arguments: list[str], descriptors: list[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            opened = {int(link.name) for link in Path("/proc/self/fd").iterdir()}
            for descriptor in opened - {0, 1, 2, *descriptors}:
                with suppress(OSError):  # the listing's own
                    os.close(descriptor)
            preload = ["yolofleet.training.parallel.ends_with_parent", *modules]
            names = ("listener_fd", "alive_r", "authkey_r")  # the last one with Python 3.14
            vars(forkserver)["main"](preload=preload, **dict(zip(names, descriptors, strict=False)))
        except SystemExit:  # the agent has closed its end of the pipe
            os._exit(0)
        except BaseException:
            echo(traceback.format_exc(), to=sys.stderr)
        finally:
            os._exit(1)

    start_interpreter = vars(util)["spawnv_passfds"]
    vars(util)["spawnv_passfds"] = fork
    try:
        forkserver.ensure_running()
    finally:
        vars(util)["spawnv_passfds"] = start_interpreter


def _make_socket_folder() -> None:
    """Let multiprocessing make its folder of sockets below yolofleet's own, and remove those of agents that were killed.

    An agent locks its folder. A connection would show as well whether it lives, but would end its fork server.
    """
    import fcntl

    own, usual = own_temporary_folder(), tempfile.tempdir
    for left in own.glob("pymp-*"):
        with suppress(OSError):  # BlockingIOError: its agent lives
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - left.stat().st_mtime > STARTING_S:
                    shutil.rmtree(left)
            finally:
                os.close(handle)
    tempfile.tempdir = str(own) if len(str(own)) < LONGEST_OWN else usual
    fcntl.flock(os.open(util.get_temp_dir(), os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends
    tempfile.tempdir = usual


def stop_fork_server() -> None:
    """Wait until the fork server, and the process that multiprocessing started beside it, have ended.

    Both end by themselves when the agent has ended, a moment too late for a launcher that says that nothing is left.
    """
    vars(forkserver)["_forkserver"]._stop()
    vars(util)["_exit_function"]()  # finalizers: the folder of the socket; semaphores, which need the tracker
    vars(resource_tracker)["_resource_tracker"]._stop()


def serve(channel: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Run torchrun with the arguments of each message until the other end closes.

    A message is JSON, ``{"arguments": [...]}``, with the socket that the run's store listens on if this host
    owns the store. The answer is ``{"code": N, "why": TEXT}``: 0, or 1 for a failure, which the log on standard error
    explains, and the text if the hosts did not meet.
    ``{"ready": true}`` says that everything is loaded.
    """
    from yolofleet.training.parallel.rendezvous import own_store

    trial = multiprocessing.get_context("forkserver").Process(target=nothing)
    trial.start()
    trial.join()
    channel.sendall(json.dumps({"ready": True}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MOST_MESSAGE_BYTES, 1)
        if not message:
            return
        for descriptor in descriptors:
            own_store(socket.socket(fileno=descriptor))
        code, why = 0, ""
        try:
            run(json.loads(message)["arguments"])
        except BaseException as problem:  # a failed worker, or the signal that ends this attempt
            traceback.print_exc()
            code, why = 1, not_met(problem)
        channel.sendall(json.dumps({"code": code, "why": why}).encode())


def not_met(problem: BaseException) -> str:
    """Return the error to show if the hosts did not meet, "" if something else failed."""
    from torch.distributed import DistError

    if isinstance(problem, DistError):
        problem = ClusterError(
            "the hosts lost each other while they started the processes",
            source=(str(problem).splitlines() or [""])[0][:MOST_WORDS],
            hint="yolofleet doctor --hosts names the way that is broken",
        )
    return problem.render()[:MOST_WORDS] if isinstance(problem, YolofleetError) else ""


def end_after(parent: int, saving_s: float) -> None:
    """End this process when its parent has ended, at the latest when its workers have had time to save.

    The kernel sends SIGTERM then. But a signal does nothing while the main thread waits for the store or for a thread.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(saving_s + END_S)
    os._exit(1)


def nothing() -> None:
    """Run in a process of the fork server, which has loaded everything then."""


def plain_logs() -> None:
    """Let torch's logs have a plain formatter. Its own one loads torch's compiler, for seconds, at the first message."""
    plain = logging.Formatter(
        "%(levelname).1s%(asctime)s %(process)d %(pathname)s:%(lineno)d] %(message)s", "%m%d %H:%M:%S"
    )
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch")]:
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(plain)


def main(argv: list[str]) -> None:
    """Run the agent, or serve one attempt after another."""
    serves = argv[:1] == ["--serve"]
    forks = serves or "--start-method=forkserver" in argv
    if forks:
        importlib.import_module("torch")
        start_fork_server("yolofleet.training.rank.worker", "yolofleet.training.rank.train")
    from torch.distributed.run import main as torchrun

    plain_logs()

    from yolofleet.training.parallel.rendezvous import register

    register()
    try:
        if serves:
            threading.Thread(target=end_after, args=(os.getppid(), float(argv[2])), daemon=True).start()
            serve(socket.socket(fileno=int(argv[1])), torchrun)
        else:
            torchrun(argv)
    finally:
        if forks:
            stop_fork_server()


if __name__ == "__main__":
    main(sys.argv[1:])
