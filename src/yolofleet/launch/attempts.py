"""Run a job on its hosts, and go on with those that are left when a process, a host or a link fails.

The first start, and every start after a failure, is an attempt. A failure ends the attempt on all hosts at once. The state
of a few seconds before is in the memory of every host (``files/memory_files.py``), torch is loaded there already
(``hosts/torchrun.py``), so the next attempt goes on where the last one was. The launcher logs in to lost hosts again, and
takes them back when they answer.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from yolofleet.closing import Closing
from yolofleet.errors import ClusterError, YolofleetError
from yolofleet.files.atomic import write_text
from yolofleet.hosts.fleet import Fleet, Host, parse_hosts
from yolofleet.hosts.remote import Remote
from yolofleet.launch.folders import JOB, LAUNCHER, Folders
from yolofleet.launch.lease_renewal import LeaseLost, LeaseRenewal, named_in_full
from yolofleet.launch.machines import RunPlan, restart_rules, shares_of
from yolofleet.launch.next_action import Action, EndedAttempt, Next, Why, run_attempts
from yolofleet.launch.preflight import ALONE, Meeting, free_port, inspect_for, make_ready, raise_faults
from yolofleet.launch.returns import LOGIN_S, Returns
from yolofleet.launch.watch import Watch, terminal_size
from yolofleet.report.events import record_event
from yolofleet.report.folder import COMMAND_ID, RESUME_COMMAND
from yolofleet.text import inform, listed

PORT_TRIES = 3
SAVE_S = 60.0
WARM_S = 120.0  # to load torch, on a busy machine
RETURN_S = 600.0  # how long a run waits for hosts if too few are left


@dataclass
class HostAttempts(Closing):
    """All attempts of one job.

    Attributes:
        remotes: connections to the hosts of ``fleet``, in their order; a host that came back has a new one.
        resume: the command that resumes the run.
        members: numbers of the hosts of the next attempt, in the order of their ranks.
        away: numbers of the hosts that were left out, and of new ones until they take part.
        watch: of the last attempt.
        joined: numbers of the hosts that the last attempt had, and the one before did not.
        renewal: of the lease, if the run is detached.
    """

    plan: RunPlan
    fleet: Fleet
    remotes: list[Remote]
    meeting: Meeting
    folders: Folders
    resume: str
    members: list[int] = field(init=False)
    watch: Watch = field(init=False)
    away: set[int] = field(default_factory=set)
    joined: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = list(range(len(self.fleet.active)))
        self.rules = restart_rules(self.plan.config.value)
        self.restarts, self._ports_left = 0, PORT_TRIES - 1
        self.returns = Returns(self.remotes[0].inbox, self._prepare, self._admit, self._added_hosts)
        self._port_of = self.remotes[0]
        # the configuration of a host, by its number and the shares
        self._texts = dict[tuple[int, str], str]()
        self._steps_before, self._title = -1, f"{self.plan.config.value.verb} {self.folders.here.path}"
        self._id = f"{self.folders.here.path.name}-{secrets.token_hex(3)}"
        self._planning = threading.Lock()
        self.renewal: LeaseRenewal | None = None
        if (supervision := self.plan.supervision) is not None:
            self._id = supervision.order.job
            self.restarts = int(supervision.term > 1)  # the newest state counts, if there is one
            self.renewal = LeaseRenewal(
                supervision,
                self._title,
                self.fleet.silence_s,
                lambda: self.remotes,
                lambda host_index: self.folders.sites[host_index].folder,
            )

    def close(self) -> None:
        self.returns.close()
        if self.renewal is not None:
            self.renewal.close()

    def run(self) -> Watch:
        """Run the job to its end, and return how its last attempt ended.

        Raises:
            LeaseLost: this process must not supervise the run.
        """
        if self.plan.supervision is not None:
            write_text(self.folders.here.path / JOB, self._id)
            for host in self.plan.supervision.absent:
                self.returns.wait_for(host)
        if not self._may_supervise():
            raise LeaseLost(self.renewal.why_lost if self.renewal else "")
        if self.rules.restarts:
            self.returns.start()
        for host_index in range(len(self.fleet.active), len(self.remotes)):
            self.returns.warm(host_index, self.remotes[host_index])
        run_attempts(self, self.rules, self.folders.here)
        if self.watch.failure() is not None and self.resume:
            self._save_states()
        return self.watch

    # -- one attempt -------------------------------------------------------------------------------

    def attempt(self) -> EndedAttempt:
        """Run an attempt on the hosts ``members``."""
        members = list(self.members)
        fleet, secret = self.fleet.of(members), secrets.token_hex(32)  # only the hosts get it, through ssh
        meeting = Meeting(
            tuple(self.meeting.endpoints[host_index] for host_index in members), self.meeting.port
        )
        self.watch = watch = Watch(
            fleet,
            [self.remotes[host_index] for host_index in members],
            lambda node_rank, rank, text: self.folders.log(members[node_rank], rank, text),
            goes_on=self.rules.restarts > 0,
            joins=self.returns.any_ready,
            must_end=lambda: self.renewal.why_lost if self.renewal is not None else "",
        )
        parts, shares = [], shares_of(self.plan.config.value.shares, self.fleet, members)
        for node_rank, host_index in enumerate(members):
            part = self._part(host_index, fleet, meeting, node_rank)
            part["meeting"]["secret"] = secret
            if (key := (host_index, shares)) not in self._texts:
                self._texts[key] = self.plan.text_for_host(self.fleet, *key)
            parts.append(part | {"text": self._texts[key], "restarts": self.restarts})
        watch.follow(parts)
        return EndedAttempt(
            hosts={host_index: self.remotes[host_index].name for host_index in members},
            failure=watch.failure(),
            gone={members[node_rank]: why for node_rank, why in watch.gone.items()},
            joined=self.joined,
            steps_before=self._steps_before,
            made_room=watch.made_room,
            has_busy_port=watch.met_busy_port,
            ports_left=self._ports_left,
        )

    def _part(self, host_index: int, fleet: Fleet, meeting: Meeting, node_rank: int) -> dict[str, Any]:
        """Return what a host gets for an attempt in which it is the ``node``-th of ``fleet``."""
        site, fields = self.folders.sites[host_index], host_fields(fleet, meeting, node_rank)
        part = {
            "id": self._id,
            "title": self._title,
            "command": None,
            "env": fields["env"] | {RESUME_COMMAND: self.resume, COMMAND_ID: self._id},
            "folder": site.folder,
            "number": host_index,
            "streamed": site.owner != LAUNCHER,
            "terminal": terminal_size() if node_rank == 0 else None,
        }
        return {**fields, **part}

    def _prepare(self, host_index: int, remote: Remote) -> None:
        """Make a host ready to take part: its folder, the package, torch loaded.

        Raises:
            YolofleetError: it cannot.
        """
        make_ready(self.plan, [remote])
        job = self._part(host_index, self.fleet, self.meeting, host_index)
        remote.ask("warm_up", WARM_S, job={**job, "terminal": None})

    def _may_supervise(self) -> bool:
        """Let the votes of the next attempt's hosts count, if the run is detached; return False if it must end."""
        if self.renewal is None:
            return True
        return self.renewal.take_members([self.remotes[host_index].name for host_index in self.members])

    def _choose_port(self, passed_over: Sequence[int] = ()) -> None:
        first = [self.remotes[self.members[0]]]
        port = free_port(self.fleet, first, passed_over)
        with self._planning:
            self.meeting = replace(self.meeting, port=port)
        self._port_of = first[0]

    # -- new hosts ---------------------------------------------------------------------------------

    def _added_hosts(self) -> list[Host]:
        """Return hosts that ``yolofleet fleet add`` named since the last call."""
        found: list[Host] = []
        for host_index in list(self.members):
            with suppress(YolofleetError):
                for text in self.remotes[host_index].ask("take_added", LOGIN_S, job=self._id):
                    found += parse_hosts(text, source="fleet add").hosts
        return found

    def _admit(self, remote: Remote) -> int:
        """Check a host that the run did not have, and return its host_index.

        Raises:
            YolofleetError: it cannot take part.
        """
        known_as = next((n for n, host in enumerate(self.fleet.hosts) if host.name == remote.name), None)
        if known_as in self.away:
            return known_as
        if known_as is not None:
            raise ClusterError(f"{remote.name} is one of the hosts of this run already")
        make_ready(self.plan, [remote])
        present = [host_index for host_index, other in enumerate(self.remotes) if not other.is_lost]
        others = [self.remotes[host_index] for host_index in present]
        host = named_in_full(remote)
        fleet = self.fleet.with_spares(replace(self.fleet, hosts=(host,), starts_on=0))
        findings, meeting = inspect_for(self.plan, fleet, [*others, remote])
        own = re.compile(rf"(?<![\w.@-]){re.escape(remote.name)}(?![\w.@-])")
        raise_faults([one for one in findings if own.search(one.where) or one.where == "fleet"])
        site = self.folders.claim_on(remote, others, may_link=self.plan.may_link)
        endpoints = dict(enumerate(self.meeting.endpoints)) | dict(
            zip([*present, len(self.remotes)], meeting.endpoints, strict=True)
        )
        with self._planning:
            self.meeting = replace(self.meeting, endpoints=tuple(endpoints.values()))
        host_index = len(self.remotes)
        self.away.add(host_index)
        self.remotes.append(remote)
        self.folders.sites.append(site)
        self.fleet = fleet
        return host_index

    def _save_states(self) -> None:
        """Let the hosts write the state in their memory to their disks, because the run ends here."""

        def save(host_index: int) -> None:
            try:
                self.remotes[host_index].ask("save_state", SAVE_S)
            except ClusterError as problem:
                inform(f"warning: the state in memory is not saved: {problem.what}")

        left = [host_index for host_index in self.members if not self.remotes[host_index].is_lost]
        with ThreadPoolExecutor(max(1, len(left))) as pool:
            list(pool.map(save, left))

    # -- between attempts --------------------------------------------------------------------------

    def prepare(self, ended: EndedAttempt, action: Action) -> bool:
        """Prepare the next attempt; return False if the run cannot go on."""
        if action.next is Next.SAME_ATTEMPT:
            self._ports_left -= 1
            first = self.remotes[self.members[0]].name
            inform(f"note: another process took port {self.meeting.port} of {first}; trying another port")
            self._choose_port(passed_over=[self.meeting.port])
            return True
        for host_index, why in action.left_out.items():
            self._leave_out(host_index, why)
        before = set(self.members)
        self._take_spares(max(0, len(self.fleet.active) - len(self.members)))
        self._take_back()
        if not self._meet() or not self._may_supervise():
            return False
        self.restarts += 1
        self.joined = [host_index for host_index in self.members if host_index not in before]
        for host_index in self.joined:
            record_event(self.folders.here, "host_joined", host=self.remotes[host_index].name)
        if self.joined and self.renewal is not None:
            self.renewal.appoint(self.fleet.hosts, self.members)
        self._steps_before = max(self._steps_before, self.watch.steps)
        self.folders.order = [*self.members, *(n for n in range(len(self.remotes)) if n not in self.members)]
        names = listed([self.remotes[host_index].name for host_index in self.members])
        many = sum(self.fleet.hosts[host_index].processes for host_index in self.members)
        inform(f"going on with {many} process{'es' if many > 1 else ''} on {names}")
        return True

    def _leave_out(self, host_index: int, why: Why) -> None:
        """Go on without a host. Begin to log in to it again if it is lost."""
        self.members.remove(host_index)
        self.away.add(host_index)
        if why is Why.LOST:
            self.returns.wait_for(self.fleet.hosts[host_index], host_index)

    def _meet(self) -> bool:
        """Wait for enough hosts, and choose the port of the first one; return False if there are too few."""
        while self._are_enough():
            try:
                if self.remotes[self.members[0]] is not self._port_of:  # it has reserved the port
                    self._choose_port()
                return True
            except ClusterError as problem:  # that host is lost as well
                inform(problem.what)
                record_event(
                    self.folders.here,
                    "host_left",
                    host=self.remotes[self.members[0]].name,
                    why=Why.LOST.value,
                )
                self._leave_out(self.members[0], Why.LOST)
        return False

    def _take_spares(self, wanted: int) -> None:
        spares = [
            n
            for n in range(len(self.fleet.active), len(self.remotes))
            if n not in (*self.members, *self.away) and not self.remotes[n].is_lost
        ]
        for host_index in spares[:wanted]:
            inform(f"the spare host {self.remotes[host_index].name} takes part from now on")
            self.members.append(host_index)

    def _take_back(self) -> None:
        """Let hosts that came back take part, after those that have the state."""
        for host_index, remote in self.returns.take():
            self.remotes[host_index] = remote
            self.away.discard(host_index)
            self.members.append(host_index)

    def _are_enough(self) -> bool:
        """Wait until enough hosts take part; return False if they do not come back."""
        rules, gives_up_at_s, is_told = self.rules, time.monotonic() + RETURN_S, False
        while True:
            devices = sum(self.fleet.hosts[host_index].processes for host_index in self.members)
            if len(self.members) >= max(rules.min_hosts, 1) and devices >= rules.min_devices:
                return True
            awaited = self.returns.awaited()
            if time.monotonic() > gives_up_at_s or not awaited:
                inform("too few hosts are left (--min-hosts, --min-devices)")
                return False
            if not is_told:
                inform(
                    f"too few hosts are left: waiting {RETURN_S / 60:.0f} minutes for {listed(awaited)}; "
                    "Ctrl-C ends the run"
                )
                is_told = True
            time.sleep(0.2)
            self._take_back()


def host_fields(fleet: Fleet, meeting: Meeting, node_rank: int) -> dict[str, Any]:
    """Return the fields of the message ``start`` that differ between hosts."""
    host = fleet.hosts[node_rank]
    return {
        "meeting": {
            "node": node_rank,
            "nodes": len(fleet.hosts),
            "address": meeting.endpoints[0].address,
            "port": meeting.port,
            "card": "" if meeting.endpoints[node_rank] == ALONE else meeting.endpoints[node_rank].interface,
        },
        "first_rank": fleet.first_rank(node_rank),
        "processes": host.processes,
        # The host agent already has all variables of its host. These override the interface that we choose.
        "env": {name: value for name, value in host.env.items() if name.endswith("_SOCKET_IFNAME")},
        "silence_s": fleet.silence_s,
        "grace_s": fleet.grace_s,
    }
