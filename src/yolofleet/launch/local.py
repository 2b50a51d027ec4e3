"""Start torchrun's agent on this machine, wait for it, and explain in one message why it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from yolofleet.errors import ExitCode, Stopped, StorageError
from yolofleet.files.atomic import open_append
from yolofleet.files.foreign import open_foreign
from yolofleet.files.memory_files import MemoryFiles
from yolofleet.hosts.endings import Ending, Failure, failure_of, last_words, print_cause, words_of_aborted
from yolofleet.hosts.torchrun import (
    AGENT_MODULE,
    JobSpec,
    ServedAgent,
    StoreEnd,
    agent_arguments,
    agent_environment,
)
from yolofleet.launch.next_action import EndedAttempt, Next, RestartRules, next_action
from yolofleet.report.events import record_restart
from yolofleet.report.folder import RunFolder
from yolofleet.system.cgroup import UNKNOWN, OomKills, oom_kills
from yolofleet.system.children import start_module
from yolofleet.system.proc import end_descendants
from yolofleet.system.signals import handling, interrupt, request_name
from yolofleet.text import announce, announcement

MOST_LOG_BYTES = 64 << 20  # of the agent's log of one start


def run_agent(job: JobSpec, rules: RestartRules) -> int:
    """Run a job to its end, again after a failure that may pass. Return the exit code.

    The agent has its own session, so Ctrl-C reaches it only through this process, as SIGTERM. A second Ctrl-C kills it.
    """
    logs = job.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    failures: list[tuple[float, Failure]] = []
    with LocalAgent(logs / "agent.log") as agent, handling(agent.on_signal):
        while True:
            for stale in logs.glob("error-rank-*.json"):
                stale.unlink()
            before, log_offset = oom_kills(), agent.log.stat().st_size
            code = agent.run(replace(job, restarts=len(failures)))
            if code == 0:
                return 0
            if agent.ends_at_once:
                stopped = Stopped(
                    "ended at once, on request; the last checkpoint is kept",
                    hint=resume_command(job.folder, job.resume_options),
                )
                announce(stopped.render())
                return ExitCode.with_text(stopped.exit_code, stopped.render())
            ending = ending_of(job.folder, code, log_offset, oom_kills().since(before))
            failure, now_s = failure_of([ending], agent.steps_done()), time.monotonic()
            action = next_action(EndedAttempt({0: ""}, failure), failures, now_s, rules)
            if agent.asked or action.next is Next.END:
                if action.text and not agent.asked:
                    announce(f"\n{action.text}")
                agent.save_state(job.folder)
                return print_cause([ending], resume_command(job.folder, job.resume_options), agent.asked)
            failures.append((now_s, failure))
            record_restart(RunFolder(job.folder), failure.text, failure.step)
            announce(f"\n{action.text}\ngoing on with {job.processes} processes")


class LocalAgent:
    """torchrun's agent on this machine: one process for all attempts on Linux, else one for each.

    Attributes:
        asked: the signal that asked the run to end, or "".
        ends_at_once: Ctrl-C came twice.
    """

    def __init__(self, log: Path) -> None:
        self.log, self.asked, self.ends_at_once = log, "", False
        self._process: subprocess.Popen[bytes] | ServedAgent | None = None
        self._memory: MemoryFiles | None = None
        self._environment = agent_environment(os.environ)

    def __enter__(self) -> LocalAgent:
        self.log.touch()
        if sys.platform == "linux":
            with suppress(OSError):  # without memory, another attempt goes on from the disk
                self._memory = MemoryFiles()
                self._environment |= self._memory.environment
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._process, ServedAgent):
            self._process.close()
        elif self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._memory is not None:
            self._memory.close()

    def run(self, job: JobSpec) -> int:
        """Run an attempt to its end, and return its exit code."""
        if sys.platform == "linux":
            if not isinstance(self._process, ServedAgent) or not self._process.lives:
                with open_append(self.log) as log:
                    self._process = ServedAgent(self._environment, None, log)
            self._process.begin(agent_arguments(job), StoreEnd())
        else:
            with open_append(self.log) as log:
                self._process = start_module(
                    *(AGENT_MODULE, *agent_arguments(job)),
                    environment=self._environment,
                    output=None,
                    errors=log,
                    has_own_session=True,
                )
        return self._process.wait()

    def steps_done(self) -> int:
        """Return the number of steps done; -1 if it is unknown."""
        return self._memory.steps_done() if self._memory is not None else -1

    def save_state(self, folder: Path) -> None:
        """Write the state in memory to the disk, if it is newer, because the run ends."""
        if self._memory is not None:
            with suppress(OSError, StorageError):
                self._memory.save_newest(folder / "checkpoints")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask the agent to stop at the first signal, and kill it at a later Ctrl-C: see :func:`handling`."""
        agent = self._process
        if agent is None:
            interrupt(number, frame)
        elif agent.poll() is None:
            self.ends_at_once = self.ends_at_once or (bool(self.asked) and number == signal.SIGINT)
            words = (
                "ending at once"
                if self.ends_at_once
                else "stopping after this step, then saving; Ctrl-C again ends at once"
            )
            with suppress(OSError):
                os.write(2, announcement(f"\n{words}").encode())
            if self.ends_at_once:
                # on Linux; elsewhere the workers end when they lose each other
                end_descendants(agent.pid, deadline_s=1.0)
                agent.kill()
            elif not self.asked:
                agent.terminate()
            self.asked = self.asked or request_name(number)


def ending_of(folder: Path, code: int, log_offset: int, killed: OomKills = UNKNOWN) -> Ending:
    """Return how the workers of this machine ended.

    Args:
        log_offset: where the agent's log of this attempt begins.
    """
    words = last_words(sorted((folder / "logs").glob("error-rank-*.json")))
    log_path = folder / "logs" / "agent.log"
    try:
        with open_foreign(log_path, follow=False) as file:
            file.seek(log_offset)
            log = file.read(MOST_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        log = ""
    words += words_of_aborted(RunFolder(folder), log, words)
    return Ending(code, words, log, str(log_path), killed=killed)


def explain(folder: Path, code: int, log_offset: int) -> int:
    """Print why the workers of this machine ended. Return the exit code of the launcher."""
    return print_cause([ending_of(folder, code, log_offset)], resume_command(folder))


def resume_command(folder: Path, options: tuple[str, ...] = ()) -> str:
    """Return the command that resumes the run; "" if there is no checkpoint."""
    saved = any(folder.glob("checkpoints/step-*.safetensors"))
    return RunFolder(folder, resume_options=options).resume_command if saved else ""
