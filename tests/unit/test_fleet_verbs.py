"""`yolofleet fleet` and other verbs as they are typed: slips, closed streams, jobs by part of their name."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams by a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_shell_has_closed(closed: str) -> None:
    script = f'"$0" -m yolofleet data list {closed}'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
