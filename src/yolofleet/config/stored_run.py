"""The copy of a run at an address, as the command line names it: ``--checkpoint-to``, ``--results-to`` and ``--resume``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import TrainConfig
from yolofleet.errors import ConfigError
from yolofleet.files.mirror import local_path
from yolofleet.files.object_store import check_address


def check_copies(config: Resolved[TrainConfig], names: Iterable[str]) -> None:
    """Raise ConfigError if an address that gets copies of the run is not usable; ``names`` are the settings."""
    addresses = {name: address for name in names if (address := getattr(config.value, name))}
    for name, address in addresses.items():
        _check_writable(address, config.flag(name))
    if len({address.removesuffix("/") for address in addresses.values()}) < len(addresses):
        raise ConfigError(
            "--checkpoint-to and --results-to name one address",
            source=config.sources_of(*addresses),
            hint="leave out --results-to: --checkpoint-to copies the results too",
        )
    if sys.platform == "win32":
        raise ConfigError("--checkpoint-to and --results-to need Linux or macOS", hint="leave them out")


def stored_run(address: str, setting: str) -> Path:
    """Return the folder with the files of the run at an address; it may have none.

    Raises:
        ConfigError: the address is not usable. StorageError: the store cannot be read.
    """
    _check_writable(address, setting)
    return local_path(f"{address.removesuffix('/')}/", setting, may_be_empty=True)


def _check_writable(address: str, setting: str) -> None:
    check_address(address, setting)
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{setting}: a web server takes no files",
            hint=f"{setting} s3://BUCKET/runs/NAME, or gs:// or az://",
        )
