"""torchrun's agent on this host: what it runs, its command, its environment, and its process.

One process runs it for all attempts of a run: a run that goes on after a failure is started again, which is an attempt.
Standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from yolofleet.runs.checkpoint.memory_slots import NUMBER, PATHS, number_in
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import exclusive, open_append, whole_file
from yolofleet.support.place import RUN_ID
from yolofleet.support.system.children import OPENMP_WAITS, module_argv, start_module
from yolofleet.support.system.proc import children

AGENT_MODULE = "yolofleet.training.parallel.torchrun_agent"
END_S = 10.0  # for the process and its fork server to end; usually much less
# Seconds from SIGTERM until torchrun's agent kills its workers. torch's default of 30 may be too short to save a
# checkpoint, and older versions have no other.
SAVING_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass(frozen=True)
class Rendezvous:
    """This host's place among the hosts of a run."""

    node: int  # number of this host, of ``nodes``
    nodes: int
    # address, port: where the host ``store_node`` lets the other hosts reach the run's store
    address: str
    port: int
    interface: str  # name of this host's network interface that the other hosts reach
    # hexadecimal key of the store. Empty for a command, which has no store
    secret: str = field(default="", repr=False)
    store_node: int = 0  # number of the host that runs the store; any host can
    hosts: Sequence[str] = ()  # names of all
    timeout_s: int = 600  # how long one waits for the others


@dataclass(frozen=True)
class StoreEnd:
    """This host's end of the run's store, always on 127.0.0.1."""

    port: int = 0  # port of the store, or of the relay that leads to it
    # file descriptor of the socket that listens on ``port``, if the agent of this host owns the store
    listener: int | None = None


@dataclass(frozen=True)
class JobSpec:
    """What one machine runs: ``processes`` workers, which read the job in the run ``folder``."""

    folder: Path
    processes: int
    job: Path | None = None  # file of the configuration; None = ``logs/job.yaml`` of the folder
    rendezvous: Rendezvous | None = None  # None if there is no other machine
    restarts: int = 0  # attempts before this one, which a failure or a joining host ended
    resume_options: tuple[str, ...] = ()  # options of the command that resumes the run


def agent_arguments(job: JobSpec, store_port: int = 0) -> list[str]:
    """Return the arguments of torchrun's agent for this host.

    Args:
        store_port: of the run's store, or of the relay to it; 0: the agent opens a store for this host alone.
    """
    nodes, options = 1, "node=0"
    if (place := job.rendezvous) is not None and place.nodes > 1:
        nodes = place.nodes
        options = f"node={place.node},timeout_s={place.timeout_s},hosts={'/'.join(place.hosts)}"
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=loopback",  # a rendezvous that opens no port
        f"--rdzv-endpoint=127.0.0.1:{store_port}",
        f"--rdzv-conf={options}",
        "--local-addr=127.0.0.1",  # not the host name, which may not resolve
        f"--nproc-per-node={job.processes}",
        f"--rdzv-id={RUN_ID}",
        "--max-restarts=0",  # the launcher starts a run again, on the hosts that are left
        f"--log-dir={os.devnull}",  # else every start leaves an empty folder in TMPDIR
        *worker_argv(str(job.folder), str(job.job or RunFolder(job.folder).job), str(job.restarts)),
    ]


def worker_argv(*words: str) -> list[str]:
    """Return torchrun's arguments that start a worker.

    On Linux a process that has loaded torch forks it. Elsewhere a new interpreter runs it: macOS's libraries do not
    survive a fork, and Windows has none.
    """
    if sys.platform == "linux":
        worker = str(Path(__file__).parents[2] / "training/rank/worker.py")
        return ["--start-method=forkserver", "--run-path", worker, *words]
    # torchrun's own `python -m` would import from the working folder
    return ["--no-python", *module_argv("yolofleet.training.rank.worker", *words)]


AGENT_DEFAULTS = {
    **OPENMP_WAITS,
    "OMP_NUM_THREADS": "1",  # torchrun would warn; the worker sets its own count (--threads)
    SAVING_S: "300",
}


LOOPBACK_INTERFACES = ("lo", "lo0")  # of Linux, of macOS


def loopback_interface() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on loopback, for a run on one machine."""
    here = {name for _, name in socket.if_nameindex()}
    name = next((name for name in LOOPBACK_INTERFACES if name in here), None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def agent_environment(base: Mapping[str, str], interface: str = "") -> dict[str, str]:
    """Return the agent's environment: the caller's, without variables of another launcher, and with our defaults.

    Args:
        interface: network interface for gloo and NCCL, which overrides the caller's environment; "" = loopback, for
            a run on one machine.
    """
    strays = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
    )
    env = AGENT_DEFAULTS | {name: value for name, value in base.items() if name not in strays}
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
        env["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=" means the whole name, not a prefix
    else:
        env |= loopback_interface()
    if sys.platform == "win32":
        env.setdefault("USE_LIBUV", "0")  # the Windows wheels of torch have no libuv
    return env


class ServedAgent:
    """torchrun's agent of this host for one attempt after another (``training/parallel/torchrun_agent.py --serve``), and the memory
    that keeps the state of its workers between attempts. Linux.

    It has the part of ``subprocess.Popen``'s interface that says how the current attempt goes on.

    Args:
        environment: of the process and of all workers.
        output: descriptor of standard output.
        log: the file that gets standard error.
    Attributes:
        log_offset: where the log of the last attempt begins. The first attempt's begins with the process, which may have
            written why it ends before the attempt starts.
    Raises:
        OSError: the process cannot be started, or the log cannot be written.
    """

    def __init__(self, environment: Mapping[str, str], output: int | None, log: Path) -> None:
        self._memory: MemoryFiles | None = None
        with suppress(OSError):  # without memory, another attempt goes on from the disk
            self._memory = MemoryFiles()
        self._environment = {**environment, **(self._memory.environment if self._memory else {})}
        self._output, self._log = output, log
        self._start()

    def _start(self) -> None:
        # SOCK_SEQPACKET keeps messages apart
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open_append(self._log) as log:
            self.log_offset, self._is_new = log.seek(0, os.SEEK_END), True
            self._process = start_module(
                *(AGENT_MODULE, "--serve", str(theirs.fileno()), self._environment[SAVING_S]),
                environment=self._environment,
                output=self._output,
                errors=log,
                keep_open=(theirs.fileno(),),
                has_own_session=True,
            )
        self._channel.setblocking(False)
        self.is_ready = False  # it has loaded everything
        self._has_hung_up = False
        self.returncode: int | None = None
        self.why = ""  # the hosts did not meet

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the process can take another attempt."""
        return self._process.poll() is None

    def begin(self, arguments: Sequence[str], store: StoreEnd) -> None:
        """Start an attempt.

        Args:
            arguments: of torchrun.
            store: with the socket of the run's store if this host owns it.
        Raises:
            OSError: the process has died, and cannot be started again.
        """
        if not self.lives:
            self._channel.close()
            self._start()
        if not self._is_new:
            self.log_offset = self._log.stat().st_size
        self.returncode, self.why, self._is_new = None, "", False
        message = json.dumps({"arguments": list(arguments)}).encode()
        with suppress(OSError):  # it has died, and poll() says so
            socket.send_fds(self._channel, [message], [] if store.listener is None else [store.listener])

    def poll(self) -> int | None:
        """Return the exit code of the attempt; None while it runs."""
        if self.returncode is None:
            self.read()
        return self.returncode

    def read(self) -> None:
        """Take the messages of the process."""
        with suppress(OSError):  # BlockingIOError: no message has arrived
            while answer := self._channel.recv(1 << 16):
                message = json.loads(answer)
                self.is_ready = self.is_ready or "ready" in message
                self.returncode = message.get("code", self.returncode)
                self.why = message.get("why", "")
            self._has_hung_up = True
        if self.returncode is None:
            self.returncode = self._process.poll()

    def terminate(self) -> None:
        """Ask the attempt to end: its workers save, and stop."""
        self._process.terminate()

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code of the attempt once it has ended. Raise ``subprocess.TimeoutExpired``."""
        while (code := self.poll()) is None:
            if self._has_hung_up:
                return self._process.wait(timeout_s)
            if not select.select([self._channel], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("agent", timeout_s or 0.0)
        return code

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def processes(self) -> list[int]:
        """Return this process and those that it keeps for the next attempt: the fork server and its tracker."""
        return [self.pid, *children(self.pid)] if self.lives else []

    def steps_done(self) -> int:
        """Return the number of steps done; -1 if none is done, or it is unknown."""
        return self._memory.steps_done() if self._memory is not None else -1

    def save_state(self, checkpoints: Path) -> None:
        """Write the state in memory into a folder of checkpoints, as :meth:`MemoryFiles.save_newest`, because the run ends."""
        if self._memory is not None:
            self._memory.save_newest(checkpoints)

    def close(self) -> None:
        """End the process, and free the memory."""
        self.read()
        self._channel.close()
        if self.is_ready:  # else it still loads torch, and has started nothing
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self.kill()
        self._process.wait()
        if self._memory is not None:
            self._memory.close()


SLOTS = 2  # for the newest state, and the one that is being written
PIECE_BYTES = 1 << 20


class MemoryFiles:
    """The files of a run's workers on one host: the number of steps done, and slots for states.

    ``runs/checkpoint/restart_store.py`` writes and reads them in the workers.

    Raises:
        OSError: the kernel refuses.
    """

    def __init__(self) -> None:
        self._files = [os.memfd_create(f"yolofleet-{number}") for number in range(1 + SLOTS)]

    @property
    def environment(self) -> dict[str, str]:
        """The variable for the workers."""
        return {PATHS: ":".join(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)}

    def steps_done(self) -> int:
        """Return the number of steps that the workers have done; -1 if they have done none."""
        return number_in(self._files[0])

    def save_newest(self, checkpoints: Path) -> None:
        """Write the newest state into a folder of checkpoints, unless that has a newer one. Raises OSError, StorageError."""
        slot = max(self._files[1:], key=number_in)
        path = checkpoints / f"step-{number_in(slot):08d}.safetensors"
        if number_in(slot) < 0 or any(
            other.name >= path.name for other in checkpoints.glob("step-*.safetensors")
        ):
            return
        # A run that starts here removes temporary files: with the lock of the folder, it refuses to start meanwhile.
        with exclusive(checkpoints.parent / ".lock"), whole_file(path) as file:
            end = NUMBER.size
            while piece := os.pread(slot, PIECE_BYTES, end):
                file.write(piece)
                end += len(piece)

    def close(self) -> None:
        """Free the memory."""
        for file in self._files:
            os.close(file)
