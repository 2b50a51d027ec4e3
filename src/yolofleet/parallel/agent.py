"""torchrun's agent for the workers of one host: ``python -m yolofleet.parallel.agent TORCHRUN-ARGUMENTS``.

Loading torch takes seconds of processor time. A fork server loads it, and the worker's modules, once for all workers of
this host while the agent loads it for itself, so that workers start at once when the hosts have met. The fork server has
no threads, uses no device and starts before the agent has any thread.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver, resource_tracker, util

from yolofleet.system.children import safe_spawn


def start_fork_server(module: str) -> None:
    """Start the process that workers are forked from, and let it load ``module`` in the background."""
    # Python 3.10.0 to 3.10.8 and 3.11.0 let every user of the machine talk to an abstract socket (CVE-2022-42919)
    vars(util)["abstract_sockets_supported"] = False
    multiprocessing.set_forkserver_preload(["yolofleet.parallel.ends_with_parent", module])
    with safe_spawn():
        forkserver.ensure_running()


def stop_fork_server() -> None:
    """Wait until the fork server, and the process that multiprocessing started beside it, have ended.

    Both end by themselves when the agent has ended, a moment too late for a launcher that says that nothing is left.
    """
    vars(forkserver)["_forkserver"]._stop()
    vars(util)["_exit_function"]()  # finalizers: the folder of the socket; semaphores, which need the tracker
    vars(resource_tracker)["_resource_tracker"]._stop()


if __name__ == "__main__":
    forks = "--start-method=forkserver" in sys.argv
    if forks:
        start_fork_server("yolofleet.worker")
    from torch.distributed.run import main

    from yolofleet.parallel.rendezvous import register

    register()
    try:
        main(sys.argv[1:])
    finally:
        if forks:
            stop_fork_server()
