"""Read ``--source``: images and video frames in a fixed order. Unreadable items are recorded and skipped."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from yolofleet.data.datasets.reader import MAX_LIST_BYTES
from yolofleet.data.images.decode import decode_image, read_image
from yolofleet.data.images.header import IMAGE_SUFFIXES, read_header
from yolofleet.inference.predict.frames import (
    VIDEO_SUFFIXES,
    Frame,
    Item,
    screen_frames,
    stream_frames,
    video_frames,
)
from yolofleet.inference.predict.pictures import picture_at
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.storage.mirrored import address_of, download
from yolofleet.storage.request import OFFLINE, is_forbidden
from yolofleet.support.errors import ConfigError, DataError
from yolofleet.support.text import size_text

MAX_STDIN_BYTES = 256 << 20
CAMERA = re.compile(r"\d{1,3}")
READ_AT_ONCE = 64  # pictures of a store
STORED = re.compile(r"(s3|gs|az|file)://")
LIVE_URL = re.compile(r"(https?|rtsps?)://", re.IGNORECASE)


class Source:
    """The frames of ``spec``, to iterate over once.

    Args:
        spec: a picture, a video, a folder (and its sub-folders, if it has no pictures itself), a glob, a list file (.txt: a path per line,
            relative to the list), or a camera's number; or, if ``is_argument``, the url of a picture, video or stream
            (http, https, rtsp), the address of a file or folder in a store (s3, gs, az, file), ``screen`` or ``screen:N``,
            or ``-``: standard input, a picture or a list of paths.
        vid_stride: take every Nth frame of a video.
        is_argument: the user typed ``spec``. An entry of a list file must not start a connection.

    Attributes:
        name: ``spec`` without a password.
        first: number of the first item, among those of several sources.
        base: folder that contains all files, absolute; "" without files.
        left_out: number of sub-folders that are not searched.
        problems: a line per unreadable item; complete at the end of the iteration.
        losses: a line per video that lacks frames, which are left out; ``lost`` is their number.
        note: called with a text about what happens meanwhile, such as a new connection.

    Raises:
        DataError: no file matches.
        ConfigError, StorageError: a store cannot be used, or cannot be read.
    """

    def __init__(self, spec: str, *, vid_stride: int = 1, is_argument: bool = False) -> None:
        if is_argument and is_live(spec):
            self.items = live_items(spec)
        elif is_argument and STORED.match(spec):
            self.items = _stored_items(spec)
        else:
            self.items = find_items(spec)
        folders = {Path(item.shown).parent for item in self.items if item.kind in ("picture", "video")}
        self.first, self.left_out = 0, 0
        self.base = common_folder(folders)
        if os.path.isdir(spec):  # noqa: PTH112
            self.base = common_folder([Path(spec)])
            if folders == {Path(spec)}:
                self.left_out = sum(entry.is_dir() for entry in Path(spec).iterdir())
        self.name = without_password(spec) if is_argument else spec
        self.problems, self.losses, self.lost = list[str](), list[str](), 0
        self.note: Callable[[str], object] = lambda text: None
        self._stride = vid_stride

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Frame]:
        for number, item in enumerate(self.items):
            if number % READ_AT_ONCE == 0:  # those of a store
                pictures = [
                    each for each in self.items[number : number + READ_AT_ONCE] if each.kind == "picture"
                ]
                download([each.name for each in pictures if each.address])
            try:
                for frame in self._read(item, self.first + number):
                    yield replace(frame, base=self.base)
            except DataError as problem:
                self.problems.append(problem.what.replace(item.name, item.shown))

    def _read(self, item: Item, number: int) -> Iterator[Frame]:
        content = picture_at(item) if item.kind == "http" else item.content
        if content is not None:
            yield Frame(item.name, decode_image(content, item.name), number, is_file=False)
        elif item.kind == "picture":
            yield Frame(item.shown, read_image(item.name), number)
        elif item.kind == "screen":
            yield from screen_frames(item, number, self._stride)
        elif item.kind == "stream":
            yield from stream_frames(item, number, self._stride, self._lacks, self.note)
        else:
            yield from video_frames(item, number, self._stride, self._lacks)

    def _lacks(self, loss: str, frames: int) -> None:
        self.losses.append(loss)
        self.lost += frames


def is_live(spec: str) -> bool:
    """Return whether ``spec`` is a url, a screen or standard input; no configuration file may set it."""
    return bool(spec == "-" or re.fullmatch(r"screen(:\d{1,2})?", spec) or LIVE_URL.match(spec))


def is_endless(spec: str) -> bool:
    """Return whether ``spec`` is a camera, a screen or an RTSP stream, whose frames may have no end."""
    is_camera = CAMERA.fullmatch(spec) is not None and not os.path.exists(spec)  # noqa: PTH110
    return is_camera or (is_live(spec) and spec.lower().startswith(("screen", "rtsp")))


def hint_for(items: Sequence[Item]) -> str:
    """Return what to do if no item of a source can be read, by the first of them."""
    first = items[0]
    suffix = Path(first.name).suffix.lower()
    if first.kind == "camera":
        return "connect a camera that no other program uses, or give a file"
    if first.kind not in ("picture", "video"):
        return "check the address, the user and the password, and the network"
    if suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
        return "open the files with an image viewer"
    return "give an image, a video, or a list of paths as a .txt file"


def check_ends(spec: str) -> None:
    """Raise ConfigError if a source :func:`is_endless`, for a caller that returns after the last frame."""
    if is_endless(spec):
        raise ConfigError(
            f"source {without_password(spec)} may have no end, and predict returns after the last frame",
            hint="for result in Model(weights).stream(source): ...",
        )


def live_items(spec: str) -> list[Item]:
    """Return the items of a source for which :func:`is_live` holds.

    Raises:
        DataError: standard input has no picture and no paths, or the user forbids connections.
    """
    if spec == "-":
        return _standard_input()
    if spec.startswith("screen"):
        return [Item("screen", spec, number=int(spec.partition(":")[2] or 1))]
    if is_forbidden(spec):
        raise DataError(
            f"cannot open {without_password(spec)}, because {OFFLINE} is set",
            source="environment",
            hint="unset it, or give a file of this machine",
        )
    return [Item("http" if spec.lower().startswith("http") else "stream", without_password(spec), spec)]


def _stored_items(spec: str) -> list[Item]:
    """Return the items of an address in a store.

    Raises:
        DataError: the folder has no pictures or videos, or a list names a file elsewhere.
        ConfigError, StorageError: see ``local_path``.
    """
    from yolofleet.storage.mirror import local_path

    path = local_path(spec, "--source")
    folder, items = address_of(path if path.is_dir() else path.parent), list[Item]()
    for item in find_items(str(path)):
        address = "" if "\0" in item.name else address_of(Path(item.name))
        if not address.startswith(f"{folder}/"):
            raise DataError(f"source {spec} lists {item.name}, which does not exist below {folder}")
        items.append(replace(item, address=address))
    return items


def without_password(spec: str) -> str:
    """Return a source as it may be shown and stored: the url ``rtsp://user:password@host/`` without its password."""
    return re.sub(r"^(\w+://[^/?#:@]*):[^/?#]*@", r"\1:***@", spec)


def _standard_input() -> list[Item]:
    content = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(content) > MAX_STDIN_BYTES:
        raise DataError(f"standard input has more than {size_text(MAX_STDIN_BYTES)}", hint="give a file")
    if read_header(content) is not None:
        return [Item("stdin", "standard input", content=content)]
    try:
        entries = _entries(content.decode("utf-8"))
    except UnicodeDecodeError:
        entries = []
    if not entries or "\0" in "".join(entries):
        raise DataError(
            "standard input has no picture in a known format and no list of paths",
            hint="for example: find . -name '*.jpg' | yolofleet predict --source - ...",
        )
    return [Item.of(Path(entry)) for entry in entries]


def _entries(text: str) -> list[str]:
    """Return the lines of a list of paths, without empty lines and lines that begin with ``#``."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def find_items(spec: str) -> list[Item]:
    """Return the files of ``spec``, or the number of a camera. Raise DataError if there are none."""
    path = Path(spec)
    if re.match(r"[a-z][a-z0-9+.]+://", spec, re.IGNORECASE):
        raise DataError(
            f"source {spec} is a url; expected a local file or a camera",
            hint="http, https, rtsp, s3, gs and az urls work as --source; a list cannot name them",
        )
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises for a name that is too long)
        known = IMAGE_SUFFIXES | VIDEO_SUFFIXES

        def pictures(entries: Iterator[Path]) -> list[Path]:
            return sorted(p for p in entries if p.suffix.lower() in known and os.path.isfile(p))  # noqa: PTH113

        # os.walk leaves out folders that cannot be read, such as those of a process that has ended
        below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        found = pictures(path.iterdir()) or pictures(below)
        if not found:
            inside = ", ".join(sorted({p.suffix for p in path.iterdir() if p.is_file()})[:5])
            hint = f"it holds {inside}" if inside else "it and its sub-folders have none"
            raise DataError(f"source {spec} has no pictures or videos", hint=hint)
        return list(map(Item.of, found))
    if os.path.isfile(path):  # noqa: PTH113
        if path.suffix.lower() == ".streams":
            hint = "name one stream in each command: --source rtsp://HOST/PATH"
            raise DataError(f"source {spec} is a list of streams", hint=hint)
        return _listed(path) if path.suffix.lower() == ".txt" else [Item.of(path)]
    if CAMERA.fullmatch(spec):
        return [Item("camera", f"camera {int(spec)}", number=int(spec))]
    if glob.has_magic(spec):
        found = sorted(p for p in map(Path, glob.glob(spec, recursive=True)) if p.is_file())  # noqa: PTH207  (absolute patterns too)
        if found:
            return list(map(Item.of, found))
        raise DataError(
            f"source {spec} matches no file", hint="quote the pattern, so that the shell does not expand it"
        )
    raise DataError(
        f"source {spec} does not exist",
        hint="an image, folder, glob, list file (.txt), video, camera number, url, screen or -",
    )


def common_folder(folders: Iterable[str | Path]) -> str:
    """Return the absolute path of the deepest folder above all of these; "" if there is none."""
    try:
        return os.path.commonpath([os.path.normpath(Path(folder).absolute()) for folder in folders])
    except ValueError:  # no path, or several drives of Windows
        return ""


def _listed(path: Path) -> list[Item]:
    """Return the items of a list file, whose paths are relative to it or else to the working folder."""
    try:
        entries = _entries(read_foreign_text(path, limit_bytes=MAX_LIST_BYTES))
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot read source {path} as a list of paths: {problem}") from None
    if not entries:
        raise DataError(f"source {path} lists no files", hint="write one path per line")
    beside = [(path.parent / entry, Path(entry)) for entry in entries]
    # Path.exists raises for a name that is too long
    return [Item.of(near if os.path.exists(near) else other) for near, other in beside]  # noqa: PTH110
