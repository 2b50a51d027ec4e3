# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH112, PTH118, PTH122, PTH208
"""Find the image that an entry of a COCO file means, if no file has exactly its name."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from contextlib import suppress

from yolofleet.data.datasets.reader import spellings
from yolofleet.data.images.header import IMAGE_SUFFIXES


class FileFinder:
    """Finds the image that is meant by a name without a file. Lists each folder once, so a name costs no system call.

    A name is tried in its ``spellings`` below each of the folders. There, a file is taken whose name differs only in upper
    and lower case, in the form of Unicode (macOS separates accents), or by a suffix that the name leaves out, if it is
    the only one.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = [folder for folder in folders if os.path.isdir(folder)]
        self._files: dict[str, dict[str, list[str]]] = {}

    def find(self, name: str) -> str:
        """Return the path of the file, or "" if no file matches."""
        for option in spellings(name):
            for root in self._folders:
                folder, base = os.path.split(os.path.join(root, option))
                found = self._in(folder).get(_folded(base), [])
                if base in found or len(found) == 1:
                    return os.path.join(folder, base if base in found else found[0])
        return ""

    def _in(self, folder: str) -> dict[str, list[str]]:
        """Return the files of a folder by their folded names, images also without suffix."""
        if folder not in self._files:
            names: dict[str, list[str]] = {}
            with suppress(OSError, ValueError):
                for file in os.listdir(folder):
                    stem, suffix = os.path.splitext(file)
                    for key in {file, stem if suffix.lower() in IMAGE_SUFFIXES else file}:
                        names.setdefault(_folded(key), []).append(file)
            self._files[folder] = names
        return self._files[folder]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
