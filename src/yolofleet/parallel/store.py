"""Open torch's key-value store on the loopback interface, without pickles.

``TCPStore`` listens on all addresses, whatever address it is given. It keeps to one address only if it receives a
socket that is bound already (``master_listen_fd``).
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# in torch 2.6 only the older server takes a socket; clients are the same for both
LIBUV_TAKES_SOCKETS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def has_libuv() -> bool:
    """Whether TCPStore may use libuv; the Windows wheels of torch have none."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") != "0"


def host_store(listener: socket.socket, timeout_s: float) -> dist.TCPStore:
    """Start a store that answers on ``listener`` and nowhere else. The store owns the socket from now on.

    Raises:
        RuntimeError: torch could not start it.
    """
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=LIBUV_TAKES_SOCKETS and has_libuv(),
    )


def connect_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of another process.

    Raises:
        RuntimeError: nobody answered in time.
    """
    return dist.TCPStore(
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        use_libuv=has_libuv(),
    )
