"""Read ``--source``: images and video frames in a fixed order. Unreadable items are recorded and skipped."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from yolofleet.datasets.reader import MAX_LIST_BYTES
from yolofleet.errors import DataError
from yolofleet.files.foreign import open_foreign, read_foreign_text
from yolofleet.images.decode import read_image
from yolofleet.images.header import IMAGE_SUFFIXES

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
        path: its file, or ``camera N``.
        image: uint8 [H, W, 3] BGR, rotated as an image viewer shows it.
        item: number of the file, from 0.
        number: of the frame in its video, from 0.
        video: None for a picture.
    """

    path: str
    image: np.ndarray
    item: int = 0
    number: int = 0
    video: Video | None = None


class Source:
    """The frames of ``spec``, to iterate over once.

    Args:
        spec: a picture, a video, a folder (not its sub-folders), a glob, a list file (.txt: a path per line,
            relative to the list), or a camera's number.
        vid_stride: take every Nth frame of a video.

    Attributes:
        items: files, in order; a camera is one item.
        problems: a line per unreadable item; complete at the end of the iteration.

    Raises:
        DataError: no file matches.
    """

    def __init__(self, spec: str, *, vid_stride: int = 1) -> None:
        self.items = find_items(spec)
        self.problems: list[str] = []
        self._stride = vid_stride

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Frame]:
        for number, item in enumerate(self.items):
            try:
                if isinstance(item, int) or item.suffix.lower() in VIDEO_SUFFIXES:
                    yield from self._frames(item, number)
                else:
                    yield Frame(str(item), read_image(item), number)
            except DataError as problem:
                self.problems.append(problem.what)

    def _frames(self, item: Path | int, number: int) -> Iterator[Frame]:
        name = str(item) if isinstance(item, Path) else f"camera {item}"
        if isinstance(item, Path):
            _check_regular(item)
        # only FFmpeg: OpenCV's AVI reader prints bytes of the file, and its image reader treats "%d" as a pattern
        capture = cv2.VideoCapture(name, cv2.CAP_FFMPEG) if isinstance(item, Path) else cv2.VideoCapture(item)
        try:
            if not capture.isOpened():
                raise DataError(f"cannot open {name} as a video")
            frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
            rate_hz = float(capture.get(cv2.CAP_PROP_FPS))
            video = Video(max(frames, 0), rate_hz if 0 < rate_hz <= 1000 else 30.0)
            count = 0
            while capture.grab():  # skipped frames are not decoded
                if count % self._stride == 0:
                    found, image = capture.retrieve()
                    if not found:
                        break
                    yield Frame(name, image, number, count, video)
                count += 1
            if count == 0:
                raise DataError(f"{name} has no readable frame")
        finally:
            capture.release()


def _check_regular(path: Path) -> None:
    """Raise DataError for a named pipe or device, which OpenCV would wait for."""
    try:
        open_foreign(path).close()
    except (OSError, ValueError) as problem:
        raise DataError(
            f"cannot open {path} as a video: {getattr(problem, 'strerror', None) or problem}"
        ) from None


def find_items(spec: str) -> list[Path | int]:
    """Return the files of ``spec``, or the number of a camera.

    Raises:
        DataError: there are none.
    """
    path = Path(spec)
    if re.match(r"[a-z][a-z0-9+.]+://", spec, re.IGNORECASE):
        raise DataError(
            f"source {spec} is a url; expected a local file or a camera", hint="download it first"
        )
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises for a name that is too long)
        known = IMAGE_SUFFIXES | VIDEO_SUFFIXES
        found = sorted(p for p in path.iterdir() if p.suffix.lower() in known and p.is_file())
        if not found:
            inside = sorted({p.suffix for p in path.iterdir() if p.is_file()})[:5]
            hint = (
                f"it holds {', '.join(inside)}"
                if inside
                else "sub-folders are not searched: give a glob, as 'folder/**/*.jpg'"
            )
            raise DataError(f"source {spec} has no pictures or videos", hint=hint)
        return list(found)
    if os.path.isfile(path):  # noqa: PTH113
        return _listed(path) if path.suffix.lower() == ".txt" else [path]
    if re.fullmatch(r"\d{1,3}", spec):
        return [int(spec)]
    if glob.has_magic(spec):
        found = sorted(p for p in map(Path, glob.glob(spec, recursive=True)) if p.is_file())  # noqa: PTH207  (absolute patterns too)
        if found:
            return list(found)
        raise DataError(
            f"source {spec} matches no file", hint="quote the pattern, so that the shell does not expand it"
        )
    raise DataError(
        f"source {spec} does not exist",
        hint="an image, folder, glob, list file (.txt), video or camera number",
    )


def _listed(path: Path) -> list[Path | int]:
    """Return the paths of a list file; skip empty lines and lines that begin with ``#``."""
    try:
        lines = read_foreign_text(path, limit_bytes=MAX_LIST_BYTES).splitlines()
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot read source {path} as a list of paths: {problem}") from None
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        raise DataError(f"source {path} lists no files", hint="write one path per line")
    return [_beside(path, entry) for entry in entries]


def _beside(listing: Path, entry: str) -> Path:
    """Return the path of an entry, relative to its list or else to the working folder."""
    near = listing.parent / entry
    return near if os.path.exists(near) else Path(entry)  # noqa: PTH110  (Path.exists raises for a name that is too long)
