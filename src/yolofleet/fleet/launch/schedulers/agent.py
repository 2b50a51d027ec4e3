"""``python -m yolofleet.fleet.launch.schedulers.agent --nproc-per-node N -m yolofleet train ...``: torchrun for schedulers.

``srun``, ``mpirun`` or Kubernetes starts one on every machine. It takes the arguments of torchrun's agent, and adds what
a scheduler needs:

- Under srun or mpirun it finds the machine's number and the address of the first machine.
- A run on one machine uses only the loopback interface. Several machines use torchrun's ``static`` rendezvous, which
  has no pickles, but its store listens on all addresses of the first machine.
- It forwards SIGUSR1, a scheduler's warning, to the workers, which save and end. torchrun alone would end.
- Its exit code is that of the worker that failed first, where torchrun's is 1. So 75 means that the same job resumes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType

from yolofleet.fleet.hosts.agent_process import AGENT_DEFAULTS, loopback_interface
from yolofleet.fleet.hosts.endings import exit_text
from yolofleet.support.errors import ClusterError, Stopped, YolofleetError
from yolofleet.support.place import scheduled_place
from yolofleet.support.system.cgroup import OomKills, oom_kills
from yolofleet.support.system.children import module_argv, module_environment
from yolofleet.support.system.proc import children, signal_all
from yolofleet.support.text import echo

POLL_S = 0.2


def main(argv: list[str]) -> int:
    """Run one machine's part of a job to its end. Return the exit code."""
    try:
        arguments = [*rendezvous_arguments(os.environ, argv), *argv]
    except YolofleetError as problem:
        echo(problem.render(), to=sys.stderr)
        return problem.exit_code
    os.environ.update(AGENT_DEFAULTS | os.environ)
    # _exit_code reports the failure
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    warning, before = StopWarning(), oom_kills()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        options = torchrun.parse_args(arguments)
        if options.nnodes in ("1", "1:1"):
            _keep_to_loopback(options)
        if options.tee == options.redirects == "0":  # else every start leaves an empty folder in TMPDIR
            options.log_dir = options.log_dir or os.devnull
        if options.module and options.training_script.partition(".")[0] == "yolofleet":
            _ignore_working_folder(options)
        torchrun.run(options)
    except ChildFailedError as failed:
        if warning.received:
            return Stopped.exit_code
        rank, failure = failed.get_first_failure()
        return _exit_code(rank, failure.exitcode, oom_kills().since(before))
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


class StopWarning:
    """Forward SIGUSR1 to the workers. If none run yet, wait until they do."""

    def __init__(self) -> None:
        self.received = False
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._forward)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        threading.Thread(target=self._signal_workers, args=(number,), daemon=True).start()

    @staticmethod
    def _signal_workers(number: int) -> None:
        while not (workers := children(os.getpid())):  # the rendezvous is not complete
            time.sleep(POLL_S)
        signal_all(workers, number)


def rendezvous_arguments(environment: Mapping[str, str], argv: list[str]) -> list[str]:
    """Return torchrun's rendezvous arguments from the variables of srun or mpirun; none if ``argv`` has its own.

    Raises:
        ConfigError: the variables of srun or mpirun contradict each other.
    """
    if any(argument.startswith(("--nnodes", "--node-rank", "--standalone", "--rdzv")) for argument in argv):
        return []
    here = scheduled_place(environment)
    if here.size == 1:
        return ["--nnodes=1"]
    return [
        f"--nnodes={here.size}",
        f"--node-rank={here.rank}",
        f"--master-addr={here.address}",
        f"--master-port={here.port}",
    ]


def _keep_to_loopback(options: argparse.Namespace) -> None:
    """Use a rendezvous on loopback, whatever the arguments say: no other machine takes part."""
    from yolofleet.training.parallel.rendezvous import BACKEND, register

    register()
    os.environ.update(loopback_interface())
    options.standalone = False
    options.rdzv_backend, options.rdzv_endpoint, options.rdzv_conf = BACKEND, "127.0.0.1:0", ""
    options.local_addr = "127.0.0.1"


def _ignore_working_folder(options: argparse.Namespace) -> None:
    """Keep workers of this package from importing from the working folder. A user's own script may need it."""
    python, *words = module_argv(options.training_script, *options.training_script_args)
    options.module, options.no_python = False, True
    options.training_script, options.training_script_args = python, words
    os.environ.update(module_environment(os.environ))


def _exit_code(rank: int, exit_code: int, killed: OomKills) -> int:
    """Return the exit code of a failed worker. Report one that was killed; others have reported themselves."""
    if exit_code > 0:
        return exit_code
    problem = ClusterError(
        f"rank {rank} {exit_text(exit_code, killed)}", hint="start the job again: it resumes"
    )
    echo(problem.render(), to=sys.stderr)
    return problem.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
