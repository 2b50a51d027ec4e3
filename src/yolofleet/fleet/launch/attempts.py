"""Run a job on its hosts, and go on with those that are left when a process, a host or a link fails.

The first start, and every start after a failure, is an attempt. A failure ends the attempt on all hosts at once. The state
of a few seconds before is in the memory of every host (``fleet/hosts/agent_process.py``), torch is loaded there already
(``training/parallel/torchrun_agent.py``), so the next attempt goes on where the last one was. The launcher logs in to lost hosts again, and
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
from dataclasses import dataclass, replace
from typing import Any

from yolofleet.fleet.doctor.network import Endpoint
from yolofleet.fleet.hosts.fleet import Fleet, Host, parse_hosts
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.folders import JOB, LAUNCHER, Folders
from yolofleet.fleet.launch.lease_renewal import LeaseLost, LeaseRenewal, named_in_full
from yolofleet.fleet.launch.machines import RunPlan, restart_rules, shares_of
from yolofleet.fleet.launch.next_action import Action, EndedAttempt, Next, Why, run_attempts
from yolofleet.fleet.launch.preflight import ALONE, Meeting, free_port, inspect_for, make_ready, raise_faults
from yolofleet.fleet.launch.returns import LOGIN_S, Returns
from yolofleet.fleet.launch.watch import Watch, terminal_size
from yolofleet.fleet.launch.ways import reaching_each_other, ways_between
from yolofleet.runs.report.folder import COMMAND_ID, COMMAND_TERM, RESUME_COMMAND
from yolofleet.runs.report.results import record_event
from yolofleet.storage.atomic import write_text
from yolofleet.support.closing import Closing
from yolofleet.support.errors import ClusterError, YolofleetError
from yolofleet.support.text import inform, listed

PORT_TRIES = 3
SAVE_S = 60.0
WARM_S = 120.0  # to load torch, on a busy machine
RETURN_S = 600.0  # how long a run waits for hosts if too few are left


@dataclass
class RunHost:
    """A host that a run has, or had. Its number, ``host_index``, never changes."""

    remote: Remote  # the connection; a host that came back has a new one
    endpoint: Endpoint  # where the other hosts reach it
    is_away: bool = False  # it was left out, or is new and has not taken part yet

    @property
    def name(self) -> str:
        return self.remote.name


class HostAttempts(Closing):
    """All attempts of one job.

    Args:
        remotes: connections to the hosts of ``fleet``, in their order.
        resume: the command that resumes the run.
    """

    watch: Watch  # watch of the last attempt

    def __init__(
        self,
        plan: RunPlan,
        fleet: Fleet,
        remotes: Sequence[Remote],
        meeting: Meeting,
        folders: Folders,
        resume: str,
    ) -> None:
        self.plan, self.fleet, self.folders, self.resume = plan, fleet, folders, resume
        # by host_index, as the hosts of `fleet` and the sites of `folders`: the active ones, then spares
        self.hosts = list(map(RunHost, remotes, meeting.endpoints))
        self.members = list(
            range(len(fleet.active))
        )  # hosts of the next attempt, in the order of their ranks
        self.joined: list[int] = []  # members of the last attempt that the one before did not have
        # port of the rendezvous on the first member, and that member
        self.port, self._port_of, self._ports_left = meeting.port, remotes[0], PORT_TRIES - 1
        self.rules = restart_rules(plan.config.value)
        self.restarts, self._steps_before = 0, -1  # attempts before the next one, and the steps done by then
        self.returns = Returns(remotes[0].inbox, self._prepare, self._admit, self._added_hosts)
        # the configuration of a host, by its number and the shares
        self._texts = dict[tuple[int, str], str]()
        self._title = f"{plan.config.value.verb} {folders.here.path}"
        self._id, self._term = f"{folders.here.path.name}-{secrets.token_hex(3)}", "0"
        self.renewal: LeaseRenewal | None = None
        if (supervision := plan.supervision) is not None:
            self._id, self._term = supervision.order.job, str(supervision.term)
            self.restarts = int(supervision.term > 1)  # the newest state counts, if there is one
            self.renewal = LeaseRenewal(
                supervision,
                self._title,
                fleet.silence_s,
                lambda: self.remotes,
                lambda host_index: folders.sites[host_index].folder,
            )

    @property
    def remotes(self) -> list[Remote]:
        """The connections to all hosts, by host_index."""
        return [host.remote for host in self.hosts]

    def close(self) -> None:
        self.returns.close()
        if self.renewal is not None:
            self.renewal.close()

    def run(self) -> Watch:
        """Run the job to its end, and return how its last attempt ended. Raise LeaseLost if this process must not supervise it."""
        if self.plan.supervision is not None:
            write_text(self.folders.here.path / JOB, self._id)
            for host in self.plan.supervision.absent:
                self.returns.wait_for(host)
        if not self._may_supervise():
            raise LeaseLost(self.renewal.why_lost if self.renewal else "")
        if self.rules.restarts:
            self.returns.start()
        for host_index in range(len(self.fleet.active), len(self.hosts)):
            self.returns.warm(host_index, self.hosts[host_index].remote)
        run_attempts(self, self.rules, self.folders.here)
        if self.watch.failure() is not None and self.resume:
            self._save_states()
        return self.watch

    # -- one attempt -------------------------------------------------------------------------------

    def attempt(self) -> EndedAttempt:
        """Run an attempt on the hosts ``members``."""
        members = list(self.members)
        fleet, secret = self.fleet.of(members), secrets.token_hex(32)  # only the hosts get it, through ssh
        meeting = self._meeting(members)
        self.watch = watch = Watch(
            fleet,
            [self.hosts[host_index].remote for host_index in members],
            lambda node_rank, rank, text: self.folders.log(members[node_rank], rank, text),
            goes_on=self.rules.restarts > 0,
            joins=self.returns.any_ready,
            must_end=lambda: self.renewal.why_lost if self.renewal is not None else "",
        )
        parts, shares = [], shares_of(self.plan.config.value.shares, self.fleet, members)
        for node_rank, host_index in enumerate(members):
            part = self._part(host_index, fleet, meeting, node_rank)
            part["meeting"] |= {"secret": secret, "timeout_s": self.plan.config.value.timeout_s}
            if (key := (host_index, shares)) not in self._texts:
                self._texts[key] = self.plan.text_for_host(self.fleet, *key)
            parts.append(part | {"text": self._texts[key], "restarts": self.restarts})
        watch.follow(parts)
        return EndedAttempt(
            hosts={host_index: self.hosts[host_index].name for host_index in members},
            failure=watch.failure(),
            gone={members[node_rank]: why for node_rank, why in watch.gone.items()},
            joined=self.joined,
            steps_before=self._steps_before,
            made_room=watch.made_room,
            has_busy_port=watch.met_busy_port,
            ports_left=self._ports_left,
        )

    def _meeting(self, host_indices: Sequence[int]) -> Meeting:
        return Meeting(tuple(self.hosts[host_index].endpoint for host_index in host_indices), self.port)

    def _part(self, host_index: int, fleet: Fleet, meeting: Meeting, node_rank: int) -> dict[str, Any]:
        """Return what a host gets for an attempt in which it has the number ``node_rank`` in ``fleet``."""
        site, fields = self.folders.sites[host_index], host_fields(fleet, meeting, node_rank)
        part = {
            "id": self._id,
            "title": self._title,
            "command": None,
            "env": fields["env"]
            | {RESUME_COMMAND: self.resume, COMMAND_ID: self._id, COMMAND_TERM: self._term},
            "folder": site.folder,
            "number": host_index,
            "streamed": site.owner != LAUNCHER,
            "terminal": terminal_size() if node_rank == 0 else None,
        }
        return {**fields, **part}

    def _prepare(self, host_index: int, remote: Remote) -> None:
        """Make a host ready to take part: its folder, the package, torch loaded. Raise YolofleetError if it cannot."""
        make_ready(self.plan, [remote])
        if self.hosts[host_index].is_away:  # not a spare, which the preflight check has tried
            others = {self.hosts[n].remote: self.hosts[n].endpoint for n in [*self.members]}
            ways = ways_between({**others, remote: self.hosts[host_index].endpoint}, remote.name)
            raise_faults([found for way, found in ways.items() if remote.name in way])
        job = self._part(host_index, self.fleet, self._meeting(range(len(self.hosts))), host_index)
        remote.ask("warm_up", WARM_S, job={**job, "terminal": None})

    def _may_supervise(self) -> bool:
        """Let the votes of the next attempt's hosts count, if the run is detached; return False if it must end."""
        if self.renewal is None:
            return True
        return self.renewal.take_members([self.hosts[host_index].name for host_index in self.members])

    def _choose_port(self, passed_over: Sequence[int] = ()) -> None:
        first = self.hosts[self.members[0]].remote
        self.port = free_port(self.fleet, [first], passed_over)
        self._port_of = first

    # -- new hosts ---------------------------------------------------------------------------------

    def _added_hosts(self) -> list[Host]:
        """Return hosts that ``yolofleet fleet add`` named since the last call."""
        found: list[Host] = []
        for host_index in list(self.members):
            with suppress(YolofleetError):
                for text in self.hosts[host_index].remote.ask("take_added", LOGIN_S, job=self._id):
                    found += parse_hosts(text, source="fleet add").hosts
        return found

    def _admit(self, remote: Remote) -> int:
        """Check a host that the run did not have, and return its host_index. Raise YolofleetError if it cannot take part."""
        known_as = next((n for n, host in enumerate(self.fleet.hosts) if host.name == remote.name), None)
        if known_as is not None:
            if self.hosts[known_as].is_away:
                return known_as
            raise ClusterError(f"{remote.name} is one of the hosts of this run already")
        make_ready(self.plan, [remote])
        present = [other for other in self.hosts if not other.remote.is_lost]
        others = [other.remote for other in present]
        host = named_in_full(remote)
        fleet = self.fleet.with_spares(replace(self.fleet, hosts=(host,), starts_on=0))
        findings, meeting = inspect_for(self.plan, fleet, [*others, remote])
        own = re.compile(rf"(?<![\w.@-]){re.escape(remote.name)}(?![\w.@-])")
        raise_faults([one for one in findings if own.search(one.where) or one.where == "fleet"])
        self.folders.claim_on(remote, others, may_link=self.plan.may_link)
        for other, endpoint in zip(
            [*present, new := RunHost(remote, ALONE, is_away=True)], meeting.endpoints, strict=True
        ):
            other.endpoint = endpoint
        self.hosts.append(new)
        self.fleet = fleet
        return len(self.hosts) - 1

    def _save_states(self) -> None:
        """Let the hosts write the state in their memory to their disks, because the run ends here."""

        def save(host_index: int) -> None:
            try:
                self.hosts[host_index].remote.ask("save_state", SAVE_S)
            except ClusterError as problem:
                inform(f"warning: the state in memory is not saved: {problem.what}")

        left = [host_index for host_index in self.members if not self.hosts[host_index].remote.is_lost]
        with ThreadPoolExecutor(max(1, len(left))) as pool:
            list(pool.map(save, left))

    # -- between attempts --------------------------------------------------------------------------

    def prepare(self, ended: EndedAttempt, action: Action) -> bool:
        """Prepare the next attempt; return False if the run cannot go on."""
        if action.next is Next.SAME_ATTEMPT:
            self._ports_left -= 1
            first = self.hosts[self.members[0]].name
            inform(f"note: another process took port {self.port} of {first}; trying another port")
            self._choose_port(passed_over=[self.port])
            return True
        for host_index, why in action.left_out.items():
            self._leave_out(host_index, why)
        before = set(self.members)
        self._take_spares()
        self._take_back()
        if not self._meet() or not self._may_supervise():
            return False
        self.restarts += 1
        self.joined = [host_index for host_index in self.members if host_index not in before]
        for host_index in self.joined:
            record_event(self.folders.here, "host_joined", host=self.hosts[host_index].name)
        if self.joined and self.renewal is not None:
            self.renewal.appoint(self.fleet.hosts, self.members)
        self._steps_before = max(self._steps_before, self.watch.steps)
        self.folders.order = [*self.members, *(n for n in range(len(self.hosts)) if n not in self.members)]
        names = listed([self.hosts[host_index].name for host_index in self.members])
        many = sum(self.fleet.hosts[host_index].processes for host_index in self.members)
        inform(f"going on with {many} process{'es' if many > 1 else ''} on {names}")
        return True

    def _leave_out(self, host_index: int, why: Why) -> None:
        """Go on without a host. Begin to log in to it again if it is lost or cut off."""
        self.members.remove(host_index)
        self.hosts[host_index].is_away = True
        if why in (Why.LOST, Why.CUT_OFF):
            if not self.hosts[host_index].remote.is_lost:
                threading.Thread(target=self.hosts[host_index].remote.close, daemon=True).start()
            self.returns.wait_for(self.fleet.hosts[host_index], host_index)

    def _meet(self) -> bool:
        """Wait for enough hosts that reach each other, and choose the port of the first; return False if there are too few."""
        while self._are_enough():
            if self._leave_out_cut_off():
                continue
            try:
                if self.hosts[self.members[0]].remote is not self._port_of:  # it has reserved the port
                    self._choose_port()
                return True
            except ClusterError as problem:  # that host is lost as well
                self._lose(self.members[0], Why.LOST, problem.what)
        return False

    def _lose(self, host_index: int, why: Why, text: str) -> None:
        inform(text)
        record_event(self.folders.here, "host_left", host=self.hosts[host_index].name, why=why.value)
        self._leave_out(host_index, why)

    def _leave_out_cut_off(self) -> bool:
        """Go on with the most hosts that all reach each other; name the others. Return whether any is left out."""
        members = {self.hosts[n].name: n for n in self.members}
        broken = ways_between({self.hosts[n].remote: self.hosts[n].endpoint for n in self.members})
        answer = [name for name in members if (name, name) not in broken]
        kept = reaching_each_other(
            {name: self.fleet.hosts[members[name]].processes for name in answer}, broken
        )
        for name in [name for name in members if name not in kept]:
            seen = next(one for way, one in broken.items() if name in way and {*way} <= {name, *kept})
            why = Why.CUT_OFF if name in answer else Why.LOST
            self._lose(members[name], why, f"{name} is left out: {why.value}\n{seen.render()}")
        if len(kept) < len(answer):
            inform(
                "the most hosts that all reach each other go on; then more devices count, then lower ranks"
            )
        self._take_spares()
        return len(kept) < len(members)

    def _take_spares(self) -> None:
        """Let spares take part in place of hosts that are gone, up to the number that the run started on."""
        wanted = max(0, len(self.fleet.active) - len(self.members))
        spares = [
            n
            for n in range(len(self.fleet.active), len(self.hosts))
            if n not in self.members and not self.hosts[n].is_away and not self.hosts[n].remote.is_lost
        ]
        for host_index in spares[:wanted]:
            inform(f"the spare host {self.hosts[host_index].name} takes part from now on")
            self.members.append(host_index)

    def _take_back(self) -> None:
        """Let hosts that came back take part, after those that have the state."""
        for host_index, remote in self.returns.take():
            self.hosts[host_index].remote, self.hosts[host_index].is_away = remote, False
            self.members.append(host_index)

    def _are_enough(self) -> bool:
        """Wait until enough hosts take part; return False if they do not come back."""
        rules, gives_up_at_s, is_told = self.rules, time.monotonic() + RETURN_S, False
        while True:
            devices = sum(self.fleet.hosts[host_index].processes for host_index in self.members)
            if self.members and devices >= rules.min_devices:
                return True
            awaited = self.returns.awaited()
            if time.monotonic() > gives_up_at_s or not awaited:
                inform("too few hosts are left (--min-devices)")
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
            "hosts": [host.name for host in fleet.hosts],
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
