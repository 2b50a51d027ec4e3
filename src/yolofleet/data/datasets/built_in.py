"""The descriptions of public data sets that come with yolofleet, and which of them ``--data`` names. No numpy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from yolofleet.storage.foreign import read_foreign

BUILT_IN = Path(__file__).resolve().parents[2] / "config" / "datasets"
YAML = (".yaml", ".yml")
NAMED = (*YAML, ".json")  # files that --data takes: descriptions, and labels of many images


def built_in_names() -> list[str]:
    """Return the names of the descriptions that come with yolofleet."""
    return sorted(file.stem for file in BUILT_IN.glob("*.yaml"))


def built_in_of(data: str) -> str:
    """Return the name of the description of ``data`` that comes with yolofleet; "" if it is a user's own."""
    try:
        path = path_of(data)
        if path.suffix.lower() in YAML and path.is_file():
            return copied_from(path)
        return path.name.removesuffix(".yaml") if not path.exists() and is_built_in_name(path) else ""
    except (OSError, ValueError, RuntimeError):  # load_dataset reports it
        return ""


def path_of(data: str) -> Path:
    """Return the path of ``data``; guides copy a file to data/mine.yaml and then type --data mine.yaml."""
    path = Path(data).expanduser()
    kept = Path("data", path.name)
    is_kept = path.suffix == ".yaml" and path.parent == Path() and not path.exists() and kept.is_file()
    return kept if is_kept else path


def is_no_dataset(data: str) -> bool:
    """Return whether ``sources.load_dataset`` refuses a path of this machine at once: it is neither a folder nor a description."""
    if not data or data.partition(":")[0] == "shapes" or "://" in data:
        return False
    with suppress(OSError, ValueError, RuntimeError):  # load_dataset has words for them
        path = path_of(data)
        is_file = path.is_file() and path.suffix.lower() in NAMED
        return not (path.is_dir() or is_file or is_built_in_name(path))
    return True


def is_built_in_name(path: Path) -> bool:
    """Return whether ``coco128``, ``coco128.yaml`` or ``data/coco128.yaml`` names a built-in description."""
    return (
        path.parent.name in ("", "data") and (BUILT_IN / f"{path.name.removesuffix('.yaml')}.yaml").is_file()
    )


def copied_from(path: Path) -> str:
    """Return the name of the built-in description that a file is a copy of; "" if it is not a copy."""
    for built_in in sorted(BUILT_IN.glob("*.yaml")):
        content = built_in.read_bytes()
        if path.stat().st_size == len(content) and read_foreign(path, limit_bytes=len(content)) == content:
            return built_in.stem
    return ""
