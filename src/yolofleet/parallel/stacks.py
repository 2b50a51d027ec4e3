"""Python stacks of this process, and of another one that does not respond."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from pathlib import Path

from yolofleet.files.foreign import open_foreign

FRAMES_SHOWN = 10
DUMP = "Timeout ("  # the first words of faulthandler.dump_traceback_later


def short_path(path: str) -> str:
    """Return the part of the path after ``site-packages`` or ``src``."""
    parts = Path(path).parts
    for landmark in ("site-packages", "src"):
        if landmark in parts:
            return "/".join(parts[parts.index(landmark) + 1 :])
    return path


def main_stack() -> list[str]:
    """Return the call stack of this process's main thread, innermost call first: ``file:line function``."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
    return [f"{short_path(call.filename)}:{call.lineno} {call.name}" for call in calls[:FRAMES_SHOWN]]


def dumped_stack(log: Path, within_s: float) -> list[str]:
    """Return the stack that faulthandler wrote at the end of a log, for a process that cannot run Python code.

    Args:
        within_s: ignore an older dump.
    """
    try:
        if time.time() - log.stat().st_mtime > within_s:
            return []
        with open_foreign(log, follow=False) as file:
            file.seek(max(log.stat().st_size - 100_000, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    _, found, dump = text.rpartition(DUMP)
    threads = re.split(r"^(?:Current t|T)hread .*$", dump, flags=re.MULTILINE) if found else []
    calls = re.findall(r'^  File "(.*?)", line (\d+) in (.*)$', threads[-1] if threads else "", re.MULTILINE)
    return [f"{short_path(path)}:{line} {name}" for path, line, name in calls[:FRAMES_SHOWN]]
