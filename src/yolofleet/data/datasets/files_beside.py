# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH118, PTH122, PTH208
"""Label files of Pascal VOC and labelme, which lie beside the images or in a folder of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from yolofleet.data.datasets.labels import Problem
from yolofleet.data.datasets.reader import LabelError, stamp
from yolofleet.support.files.arrayfile import cached_arrays


def files_found(kind: str, found: Sequence[tuple[str, str]]) -> list[tuple[Problem, int]]:
    """Return the first of some findings about files (path, what) with their number, for ``SplitReader.findings``."""
    return [
        (Problem(path, None, f"{what} (files like this: {len(found)})", kind), len(found))
        for path, what in found[:1]
    ]


def files_in(folder: str, suffix: str) -> dict[str, str]:
    """Return the files of a folder with a suffix, by the name without it; {} if there is no such folder."""
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(suffix)]
    except (OSError, ValueError):  # ValueError: a list may name a folder with a NUL character
        return {}
    return {name[: -len(suffix)]: os.path.join(folder, name) for name in names}


def files_beside(
    images: Iterable[str], suffix: str, folders_of: Callable[[str], Iterable[str]]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Find the files with the names of images.

    Args:
        folders_of: returns where the files of a folder of images may be, the most likely place first.
    Returns:
        the file of each image that has one, and ``files_in`` of each folder that has such files or is the first with any.
    """
    options: dict[str, list[str]] = {}
    files: dict[str, dict[str, str]] = {}
    found: dict[str, str] = {}
    used: set[str] = set()
    for image in images:
        folder, name = os.path.split(image)
        if folder not in options:
            options[folder] = list(folders_of(folder))
            files |= {option: files_in(option, suffix) for option in options[folder] if option not in files}
            used.add(next((option for option in options[folder] if files[option]), folder))
        stem = os.path.splitext(name)[0]
        if option := next((option for option in options[folder] if stem in files[option]), ""):
            found[image] = files[option][stem]
            used.add(option)
    return found, {option: files[option] for option in used}


def summaries(kind: str, files: Sequence[str], of_file: Callable[[str], Any]) -> list[Any]:
    """Return what ``of_file`` says of each label file, in the types of JSON; None where it raises LabelError.

    Each file is read once per machine, and the result is stored in the folder ``kind`` of the cache.
    """

    def read(file: str) -> Any:
        with suppress(LabelError):  # the index of the split reports it
            return of_file(file)
        return None

    key = "\n".join(f"{file}\0{stamp(file)}" for file in files)
    found = cached_arrays(kind, key, lambda: ({}, {"files": json.dumps(list(map(read, files)))}))
    return list(json.loads(found[1]["files"]))
