"""Print the files of yolofleet that a training enters, from its command to the start of torchrun's agent.

    python tests/entered_files.py train --data shapes:8 --model yolov5n --device cpu:2

A file is entered when one of its functions is called, except by an import: a module's own code defines things. The process
ends where it would start the agent's process.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import yolofleet

SOURCE = str(Path(yolofleet.__file__).parent) + os.sep
AGENT = "yolofleet.training.parallel.torchrun_agent"
entered: dict[str, None] = {}


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def profile(frame: FrameType, event: str, _argument: Any) -> None:
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(SOURCE) and file not in entered and not is_importing(frame):
        entered[file] = None


def end_at_agent(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and any(word == AGENT for word in arguments[1]):
        sys.setprofile(None)
        print(*(file.removeprefix(SOURCE) for file in entered), sep="\n", flush=True)
        os._exit(0)


if __name__ == "__main__":
    from yolofleet.cli import main

    sys.addaudithook(end_at_agent)
    threading.setprofile(profile)
    sys.setprofile(profile)
    sys.exit(main(sys.argv[1:]))
