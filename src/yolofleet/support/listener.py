"""Open a socket that listens."""

from __future__ import annotations

import os
import socket

LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # connections waiting to be accepted; all workers of a run may connect at once


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address; port 0 lets the kernel choose.

    Raises:
        OSError: the address or port cannot be used; its text names both.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # connections of an ended run in TIME_WAIT must not block the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as problem:
        listener.close()
        error = OSError(f"{address}:{port}: {problem.strerror or problem}")
        error.errno = problem.errno
        raise error from None
    return listener
