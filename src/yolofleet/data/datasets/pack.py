# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH118, PTH122
"""Put the files of a data set into shards (``storage/shards.py`` describes them), and take them out again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.spec import DatasetSpec
from yolofleet.data.datasets.writers import AT_ONCE
from yolofleet.data.images.header import has_image_suffix, read_header
from yolofleet.storage.atomic import storage_error, whole_folder, write_bytes, writing
from yolofleet.storage.caches import INDEX
from yolofleet.storage.foreign import copy_foreign, link_out_of, links_refused, read_foreign, reading
from yolofleet.storage.mirror import local_path
from yolofleet.storage.mirrored import download, mirror_of
from yolofleet.storage.object_store import check_address
from yolofleet.storage.object_writer import ObjectWriter
from yolofleet.storage.shards import FORMAT, LIST, MAX_FILE_BYTES, SMALL_BYTES, is_plain_path
from yolofleet.support.errors import ConfigError, DataError
from yolofleet.support.text import shown

Progress = Callable[[int, int], None]  # files that are done, of how many


def shard(data: str, out: str, size: int, on_progress: Progress) -> tuple[int, int]:
    """Write the folder of a data set as shards of about ``size`` bytes; return the numbers of files and of shards.

    Args:
        data: as for ``load_dataset``; all that its description names must lie in one folder.
        out: a folder that does not exist, or an address without objects.
    Raises:
        ConfigError: ``out`` is in use, or files of the data set lie elsewhere.
        DataError: a file cannot be read.
        StorageError: ``out`` cannot be written.
    """
    folder = _folder_of(load_dataset(data))
    paths = _paths_of_set(folder)
    files = list(members_of(paths))
    done = 0

    def sources() -> Iterator[tuple[str, str, Path]]:
        nonlocal done
        for first in range(0, len(files), AT_ONCE):
            group = files[first : first + AT_ONCE]
            download([os.path.join(folder, path) for path, _ in group])
            for path, member in group:
                yield path, member, folder / path
                done += 1
                on_progress(done, len(files))

    try:
        if "://" not in out:
            target = Path(out)
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise ConfigError(f"--out {out} is not an empty folder", hint="--out another")
            with whole_folder(target) as made:
                return write_shards(sources(), made, size, lambda file: None)
        check_address(out, "--out")
        store = ObjectWriter(out.removesuffix("/"))
        if not store.is_empty():
            raise ConfigError(f"--out {store.root} is not empty", hint="--out another")
        with tempfile.TemporaryDirectory(prefix="yolofleet-shards-") as local:

            def upload(file: Path) -> None:
                store.put(file, file.name)
                file.unlink()

            return write_shards(sources(), Path(local), size, upload)
    except OSError as problem:
        raise storage_error(problem, Path(problem.filename or out)) from None


def _folder_of(spec: DatasetSpec) -> Path:
    """Return the folder in which all files of a data set lie. Raises ConfigError."""
    origin = next(iter(spec.splits.values()))[0].path
    mirror = mirror_of(os.path.realpath(origin))
    folder = mirror.tree if mirror else Path(spec.origin).expanduser().absolute()
    folder = folder if folder.is_dir() else folder.parent
    if folder.name == "annotations":  # of COCO, beside the images
        folder = folder.parent
    for split, sources in spec.splits.items():
        for source in sources:
            if not source.path.absolute().is_relative_to(folder):
                raise ConfigError(
                    f"{split} is {source.path}, which is not in {folder}",
                    source=spec.origin,
                    hint="yolofleet data convert makes one folder of a data set",
                )
    if mirror is None and (link := link_out_of(folder)):
        raise links_refused(link, str(folder))
    return folder


def _paths_of_set(folder: Path) -> list[str]:
    """Return the paths that an index names. Raise DataError for a name that no reader of an index takes."""
    paths = [path for path in _files_below(folder) if path not in (INDEX, LIST)]
    for path in paths:
        if not is_plain_path(path):
            raise DataError(
                f"{folder}: the file {shown(path)} has a name that not every disk can have", hint="rename it"
            )
    return paths


def _files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it with ``/``; hidden ones are left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        within = os.path.relpath(parent, folder).replace(os.sep, "/")
        found += [name if within == "." else f"{within}/{name}" for name in names if not name.startswith(".")]
    return found


def unshard(data: str, out: str, on_progress: Progress) -> int:
    """Write the files of a set of shards into a folder that does not exist; return how many.

    Args:
        data: the address or folder of the shards; any folder of a store is copied as well.
    Raises:
        ConfigError: ``out`` exists, or ``data`` is not one.
        StorageError: the shards cannot be read, or ``out`` cannot be written.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--out {out} is not an empty folder", hint="--out another")
    address = data if "://" in data else f"file://{Path(data).expanduser().resolve()}"
    path = local_path(address, "SET")
    mirror = mirror_of(str(path))
    assert mirror is not None
    names = _files_below(mirror.tree)
    with writing(target), whole_folder(target) as made:
        for first in range(0, len(names), AT_ONCE):
            group = names[first : first + AT_ONCE]
            download([os.path.join(mirror.tree, name) for name in group])
            for name in group:
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                copy_foreign(mirror.tree / name, made / name)
            on_progress(first + len(group), len(names))
    return len(names)


def write_shards(
    files: Iterable[tuple[str, str, Path]], folder: Path, size: int, finished: Callable[[Path], None]
) -> tuple[int, int]:
    """Write tar files of about ``size`` bytes, and then the index; return the numbers of files and of shards.

    Args:
        files: path in the data set, name in the tar file, and where the file is. A larger file gets a shard of its own.
        folder: is empty.
        finished: gets each finished file of ``folder``, which it may move away; the index is last.
    Raises:
        DataError: a file cannot be read.
        OSError: the disk cannot be written.
    """
    samples, small = (_Shards(folder, name, size, finished) for name in ("shard", "labels"))
    rows: list[list[Any]] = []
    for path, member, source in files:
        content, modified_ns, facts = _read(path, source)
        place = samples.add(member, content, modified_ns)
        if not has_image_suffix(path) and len(content) <= SMALL_BYTES:
            place = small.add(member, content, modified_ns)
        rows.append([path, *place, *facts])
    shards = [*samples.close(), *small.close()]
    numbers = {name: number for number, (name, _) in enumerate(shards)}
    write_bytes(folder / INDEX, _index_of(shards, [[row[0], numbers[row[1]], *row[2:]] for row in rows]))
    finished(folder / INDEX)
    return len(rows), len(shards)


def write_list(data: str, on_progress: Progress) -> tuple[Path, int]:
    """Write the list of the files of a data set into its folder, for a web server; return where it is, and of how many files.

    Raises:
        ConfigError: files of the data set lie elsewhere, or it is not on a disk.
        DataError: a file cannot be read. StorageError: the list cannot be written.
    """
    folder = _folder_of(load_dataset(data))
    if mirror_of(os.path.realpath(folder)) is not None:
        raise ConfigError(
            f"{data} is not a folder of a disk", hint="run this on the machine that has the files"
        )
    paths = sorted(_paths_of_set(folder))
    rows: list[list[Any]] = []
    for path in paths:
        rows.append([path, -1, 0, *_read(path, folder / path)[2]])
        on_progress(len(rows), len(paths))
    write_bytes(folder / LIST, _index_of([], rows))
    return folder / LIST, len(rows)


def _read(path: str, source: Path) -> tuple[bytes, int, list[Any]]:
    """Return content and time of a file of a data set, and what an index says of it. Raises DataError."""
    with reading(source, DataError):
        content = read_foreign(source, limit_bytes=MAX_FILE_BYTES)
        modified_ns = source.stat().st_mtime_ns
    facts: list[Any] = [len(content), modified_ns, hashlib.sha256(content).hexdigest()]
    header = read_header(content) if has_image_suffix(path) else None
    if header is not None and not header.problem:
        facts += header.size_wh
    return content, modified_ns, facts


def _index_of(shards: Sequence[tuple[str, int]], rows: Sequence[Sequence[Any]]) -> bytes:
    """Return the content of an index; see ``storage/shards.py``."""
    lines = map(json.dumps, [{"format": FORMAT, "shards": shards}, *rows])
    text = "".join(f"{line}\n" for line in lines).encode()
    end = json.dumps({"files": len(rows), "sha256": hashlib.sha256(text).hexdigest()})
    return text + end.encode() + b"\n"


class _Shards:
    """Tar files of about ``size`` bytes, one after the other. Without users and groups: equal files give equal shards."""

    def __init__(self, folder: Path, name: str, size: int, finished: Callable[[Path], None]) -> None:
        self.folder, self.name, self.size, self.finished = folder, name, size, finished
        self._tar: tarfile.TarFile | None = None
        self._done: list[tuple[str, int]] = []

    def add(self, member: str, content: bytes, modified_ns: int) -> tuple[str, int]:
        """Append a file; return the name of its tar file, and where its content begins there."""
        if self._tar is not None and self._tar.offset + len(content) > self.size:
            self.close()
        path = self._path()
        if self._tar is None:
            self._tar = tarfile.open(path, "w", format=tarfile.PAX_FORMAT, encoding="utf-8")  # noqa: SIM115
        info = tarfile.TarInfo(member)
        info.size, info.mtime = len(content), modified_ns // 10**9
        before = self._tar.offset
        self._tar.addfile(info, io.BytesIO(content))
        return path.name, before + len(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _path(self) -> Path:
        return self.folder / f"{self.name}-{len(self._done):05d}.tar"

    def close(self) -> list[tuple[str, int]]:
        """Finish the last tar file; return name and size of each one."""
        if self._tar is not None:
            self._tar.close()
            path, self._tar = self._path(), None
            self._done.append((path.name, path.stat().st_size))
            self.finished(path)
        return self._done


def members_of(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield paths of a data set and their names in a tar file, in the order of the names.

    A label file in ``labels`` gets the name of its image in ``images`` with its own suffix, so that both form a sample.
    """
    stems = {os.path.splitext(path)[0] for path in paths if has_image_suffix(path)}
    names = []
    for path in paths:
        stem, suffix = os.path.splitext(path)
        folder, found, rest = f"/{stem}".rpartition("/labels/")
        image = f"{folder}/images/{rest}"[1:]
        names.append((image + suffix if found and image in stems else path, path))
    for name, path in sorted(names):
        yield path, name
