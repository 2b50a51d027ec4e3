"""Completion of command lines: the scripts of `yolofleet completion`, and what a press of Tab shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import called

from yolofleet.cli.app import APP


def completed(words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what Tab after ``words`` offers in bash, as ``kind,value``."""
    monkeypatch.setenv("_YOLOFLEET_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    done = called()
    assert not done.err
    return done.out.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("yolofleet da", ["plain,data"]),
        ("yolofleet data ch", ["plain,check"]),
        ("yolofleet train --redu", ["plain,--reduce"]),
        ("yolofleet train --reduce e", ["plain,exact"]),
        ("yolofleet train --epochs 3 --data my", ["file,my"]),
        ("yolofleet train --epochs ", []),
        ("yolofleet completion z", ["plain,zsh"]),
        ("yolofleet nothing --da", []),
    ],
)
def test_tab_offers_verbs_options_choices_and_files(
    words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(words, monkeypatch) == offered


def test_tab_offers_every_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("yolofleet ", monkeypatch) == [f"plain,{verb}" for verb in APP.members]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_names_the_command_and_is_accepted_by_its_shell(shell: str, tmp_path: Path) -> None:
    done = called("completion", shell)
    assert done.code == 0 and "_YOLOFLEET_COMPLETE=" in done.out
    script = tmp_path / "completion"
    script.write_text(done.out, encoding="utf-8")
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True)


def test_another_shell_is_refused_with_the_names_of_those_that_work() -> None:
    done = called("completion", "tcsh")
    assert done.code == 2 and "'bash', 'zsh', 'fish'" in done.err


@pytest.mark.skipif(not shutil.which("bash") or sys.platform == "win32", reason="needs bash")
def test_bash_completes_with_the_script() -> None:
    lines = """
        eval "$(yolofleet completion bash)"
        COMP_WORDS=(yolofleet train --reduce e) COMP_CWORD=3
        _yolofleet_completion yolofleet
        echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", lines], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["exact"], done.stderr
