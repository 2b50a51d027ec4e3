"""Frames of videos, cameras, streams and screens. Frames that cannot be decoded are counted and left out."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import ConfigError, DataError, install_hint

WAIT_MS = 20_000  # longest wait for a server
RECONNECT_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # waits before new connections to a stream that stopped
MOST_FAILED = 1000  # reads of a video in a row; at its end they take milliseconds
COUNTED = {".avi", ".m4v", ".mov", ".mp4"}  # state the number of frames; FFmpeg estimates that of other files

VIDEO_SUFFIXES = {
    *(".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg"),
    *(".ts", ".webm", ".wmv"),
}
Lacks = Callable[[str, int], object]


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


def stream_frames(
    item: Item, number: int, stride: int, lacks: Lacks, note: Callable[[str], object]
) -> Iterator[Frame]:
    """Yield the frames of a live stream. Connect again when it stops, because cameras and networks fail for moments.

    Raises:
        DataError: the first connection failed, or all new connections after it stopped.
    """
    count, waits, ends = 0, iter(RECONNECT_S), False
    while True:
        try:
            for frame in video_frames(item, number, stride, lacks, first=count):
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
        note(f"{item.name} stopped after {count} frames; connecting again in {wait_s:g} s")
        time.sleep(wait_s)


def video_frames(item: Item, number: int, stride: int, lacks: Lacks, *, first: int = 0) -> Iterator[Frame]:
    """Yield the frames of a video, a camera or a stream; the first one has the number ``first``.

    Every ``stride``-th is decoded. ``lacks`` gets a line about frames that the video lacks, and their number.

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
            if is_read and at % stride == 0:
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
        if parts:
            lacks(f"{item.shown} lacks frames: {'; '.join(parts)}", len(lost) + max(missing, 0))


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


def screen_frames(item: Item, number: int, stride: int) -> Iterator[Frame]:
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
