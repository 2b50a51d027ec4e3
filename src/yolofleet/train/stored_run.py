"""What a run takes from its copy at an address when it goes on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from yolofleet.checkpoint.store import CheckpointStore, set_aside
from yolofleet.config.load import load_config_yaml
from yolofleet.errors import ConfigError, StorageError
from yolofleet.files.atomic import write_bytes
from yolofleet.files.foreign import read_foreign, reading
from yolofleet.files.mirror import local_path

RESULTS = ("results.csv", "weights/best.safetensors", "weights/last.safetensors")
EVENTS = "events.jsonl"
MAX_RESULT_BYTES = 1 << 30


def bring_results(address: str, run: Path, *, is_restart: bool) -> None:
    """Copy the results of the run at an address into its folder here, unless the folder has later states of that run.

    Files of another run in the folder are moved aside.

    Args:
        is_restart: the folder is that of this run, but perhaps on a machine that has none of its files.
    Raises:
        ConfigError, StorageError: the store cannot be read, or the disk cannot be written.
    """
    if is_restart:
        if missing := [name for name in (*RESULTS, EVENTS) if not (run / name).exists()]:
            _copy(local_path(f"{address}/", "--resume"), run, missing)
        return
    if not _is_copied_to(run, address):
        set_aside(run)
    there = local_path(f"{address}/", "--resume")
    if _last_step(there) > _last_step(run):
        _copy(there, run, [*RESULTS, EVENTS])


def later_copy(address: str, step: int) -> Path | None:
    """Return the folder with the files at an address if a state there is later than ``step``.

    Raises:
        ConfigError, StorageError: the store cannot be read.
    """
    there = local_path(f"{address}/", "--resume")
    return there if _last_step(there) > step else None


def _copy(there: Path, run: Path, names: Iterable[str]) -> None:
    for name in names:
        if (there / name).is_file():
            with reading(there / name, StorageError):
                write_bytes(run / name, read_foreign(there / name, limit_bytes=MAX_RESULT_BYTES))


def _last_step(run: Path) -> int:
    """Return the step of the newest state in a run folder by its name; -1 without any."""
    entries = CheckpointStore(run / "checkpoints").entries()
    return entries[0].step if entries else -1


def _is_copied_to(run: Path, address: str) -> bool:
    """Return whether the states in a folder are of the run at an address."""
    with suppress(ConfigError):
        return load_config_yaml(run / "config.yaml")[0].value.checkpoint_to.removesuffix("/") == address
    return False
