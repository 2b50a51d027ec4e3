"""Requests of a launcher that a host agent answers, by name. Standard library alone.

Arguments and answers are plain values; ``messages.py`` has models of the answers. The launcher may also ask the doctor's
probes (``fleet/doctor/probes.py``). All requests run with the rights of the user who logged in.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import signal
import socket
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import Any

import yolofleet
from yolofleet.fleet.doctor.machine_facts import SOURCES, package_sha256
from yolofleet.fleet.doctor.probes import run_probe
from yolofleet.fleet.hosts import jobs, lease
from yolofleet.fleet.hosts.ssh import refused_login
from yolofleet.runs.report.folder import REQUESTS as REQUESTS_OF_RUNS
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import open_append, write_text
from yolofleet.storage.foreign import digest_of, link_out_of, open_foreign, read_foreign_text
from yolofleet.support.errors import Stopped
from yolofleet.support.system.proc import signal_all

PIECE_BYTES = 1 << 20
MOST_MARK_BYTES = 1 << 10
Arguments = Mapping[str, Any]


def enter(arguments: Arguments) -> str:
    """Change to ``folder``, and return its full path. Raise OSError if it does not exist."""
    os.chdir(Path(str(arguments["folder"])).expanduser())
    return str(Path.cwd())


def claim(arguments: Arguments) -> dict[str, Any]:
    """Make the run folder ``folder``, or recognise it as the one that another host of this fleet has made.

    Args:
        arguments: ``mark``: name of a file that the maker of the folder puts there; ``owner``: its content, if this
            host is the maker; ``used``: the folder may exist already; ``may_link``: symbolic links in it may
            lead out of it.
    Returns:
        ``folder``: its full path; ``owner``: the first host that sees the same disk, or this host; "" if the folder
        belongs to another run; ``made``: this call made it; ``linked``: which link is forbidden, and where it leads;
        nothing is written then.
    """
    folder = Path(str(arguments["folder"])).absolute()
    mark = folder / str(arguments["mark"])
    made = True
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        made = False
        if not (arguments["used"] or _appears(mark)):
            return {"folder": str(folder), "owner": "", "made": False, "linked": ""}
        if not arguments["may_link"] and (link := link_out_of(folder)):
            return {"folder": str(folder), "owner": "", "made": False, "linked": link}
    if not mark.is_file():
        write_text(mark, str(arguments["owner"]))
    owner = read_foreign_text(mark, limit_bytes=MOST_MARK_BYTES, follow=False)
    return {"folder": str(folder), "owner": owner, "made": made, "linked": ""}


def _appears(file: Path) -> bool:
    """Return whether a file exists, or appears within the moment that a network disk may need."""
    for _ in range(5):
        if file.is_file():
            return True
        time.sleep(0.1)
    return False


def unclaim(arguments: Arguments) -> None:
    """Remove the mark; with ``discard`` also the folder, unless it holds more than a failed start leaves."""
    folder = Path(str(arguments["folder"]))
    (folder / str(arguments["mark"])).unlink(missing_ok=True)
    if arguments.get("discard"):
        RunFolder(folder, is_new=True).discard_unless_used()


def hash_files(arguments: Arguments) -> dict[str, str]:
    """Return the SHA-256 of each of ``names`` that is a file here."""
    names = map(str, arguments["names"])
    return {name: digest_of(Path(name)) for name in names if Path(name).is_file()}


_reserved: list[socket.socket] = []


def reserve_port(arguments: Arguments) -> int:
    """Return the first of ``count`` ports from ``first`` on where no process listens at any address.

    While this process lives, the kernel gives the port to no process that asks for any port. A process that asks for
    this number can listen on it, as torch's store will.

    Raises:
        OSError: no port is free.
    """
    first, count = int(arguments["first"]), int(arguments["count"])
    for port in range(first, first + count):
        mark, held = socket.socket(socket.AF_UNIX), socket.socket()
        # as torch's store does: connections of an ended run stay for a minute (TIME_WAIT), and must not block the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # fails if another launcher has reserved the port, but does not listen yet
            mark.bind(f"\0yolofleet-port-{port}")
            held.bind(("", port))
        except OSError:
            mark.close()
            held.close()
            continue
        _reserved.extend((mark, held))
        return port
    raise OSError(f"ports {first} to {first + count - 1} are all in use")


def list_files(arguments: Arguments) -> list[list[Any]]:
    """Return the files below ``folder`` as [name with /, bytes], except those below the folders ``without``."""
    folder, without = Path(str(arguments["folder"])), {str(name) for name in arguments["without"]}
    found: list[list[Any]] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] not in without and path.is_file() and not path.is_symlink():
            found.append([name.as_posix(), path.stat().st_size])
    return found


def read_piece(arguments: Arguments) -> dict[str, Any]:
    """Return at most a mebibyte of ``file`` from ``offset`` on, as base64. A negative offset counts from its end."""
    path, offset = Path(str(arguments["file"])), int(arguments["offset"])
    size = path.stat().st_size
    begin = offset if offset >= 0 else max(0, size + offset)
    with open_foreign(path, follow=False) as file:
        file.seek(begin)
        piece = file.read(PIECE_BYTES)
    return {"offset": begin, "data": base64.b64encode(piece).decode(), "size": size}


def request_run(arguments: Arguments) -> None:
    """Ask the run in ``folder`` to ``save`` (``kind``), as `yolofleet board` does on the machine of rank 0.

    Raises:
        LookupError: there is no such request.
    """
    kind = str(arguments["kind"])
    if kind not in REQUESTS_OF_RUNS:
        raise LookupError(f"no request {kind[:20]!r} to a run")
    open_append(RunFolder(Path(str(arguments["folder"]))).request(kind)).close()


def list_jobs(_: Arguments) -> list[dict[str, Any]]:
    """Return the jobs of this host, the newest first; also detached runs that run no processes here now."""
    records = jobs.records()
    running = {record.job for record in records if record.runs}
    found = [record.to_dict() for record in records]
    for known in lease.leases():
        if known.code is None and known.job not in running:
            waiting = jobs.Record(
                known.job, known.title, known.holder, known.folder, 0, (0, 0), (0, ""), known.began_s
            )
            found.append(waiting.to_dict() | {"runs": True})
    return found


def end_job(arguments: Arguments) -> dict[str, Any]:
    """Ask the host agent of ``job`` to end it, and wait until it has ended.

    A detached run is not resumed by another host then.

    Returns:
        ``found``: it ran here; ``left``: it still runs after ``deadline_s``.
    """
    wanted = [r for r in jobs.records() if r.job == str(arguments["job"]) and r.runs]
    number = signal.SIGINT if arguments.get("now") else signal.SIGTERM  # see host_agent.py
    signal_all([record.host_agent[0] for record in wanted], number)
    gives_up_at_s = time.monotonic() + float(arguments["deadline_s"])
    while any(record.runs for record in wanted) and time.monotonic() < gives_up_at_s:
        time.sleep(0.1)
    is_left = any(record.runs for record in wanted)
    known = lease.read(str(arguments["job"]))
    if not is_left and known is not None and (wanted or known.is_over):  # else its launcher goes on
        lease.end_lease({"job": arguments["job"], "code": Stopped.exit_code})
    return {"found": bool(wanted), "left": is_left}


def add_host(arguments: Arguments) -> bool:
    """Queue ``host``, as in ``--hosts``, for the launcher of ``job``; return whether the job runs here."""
    job = str(arguments["job"])
    if not any(record.job == job and record.runs for record in jobs.records()):
        return False
    with open_append(jobs.file_of(job, "added")) as file:
        file.write(f"{arguments['host']}\n".encode())
    return True


def take_added(arguments: Arguments) -> list[str]:
    """Return the hosts of :func:`add_host` that no launcher has taken yet."""
    file = jobs.file_of(str(arguments["job"]), "added")
    try:
        lines = read_foreign_text(file, limit_bytes=PIECE_BYTES, follow=False).splitlines()
    except FileNotFoundError:
        return []
    file.unlink()
    return lines


def has_added(arguments: Arguments) -> bool:
    """Return whether :func:`add_host` has noted hosts that no launcher has taken yet."""
    return jobs.file_of(str(arguments["job"]), "added").exists()


def refused_logins(arguments: Arguments) -> dict[str, str]:
    """Return why this host cannot log in to ``hosts``, by name, for those where it cannot."""
    names = [str(name) for name in arguments["hosts"]]
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        found = zip(names, pool.map(refused_login, names), strict=True)
    return {name: words for name, words in found if words}


# -- --sync-code: this machine's package on the hosts, for one run --------------------------------------------

# The digest is of sources and data files alone. Extensions that a host cannot load are not needed there.
SUFFIXES = (*SOURCES, *EXTENSION_SUFFIXES)
MOST_PACKAGE_BYTES = 32 << 20
_taken: list[Path] = []


def packed() -> dict[str, str]:
    """Return the arguments of :func:`take`: this package. The libraries that it imports must be installed on the host."""
    package = Path(yolofleet.__file__).parent
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for file in sorted(package.rglob("*")):
            if file.name.endswith(SUFFIXES) and file.is_file():
                archive.add(file, file.relative_to(package).as_posix(), recursive=False)
    return {"sha256": package_sha256(package), "archive": base64.b64encode(stream.getvalue()).decode()}


def take(arguments: Mapping[str, Any]) -> str:
    """Unpack a package, and let all processes that start from now on import it. Return its folder.

    Raises:
        OSError: the package is incomplete, or cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="yolofleet-code-"))
    _taken.append(folder)
    package, left = folder / "yolofleet", MOST_PACKAGE_BYTES
    stream = io.BytesIO(base64.b64decode(str(arguments["archive"])))
    with tarfile.open(fileobj=stream, mode="r:gz") as archive:
        for member in archive:
            name, left = PurePosixPath(member.name), left - member.size
            file = archive.extractfile(member)
            if file is None or name.is_absolute() or ".." in name.parts or left < 0:
                raise OSError(
                    f"the package from the launcher contains {member.name[:80]!r}, which is not allowed"
                )
            target = package.joinpath(*name.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read())
    if package_sha256(package) != arguments["sha256"]:
        raise OSError("the package from the launcher is incomplete")
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), others]))
    return str(package)


def discard() -> None:
    """Remove all unpacked packages."""
    while _taken:
        shutil.rmtree(_taken.pop(), ignore_errors=True)


REQUESTS: dict[str, Callable[[Arguments], Any]] = {
    "enter": enter,
    "claim": claim,
    "unclaim": unclaim,
    "take_code": take,
    "hash_files": hash_files,
    "reserve_port": reserve_port,
    "list_files": list_files,
    "read_piece": read_piece,
    "request_run": request_run,
    "list_jobs": list_jobs,
    "end_job": end_job,
    "add_host": add_host,
    "take_added": take_added,
    "has_added": has_added,
    "refused_logins": refused_logins,
    "renew_lease": lease.renew_lease,
    "vote": lease.vote,
    "end_lease": lease.end_lease,
    "list_leases": lease.list_leases,
}


def answer(name: str, arguments: Arguments) -> Any:
    """Return the answer to a request, or to a probe of the doctor. Raise LookupError if there is no such request."""
    if name in REQUESTS:
        return REQUESTS[name](arguments)
    return run_probe(name, arguments)
