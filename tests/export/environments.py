"""Converters that need an environment of their own: made in a temporary folder, used, deleted.

    python tests/export/environments.py tflite

Each gets this project with the format's extra, at the torch of ``constraints.txt`` (without it, pip would fetch
gigabytes for NVIDIA GPUs), and runs ``tests/export/check.py`` there. Exit code 1 when one of them fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PINNED = ("torch==", "numpy==")  # other pins contradict the converters' own
FREE_GIB = 6


def pins() -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith(PINNED)) + "\n"


def check(format: str, folder: Path) -> bool:
    """Make the environment and run the check in it; says what it costs."""
    if shutil.disk_usage(folder).free < FREE_GIB * 2**30:
        print(f"{format}: not run, less than {FREE_GIB} GiB are free in {folder}", flush=True)
        return False
    began_s = time.monotonic()
    venv.create(folder / format, with_pip=True)
    python = folder / format / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    constraints = folder / "pins.txt"
    constraints.write_text(pins(), encoding="utf-8")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    done = subprocess.run([python, *install, "-e", f"{ROOT}[{format}]"])
    if done.returncode:
        print(f"{format}: not run, pip cannot install it here", flush=True)
        return False
    made_s = time.monotonic() - began_s
    gib = sum(f.stat().st_size for f in (folder / format).rglob("*") if f.is_file()) / 2**30
    print(f"{format}: environment of {gib:.1f} GiB in {made_s:.0f} s", flush=True)
    code = subprocess.run([python, str(ROOT / "tests" / "export" / "check.py"), format]).returncode
    shutil.rmtree(folder / format, ignore_errors=True)
    return code == 0


def main(formats: list[str]) -> int:
    with TemporaryDirectory(prefix="yolofleet-converters-") as temporary:
        return 0 if all([check(format, Path(temporary)) for format in formats]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["tflite"]))
