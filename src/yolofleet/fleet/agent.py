"""``python -m yolofleet.fleet.agent --nproc-per-node N -m yolofleet train ...``: torchrun for schedulers.

One on every machine, started by ``srun``, ``mpirun`` or Kubernetes. To torchrun's agent, whose arguments it takes, it
adds what a scheduler needs:

- under srun or mpirun it finds the machine's number and the address of the first;
- on one machine everything stays on the loopback interface. Several machines use torchrun's ``static`` rendezvous: it
  has no pickles, but its store listens on all addresses of the first machine;
- SIGUSR1, a scheduler's warning, is passed on to the workers, which save and end (torchrun would die of it);
- the exit code is that of the worker that failed first (torchrun's is 1), so 75 means: start again, it will resume.
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

from yolofleet.errors import ClusterError, Stopped, YolofleetError
from yolofleet.fleet.job import AGENT_DEFAULTS, loopback_interface
from yolofleet.fleet.launch.local import exit_text
from yolofleet.parallel.place import scheduled_place
from yolofleet.system.cgroup import OomKills, oom_kills
from yolofleet.system.children import module_argv, module_environment
from yolofleet.system.proc import children, signal_all
from yolofleet.text import echo

POLL_S = 0.2


def main(argv: list[str]) -> int:
    """One machine's part of a run, to its end; returns the exit code."""
    try:
        arguments = [*meeting_arguments(os.environ, argv), *argv]
    except YolofleetError as problem:
        echo(problem.render(), to=sys.stderr)
        return problem.exit_code
    os.environ.update(AGENT_DEFAULTS | os.environ)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
        logging.CRITICAL
    )  # see _explained
    warning, before = StopWarning(), oom_kills()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        wishes = torchrun.parse_args(arguments)
        if wishes.nnodes in ("1", "1:1"):
            _keep_to_loopback(wishes)
        if (
            wishes.tee == wishes.redirects == "0"
        ):  # nothing to keep; else every start leaves an empty folder in TMPDIR
            wishes.log_dir = wishes.log_dir or os.devnull
        if wishes.module and wishes.training_script.partition(".")[0] == "yolofleet":
            _ignore_working_folder(wishes)
        torchrun.run(wishes)
    except ChildFailedError as failed:
        if warning.has_come:
            return Stopped.exit_code
        rank, failure = failed.get_first_failure()
        return _explained(rank, failure.exitcode, oom_kills().since(before))
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


class StopWarning:
    """SIGUSR1: passed on to the workers whenever it comes; to those that do not run yet when they do."""

    def __init__(self) -> None:
        self.has_come = False
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._pass_on)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.has_come = True
        threading.Thread(target=self._tell_workers, args=(number,), daemon=True).start()

    @staticmethod
    def _tell_workers(number: int) -> None:
        while not (workers := children(os.getpid())):  # the machines have not met yet
            time.sleep(POLL_S)
        signal_all(workers, number)


def meeting_arguments(environment: Mapping[str, str], argv: list[str]) -> list[str]:
    """Return torchrun's arguments for the place that srun or mpirun gave; nothing if ``argv`` has its own.

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
    """Let a run on one machine meet on loopback, whatever rendezvous its arguments name: nobody else takes part."""
    from yolofleet.parallel.rendezvous import BACKEND, register

    register()
    os.environ.update(loopback_interface())
    options.standalone = False
    options.rdzv_backend, options.rdzv_endpoint, options.rdzv_conf = BACKEND, "127.0.0.1:0", ""
    options.local_addr = "127.0.0.1"


def _ignore_working_folder(options: argparse.Namespace) -> None:
    """Let workers that run this package import nothing from the working folder. A user's own script may need it."""
    python, *words = module_argv(options.training_script, *options.training_script_args)
    options.module, options.no_python = False, True
    options.training_script, options.training_script_args = python, words
    os.environ.update(module_environment(os.environ))


def _explained(rank: int, exit_code: int, killed: OomKills) -> int:
    """A worker that ended by itself has said why; of one that was killed it is said here."""
    if exit_code > 0:
        return exit_code
    problem = ClusterError(
        f"rank {rank} {exit_text(exit_code, killed)}", hint="start the job again: it resumes"
    )
    echo(problem.render(), to=sys.stderr)
    return problem.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
