"""The jobs on hosts, by name, what their ranks do now, and the logs that they write there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from yolofleet.fleet.doctor.examination import on_each
from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.hosts.messages import Job as JobRecord
from yolofleet.fleet.hosts.remote import Refused, Remote, logged_in
from yolofleet.fleet.hosts.ssh import Unreachable
from yolofleet.runs.rank_status import MOST_STATUS_BYTES, RankStatus, parsed_status
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import ClusterError, ConfigError, DataError
from yolofleet.support.text import echo, shown

T = TypeVar("T")
Job = tuple[Remote, JobRecord]
Status = tuple[float, list[RankStatus]]  # seconds since rank 0 wrote it, and the ranks


def each(
    remotes: Iterable[Remote], request: Callable[[Remote], T]
) -> tuple[dict[Remote, T], dict[Remote, ClusterError]]:
    """Send a request to all hosts in parallel; return answers and errors by host."""

    def ask(remote: Remote) -> T | ClusterError:
        try:
            return request(remote)
        except ClusterError as problem:
            return problem

    unique = list(dict.fromkeys(remotes))
    answers = dict(zip(unique, on_each(unique, ask), strict=True))
    lost = {remote: answer for remote, answer in answers.items() if isinstance(answer, ClusterError)}
    return {r: a for r, a in answers.items() if not isinstance(a, ClusterError)}, lost


def jobs_of(remotes: Iterable[Remote]) -> tuple[list[Job], dict[Remote, ClusterError]]:
    """Return all jobs, the newest first, and an error for each host that did not answer."""
    listed, lost = each(remotes, lambda remote: list(remote.ask("list_jobs")))
    found = [(remote, job) for remote, jobs in listed.items() for job in jobs]
    began_s = {job.job: float(job.began_s) for _, job in found}
    found.sort(key=lambda entry: (-began_s[entry[1].job], entry[1].job, entry[1].node))
    return found, lost


def with_jobs(fleet: Fleet, work: Callable[[list[Job]], int]) -> int:
    """Call ``work`` with the jobs of reachable hosts; print an error for each other host."""
    unreached: list[Unreachable] = []
    with logged_in(fleet, lost=unreached) as remotes:
        found, silent = jobs_of(remotes)
        lost = [*unreached, *silent.values()]
        print_errors(lost)
        code = work(found) if len(lost) < len(fleet.hosts) else 0
    return ClusterError.exit_code if lost else code


def print_errors(problems: Iterable[ClusterError]) -> None:
    for problem in problems:
        echo(problem.render(), to=sys.stderr)


def names_of(jobs: Iterable[Job]) -> list[str]:
    return list(dict.fromkeys(record.job for _, record in jobs))


def named_job(asked: str, names: Sequence[str], what: str) -> str:
    """Return the job that ``asked`` names: its exact name, the name of its run (without the suffix), or a prefix.

    Args:
        what: state of these jobs, for messages: "running", "known".
    Raises:
        ConfigError: ``asked`` names no job, or several.
    """
    fitting: list[Callable[[str], bool]] = [
        lambda name: name == asked,
        lambda name: name.rpartition("-")[0] == asked,
        lambda name: name.startswith(asked),
    ]
    for fits in fitting:
        meant = [name for name in names if fits(name)]
        if len(meant) > 1:
            raise ConfigError(
                f"{shown(asked)} is ambiguous: {', '.join(meant)}", hint="type more letters of the name"
            )
        if meant:
            return meant[0]
    raise ConfigError(
        f"no {what} job {shown(asked)} on these hosts", hint=f"{what} jobs: {', '.join(names) or 'none'}"
    )


def running_job(jobs: Iterable[Job], asked: str, hint: str) -> str:
    """Return the running job that ``asked`` names, or the only one if it is "".

    Raises:
        ConfigError: no job runs, or several and ``asked`` is ""; ``hint`` says how to type its NAME.
    """
    names = names_of(jobs)
    if asked:
        return named_job(asked, names, "running")
    if not names:
        raise ConfigError("no run is running on these hosts")
    if len(names) > 1:
        raise ConfigError(
            f"several jobs run: {', '.join(names)}; expected one name", hint=hint.replace("NAME", names[0])
        )
    return names[0]


def logged_job(found: list[Job], asked: str) -> str:
    """Return the named job, or the newest job with logs. Commands of `fleet run` have no logs.

    Raises:
        ConfigError: no job has logs, or the named job has none.
    """
    logged = names_of(entry for entry in found if entry[1].folder)
    if asked:
        name = named_job(asked, names_of(found), "known")
        if name not in logged:
            raise ConfigError(
                f"{name} was started by `fleet run`: its output appears only in the terminal that started it; "
                "it has no log files",
                hint=f"jobs with logs: {', '.join(logged) or 'none'}",
            )
        return name
    if not logged:
        raise ConfigError(
            "no known run on these hosts", hint="runs have log files; commands of `fleet run` have none"
        )
    return logged[0]


def local_status(file: Path) -> Status | None:
    """Return how many seconds ago rank 0 wrote what the ranks do, and the ranks; None if there is no file."""
    try:
        written_at_s, ranks = parsed_status(read_foreign(file, limit_bytes=MOST_STATUS_BYTES, follow=False))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot read {file}: {problem}", hint="try again in a few seconds") from None
    return max(time.time() - written_at_s, 0.0), ranks


def remote_status(remote: Remote, file: str) -> Status | None:
    """Return the same of a file on a host."""
    content = b""
    try:
        while len(content) < MOST_STATUS_BYTES:
            piece = remote.ask("read_piece", file=file, offset=len(content))
            content += piece.content
            if not piece.content or len(content) >= piece.size:
                break
        written_at_s, ranks = parsed_status(content)
    except Refused:  # the file does not exist
        return None
    except ValueError as problem:
        raise ClusterError(f"{remote.name} has a status that cannot be read: {problem}") from None
    return max(time.time() + remote.ahead_s - written_at_s, 0.0), ranks


LAST_BYTES = 64 << 10  # the search for the last lines begins with so much of the file's end,
PIECE_BYTES = 1 << 20  # and goes back in pieces of this size
LONGEST_LINE = 1 << 20  # bytes; what is longer is cut


@dataclass
class Log:
    """What a rank writes on its host, line by line, of which a few pieces are in memory at a time."""

    remote: Remote
    file: str
    offset: int = 0  # bytes that have been read or skipped
    half: bytes = b""  # the beginning of a line whose end has not been read

    def skip_to_last(self, lines: int) -> bool:
        """Go to the beginning of the last ``lines`` lines. Return whether the file has more before it."""
        begin, piece = self._piece(-LAST_BYTES)
        ends = lines + piece.endswith(b"\n")  # of lines, counted from the end of the file
        while begin and piece.count(b"\n") < ends:
            ends -= piece.count(b"\n")
            begin, piece = self._before(begin)
        if ends:
            parts = piece.rsplit(b"\n", ends)
            piece = piece[: len(parts[0]) + 1] if len(parts) > ends else b""
        self.offset = begin + len(piece)
        return self.offset > 0

    def _before(self, end: int) -> tuple[int, bytes]:
        """Return the piece that ends at ``end``: its offset and its content."""
        begin = max(0, end - PIECE_BYTES)
        found = b""
        while len(found) < end - begin and (piece := self._piece(begin + len(found))[1]):
            found += piece
        return begin, found[: end - begin]

    def lines(self, *, to_end: bool) -> Iterator[bytes]:
        """Yield the lines that are complete now and were not at the last call.

        Args:
            to_end: the file will not grow, so its last line counts without a line end too.
        """
        while piece := self._piece(self.offset)[1]:
            self.offset += len(piece)
            *whole, self.half = (self.half + piece).split(b"\n")
            yield from whole
            if len(self.half) > LONGEST_LINE:
                yield self.half
                self.half = b""
        if to_end and self.half:
            yield self.half
            self.half = b""

    def _piece(self, offset: int) -> tuple[int, bytes]:
        """Return where the piece at ``offset`` begins, and its content. A negative offset counts from the file's end.

        Raises:
            ClusterError: the host is lost.
        """
        try:
            answer = self.remote.ask("read_piece", file=self.file, offset=offset)
        except Refused:  # the rank has not written yet
            return 0, b""
        return answer.offset, answer.content
