"""How the launcher and the workers share files in memory (Linux): ``fleet/hosts/agent_process.py`` holds them, ``restart_store.py`` fills them."""

from __future__ import annotations

import os
import struct

PATHS = "YOLOFLEET_MEMORY"  # the variable that gives their paths to the workers
NUMBER = struct.Struct("<q")


def number_in(file: int) -> int:
    """Return the number at the beginning of a file; -1 if the file is empty."""
    content = os.pread(file, NUMBER.size, 0)
    return int(NUMBER.unpack(content)[0]) if len(content) == NUMBER.size else -1
