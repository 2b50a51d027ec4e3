"""Follow a job on several hosts to the end of all its processes, and explain its end."""

from __future__ import annotations

import os
import select
import shlex
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty
from typing import Any

from yolofleet.fleet.hosts.endings import (
    Ending,
    Failure,
    ends_in,
    failure_of,
    is_consequence,
    print_cause,
    signal_name,
)
from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.hosts.messages import Exit, Gone, LastWords, Log, Message, Output
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.hosts.wire_protocol import AGENT, STOPPED_BY_LAUNCHER, STOPPED_ON_REQUEST
from yolofleet.fleet.launch.next_action import RunningAttempt, Why, stop_grace_s
from yolofleet.fleet.launch.nonblocking_stdout import NonblockingStdout
from yolofleet.support.errors import ClusterError, ExitCode, Stopped
from yolofleet.support.system.cgroup import OomKills
from yolofleet.support.system.signals import handling, request_name
from yolofleet.support.text import ERASE, RelayedText, announce, announcement, can_redraw, inform

NOTICE_S = 6.0  # a silence that is reported
AFTER_GRACE_S = 10.0  # after the grace period, the launcher gives up a host that still runs processes
BUSY_PORT = ("EADDRINUSE", "Address already in use", "address already in use")


def terminal_size() -> dict[str, Any] | None:
    """Return rows, columns and type of the terminal on standard output; None if lines cannot be drawn there in place."""
    if not can_redraw(sys.stdout):
        return None
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
    return {"rows": rows, "columns": columns, "term": os.environ["TERM"]}


@dataclass
class Node:
    """One host's part of the job."""

    remote: Remote
    ending: Exit | None = None
    lost: str = ""  # why the launcher gave the host up
    is_silent: bool = False
    ended_at_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.ending is not None or bool(self.lost)


@dataclass
class Watch:
    """Follow one start of a job to the end of all its processes."""

    fleet: Fleet
    remotes: Sequence[Remote]
    log: Callable[[int, int, str], None]  # takes (node, rank or AGENT, text)
    # a command, not a run: there is no rank 0 whose output stands for all, and no checkpoint
    plain: bool = False
    # another attempt follows a failure, so the processes that are left are killed at once
    goes_on: bool = False
    # returns the name of a host that waits to take part in another attempt, or ""
    joins: Callable[[], str] = str
    must_end: Callable[[], str] = str  # returns why this launcher must end the run at once, or ""
    joining: str = ""  # name of that host, once the others were asked to save and stop for it
    nodes: list[Node] = field(init=False)
    stop_requests: int = 0  # number of requests to stop; two or more end the job at once
    asked: str = ""  # the first of them: Ctrl-C, or the name of a signal
    order: list[int] = field(default_factory=list)  # nodes in the order in which they ended
    stopped_at_s: float = 0.0
    give_up_at_s: float = float("inf")
    began_line: dict[int, bool] = field(default_factory=dict)
    relayed: dict[int, RelayedText] = field(default_factory=lambda: defaultdict(RelayedText))
    stdout: NonblockingStdout = field(default_factory=NonblockingStdout)
    terminal: dict[str, Any] | None = field(default_factory=terminal_size)

    def __post_init__(self) -> None:
        self.nodes = [Node(remote) for remote in self.remotes]

    def follow(self, parts: Sequence[dict[str, Any]]) -> None:
        """Start each host's part, and return when every host has ended everything or is given up."""
        inbox = self.remotes[0].inbox
        with handling(self._on_signal):
            for remote, part in zip(self.remotes, parts, strict=True):
                remote.start(part)
            while not all(node.is_over for node in self.nodes):
                with suppress(Empty):
                    remote, message = inbox.get(timeout=0.2)
                    if remote in self.remotes:  # not a host that waits
                        self._take(self.remotes.index(remote), message)
                self._stop_if_needed()
            self.stdout.close()

    def _take(self, node_rank: int, message: Message) -> None:
        node = self.nodes[node_rank]
        if isinstance(message, Output):
            self._show(node_rank, self.relayed[node_rank].clean(without_surrogates(message.text)))
        elif isinstance(message, Log) and (
            message.rank == AGENT or message.rank in self.fleet.ranks(node_rank)
        ):
            self.log(node_rank, message.rank, without_surrogates(message.text))
        elif isinstance(message, Exit) and not node.is_over:
            node.ending = message
            self._ended(node_rank)
        elif isinstance(message, Gone) and not node.is_over:
            self._lose(node_rank, node.remote.words() or "the connection to it broke")

    def _ended(self, node_rank: int) -> None:
        self.nodes[node_rank].ended_at_s = time.monotonic()
        self.order.append(node_rank)

    def _lose(self, node_rank: int, why: str) -> None:
        self.nodes[node_rank].lost = why
        self._ended(node_rank)
        threading.Thread(target=self.nodes[node_rank].remote.close, daemon=True).start()

    def _stop_if_needed(self) -> None:
        """Stop the job if a host failed, is silent, or the user asked for it."""
        now, size = time.monotonic(), terminal_size()
        if size and size != self.terminal and not self.nodes[0].is_over:
            self.terminal = size
            self.nodes[0].remote.resize(size)
        for node_rank, node in enumerate(self.nodes):
            if not node.is_over:
                self._listen(node_rank, now - node.remote.heard_at_s)
        failed = [n for n in self.nodes if n.is_over and (n.lost or not n.ending or n.ending.code != 0)]
        waiting_host = "" if self.joining else self.joins()
        attempt = RunningAttempt(
            stop_requests=self.stop_requests,
            must_end=bool(self.must_end()),
            failed_for_s=now - min(node.ended_at_s for node in failed) if failed else None,
            has_lost_host=any(node.lost for node in failed),
            goes_on=self.goes_on,
            has_host_to_join=bool(waiting_host),
        )
        if (grace_s := stop_grace_s(attempt, self.fleet.grace_s)) is not None:
            if waiting_host and not (failed or attempt.stop_requests or attempt.must_end):
                self.joining = waiting_host
                inform(f"\n{waiting_host} is ready: the others save after this step, and it takes part")
            self._stop(grace_s)
        if now > self.give_up_at_s:
            for node_rank, node in enumerate(self.nodes):
                if not node.is_over:
                    self._lose(node_rank, "it did not end its processes in time")

    def _listen(self, node_rank: int, silent_s: float) -> None:
        """Report a host that stops sending messages, or sends them again; drop it after ``silence_s``."""
        node, most_s = self.nodes[node_rank], self.fleet.silence_s
        if silent_s > most_s:
            self._lose(node_rank, f"no message from it for {most_s:.0f} s")
        elif silent_s > min(NOTICE_S, most_s / 2) and not node.is_silent:
            node.is_silent = True
            inform(
                f"\n{node.remote.name} has sent no message for {silent_s:.0f} s; the run drops it after {most_s:.0f} s"
            )
        elif node.is_silent and silent_s < min(NOTICE_S, most_s / 2):
            node.is_silent = False
            inform(f"\n{node.remote.name} answers again")

    def _stop(self, grace_s: float) -> None:
        """Ask the hosts that still run to end. A second call can only shorten the grace."""
        now = time.monotonic()
        give_up_at_s = now + grace_s + AFTER_GRACE_S
        if self.stopped_at_s and give_up_at_s > self.give_up_at_s - 1.0:
            return
        self.stopped_at_s = self.stopped_at_s or now
        self.give_up_at_s = give_up_at_s
        for node in self.nodes:
            if not node.is_over:
                node.remote.stop(grace_s)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Ask all hosts to save and stop at the first signal, and end them at once at a later Ctrl-C.

        Further signals of other kinds change nothing: a process manager sends several, to a group and its members.
        """
        if self.stop_requests and number != signal.SIGINT:
            return
        self.stop_requests += 1
        self.asked = self.asked or request_name(number)
        first = "stopping all hosts" + ("" if self.plain else " after this step, then saving")
        words = (
            f"{first}; Ctrl-C again ends at once" if self.stop_requests == 1 else "ending all hosts at once"
        )
        with suppress(OSError):
            if select.select([], [2], [], 0)[1]:  # otherwise the write would block
                os.write(2, announcement(f"\n{words}").encode())
        if self.stop_requests > 1:
            self.stdout.give_up()

    def _show(self, node_rank: int, text: str) -> None:
        """Print a text. Lines that are not of rank 0's host begin with the host's name."""
        if (self.plain and len(self.nodes) > 1) or node_rank > 0:
            mark, begins = f"{self.remotes[node_rank].name}: ", not self.began_line.get(node_rank)
            self.began_line[node_rank] = not text.endswith("\n")
            begin = ERASE if self.terminal else ""  # the progress of rank 0 may be there
            text = (begin + mark if begins else "") + text.replace("\n", f"\n{mark}")
            text = text if self.began_line[node_rank] else text.removesuffix(mark)
        self.stdout.write(text)

    # -- why it ended ------------------------------------------------------------------------------

    @property
    def met_busy_port(self) -> bool:
        """Whether the run did not begin because another process took its port on the first host."""
        first = self.nodes[0].ending
        if first is None or first.code == 0:
            return False
        words = f"{first.log}\n{first.why}"
        return (
            not self.stop_requests
            and not any(node.ending and node.ending.words for node in self.nodes)
            and not ends_in(words)
            and any(known in words for known in BUSY_PORT)
        )

    @property
    def steps(self) -> int:
        """The number of steps done, as far as the hosts told; -1 if none was done."""
        return max([node.ending.step for node in self.nodes if node.ending], default=-1)

    @property
    def gone(self) -> dict[int, Why]:
        """Why nodes cannot take part any longer; without those that said so after someone asked the run to stop."""
        found = {}
        for node_rank, node in enumerate(self.nodes):
            codes = {words.exit_code for words in node.ending.words if words.leaves} if node.ending else set()
            if node.lost:
                found[node_rank] = Why.LOST
            elif codes and not self._is_asked:
                found[node_rank] = Why.TAKEN_AWAY if Stopped.exit_code in codes else Why.GPU_FAILED
        return found

    def failure(self) -> Failure | None:
        """Return why the attempt failed; None if it succeeded, or was asked to stop."""
        ended = [self.nodes[node_rank] for node_rank in self.order]
        if self._is_asked or all(node.ending and node.ending.code == 0 for node in ended):
            return None
        for node in ended:
            if node.lost:
                ranks = self.fleet.ranks_text(self.nodes.index(node))
                what = f"{node.remote.name} is lost"
                return Failure(
                    f"{what}, with {ranks}: {node.lost.splitlines()[0]}",
                    what,
                    self.steps,
                    True,
                    node.remote.name,
                )
        endings = [self._ending(node) for node in ended]
        if self.made_room:
            return None
        failure = failure_of(endings, self.steps)
        return replace(failure, details="\n".join(filter(None, [failure.details, *self._stopped()])))

    def _stopped(self) -> list[str]:
        """Return lines about stopped processes: rank 0 cannot see those of other hosts, but their host agents can."""
        return [f"  {n.remote.name}: {rank}" for n in self.nodes if n.ending for rank in n.ending.stopped]

    @property
    def made_room(self) -> bool:
        """Whether the ranks saved and stopped, so that a host can take part; not if the run has ended meanwhile."""
        endings = [node.ending for node in self.nodes]
        said = [words for ending in endings if ending is not None for words in ending.words]
        return bool(
            self.joining
            and not self._is_asked
            and any(ending is None or ending.code for ending in endings)
            and all(words.exit_code == Stopped.exit_code for words in said)
        )

    @property
    def _is_asked(self) -> bool:
        return bool(self.stop_requests) or any(
            node.ending is not None and node.ending.why == STOPPED_ON_REQUEST for node in self.nodes
        )

    def explain(self, resume: str) -> int:
        """Print why the run ended, unless it succeeded. Return the exit code."""
        if all(node.ending is not None and node.ending.code == 0 for node in self.nodes):
            return 0
        code = self._explain(resume)
        for line in self._stopped():
            announce(line)
        return code

    def _explain(self, resume: str) -> int:
        ended = [self.nodes[node_rank] for node_rank in self.order]
        endings = [self._ending(node) for node in ended]
        if any(not is_consequence(word) for ending in endings for word in ending.words):
            # a rank that stopped on request did so because of another one
            endings = [replace(ending, words=list(map(_ranked, ending.words))) for ending in endings]
        elif not self._is_asked:
            problem = next((p for node in ended if (p := self._own_end(node, resume))), None)
            if problem is not None:
                announce(problem.render())
                return ExitCode.with_text(problem.exit_code, problem.render())
        return print_cause([e for e in endings if e.code or e.words] or endings, resume, self.asked)

    def command_code(self) -> int:
        """Print every host where a command failed. Return the exit code of the first failure, or of a stop."""
        first = 0
        for node in (self.nodes[node_rank] for node_rank in self.order):
            ending = node.ending or Exit(code=ClusterError.exit_code, why=node.lost)
            code, why = ending.code, ending.why
            if not first and (
                why == STOPPED_ON_REQUEST or (self.stop_requests and why == STOPPED_BY_LAUNCHER)
            ):
                announce(f"{node.remote.name}: {STOPPED_ON_REQUEST}")
                return Stopped.exit_code
            if code and not (first and why == STOPPED_BY_LAUNCHER):  # others end because of the first
                ended = f"ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                announce(f"{node.remote.name}: {why or ended}")
                first = first or (code if code > 0 else 128 - code)
        return first

    def _own_end(self, node: Node, resume: str) -> ClusterError | None:
        """Return the error of a host that was lost, or whose agent was killed; None if it was neither."""
        ranks = self.fleet.ranks_text(self.nodes.index(node))
        hint = resume or "give the same command again"
        if node.lost:
            hint = self._resume_without(node, resume) if resume else hint
            what, *more = node.lost.splitlines()
            return ClusterError(
                f"{node.remote.name} is lost, with {ranks}: {what}", source=" ".join(more) or None, hint=hint
            )
        if node.ending is not None and node.ending.code < 0 and not node.ending.why:
            name = signal_name(-node.ending.code)
            return ClusterError(
                f"torchrun's agent of {ranks} on {node.remote.name} was ended by {name}", hint=hint
            )
        return None

    def _resume_without(self, lost: Node, resume: str) -> str:
        """Return ``resume`` for the remaining hosts, which have a copy of the states by default."""
        name, words = lost.remote.name, shlex.split(resume)
        if len(self.nodes) == 1:
            return f"{resume}   # once {name} is back: it has the states of the run"
        if "--hosts" not in words:
            return f"{resume}   # once {name} is back, or without it in that file"
        at = words.index("--hosts") + 1
        words[at] = ",".join(
            entry for entry in words[at].split(",") if entry.partition(":")[0].strip() != name
        )
        return f"{shlex.join(words)}   # without {name}; with it again once it is back"

    def _ending(self, node: Node) -> Ending:
        ending = node.ending or Exit(code=1, why=node.lost)
        return Ending(
            code=-signal.SIGTERM if ending.why and ending.code < 0 else ending.code,
            words=ending.words,
            log=ending.log or ending.why,
            source=f"logs/agent-{self.nodes.index(node)}.log",
            host=node.remote.name,
            ahead_s=node.remote.ahead_s,
            killed=OomKills(ending.killed.group, ending.killed.machine),
        )


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can hold but a file cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _ranked(word: LastWords) -> LastWords:
    """Return the words of a rank, marked as secondary if another rank is the cause."""
    return word.model_copy(update={"secondary": is_consequence(word)})
