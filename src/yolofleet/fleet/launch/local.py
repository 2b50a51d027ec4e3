"""Run torchrun's agent on this machine, again after a failure that may pass, and explain in one message why it ended."""

from __future__ import annotations

import io
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from yolofleet.config.stored.job import dump_config
from yolofleet.config.stored.resume_options import options_to_repeat
from yolofleet.fleet.hosts.agent_process import (
    AGENT_MODULE,
    JobSpec,
    ServedAgent,
    StoreEnd,
    agent_arguments,
    agent_environment,
)
from yolofleet.fleet.hosts.endings import Ending, failure_of, print_cause, words_and_log
from yolofleet.fleet.launch.machines import RunPlan, restart_rules
from yolofleet.fleet.launch.next_action import Action, EndedAttempt, RestartRules, run_attempts
from yolofleet.runs.report.folder import COMMAND_ID, RunFolder
from yolofleet.storage.atomic import open_append, write_text
from yolofleet.support.errors import ConfigError, DataError, ExitCode, Stopped, StorageError
from yolofleet.support.system.cgroup import UNKNOWN, OomKills, oom_kills
from yolofleet.support.system.children import start_module
from yolofleet.support.system.proc import end_descendants
from yolofleet.support.system.signals import handling, interrupt, request_name
from yolofleet.support.text import announce, announcement, echo, inform

LAST_LINES_S = 5.0  # for the last lines, if a process has left its output open


def run_processes(plan: RunPlan, check: Callable[[], None]) -> tuple[int, RunFolder]:
    """Run a plan on this machine to its end. Return the exit code and the folder of the run.

    Args:
        check: raises if this machine cannot run it. torchrun's agent loads torch meanwhile.
    """
    folder, settings, code = plan.folder(), plan.config.value, None
    try:
        write_text(folder.job, dump_config(plan.config, plan.recipe))
        options = tuple(options_to_repeat(settings))
        job = JobSpec(folder.path.resolve(), plan.processes, resume_options=options)
        code = _run_agent(job, restart_rules(settings), check)
    finally:
        if code in (None, ConfigError.exit_code, DataError.exit_code, Stopped.exit_code):
            folder.discard_unless_used()
    return code, folder


def _run_agent(job: JobSpec, rules: RestartRules, check: Callable[[], None]) -> int:
    """Run a job to its end, again after a failure that may pass. Return the exit code.

    The agent has its own session, so Ctrl-C reaches it only through this process, as SIGTERM. A second Ctrl-C kills it.
    """
    (job.folder / "logs").mkdir(parents=True, exist_ok=True)
    with shown_output() as output, closing(LocalAttempts(job, output)) as attempts:
        attempts.warm_up()
        check()
        with handling(attempts.on_signal):
            run_attempts(attempts, rules, RunFolder(job.folder))
            return attempts.explain()


@contextmanager
def shown_output() -> Iterator[int | None]:
    """Yield the descriptor for the standard output of processes; None: they have that of this process.

    A notebook replaces ``sys.stdout``, and shows in the cell what is written there. What processes write themselves appears
    below another cell, or only in the log of the notebook's server.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        yield None
        return
    ours, theirs = os.pipe()

    def show() -> None:
        with open(ours, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                echo(line, end="")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        thread.join(LAST_LINES_S)


class LocalAttempts:
    """The attempts of a job on this machine: one process runs torchrun's agent for all of them on Linux, else one for each.

    Args:
        output: see :func:`shown_output`.
    """

    def __init__(self, job: JobSpec, output: int | None = None) -> None:
        self.job, self.log, self._output = job, job.folder / "logs" / "agent.log", output
        self.ending = Ending(0, [], "", "")  # how the last attempt ended
        self.asked = ""  # the signal that asked the run to end
        self.ends_at_once = False  # Ctrl-C came twice
        self._environment = agent_environment(os.environ) | {COMMAND_ID: secrets.token_hex(8)}
        self._process: subprocess.Popen[bytes] | ServedAgent | None = None

    def close(self) -> None:
        """End the process."""
        if isinstance(self._process, ServedAgent):
            self._process.close()
        elif self._process is not None and self._process.poll() is None:
            self._process.kill()

    def warm_up(self) -> None:
        """Let the process of all attempts load torch."""
        if sys.platform == "linux":
            self._process = ServedAgent(self._environment, self._output, self.log)

    def attempt(self) -> EndedAttempt:
        """Run an attempt to its end."""
        for stale in self.log.parent.glob("error-rank-*.json"):
            stale.unlink()
        before = oom_kills()
        if isinstance(self._process, ServedAgent):
            self._process.begin(agent_arguments(self.job), StoreEnd())
            log_offset = self._process.log_offset
        else:
            with open_append(self.log) as log:
                log_offset = log.seek(0, os.SEEK_END)
                words = agent_arguments(self.job)
                self._process = start_module(
                    AGENT_MODULE,
                    *words,
                    environment=self._environment,
                    output=self._output,
                    errors=log,
                    has_own_session=True,
                )
        if (code := self._process.wait()) == 0:
            self.ending = Ending(0, [], "", "")
            return EndedAttempt({0: ""})
        self.ending = ending_of(self.job.folder, code, log_offset, oom_kills().since(before))
        steps = self._process.steps_done() if isinstance(self._process, ServedAgent) else -1
        return EndedAttempt({0: ""}, None if self.asked else failure_of([self.ending], steps))

    def prepare(self, ended: EndedAttempt, action: Action) -> bool:
        """Count the restart."""
        self.job = replace(self.job, restarts=self.job.restarts + 1)
        inform(f"going on with {self.job.processes} processes")
        return True

    def explain(self) -> int:
        """Save the state in memory and print why the run ended, unless it succeeded. Return the exit code."""
        if self.ending.code == 0:
            return 0
        resume = resume_command(self.job.folder, self.job.resume_options)
        if self.ends_at_once:
            stopped = Stopped("ended at once, on request; the last checkpoint is kept", hint=resume)
            announce(stopped.render())
            return ExitCode.with_text(stopped.exit_code, stopped.render())
        if isinstance(self._process, ServedAgent):
            with suppress(OSError, StorageError):
                self._process.save_state(self.job.folder / "checkpoints")
        return print_cause([self.ending], resume, self.asked)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask the agent to stop at the first signal, and kill it at a later Ctrl-C: see :func:`handling`."""
        agent = self._process
        if agent is None:
            interrupt(number, frame)
        elif agent.poll() is None:
            # At once, because the next signal may come while this one is announced
            is_first, self.asked = not self.asked, self.asked or request_name(number)
            self.ends_at_once = self.ends_at_once or (not is_first and number == signal.SIGINT)
            if is_first or self.ends_at_once:  # a later SIGTERM changes nothing
                stopping = "stopping after this step, then saving; Ctrl-C again ends at once"
                words = "ending at once" if self.ends_at_once else stopping
                with suppress(OSError):
                    os.write(2, announcement(f"\n{words}").encode())
            if self.ends_at_once:
                # on Linux; elsewhere the workers end when they lose each other
                end_descendants(agent.pid, deadline_s=1.0)
                agent.kill()
            elif is_first:
                agent.terminate()


def ending_of(folder: Path, code: int, log_offset: int, killed: OomKills = UNKNOWN) -> Ending:
    """Return how the workers here ended; the agent's log of this attempt begins at ``log_offset``."""
    log = folder / "logs" / "agent.log"
    words, text = words_and_log(sorted(log.parent.glob("error-rank-*.json")), log, log_offset)
    return Ending(code, words, text, str(log), killed=killed)


def explain(folder: Path, code: int, log_offset: int) -> int:
    """Print why the workers of this machine ended. Return the exit code of the launcher."""
    return print_cause([ending_of(folder, code, log_offset)], resume_command(folder))


def resume_command(folder: Path, options: tuple[str, ...] = ()) -> str:
    """Return the command that resumes the run; "" if there is no checkpoint."""
    saved = any(folder.glob("checkpoints/step-*.safetensors"))
    return RunFolder(folder, resume_options=options).resume_command if saved else ""
