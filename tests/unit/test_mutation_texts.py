"""The code has the lines that ``make mutations`` changes, so a change of the code also changes the list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).resolve().parents[1] / "mutation" / "run.py"


def test_the_code_has_the_text_of_every_mutation() -> None:
    done = subprocess.run([sys.executable, RUN, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
