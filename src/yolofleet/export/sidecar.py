"""Read and write metadata beside a file whose format cannot store it.

The metadata file is ``<file>.json`` beside the file, or ``yolofleet.json`` in the folder.
"""

from __future__ import annotations

from pathlib import Path

from yolofleet.errors import CheckpointError
from yolofleet.export.export_metadata import KEY, MAX_TEXT, ExportMetadata
from yolofleet.files.atomic import write_text
from yolofleet.files.foreign import read_foreign_text


def sidecar_of(path: Path) -> Path:
    """Return the path of the metadata of an exported file or folder."""
    return path / f"{KEY}.json" if path.is_dir() else path.with_name(path.name + ".json")


def write_sidecar(path: Path, metadata: ExportMetadata) -> None:
    """Write the metadata of the exported file or folder ``path``."""
    write_text(sidecar_of(path), metadata.to_json() + "\n")


def read_sidecar(path: Path) -> ExportMetadata:
    """Return the metadata of the exported file or folder ``path``.

    Raises:
        CheckpointError: the metadata file is missing or invalid.
    """
    file = sidecar_of(path)
    try:
        text = read_foreign_text(file, limit_bytes=4 * MAX_TEXT, encoding="utf-8")
    except (OSError, ValueError) as problem:
        words = getattr(problem, "strerror", None) or "it is not text in UTF-8"
        raise CheckpointError(
            f"{path} has no metadata: cannot read {file}: {words}",
            hint="copy both files together, or export the weights with yolofleet export",
        ) from None
    return ExportMetadata.from_json(text, source=str(file))
