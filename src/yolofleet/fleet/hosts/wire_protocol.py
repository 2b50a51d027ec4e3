"""What a host agent may say: the shape of its frames, which are lines of JSON, and of its answers.

A host is not believed: it may be broken, of another version, or somebody's who means ill. What does not fit here
gets no further than this.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Any

from yolofleet.fleet.doctor.shapes import fits, is_number, is_whole

PROTOCOL = 2
MOST_FRAME_BYTES = 16 << 20
ENDINGS = range(-64, 256)  # what a process can end with: signals below 0
MOST_RANKS = 100_000

Frame = dict[str, Any]


def _is_ending(value: Any) -> bool:
    return isinstance(value, int) and value in ENDINGS


def _is_exit_code(value: Any) -> bool:
    return isinstance(value, int) and value in range(256)


def _is_file(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_path(value[0]) and is_whole(value[1])


def _are_ranks(value: Any) -> bool:
    return fits(value, [int]) and len(value) == 2 and all(number in range(MOST_RANKS) for number in value)


def _is_path(value: Any) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except ValueError:
        return False


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value) is not None
    except ValueError:
        return False


_count = (is_whole, None)
WORDS = {
    "rank": is_whole,
    "host": str,
    "message": str,
    "exit_code": _is_exit_code,
    "time": is_number,
}  # see worker.py
FRAMES: dict[str, Frame] = {
    "hello": {"protocol": is_whole, "platform": str, "software": dict, "time_s": is_number},
    "beat": {},
    "reply": {"id": is_whole},
    "output": {"text": str},
    "log": {"rank": is_whole, "text": str},
    "exit": {
        "code": _is_ending,
        "words": [WORDS],
        "log": str,
        "why": str,
        "stopped": [str],
        "killed": {"group": _count, "machine": _count},
    },
}
JOB = {
    "job": str,
    "title": str,
    "folder": _is_path,
    "node": is_whole,
    "ranks": _are_ranks,
    "runs": bool,
    "began_s": is_number,
    "ended_s": is_number,
    "code": _count,
}
ANSWERS: dict[str, Any] = {  # of fleet/hosts/requests.py
    "enter": _is_path,
    "claim": {"folder": _is_path, "owner": str, "made": bool, "linked": str},
    "unclaim": None,
    "take_code": str,
    "hash_files": {str: str},
    "reserve_port": is_whole,
    "list_files": [_is_file],
    "read_piece": {"offset": is_whole, "data": _is_base64, "size": is_whole},
    "list_jobs": [JOB],
    "end_job": {"found": bool, "left": bool},
}
A_PROBES = (dict, list)


def frame_of(line: bytes) -> Frame:
    """{} for what is none, as a login shell prints it."""
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return frame if isinstance(frame, dict) and isinstance(frame.get("type"), str) else {}


def is_sound(frame: Frame) -> bool:
    """It is one that a host agent sends, and has what belongs to it."""
    shape = FRAMES.get(frame.get("type", ""))
    answers = frame.get("type") != "reply" or "value" in frame or isinstance(frame.get("error"), str)
    return shape is not None and fits(frame, shape) and answers
