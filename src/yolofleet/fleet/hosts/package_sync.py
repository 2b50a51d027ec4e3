"""``--sync-code``: copy this machine's yolofleet to hosts, for one run. Standard library alone.

Only the package is copied, over the connection to the host agent. The libraries that it imports must be installed on the
host. A host agent removes the copy when it ends.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import Any

import yolofleet
from yolofleet.fleet.doctor.machine_facts import SOURCES, package_sha256

# The digest is of sources and data files alone. Extensions that a host cannot load are not needed there.
SUFFIXES = (*SOURCES, *EXTENSION_SUFFIXES)
MOST_BYTES = 32 << 20

_taken: list[Path] = []


def packed() -> dict[str, str]:
    """Return the arguments of :func:`take`: this package."""
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
    package, left = folder / "yolofleet", MOST_BYTES
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
