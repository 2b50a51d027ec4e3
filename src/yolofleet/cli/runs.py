"""The runs that a command names: folders, or addresses of copies."""

from __future__ import annotations

from pathlib import Path

from yolofleet.errors import ConfigError
from yolofleet.text import shown


def named_run(name: str) -> Path:
    """Return the folder of a run or of runs that a user names. That of an address is mirrored on this machine.

    Raises:
        ConfigError: it does not exist, or is not usable. StorageError: the store cannot be read.
    """
    if "://" in name:
        from yolofleet.files.mirror import local_path  # only addresses need it

        return local_path(f"{name.removesuffix('/')}/", "RUN")
    if not Path(name).is_dir():
        raise ConfigError(
            f"{shown(name)} is not a folder",
            source="command line",
            hint="name a run folder, such as runs/train/exp, or the address of --checkpoint-to",
        )
    return Path(name)
