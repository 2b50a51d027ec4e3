"""The file system of a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from yolofleet.system.kernel_files import text_of
from yolofleet.system.proc import PROC

NETWORK = (  # types of file systems on other machines
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "pvfs2", "smb3",
    "smbfs", "wekafs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.rclone",
    "fuse.s3fs", "fuse.sshfs",
)  # fmt: skip


def network_disk(folder: Path, proc: Path = PROC) -> str:
    """Return the type of the network file system that a folder is on, such as nfs4; "" if it is local or unknown."""
    try:
        path = os.path.realpath(folder)
    except OSError:
        return ""
    found = ("", "")
    for line in text_of(proc / "self" / "mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        point = _unescaped(mount.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):  # of equal points, the last one covers the others
            found = (point, source.split()[0])
    return found[1] if found[1] in NETWORK else ""


def _unescaped(text: str) -> str:
    """Return a path of the kernel with its escapes (``\\040`` is a space) replaced."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
