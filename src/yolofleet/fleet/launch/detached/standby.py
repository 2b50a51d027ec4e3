"""The standby launcher: the process on each host of a detached run that supervises it, or takes over from the host that does.

``lease_renewal.py`` starts it through ssh on every host, with an order on standard input. It leaves the ssh session, and lives
until the run has ended. The standby launcher of the host that holds the lease (``lease.py``) starts the detached launcher, which is a
launcher like any other. When the lease is over, the standby launchers of the other hosts ask for votes; the one that gets them
resumes the run on the hosts that are left. Linux.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from yolofleet.fleet.hosts import jobs, lease
from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.hosts.lease import Lease, is_majority
from yolofleet.fleet.hosts.messages import Vote
from yolofleet.fleet.hosts.remote import Remote, logged_in
from yolofleet.fleet.launch.lease_renewal import ORDER, READY, SUPERVISION, Order, Supervision
from yolofleet.storage.atomic import exclusive, open_append
from yolofleet.support.errors import ClusterError, YolofleetError
from yolofleet.support.system.children import name_process, start_module
from yolofleet.support.text import echo

LAUNCHER = "yolofleet.fleet.launch.detached.launcher"
POLL_S = 0.5
MOST_TRIES = 5  # to take over, if a start fails or the launcher is killed soon
SOON_S = 60.0  # after its start
GIVES_UP_S = 24 * 3600.0  # after the lease was renewed for the last time
AFTER_GRACE_S = 10.0  # until processes that were asked to end have ended
TURN_S = 2.0  # each host waits so much longer than the one before it


@dataclass
class StandbyLauncher:
    """The standby launcher of this host."""

    order: Order
    tries: int = 0  # number of starts in a row that have failed

    def run(self) -> None:
        """Supervise, or wait to take over, until the run has ended."""
        if self.order.begins:
            self._begin()
        while (known := lease.read(self.order.job)) is not None and known.code is None:
            time.sleep(POLL_S)
            if lease.clock() - known.renewed_s > GIVES_UP_S:
                return
            try:
                self.order = self.order.newest()
                if self._is_my_turn(known):
                    granted = self._ask_for_votes()
                    if granted is not None:
                        self._supervise(*granted)
                    time.sleep(TURN_S)
            except (OSError, YolofleetError) as problem:  # such as a full disk
                echo(str(problem), to=sys.stderr)
                time.sleep(TURN_S)

    def _begin(self) -> None:
        """Write the first lease, and supervise if this is the first host."""
        order, names = self.order, tuple(host.name for host in self.order.fleet.active)
        lasts_s = order.fleet.silence_s
        first = Lease(order.job, order.title, 1, names[0], (names,), 0, lasts_s, began_s=time.time())
        lease.write(first, is_new=True)
        if names[0] == order.here:
            everyone = [host.name for host in order.fleet.hosts]
            self._supervise(Supervision(order, 1, first.voters, 0), everyone)

    def _is_my_turn(self, known: Lease) -> bool:
        """Return whether this host should ask for votes: its own launcher has died, or another's lease is over."""
        if known.holder == self.order.here or not known.is_over:
            return known.holder == self.order.here
        names = [host.name for host in self.order.fleet.hosts]
        waited_s = lease.clock() - known.renewed_s - known.lasts_s - lease.MARGIN_S
        return waited_s > TURN_S * names.index(self.order.here)

    def _ask_for_votes(self) -> tuple[Supervision, Sequence[str]] | None:
        """Ask all hosts whether this one may supervise; return None if it may not, else also the hosts that agree."""
        with logged_in(self._fleet(), lost=[], tells=False) as remotes:
            answers = self._answers(remotes, 0)
            votes = [vote for vote in answers.values() if vote is not None]
            codes = [vote.code for vote in votes if vote.code is not None]
            if codes:
                lease.end_lease({"job": self.order.job, "code": codes[0]})
                return None
            if not votes:
                return None
            newest = max(votes, key=lambda vote: (vote.version, vote.term))
            if not self._suffices(newest.voters, answers):
                return None
            term = max(vote.term for vote in votes) + 1
            answers = self._answers(remotes, term)
            if not self._suffices(newest.voters, answers):
                return None
            self._await_end(remotes)
        present = granting(answers)
        first = [self.order.here, *(name for name in newest.voters[-1] if name in present)]
        hosts = list(dict.fromkeys([*first, *present]))
        if is_majority(newest.voters, present):
            return Supervision(self.order, term, newest.voters, newest.version), hosts
        return Supervision(self.order, term, (hosts,), newest.version + 1), hosts

    def _suffices(self, voters: Sequence[Sequence[str]], answers: Mapping[str, Vote | None]) -> bool:
        """Return whether this host may supervise, by the answers of some hosts.

        If all hosts answer and none objects, no majority is needed. A host that knows no lease was started again, so no
        launcher runs there; and a host that has joined without this one's knowledge needs this one's vote.
        """
        present = granting(answers)
        unknown = [name for name, vote in answers.items() if vote is None]
        everyone = len(present) + len(unknown) == len(self.order.fleet.hosts)
        return is_majority(voters, present) or (everyone and self.order.here in present)

    def _answers(self, remotes: Sequence[Remote], term: int) -> dict[str, Vote | None]:
        """Ask for votes, by the names of the hosts that answer; None: the host knows no lease of this run."""
        found = {}
        for remote in remotes:
            with suppress(ClusterError):
                found[remote.name] = remote.ask("vote", job=self.order.job, holder=self.order.here, term=term)
        return found

    def _await_end(self, remotes: Sequence[Remote]) -> None:
        """Wait until the processes of the last attempt have ended on the hosts that answer."""
        fleet = self.order.fleet
        gives_up_at_s = time.monotonic() + max(fleet.silence_s, fleet.grace_s + AFTER_GRACE_S)
        for remote in remotes:
            with suppress(ClusterError):
                while time.monotonic() < gives_up_at_s and any(
                    job.runs and job.ranks[1] and job.job == self.order.job for job in remote.ask("list_jobs")
                ):
                    time.sleep(POLL_S)

    def _fleet(self) -> Fleet:
        """Return all hosts; this one needs no ssh."""
        hosts = [replace(host, is_here=host.name == self.order.here) for host in self.order.fleet.hosts]
        return replace(self.order.fleet, hosts=tuple(hosts))

    def _supervise(self, supervision: Supervision, present: Sequence[str]) -> None:
        """Run the launcher to its end on the hosts ``present``; if the run has ended, tell all hosts."""
        known = lease.read(self.order.job)
        by_name = {host.name: host for host in self._fleet().hosts}
        absent = tuple(host for name, host in by_name.items() if name not in present)
        starts_on = min(len(self.order.fleet.active), len(present))
        hosts = tuple(by_name[name] for name in present)
        supervision = replace(
            supervision,
            fleet=replace(self.order.fleet, hosts=hosts, starts_on=starts_on),
            absent=absent,
            folder=known.folder if known is not None and supervision.term > 1 else "",
        )
        started_s = lease.clock()
        code = self._run_launcher(SUPERVISION.dump_json(supervision))
        was_killed_soon = code < 0 and lease.clock() - started_s < SOON_S  # such as by a lack of memory
        self.tries = self.tries + 1 if code == lease.NOT_BEGUN or was_killed_soon else 0
        if self.tries == MOST_TRIES:
            code = ClusterError.exit_code
        if code >= 0 and code not in (lease.LEASE_LOST, lease.NOT_BEGUN):
            self._tell_the_end(code, supervision.term)

    def _run_launcher(self, message: bytes) -> int:
        with open_append(jobs.file_of(self.order.job, "console")) as console:
            launcher = start_module(
                LAUNCHER, environment=os.environ, output=console, errors=console, stdin=subprocess.PIPE
            )
        with suppress(OSError):  # it has ended
            launcher.communicate(message)
        return launcher.wait()

    def _tell_the_end(self, code: int, term: int) -> None:
        job = self.order.job
        lease.end_lease({"job": job, "code": code, "term": term})
        with suppress(YolofleetError), logged_in(self._fleet(), lost=[], tells=False) as remotes:
            for remote in remotes:
                with suppress(ClusterError):
                    remote.ask("end_lease", job=job, code=code, term=term)


def granting(answers: Mapping[str, Vote | None]) -> Collection[str]:
    """Return the names of the hosts that vote for this one."""
    return [name for name, vote in answers.items() if vote is not None and vote.granted]


def leave_session(log: Path) -> None:
    """Let the process live when its ssh session ends. The first process ends, and says that the standby launcher is ready."""
    output = open_append(log)
    if os.fork():
        echo(READY)
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()


def main() -> int:
    order = ORDER.validate_json(sys.stdin.read())
    with ExitStack() as until_the_end:
        try:
            os.chdir(Path(order.folder).expanduser())
            lease.forget_old()
            order.write()
            if not until_the_end.enter_context(exclusive(jobs.file_of(order.job, "standby"))):
                echo(READY)  # this host has one, which will read the order
                return 0
            log = jobs.file_of(order.job, "console")
            log.unlink(missing_ok=True)
            leave_session(log)
        except (OSError, ValueError, YolofleetError) as problem:
            echo(str(problem), to=sys.stderr)
            return 1
        name_process("yolofleet-standby")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        StandbyLauncher(order).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
