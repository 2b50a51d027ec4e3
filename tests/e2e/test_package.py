"""The sdist and the wheel: their contents, and the command in a clean environment, outside of the checkout.

`make test-slow FILES=tests/e2e/test_package.py` runs them. They download the dependencies with pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL

import yolofleet

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "yolofleet"
DATA_ENDINGS = {".py", ".pyi", ".yaml", ".typed", ".html", ".css", ".js", ".txt"}
DEADLINE_S = 1800

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the environment's folders are those of POSIX"),
]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "YOLOFLEET"))
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist from a copy of the tracked files, and the wheel from the sdist; return both paths."""
    place = tmp_path_factory.mktemp("build")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        (place / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / "copy" / name)
    run(sys.executable, "-m", "build", "--outdir", place / "dist", cwd=place / "copy")
    (sdist,), (wheel,) = (place / "dist").glob("*.tar.gz"), (place / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def clean_python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with its dependencies in a new environment; return its Python."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, built[1], cwd=folder)
    return python


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    _, wheel = built
    tracked = subprocess.run(
        ["git", "ls-files", PACKAGE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {
        str(Path(name).relative_to("src"))
        for name in tracked.stdout.splitlines()
        if Path(name).suffix in DATA_ENDINGS
    }
    assert {Path(name).suffix for name in tracked.stdout.splitlines()} == {*DATA_ENDINGS, ".c", ".h"}
    inside = {name for name in names_of(wheel) if ".dist-info/" not in name}
    assert {name for name in inside if not name.endswith(".so")} == expected
    assert len([name for name in inside if name.endswith(".so")]) == 3, "all extensions are compiled"


def test_the_sdist_holds_what_a_build_needs_and_no_tests(built: tuple[Path, Path]) -> None:
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "NOTICE", "README.md"} <= names
    sources = ("support/extension.h", "data/input/_pixels.c", "data/images/_jpeg.c", "data/geometry/_nms.c")
    assert {f"src/yolofleet/{name}" for name in sources} <= names
    assert not {name.split("/")[0] for name in names} & {"tests", "benchmarks", "docs", "runs"}


def test_the_metadata_is_complete(built: tuple[Path, Path]) -> None:
    _, wheel = built
    said = metadata(wheel)
    assert said["Version"] == yolofleet.__version__
    assert said["License-Expression"] == "Apache-2.0 AND MIT"
    assert said.get_all("License-File") == [
        *("LICENSE", "NOTICE"),
        "src/yolofleet/runs/report/assets/uPlot-LICENSE.txt",
    ]
    assert said["Requires-Python"] == ">=3.10"
    assert said["Description-Content-Type"] == "text/markdown" and said["Summary"]
    assert "Programming Language :: Python :: 3.14" in said.get_all("Classifier", [])
    assert not said.get_all("Project-URL"), "add the addresses of the hosting here and to CONTRIBUTING.md"


def use(python: Path, folder: Path) -> str:
    """Make data, train and predict with the installed command; return its output."""
    command = python.parent / "yolofleet"
    variables = {"YOLOFLEET_CACHE": str(folder / "cache"), "YOLOFLEET_OFFLINE": "1"}
    assert run(command, "--version", cwd=folder, **variables).strip() == f"yolofleet {yolofleet.__version__}"
    assert "Verbs:" in run(command, "--help", cwd=folder, **variables)
    size = ("--images", "16", "--val-images", "4", "--img", "64")
    said = run(command, "data", "make", "shapes", "--out", "my data", *size, cwd=folder, **variables)
    length = ("--epochs", "1", "--threads", "1", "--device", "cpu:2", "--recipe", "demo")
    said += run(command, "train", "--data", "my data/data.yaml", *SMALL, *length, cwd=folder, **variables)
    weights = "runs/train/exp/weights/best.safetensors"
    source = ("--source", "my data/images/val", "--img", "64")
    said += run(command, "predict", "--weights", weights, *source, cwd=folder, **variables)
    assert len(list((folder / "runs" / "predict" / "exp").glob("*.png"))) == 4
    return said


def test_the_installed_command_trains_outside_of_the_checkout(clean_python: Path, tmp_path: Path) -> None:
    where = run(clean_python, "-c", "import yolofleet; print(yolofleet.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean_python.parents[1])
    assert "C compiler" not in use(clean_python, tmp_path)


def test_the_sdist_installs_and_trains_without_a_c_compiler(
    built: tuple[Path, Path], clean_python: Path, tmp_path: Path
) -> None:
    sdist, _ = built
    pip = (
        clean_python,
        *("-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", "--no-cache-dir"),
    )
    run(*pip, sdist, cwd=tmp_path, CC="/bin/false")
    installed = Path(
        run(clean_python, "-c", "import yolofleet; print(yolofleet.__path__[0])", cwd=tmp_path).strip()
    )
    assert not list(installed.rglob("*.so"))
    assert "C compiler" in use(clean_python, tmp_path)
