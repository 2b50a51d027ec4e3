"""Read small text files of /proc and /sys, and what they say of the file system of a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

NETWORK = (  # types of file systems on other machines
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "pvfs2", "smb3",
    "smbfs", "wekafs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.rclone",
    "fuse.s3fs", "fuse.sshfs",
)  # fmt: skip


def text_of(path: Path) -> str:
    """Return the text of a file without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # for example EINVAL for the speed of a network interface that is down
        return ""


def number_of(path: Path) -> int | None:
    """Return the whole number that a file holds; None if it holds none or cannot be read."""
    try:
        return int(text_of(path))
    except ValueError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name; [] if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def network_disk(folder: Path, proc: Path = Path("/proc")) -> str:
    """Return the type of the network file system that a folder is on, such as nfs4; "" if it is local or unknown."""
    try:
        path = os.path.realpath(folder)
    except OSError:
        return ""
    found = ("", "")
    for line in text_of(proc / "self" / "mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        # with the escapes of the kernel (\040 is a space) replaced
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):  # of equal points, the last one covers the others
            found = (point, source.split()[0])
    return found[1] if found[1] in NETWORK else ""
