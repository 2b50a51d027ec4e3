# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH119, PTH120, PTH122, PTH211
"""Name the images of a converted data set, and link or copy them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from yolofleet.data.images.header import IMAGE_SUFFIXES
from yolofleet.support.files.caches import is_mirrored
from yolofleet.support.files.foreign import copy_foreign
from yolofleet.support.files.mirrored import download

Images = Literal["link", "copy", "symlink", "none"]
AT_ONCE = 256  # images of a store that are read together
_LAYOUT_FOLDERS = ("images", "labels", "jpegimages")  # readers derive label files from these names


def below_common_folder(paths: Sequence[str]) -> list[str]:
    """Return the paths relative to their deepest common folder, separated by /."""
    folders = {os.path.dirname(path) for path in paths}
    try:
        common = os.path.commonpath(folders)
    except ValueError:  # the paths are on several Windows drives
        return [os.path.basename(path) for path in paths]
    return [os.path.relpath(path, common).replace(os.sep, "/") for path in paths]


def free_names(names: Sequence[str], split: str, taken: set[str], *, flat: bool) -> list[str]:
    """Return names that are allowed in the layout and distinct even without suffix and in lower case.

    Two images that differ only in suffix or case would share a label file. If a name is ``taken`` by another split, all
    names of this split begin with ``<split>-``. Adds the names to ``taken``.
    """
    parts = [_suitable(name, flat=flat) for name in names]
    front = f"{split}-" if any(stem.casefold() in taken for stem, _ in parts) else ""
    free = []
    for stem, suffix in parts:
        stem = front + stem
        options = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        option = next(option for option in options if option.casefold() not in taken)
        taken.add(option.casefold())
        free.append(option + suffix)
    return free


def _suitable(name: str, *, flat: bool) -> tuple[str, str]:
    """Return (stem, suffix) of a name that is allowed in the layout; without folders if ``flat``.

    Left out or replaced: folders that have a meaning in a layout, control characters, leading dots and spaces, and
    suffixes that are not those of images.
    """
    parts = [part for part in name.split("/") if part]
    parts = [part for part in parts[:-1] if part.lower() not in _LAYOUT_FOLDERS] + parts[-1:]
    parts = ["".join("_" if c < " " or c == "\x7f" else c for c in part).strip() for part in parts]
    parts = ["_" + part[1:] if part.startswith(".") else part for part in parts]
    stem, suffix = os.path.splitext("__".join(parts) if flat else "/".join(parts))
    if suffix.lower() in IMAGE_SUFFIXES:
        return stem.rstrip(), suffix
    return stem + suffix, ".jpg"  # any image suffix will do, because decoders look at the content


def place(jobs: Sequence[tuple[str, str]], how: Images) -> int:
    """Link or copy images (from, to); return how many were copied. Those of a store are always copied."""
    copied = 0
    for first in range(0, len(jobs), AT_ONCE):
        download([path for path, _ in jobs[first : first + AT_ONCE]])
        copied += sum(_place(path, to, how) for path, to in jobs[first : first + AT_ONCE])
    return copied


def _place(path: str, to: str, how: Images) -> bool:
    source = os.path.realpath(path)
    if is_mirrored(source):  # the cache may be deleted
        copy_foreign(source, to)
        return True
    if how == "symlink":
        os.symlink(source, to)
        return False
    if how == "link":
        with suppress(OSError):  # another disk, a file system without links, or a file of another user
            os.link(source, to)
            return False
    shutil.copyfile(source, to)
    return True
