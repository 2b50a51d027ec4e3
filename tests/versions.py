"""Install the wheel with the oldest or the newest dependencies that pyproject.toml allows, and run the quick tests on it.

``python tests/versions.py oldest`` makes build/versions/oldest-3.10 (or another Python's), installs, and tests there.
Python is the one that runs this file. Arguments of pytest may follow instead of the quick tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# units, the record of what users rely on, and trainings with one and with two processes
QUICK_TESTS = ["tests/unit", "tests/golden", "tests/multiprocess/test_training.py"]
TOOLS = ["pytest>=8.4", "pytest-timeout", "pytest-xdist", "pycocotools>=2.0.8", "kubernetes-validate>=1.37"]
PARTS_OF_A_BUILD = ["pyproject.toml", "README.md", "LICENSE", "NOTICE"]


def lower_bounds() -> dict[str, str]:
    """Return the lowest allowed version of each dependency, such as ``{"torch": "2.6"}``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    inner = text.split("\ndependencies = [")[1].split("]")[0]
    found = dict(re.findall(r'"([\w-]+)>=([\d.]+)', inner))
    assert len(found) == inner.count('"') // 2, "each dependency needs a lower bound"
    return found


def installed_wheel(folder: Path, constraints: list[str]) -> Path:
    """Make an environment in ``folder`` and install the wheel with its dependencies there; return its Python."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    source = folder / "source"  # a copy: setuptools packs what an earlier build left in the checkout
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    )
    for name in PARTS_OF_A_BUILD:
        shutil.copy(ROOT / name, source)
    limits = folder / "constraints.txt"
    limits.write_text("\n".join(constraints), encoding="utf-8")
    pip: list[str | Path] = [
        python,
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        "--constraint",
        limits,
    ]
    subprocess.run([*pip, source, *TOOLS], check=True)
    return python


def main(dependencies: str, *pytest_options: str) -> int:
    bounds = lower_bounds()
    constraints = (
        [f"{name}=={lowest}.*" for name, lowest in bounds.items()] if dependencies == "oldest" else []
    )
    folder = ROOT / "build" / "versions" / f"{dependencies}-{sys.version_info.major}.{sys.version_info.minor}"
    python = installed_wheel(folder, constraints)
    versions = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {[*bounds]}), sep=', ')"
    subprocess.run([python, "-c", f"import sys; print('Python', sys.version); {versions}"], check=True)
    command: list[str | Path] = [
        python,
        *("-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"),
    ]
    quick = ["-m", "not slow and not gpu and not cluster and not store"]
    environment = {"OMP_NUM_THREADS": "1"} | {
        k: v for k, v in os.environ.items() if not k.startswith("PYTHON")
    }
    return subprocess.run(
        [*command, *quick, *(pytest_options or QUICK_TESTS)], cwd=ROOT, env=environment
    ).returncode


if __name__ == "__main__":
    assert sys.argv[1:2] in (["oldest"], ["newest"]), __doc__
    raise SystemExit(main(*sys.argv[1:]))
