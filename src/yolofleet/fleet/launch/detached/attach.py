"""Start a detached run, show it from any machine that reaches its hosts, and fetch its results when it has ended.

It has a standby launcher on each host (``standby.py``), so it does not depend on the launcher that starts it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from yolofleet.config.stored.job import dump_config
from yolofleet.fleet.hosts.fleet import HERE, Fleet
from yolofleet.fleet.hosts.messages import LeaseThere
from yolofleet.fleet.hosts.remote import Remote, logged_in
from yolofleet.fleet.launch.folders import JOB, fetch_folder
from yolofleet.fleet.launch.jobs_on_hosts import Log
from yolofleet.fleet.launch.lease_renewal import Order, appoint, named_in_full
from yolofleet.fleet.launch.machines import RunPlan
from yolofleet.fleet.launch.preflight import checked
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import write_text
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.closing import Closing
from yolofleet.support.errors import ClusterError, ConfigError
from yolofleet.support.system.signals import stoppable
from yolofleet.support.text import echo, inform, quoted, shown

LOGINS_S = 60.0


def begin(plan: RunPlan) -> tuple[Fleet, str]:
    """Start the standby launchers of a plan; return its hosts and its job's name. Raises YolofleetError."""
    run = {"config": dump_config(plan.config, plan.recipe), "resumed": str(plan.resumed or "")}
    name = plan.resumed.name if plan.resumed is not None else plan.config.value.name
    job_name = f"{Path(name).name}-{secrets.token_hex(3)}"
    with stoppable(), checked(plan) as (_, fleet, remotes, _config):
        check_logins(remotes)
        fleet = replace(fleet, hosts=tuple(map(named_in_full, remotes)))
        order = Order(job_name, f"{plan.config.value.verb} {name}", "", fleet, run, "", begins=True)
        try:
            for host in reversed(fleet.hosts):  # the first one begins the run
                appoint(host, order)
        except BaseException:
            for remote in remotes:
                with suppress(ClusterError):
                    remote.ask("end_lease", job=job_name, code=ClusterError.exit_code)
            raise
    return fleet, job_name


def check_logins(remotes: Sequence[Remote]) -> None:
    """Let the hosts log in to each other. Warn of those that cannot take over.

    Raises:
        ClusterError: the first host, which supervises at first, cannot.
    """
    names = [remote.name for remote in remotes if remote.name != HERE]
    for remote in remotes:  # one after another: sshd refuses many logins at once
        for name, words in remote.ask("refused_logins", LOGINS_S, hosts=names).items():
            why = (words.strip().splitlines() or ["no reason was given"])[-1]
            what = f"{remote.name} cannot log in to {name}"
            if remote is remotes[0]:
                raise ClusterError(
                    f"--detach: {what}",
                    source=why,
                    hint=f"on {remote.name}, `ssh {name} true` must work without a prompt",
                )
            inform(f"warning: {what}, so it may not be able to take over the run: {why}")


LOOK_S = 1.0
MOST_NAME_BYTES = 1 << 10
SILENT_S = 300.0  # without any news of the run


class Hosts(Closing):
    """Connections to the hosts of a run, of which some may be lost."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self._stack = fleet, ExitStack()
        self.log_in()

    def close(self) -> None:
        self._stack.close()

    def log_in(self) -> None:
        """Log in to all hosts again."""
        self.close()
        self.remotes: list[Remote] = self._stack.enter_context(logged_in(self.fleet, lost=[], tells=False))

    def leases(self) -> list[tuple[Remote, LeaseThere]]:
        """Return what the hosts know of detached runs, the newest knowledge of each run first."""
        found: list[tuple[Remote, LeaseThere]] = []
        for remote in self.remotes:
            with suppress(ClusterError):
                found += [(remote, lease) for lease in remote.ask("list_leases")]
        return sorted(
            found,
            key=lambda entry: (entry[1].code is not None, entry[1].term, entry[1].version),
            reverse=True,
        )


def attach(fleet: Fleet, job: str, *, until_begun: bool = False) -> int:
    """Show what the launcher prints, until the run has ended; then fetch the results.

    Args:
        job: name of the job, or how it begins; "" = the only one.
        until_begun: return 0 when the run has begun.
    Returns:
        The exit code of the run; 0 after Ctrl-C, which ends only this view.
    Raises:
        as :func:`follow`.
    """
    try:
        return follow(fleet, job, until_begun=until_begun)[0]
    except KeyboardInterrupt:
        return 0


def follow(fleet: Fleet, job: str, *, until_begun: bool = False) -> tuple[int, Path | None]:
    """Do the work of :func:`attach`. Return the exit code of the run, and its folder on this machine if there is one.

    Args:
        job: as for :func:`attach`, or the folder of the run on this machine.
    Raises:
        ConfigError: there is no such run. ClusterError: no host knows of it any longer. KeyboardInterrupt: on Ctrl-C,
            after a line that says how to see the run again, and how to stop it.
    """
    with suppress(OSError, ValueError):
        job = job and read_foreign_text(Path(job) / JOB, limit_bytes=MOST_NAME_BYTES, follow=False)
    with Hosts(fleet) as hosts:
        known = find(hosts, job)
        try:
            return _follow(hosts, known, until_begun=until_begun)
        except KeyboardInterrupt:
            inform(f"\n{known.job} goes on; {how_to_go_on(fleet, known.job)}")
            raise


def how_to_go_on(fleet: Fleet, job: str) -> str:
    """Return how to see a run again, and how to stop it."""
    names = ",".join(host.name for host in fleet.hosts)
    words, argument = [job], ""
    if names != HERE:
        words, argument = [job, "--hosts", names], f", hosts={names!r}"
    return (
        f"to see it again: yolofleet fleet attach {' '.join(map(quoted, words))}, "
        f"in Python yolofleet.attach({job!r}{argument}); "
        f"to save and stop it: yolofleet fleet stop {' '.join(map(quoted, words))}"
    )


def find(hosts: Hosts, job: str) -> LeaseThere:
    """Return the detached run that ``job`` names, or the only one that runs. Raise ConfigError if none fits, or several."""
    newest = {lease.job: lease for _, lease in reversed(hosts.leases())}
    fitting = [
        lease for name, lease in newest.items() if name.startswith(job) and (job or lease.code is None)
    ]
    names = ", ".join(sorted(lease.job for lease in fitting or newest.values()))
    if len(fitting) > 1:
        raise ConfigError(
            f"several jobs run: {names}; expected one name",
            hint=f"yolofleet fleet attach {quoted(fitting[0].job)}",
        )
    if not fitting:
        what = f"known detached run {shown(job)}" if job else "running detached run"
        raise ConfigError(f"no {what} on these hosts", hint=f"known: {names or 'none'}")
    return fitting[0]


def _follow(hosts: Hosts, known: LeaseThere, *, until_begun: bool) -> tuple[int, Path | None]:
    console: Log | None = None
    awaited = ""
    heard_at_s = time.monotonic()
    while True:
        there = [(remote, lease) for remote, lease in hosts.leases() if lease.job == known.job]
        if there:
            known = there[0][1]
        if any(lease.code is not None or not lease.is_over for _, lease in there):
            heard_at_s = time.monotonic()
        elif time.monotonic() - heard_at_s > SILENT_S:
            raise ClusterError(
                f"{known.job} has had no launcher for {SILENT_S:.0f} s, as far as these hosts know",
                hint="name all of its hosts; if most of them are lost: yolofleet fleet stop, then --resume on one of the hosts",
            )
        holder = next(((remote, lease) for remote, lease in there if remote.name == known.holder), None)
        if holder is None and (known.code is None or not there):
            if awaited != known.holder:
                awaited = known.holder
                inform(f"\n{awaited} supervises the run, and does not answer")
            time.sleep(LOOK_S)
            hosts.log_in()
            continue
        remote, lease = holder or there[0]  # if the run has ended, any host has its results
        if holder is not None:
            if console is None or console.remote.name != remote.name:
                if console is not None:
                    inform(f"\n{remote.name} supervises the run from now on")
                console = Log(remote, lease.console)
            console.remote = remote
            with suppress(ClusterError):
                for line in console.lines(to_end=known.code is not None):
                    echo(line.decode("utf-8", "replace"))
        if known.code is not None:
            return known.code, take_results(remote, lease) if known.code == 0 or lease.folder else None
        if until_begun and lease.folder:
            inform(f"detached; {how_to_go_on(hosts.fleet, known.job)}")
            return 0, None
        time.sleep(LOOK_S)


def take_results(remote: Remote, lease: LeaseThere) -> Path | None:
    """Copy the results of a run that has ended to this machine, unless they are on its disk. Return their folder.

    Raises:
        StorageError: the disk refused.
    """
    there = Path(lease.folder)
    with suppress(OSError, ValueError):
        if read_foreign_text(there / JOB, limit_bytes=MOST_NAME_BYTES, follow=False) == lease.job:
            inform(f"results are in {there}")
            return there
    name = there.name if there.name.isprintable() else "exp"
    here = RunFolder.create("train", name=name)
    try:
        fetch_folder(remote, lease.folder, here.path)
        write_text(here.path / JOB, lease.job)
    except (ClusterError, OSError) as problem:
        words = problem.what if isinstance(problem, ClusterError) else str(problem)
        inform(f"warning: the results stay on {remote.name}, in {lease.folder}: {words}")
        return None
    inform(f"results are in {here.path}; states to resume from stay on {remote.name}, in {lease.folder}")
    return here.path
