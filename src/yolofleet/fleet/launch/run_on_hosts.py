"""Run a training, a validation or a command on several hosts: check them, start it on each, follow it, end it everywhere.

The job ends when the launcher ends for any reason, even by SIGKILL. If a process or a host fails, the job continues
with the rest (``attempts.py``). One loop reads the messages of all hosts (``watch.py``). The console shows rank 0, and
this machine keeps the logs of all ranks.
"""

from __future__ import annotations

import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.hosts.lease import LEASE_LOST
from yolofleet.fleet.hosts.remote import Remote, logged_in
from yolofleet.fleet.launch.attempts import HostAttempts, host_fields
from yolofleet.fleet.launch.folders import Folders
from yolofleet.fleet.launch.machines import RunPlan, resume_options
from yolofleet.fleet.launch.preflight import check, checked, enter_folders, inspect
from yolofleet.fleet.launch.watch import Watch
from yolofleet.fleet.resources import RunResources
from yolofleet.runs.report.folder import REQUESTS, RunFolder
from yolofleet.runs.report.page import write_report
from yolofleet.storage.atomic import write_bytes, write_unsynced
from yolofleet.support.errors import ClusterError, ConfigError, DataError, Stopped, YolofleetError
from yolofleet.support.system.signals import request_stop, stoppable
from yolofleet.support.text import inform

USER_ERRORS = (ConfigError.exit_code, DataError.exit_code, Stopped.exit_code)


def run_on_hosts(plan: RunPlan) -> tuple[int, RunFolder]:
    """Run a plan on its hosts. Return the exit code and the run's folder on this machine.

    Raises:
        YolofleetError: the run cannot be started, or the file of ``--json`` cannot be written.
    """
    settings = plan.config.value
    code, folder = _run(plan)
    if code == 0 and not settings.plots:
        folder.discard_report()
    if code == 0 and folder.report_json.is_file():
        # the results are complete; `yolofleet report` shows why the page is missing
        with suppress(YolofleetError):
            write_report(folder)
    if settings.json_out not in ("", "-") and code == 0 and folder.results_json.is_file():
        # Without that file, the launcher has printed why it is missing.
        write_bytes(Path(settings.json_out), folder.results_json.read_bytes(), into_special=True)
    return code, folder


def _run(plan: RunPlan) -> tuple[int, RunFolder]:
    can_resume = plan.recipe is not None  # a validation writes no states
    with stoppable(), checked(plan) as (meeting, fleet, remotes, config):
        code: int | None = None
        saved: bool | None = False
        folders = Folders.claim(plan, remotes)
        resume = folders.resume_command(resume_options(plan.config.value)) if can_resume else ""
        with HostAttempts(plan, fleet, remotes, meeting, folders, resume) as attempts:
            try:
                if can_resume:
                    folders.begin(config, remotes, is_resumed=plan.resumed is not None)
                saved = None  # from here on, only the hosts know whether there are states
                with live_copy(folders, lambda: attempts.remotes):
                    watch = attempts.run()
                saved = folders.has_states(attempts.remotes)
                code = watch.explain("" if saved is False else resume)
                if attempts.renewal is not None and attempts.renewal.why_lost:
                    inform(attempts.renewal.why_lost)
                    code = LEASE_LOST
            finally:
                discard = saved is False and code in (None, *USER_ERRORS)
                folders.fetch(attempts.remotes, saved=saved, discard=discard, config=config)
    return code, folders.here


def check_hosts(config: Resolved[TrainConfig], fleet: Fleet) -> None:
    """Check the hosts of a study as before a training: each trial then runs on one of them.

    Args:
        config: of the training that the trials vary.

    Raises:
        ClusterError, ConfigError: a host cannot be reached, lacks a file or the data, or differs from the others.
    """
    plan = RunPlan(config, None, fleet, 1, None)
    with stoppable(), logged_in(fleet) as remotes:
        check(plan, fleet, remotes)


def run_command(fleet: Fleet, command: Sequence[str], resources: RunResources) -> int:
    """Run a command once on every host, and print each line after its host's name. If one fails, end all.

    The command gets torchrun's variables, so ``torchrun SCRIPT`` is one job of all hosts.

    Returns:
        0, or the exit code of the command that failed first.
    """
    with stoppable(), logged_in(fleet) as remotes:
        enter_folders(remotes)
        findings, meeting = inspect(fleet, remotes, resources)
        for finding in findings:
            if finding.level == "fault" and not finding.code.startswith("gpu"):  # a command may need no GPU
                inform(f"warning: {finding.where}: {finding.seen}")
        watch = Watch(fleet, remotes, lambda *_: None, plain=True)
        title = shlex.join(command)
        job = {"id": f"run-{secrets.token_hex(3)}", "title": title, "command": list(command), "text": ""}
        fields = {"folder": ".", "streamed": False, "terminal": None, "number": 0, "restarts": 0}
        watch.follow(
            [{**job, **host_fields(fleet, meeting, node_rank), **fields} for node_rank in range(len(remotes))]
        )
        return watch.command_code()


PERIOD_S = 3.0
ASK_S = 10.0
END_S = 1.0  # for the thread to end
MOST_BYTES = 32 << 20  # of a file; a larger one comes at the end of the run
STATUS = ("logs/status.json", "logs/ranks.json")  # they change without another size
SHOWN = (*STATUS, "results.csv", "events.jsonl", "report.json", "plots/train_step0.jpg")


@contextmanager
def live_copy(folders: Folders, remotes: Callable[[], Sequence[Remote]]) -> Iterator[None]:
    """Copy the files ``SHOWN`` and pass requests on inside the block, every few seconds, from a thread.

    Only for runs whose results are on another disk. The complete results are copied at the end (``folders.py``).

    Args:
        remotes: returns the connections of the hosts, in the order of ``folders.sites``.
    """
    closing = threading.Event()
    copy = LiveCopy(folders.here, closing.is_set)
    if folders.states_are_elsewhere:
        for kind in REQUESTS:  # to an earlier start of the run
            folders.here.take_request(kind)

    def serve() -> None:
        while not closing.wait(PERIOD_S):
            if folders.states_are_elsewhere:  # else rank 0 reads and writes the same folder
                host_index = folders.order[0] if folders.order else 0
                copy.renew(remotes()[host_index], folders.sites[host_index].folder)

    thread = threading.Thread(target=serve, name="live-copy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(END_S)
        if folders.states_are_elsewhere:
            with suppress(OSError):
                folders.here.ranks.unlink(missing_ok=True)  # as rank 0 does at the end


class LiveCopy:
    """The copy of a run's files on the launcher's disk.

    Args:
        is_over: returns whether the run has ended, after which nothing may be written.
    """

    def __init__(self, here: RunFolder, is_over: Callable[[], bool]) -> None:
        self.here, self._is_over = here, is_over
        self._sizes = dict[tuple[str, str], int]()  # (host, file) -> bytes

    def renew(self, remote: Remote, there: str) -> None:
        """Copy the files that have another size than before, and pass requests on. Ignore errors: the launcher reports them.

        Args:
            there: the folder of the run on the host ``remote``.
        """
        if self.here.take_request("stop"):
            request_stop("a request in the run folder")
        with suppress(ClusterError):
            if self.here.take_request("save"):
                remote.ask("request_run", ASK_S, folder=there, kind="save")
        for name in SHOWN:
            with suppress(ClusterError, OSError):  # a file that does not exist yet, a lost host, a full disk
                self._copy(remote, there, name)

    def _copy(self, remote: Remote, there: str, name: str) -> None:
        file, target, key = f"{there}/{name}", self.here.path / name, (remote.name, name)
        size = remote.ask("read_piece", ASK_S, file=file, offset=-1).size
        if size > MOST_BYTES or (self._sizes.get(key) == size and name not in STATUS):
            return
        content = b""
        while len(content) < size and not self._is_over():
            piece = remote.ask("read_piece", ASK_S, file=file, offset=len(content)).content
            if not piece:
                break
            content += piece
        if not self._is_over() and not target.parent.is_symlink():
            write_unsynced(target, content)
            self._sizes[key] = size
