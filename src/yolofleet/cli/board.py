"""`yolofleet board`: a live page of runs."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import click

from yolofleet.cli.commands import named_run, option, verb
from yolofleet.runs.report.folder import REQUESTS, RunFolder
from yolofleet.storage.mirrored import mirror_of
from yolofleet.support.errors import ConfigError, install_hint
from yolofleet.support.text import echo, listed, shown

RUNS = "runs"
PORT, MORE_PORTS = 8642, 20  # the default, and how many after it are tried
REFRESH_S = 15.0
PACKAGES = ("starlette", "uvicorn")


@verb(
    "board",
    click.Argument(["runs"], nargs=-1, metavar="[RUN ...]"),
    option(
        "--port",
        f"port to listen on; 0 = any free one  [{PORT}, or the next free one]",
        type=click.IntRange(0, 65535),
        metavar="N",
    ),
    option(
        "--host",
        "address to listen on; with the default, other machines cannot connect; connections are not encrypted",
        default="127.0.0.1",
        metavar="ADDRESS",
    ),
    option(
        "--allow",
        "requests to running trainings that the page offers as buttons: stop,save, or one of them",
        default="",
        metavar="LIST",
    ),
    help="Show runs in a browser while they go on: RUN is a run folder, a folder of runs (by default `runs`), or the address of "
    "--checkpoint-to or of a folder of them. Prints the "
    "address of the list, or of the page of the only RUN, with a secret token. Only this machine reaches it; from another one: "
    "ssh -t -L 8642:127.0.0.1:8642 HOST yolofleet board. Needs the packages Starlette and uvicorn.",
)
def command(runs: tuple[str, ...], port: int | None, host: str, allow: str) -> int:
    places = _places(runs)
    asked = [kind for kind in allow.split(",") if kind]
    if unknown := [kind for kind in asked if kind not in REQUESTS]:
        raise ConfigError(
            f"--allow {shown(unknown[0])} is not a request to a run",
            source="command line",
            hint=f"--allow {','.join(REQUESTS)}, or one of them",
        )
    address = address_of(host)
    need_packages("board")
    from yolofleet.runs.board.runs import Runs
    from yolofleet.runs.board.server import Board, server_of
    from yolofleet.support.http_server import names_of

    ports = (*range(PORT, PORT + MORE_PORTS), 0) if port is None else (port,)
    busy = "leave out --port, which takes a free port; another board may run already"
    listener = listener_of("board", address, ports, busy)
    _keep_fresh(places)
    with listener:
        names, any_address = names_of(address)
        board = Board(Runs(places), asked, names, any_address)
        board.runs.look()
        board.runs.read_newest()
        if not ipaddress.ip_address(address).is_loopback:
            echo(
                f"warning: the board listens on {address}, without encryption: anyone on the network can read the pages "
                "and the token. Better: ssh -t -L 8642:127.0.0.1:8642 HOST yolofleet board",
                to=sys.stderr,
            )
        used = listener.getsockname()[1]
        if port is None and used != PORT:
            echo(f"note: port {PORT} is in use, so the board listens on port {used}", to=sys.stderr)
        run = board.runs.only()
        where = f"http://{'127.0.0.1' if any_address else address}:{used}/{f'runs/{run.id}' if run else ''}"
        echo(f"{where}?token={board.token}")
        count, folders = len(board.runs.rows()), listed([RunFolder(place).shown for place in places])
        below = f"{count} run{'s' if count != 1 else ''} below the folder{'s' if len(places) != 1 else ''} {folders}"
        echo(f"{f'the run {folders}' if run else below}; Ctrl-C ends the board", to=sys.stderr)
        try:
            server_of(board).run(sockets=[listener])
        except KeyboardInterrupt:
            echo("the board has ended; the runs go on", to=sys.stderr)
    return 0


def need_packages(verb: str) -> None:
    """Raise ConfigError if the packages of a server are not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ConfigError(
                f"yolofleet {verb} needs the package {package}, which is not installed",
                hint=install_hint(verb),
            )


def listener_of(what: str, address: str, ports: Sequence[int], busy_hint: str) -> socket.socket:
    """Return a socket that listens on the first of ``ports`` that is free; 0: any.

    Args:
        what: the server, for messages.
        busy_hint: what to do if all are in use.

    Raises:
        ConfigError: the address or port cannot be used.
    """
    from yolofleet.support.listener import open_listener

    for one in ports:
        try:
            return open_listener(address, one)
        except OSError as problem:
            is_busy = problem.errno == errno.EADDRINUSE
            if is_busy and one != ports[-1]:
                continue
            raise ConfigError(
                f"the {what} cannot listen on {problem}",
                source="--port, --host",
                hint=busy_hint if is_busy else "--host 127.0.0.1",
            ) from None
    raise AssertionError("ports is never empty")


def _places(runs: tuple[str, ...]) -> list[Path]:
    """Return the folders to show. Raise ConfigError if one does not exist."""
    try:
        return [named_run(name) for name in runs or (RUNS,)]
    except ConfigError as problem:
        if not runs:
            problem.source = "the default of yolofleet board"
        raise


def _keep_fresh(places: list[Path]) -> None:
    """Read the lists of mirrored places again from time to time."""

    def refresh_all() -> None:
        while True:
            time.sleep(REFRESH_S)
            for mirror in mirrors:
                with suppress(Exception):  # the store may be away for a while, or the disk full
                    mirror.update()

    mirrors = {mirror for place in places if (mirror := mirror_of(os.path.realpath(place)))}
    if mirrors:
        threading.Thread(target=refresh_all, daemon=True, name="refresh").start()


def address_of(host: str) -> str:
    """Return the IPv4 address to listen on. Raise ConfigError if it is not one."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise ConfigError(
            f"--host {shown(host)} is not an IPv4 address",
            source="command line",
            hint="--host 127.0.0.1 (the default), or an address of this machine",
        ) from None
