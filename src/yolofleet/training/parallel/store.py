"""Open torch's key-value store on the loopback interface, without pickles.

``TCPStore`` listens on all addresses, whatever address it gets. To listen on one address, it needs a socket that is
already bound (``master_listen_fd``).
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
    """Return whether TCPStore may use libuv; the Windows wheels of torch do not have it."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") != "0"


def host_store(listener: socket.socket, timeout_s: float) -> dist.TCPStore:
    """Start a store that listens only on ``listener`` and takes ownership of that socket.

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
        RuntimeError: no store answered within ``timeout_s``.
    """
    return dist.TCPStore(
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        use_libuv=has_libuv(),
    )
