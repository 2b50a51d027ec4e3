"""Read ``--source``: images and video frames in a fixed order. Unreadable items are recorded and skipped."""

from __future__ import annotations

import glob
import http.client
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
import torch

from yolofleet.data.datasets.reader import MAX_LIST_BYTES
from yolofleet.data.images.decode import decode_image, read_image, upright
from yolofleet.data.images.header import IMAGE_SUFFIXES, read_header
from yolofleet.storage.foreign import open_foreign, read_foreign_text
from yolofleet.storage.mirrored import address_of, download
from yolofleet.storage.request import OFFLINE, Refused, Transient, is_forbidden, open_url
from yolofleet.support.errors import ConfigError, DataError, install_hint
from yolofleet.support.text import size_text

MAX_PICTURE_BYTES = 64 << 20  # of a picture from the network
MAX_STDIN_BYTES = 256 << 20
WAIT_MS = 20_000  # longest wait for a server
RECONNECT_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # waits before new connections to a stream that stopped
CAMERA = re.compile(r"\d{1,3}")
READ_AT_ONCE = 64  # pictures of a store
MOST_FAILED = 1000  # reads of a video in a row; at its end they take milliseconds
COUNTED = {".avi", ".m4v", ".mov", ".mp4"}  # state the number of frames; FFmpeg estimates that of other files
STORED = re.compile(r"(s3|gs|az|file)://")
LIVE_URL = re.compile(r"(https?|rtsps?)://", re.IGNORECASE)
VIDEO_SUFFIXES = {
    *(".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg"),
    *(".ts", ".webm", ".wmv"),
}


@dataclass(frozen=True)
class Video:
    """The video of a frame.

    Attributes:
        frames: number of frames; 0: unknown (a camera, some containers).
        rate_hz: frames per second, from the file.
    """

    frames: int
    rate_hz: float


@dataclass(frozen=True)
class Frame:
    """An image, or one frame of a video.

    Attributes:
        path: its file, its address in a store, or ``camera N``.
        image: uint8 [H, W, 3] BGR, rotated as an image viewer shows it.
        item: number of the file, from 0.
        number: of the frame in its video, from 0.
        video: None for a picture.
        is_file: ``path`` is the path of a file, and not a name.
        base: the folder of the source; files of results keep the folders of ``path`` below it. "": none.
    """

    path: str
    image: np.ndarray = field(repr=False)
    item: int = 0
    number: int = 0
    video: Video | None = None
    is_file: bool = True
    base: str = ""


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
        items: in order.
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
        content = _picture_at(item) if item.kind == "http" else item.content
        if content is not None:
            yield Frame(item.name, decode_image(content, item.name), number, is_file=False)
        elif item.kind == "picture":
            yield Frame(item.shown, read_image(item.name), number)
        elif item.kind == "screen":
            yield from _screen_frames(item, number, self._stride)
        elif item.kind == "stream":
            yield from self._stream(item, number)
        else:
            yield from self._frames(item, number)

    def _stream(self, item: Item, number: int) -> Iterator[Frame]:
        """Yield the frames of a live stream. Connect again when it stops, because cameras and networks fail for moments.

        Raises:
            DataError: the first connection failed, or all new connections after it stopped.
        """
        count, waits, ends = 0, iter(RECONNECT_S), False
        while True:
            try:
                for frame in self._frames(item, number, first=count):
                    count, waits = frame.number + 1, iter(RECONNECT_S)
                    yield frame
                    ends = frame.video is not None and frame.video.frames > 0  # a recording
                if ends:
                    return
            except DataError:
                if count == 0:
                    raise
            wait_s = next(waits, None)
            if wait_s is None:
                raise DataError(
                    f"the rest of {item.name}: it stopped after {count} frames, and {len(RECONNECT_S)} new connections failed"
                )
            self.note(f"{item.name} stopped after {count} frames; connecting again in {wait_s:g} s")
            time.sleep(wait_s)

    def _frames(self, item: Item, number: int, *, first: int = 0) -> Iterator[Frame]:
        """Yield the frames of a video, a camera or a stream; the first one has the number ``first``.

        Raises:
            DataError: it cannot be opened, has no readable frame, or is a camera that stopped.
        """
        lost, missing, frames, count = list[int](), 0, 0, first
        # only FFmpeg: OpenCV's AVI reader prints bytes of the file, and its image reader treats "%d" as a pattern
        if item.kind == "video":
            _check_regular(item.name)
            capture = cv2.VideoCapture(item.name, cv2.CAP_FFMPEG)
        elif item.kind == "camera":
            capture = cv2.VideoCapture(item.number)
        else:
            waits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, WAIT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, WAIT_MS]
            capture = cv2.VideoCapture(item.address, cv2.CAP_FFMPEG, waits)
        try:
            if not capture.isOpened():
                raise DataError(_unopened(item))
            frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
            rate_hz = float(capture.get(cv2.CAP_PROP_FPS))
            video = Video(max(frames, 0), rate_hz if 0 < rate_hz <= 1000 else 30.0)
            failed, is_even, until_s = 0, True, time.monotonic() + WAIT_MS / 1000
            # OpenCV reports a damaged frame as it reports the end: read on
            while failed < MOST_FAILED and (item.kind == "video" or time.monotonic() < until_s):
                is_read, image, at = capture.grab(), None, count + failed  # skipped frames are not decoded
                place = first + capture.get(cv2.CAP_PROP_POS_MSEC) * video.rate_hz / 1000
                if failed and is_even and at < place < frames:  # FFmpeg has left out more packets
                    at = round(place)
                if is_read and at % self._stride == 0:
                    is_read, image = capture.retrieve()
                if not is_read:
                    failed += 1
                    continue
                lost += range(count, at)
                count, failed, is_even = at + 1, 0, is_even and abs(place - at) < 0.1
                if image is not None:
                    yield Frame(item.shown, image, number, at, video, is_file=item.kind == "video")
                until_s = time.monotonic() + WAIT_MS / 1000
            if count == first:
                raise DataError(f"{item.name} has no readable frame")
            if item.kind == "camera":
                raise DataError(f"the rest of {item.name}: it stopped after {count} frames")
            exact = Path(item.name).suffix.lower() in COUNTED
            missing = frames - count if exact or frames - count > max(video.rate_hz / 2, frames / 50) else 0
        finally:
            capture.release()
            parts = [f"{len(lost)} cannot be decoded, the first is frame {lost[0] + 1}"] if lost else []
            if missing > 0:
                parts.append(f"it ends after {frames - missing} of the {frames} that it states")
            self.lost += len(lost) + max(missing, 0)
            self.losses += [f"{item.shown} lacks frames: {'; '.join(parts)}"] if parts else []


def _unopened(item: Item) -> str:
    """Return why a video cannot be opened, as far as it is known."""
    what = f"cannot open {item.name}"
    if item.kind == "video":
        return f"{what} as a video"
    if item.kind != "camera":
        return f"{what}: the server does not answer, has no such stream, or refuses the user and password"
    if sys.platform != "linux":
        return what
    found = [str(path) for path in sorted(Path("/dev").glob("video*"))]
    return f"{what}: this machine has {', '.join(found) or 'no camera'}"


def _check_regular(path: str) -> None:
    """Raise DataError for a named pipe or device, which OpenCV would wait for."""
    try:
        open_foreign(path).close()
    except (OSError, ValueError) as problem:
        raise DataError(
            f"cannot open {path} as a video: {getattr(problem, 'strerror', None) or problem}"
        ) from None


@dataclass(frozen=True)
class Item:
    """A picture or a video, in a file or from elsewhere.

    Attributes:
        kind: picture | video | camera | http | stream | screen | stdin.
        name: the path, ``camera N``, or the url without a password; shown, and part of file names.
        address: the url; of a file in a store, whose mirror ``name`` is the path of, its address.
        content: the bytes of a picture, if they are known.
        number: of the camera or the screen; 0: all screens as one picture.
    """

    kind: str
    name: str
    address: str = ""
    content: bytes | None = None
    number: int = 0

    @property
    def shown(self) -> str:
        """Return the address of a file in a store, else the name, which has no password."""
        return self.address if self.address and self.kind in ("picture", "video") else self.name

    @classmethod
    def of(cls, path: Path) -> Item:
        return cls("video" if path.suffix.lower() in VIDEO_SUFFIXES else "picture", str(path))


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


def _picture_at(item: Item) -> bytes | None:
    """Return the picture at an http(s) url; None if there is something else, which FFmpeg then reads.

    Redirects lead to http and https only. FFmpeg has the same rule for what it opens for an http url.

    Raises:
        DataError: there is no answer, or the picture is larger than ``MAX_PICTURE_BYTES``.
    """
    if urlsplit(item.address).username is not None:  # urllib would send the password on after a redirect
        return None
    try:
        with open_url(item.address, {}, WAIT_MS / 1000) as response:
            suffix = Path(urlsplit(item.address).path).suffix.lower()
            kind = response.headers.get_content_type()
            if not (
                kind.startswith("image/")
                or (suffix in IMAGE_SUFFIXES and kind != "multipart/x-mixed-replace")
            ):
                return None
            content: bytes = response.read(MAX_PICTURE_BYTES + 1)
    except (Refused, Transient, OSError, http.client.HTTPException) as problem:
        raise DataError(
            f"cannot read {item.name}: {problem}", hint="check the address, and the network"
        ) from None
    if len(content) > MAX_PICTURE_BYTES:
        raise DataError(f"the picture at {item.name} has more than {size_text(MAX_PICTURE_BYTES)}")
    return content


def _screen_frames(item: Item, number: int, stride: int) -> Iterator[Frame]:
    """Yield pictures of the screen, without end."""
    try:
        import mss
    except ImportError:
        raise ConfigError("--source screen needs the package mss", hint=install_hint("screen")) from None
    try:
        with (getattr(mss, "MSS", None) or mss.mss)() as screens:  # mss 10.2 deprecates mss.mss
            if item.number >= len(screens.monitors):
                raise DataError(
                    f"there is no screen {item.number}: screens are 1 to {len(screens.monitors) - 1}"
                )
            for count in itertools.count(step=stride):
                shot = np.asarray(screens.grab(screens.monitors[item.number]))  # [H, W, 4] BGRA
                image = np.ascontiguousarray(shot[..., :3])
                yield Frame(item.name, image, number, count, Video(0, 10.0), is_file=False)
    except mss.exception.ScreenShotError as problem:
        raise DataError(f"cannot take a picture of the screen: {problem}") from None


def pixels_of(picture: Any, name: str) -> np.ndarray:
    """Return a picture in memory as uint8 [H, W, 3] BGR, by the rules of :func:`decode_image`: of 16 bits the upper 8, no alpha.

    Args:
        picture: the bytes of an image file, or a file object; a PIL image, rotated by its EXIF; a numpy array (H, W),
            (H, W, 1), (H, W, 3) BGR or (H, W, 4) BGRA, as of OpenCV; or a torch tensor [1, H, W], [3, H, W] RGB or
            [4, H, W] RGBA. A batch of one is allowed. Values are uint8, uint16, bool or float in 0..1.
        name: for messages.

    Raises:
        DataError: it is something else.
    """
    orientation, is_rgb, expected, to_last = 1, True, "[3, H, W] in RGB order", "permute(2, 0, 1)"
    pil = sys.modules.get("PIL.Image")  # without it, nobody has made a PIL image
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return decode_image(bytes(picture), name)
    if callable(getattr(picture, "read", None)):
        return decode_image(_content_of(picture, name), name)
    if isinstance(picture, torch.Tensor):
        values = picture.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        array = (values if values.ndim < 3 else values.movedim(-3, -1)).numpy()
    elif pil is not None and isinstance(picture, pil.Image):
        array, orientation = _array_of_pil(picture, name)
    elif isinstance(picture, np.ndarray):
        array, is_rgb, expected, to_last = picture, False, "(H, W, 3) in BGR order", "transpose(1, 2, 0)"
    else:
        raise DataError(
            f"{name} is a {type(picture).__name__}",
            hint="a path, a numpy array, a torch tensor, a PIL image, the bytes of an image file, or a list of these",
        )
    array = array[0] if array.ndim == 4 and len(array) == 1 else array
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        hint = "give a list of pictures: list(batch)" if array.ndim == 4 else f"is it {to_last}?"
        shape = [*getattr(picture, "shape", array.shape)]
        raise DataError(f"{name} has the shape {shape}, expected {expected}", hint=hint)
    array = _in_8_bits(array, name)
    array = np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array
    return upright(np.ascontiguousarray(array[..., 2::-1] if is_rgb else array[..., :3]), orientation)


def _content_of(file: Any, name: str) -> bytes:
    """Return the bytes of a file object. Raise DataError if it cannot be read, or has no bytes."""
    try:
        content = file.read()
        if not content:  # just written, and not rewound
            file.seek(0)
            content = file.read()
    except (OSError, ValueError) as problem:
        raise DataError(f"{name} cannot be read: {problem}", hint="give an open file, or its path") from None
    if not isinstance(content, bytes):
        what = f"{name} reads as {type(content).__name__}, expected bytes"
        raise DataError(what, hint='open it in binary mode: open(path, "rb")')
    return content


def _array_of_pil(picture: Any, name: str) -> tuple[np.ndarray, int]:
    """Return the values of a PIL image, [H, W] or [H, W, 3] RGB, and its EXIF orientation."""
    try:
        picture.load()  # PIL rotates TIFF files here
        orientation = picture.getexif().get(0x0112, 1)
        is_deep = picture.mode in ("F", "I") or picture.mode.startswith("I;16")
        array = np.asarray(picture if is_deep else picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as problem:
        raise DataError(f"{name} cannot be decoded: {problem}", hint="open it in an image viewer") from None
    if picture.mode == "I":  # PIL opens some files of 16 bits so
        if not (array.min() >= 0 and 255 < array.max() < 1 << 16):
            what = f"{name} has mode I and values from {array.min()} to {array.max()}, expected 16 bits"
            raise DataError(what, hint='convert("L"), if its values are 0 to 255')
        array = array.astype(np.uint16)
    return array, orientation if orientation in range(1, 9) else 1


def _in_8_bits(array: np.ndarray, name: str) -> np.ndarray:
    """Return values as uint8. Raise DataError if their range is unknown."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return (array >> 8).astype(np.uint8)
    if array.dtype.kind != "f":
        raise DataError(f"{name} is {array.dtype}, expected uint8", hint="or uint16, or a float in 0..1")
    if not 0 <= array.min() <= array.max() <= 1:
        raise DataError(f"{name} has values outside of 0..1", hint="divide by 255, or give uint8")
    return np.rint(array.astype(np.float32) * 255).astype(np.uint8)


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
