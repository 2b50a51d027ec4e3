"""Log in to all hosts of a fleet at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Queue

from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.hosts.messages import Message
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.hosts.ssh import Unreachable
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import inform

LOGINS_AT_ONCE = 32
FILES_PER_HOST = 3  # descriptors: ssh's input, output and errors
OTHER_FILES = 10 * LOGINS_AT_ONCE  # of this process, and those that starting an ssh needs
NOTICE_AFTER_S = 2.0  # print a notice when logins take longer


@contextmanager
def logged_in(
    fleet: Fleet, *, lost: list[Unreachable] | None = None, tells: bool = True
) -> Iterator[list[Remote]]:
    """Log in to all hosts at the same time. Everything that is started there ends with the block.

    Args:
        lost: if given, takes one error per unreachable host, and the block gets the other hosts.
        tells: print a notice when it takes long.
    Raises:
        Unreachable: a host is unreachable and ``lost`` is None. The source names all other unreachable hosts.
        ConfigError: this machine runs Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "several machines cannot be started from Windows",
            hint="type it on Linux, macOS or in WSL; for this machine alone: --device",
        )
    inbox: Queue[tuple[Remote, Message]] = Queue()
    remotes = [Remote(host, inbox) for host in fleet.hosts]
    _allow_open_files(FILES_PER_HOST * len(remotes) + OTHER_FILES)
    try:
        problems = _log_in(remotes, NOTICE_AFTER_S if tells else None)
        if problems and lost is None:
            first, others = problems[0], problems[1:]
            if others:
                first.source = "\n".join([first.source or "", *(problem.what for problem in others)]).strip()
            raise first
        if lost is not None:
            lost += problems
        gone = {problem.host for problem in problems}
        yield [remote for remote in remotes if remote.name not in gone]
    finally:
        with ThreadPoolExecutor(len(remotes)) as pool:
            list(pool.map(Remote.close, remotes))


def _log_in(remotes: Sequence[Remote], notice_after_s: float | None) -> list[Unreachable]:
    """Log in to all hosts. Return one error per unreachable host. After Ctrl-C the caller's close ends the logins."""

    def login(remote: Remote) -> Unreachable | None:
        try:
            remote.open()
        except Unreachable as problem:
            return problem
        return None

    pool = ThreadPoolExecutor(min(LOGINS_AT_ONCE, len(remotes)))
    try:
        logins = [pool.submit(login, remote) for remote in remotes]
        if wait(logins, notice_after_s).not_done:
            inform(f"logging in to {len(remotes)} host{'s' if len(remotes) > 1 else ''} ...")
        return [problem for done in logins if (problem := done.result()) is not None]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to ``count``, as far as the hard limit allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
