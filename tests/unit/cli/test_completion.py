"""Completion of command lines: the scripts of `yolofleet completion`, and what a press of Tab shows."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import called
from pydantic import BaseModel

from yolofleet import Model
from yolofleet.cli.app import APP
from yolofleet.config.schema import TrainConfig
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.schema.verbs import PredictConfig


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


# each loads the script, and prints what Tab makes of `yolofleet train --reduce e`
TAB = {
    "bash": """
        eval "$(yolofleet completion bash)"
        COMP_WORDS=(yolofleet train --reduce e) COMP_CWORD=3
        _yolofleet_completion yolofleet
        echo "${COMPREPLY[@]}"
    """,
    "zsh": r"""
        zmodload zsh/zpty
        zpty -b terminal zsh -f -i
        zpty -w terminal 'autoload -Uz compinit && compinit -u -D && eval "$(yolofleet completion zsh)" && echo re""ady'
        zpty -r terminal output $'*ready\r*'
        zpty -w -n terminal $'yolofleet train --reduce e\t'
        zpty -r terminal output '*--reduce*exact*' && echo exact
        zpty -d terminal
    """,
    "fish": """
        yolofleet completion fish | source
        complete --do-complete "yolofleet train --reduce e"
    """,
}


@pytest.mark.parametrize("shell", TAB)
@pytest.mark.skipif(sys.platform == "win32", reason="shells of POSIX")
def test_a_shell_completes_with_the_script(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    settings = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "xterm",
    }
    done = subprocess.run(
        [shell, "-c", TAB[shell]], env=os.environ | settings, capture_output=True, text=True, timeout=900
    )
    assert done.stdout.split() == ["exact"], done.stderr


@pytest.mark.parametrize(
    ("method", "config"), [("train", TrainConfig), ("stream", PredictConfig), ("tune", TuneConfig)]
)
def test_the_methods_of_python_state_their_settings(method: str, config: type[BaseModel]) -> None:
    """For help() and for completion in notebooks, which ask for the signature."""
    stated = inspect.signature(getattr(Model("yolov5n"), method)).parameters
    defaults = {name: field.default for name, field in config.model_fields.items() if name != "source"}
    assert {name: one.default for name, one in stated.items() if name != "source"} == defaults
    assert "self" not in stated and ("source" in stated) == (method == "stream")
