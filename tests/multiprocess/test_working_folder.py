"""Modules that lie in the working folder are not executed by the processes that a command starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, environment, small_shapes

import yolofleet
from yolofleet.fleet.doctor.machine_facts import CHILD_S, in_child
from yolofleet.fleet.hosts.fleet import Host
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.support.system.children import module_argv

HOSTILE = ("numpy", "yaml", "torch", "cv2", "json", "pickle", "yolofleet", "sitecustomize")
DEADLINE_S = 900


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of hostile modules; each of them would make this file."""
    mark, folder = tmp_path / "executed", tmp_path / "hostile"
    folder.mkdir()
    code = f"open({str(mark)!r}, 'a').write(__name__ + '\\n')\nraise SystemExit('executed ' + __name__)\n"
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(code)
    (folder / "yolofleet").mkdir()
    (folder / "yolofleet" / "__init__.py").write_text(code)
    monkeypatch.chdir(folder)
    return mark


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_training_processes_execute_nothing_of_the_working_folder(tmp_path: Path, mark: Path) -> None:
    data = small_shapes(tmp_path)
    steps = ("--epochs", "1", "--max-steps", "1", "--threads", "1", "--val-period", "0")
    program = Path(sys.executable).with_name("yolofleet")
    run(program, "train", "--data", data, *SMALL, *steps, "--device", "cpu:2", folder=tmp_path)
    assert not mark.exists()
    if sys.version_info < (3, 11):
        return
    run(program, "data", "check", data, "--decode", folder=tmp_path)
    assert not mark.exists()


def test_the_schedulers_agent_starts_training_without_the_working_folder(tmp_path: Path, mark: Path) -> None:
    agent = module_argv(
        "yolofleet.fleet.launch.schedulers.agent", "--nproc-per-node=2", "-m", "yolofleet", "train", "--help"
    )
    assert "--data" in run(*agent, folder=tmp_path)
    assert not mark.exists()


def test_probes_of_the_doctor_execute_nothing_of_the_working_folder(
    mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHILD_S, "libraries", DEADLINE_S)
    libraries = in_child("libraries", {})
    assert "problem" not in libraries and not mark.exists()


def test_the_host_agent_executes_nothing_of_the_working_folder(mark: Path) -> None:
    remote = Remote(Host("localhost", "cpu"))
    assert remote.open(DEADLINE_S).platform == "linux"
    remote.close()
    assert not mark.exists()


def test_children_use_this_package_when_the_working_folder_was_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cd src; python -m yolofleet``, where another copy is installed."""
    package = tmp_path / "src" / "yolofleet"
    (package / "support" / "system").mkdir(parents=True)
    for name in (
        "__init__.py",
        "support/__init__.py",
        "support/system/__init__.py",
        "support/system/children.py",
    ):
        shutil.copy(Path(yolofleet.__file__).parent / name, package / name)
    (package / "__main__.py").write_text(
        "import os, subprocess, yolofleet.support.system.children as c\n"
        "subprocess.run(c.module_argv('yolofleet.where'), env=c.module_environment(os.environ), check=True)\n"
    )
    (package / "where.py").write_text("print(__file__)")
    monkeypatch.chdir(package.parent)
    assert run(sys.executable, "-m", "yolofleet", folder=tmp_path).strip() == str(package / "where.py")
