"""While a run goes on, copy what `yolofleet board` shows from the disk of rank 0 to the launcher's, and pass requests on.

Only for runs whose results are on another disk. The complete results are copied at the end (``folders.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.launch.folders import Folders
from yolofleet.runs.report.folder import REQUESTS, RunFolder
from yolofleet.support.errors import ClusterError
from yolofleet.support.files.atomic import write_unsynced
from yolofleet.support.system.signals import request_stop

PERIOD_S = 3.0
ASK_S = 10.0
END_S = 1.0  # for the thread to end
MOST_BYTES = 32 << 20  # of a file; a larger one comes at the end of the run
STATUS = ("logs/status.json", "logs/ranks.json")  # they change without another size
SHOWN = (*STATUS, "results.csv", "events.jsonl", "report.json", "plots/train_step0.jpg")


@contextmanager
def live_copy(folders: Folders, remotes: Callable[[], Sequence[Remote]]) -> Iterator[None]:
    """Copy the files ``SHOWN`` and pass requests on inside the block, every few seconds, from a thread.

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
