"""The facts of a file whose format has no place for them: ``<file>.json`` beside it, or ``yolofleet.json`` in a folder."""

from __future__ import annotations

from pathlib import Path

from yolofleet.errors import CheckpointError
from yolofleet.export.export_metadata import KEY, MAX_TEXT, ExportMetadata
from yolofleet.files.atomic import write_text
from yolofleet.files.foreign import read_foreign_text


def sidecar_of(path: Path) -> Path:
    """Where the facts of an exported file or folder lie."""
    return path / f"{KEY}.json" if path.is_dir() else path.with_name(path.name + ".json")


def write_sidecar(path: Path, facts: ExportMetadata) -> None:
    write_text(sidecar_of(path), facts.to_json() + "\n")


def read_sidecar(path: Path) -> ExportMetadata:
    """
    Raises:
        CheckpointError: it is not there, or not ours.
    """
    file = sidecar_of(path)
    try:
        text = read_foreign_text(file, limit_bytes=4 * MAX_TEXT, encoding="utf-8")
    except (OSError, ValueError) as problem:
        words = getattr(problem, "strerror", None) or "it is no text in UTF-8"
        raise CheckpointError(
            f"{path} has no description: {file} cannot be read: {words}",
            hint="copy it together with its file, or export the weights with yolofleet export",
        ) from None
    return ExportMetadata.from_json(text, source=str(file))
