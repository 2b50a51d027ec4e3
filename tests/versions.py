"""Run quick tests against the installed wheel with the oldest or the newest dependencies that pyproject.toml allows.

``python tests/versions.py oldest`` makes build/env-oldest-3.10 (or another Python's), installs, and tests there.
Python is the one that runs this file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the parts that meet other packages: settings, command line, tensors, files, processes
TESTS = [
    *("tests/unit/config", "tests/unit/cli", "tests/unit/geometry", "tests/unit/losses", "tests/unit/models"),
    *("tests/unit/parallel", "tests/unit/train", "tests/unit/checkpoint", "tests/unit/data"),
    *("tests/multiprocess/test_training.py", "tests/multiprocess/test_reduction.py"),
]


def bounds(dependencies: str) -> list[str]:
    """Return a constraint for each dependency, such as ``torch==2.6.*``, or none for the newest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    inner = text.split("\ndependencies = [")[1].split("]")[0]
    floors = re.findall(r'"([\w-]+)>=([\d.]+)', inner)
    assert len(floors) == inner.count('"') // 2, "each dependency needs a lower bound"
    return [f"{name}=={floor}.*" for name, floor in floors] if dependencies == "oldest" else []


def main(dependencies: str) -> int:
    here = f"{dependencies}-{sys.version_info.major}.{sys.version_info.minor}"
    folder = ROOT / "build" / f"env-{here}"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(bounds(dependencies)), encoding="utf-8")
    pip = [
        str(python),
        *["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"],
        str(constraints),
    ]
    subprocess.run([*pip, str(ROOT), "pytest>=8.4", "pytest-timeout", "pytest-xdist"], check=True)
    subprocess.run([python, "-m", "pip", "list"], check=True)
    command = [str(python), *["-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]]
    return subprocess.run(
        [*command, "-m", "not slow and not gpu and not cluster", *TESTS], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    assert sys.argv[1:] in (["oldest"], ["newest"]), __doc__
    raise SystemExit(main(sys.argv[1]))
