"""The command line, words -> a verb and its configuration, and the Python interface (``api.py``).

It imports every other room, and torch only inside a verb. Start reading in ``app.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from yolofleet.cli.app import run

    return run(sys.argv[1:] if argv is None else list(argv))
