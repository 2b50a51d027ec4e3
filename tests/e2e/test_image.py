"""The image of packaging/docker/Dockerfile, and the two containers of its compose.yaml, with a real engine.

Build the image first (docs/schedulers.md says how). The engine is Docker, or podman with podman-compose.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "yolofleet:cpu"
USER = 1000
DEADLINE_S = 600


def has_image(engine: str) -> bool:
    if not shutil.which(engine):
        return False
    return subprocess.run([engine, "image", "inspect", IMAGE], capture_output=True).returncode == 0


ENGINE = next((name for name in ("docker", "podman") if has_image(name)), "")
COMPOSE = ["docker", "compose"] if ENGINE == "docker" else ["podman-compose"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ENGINE, reason=f"no engine has the image {IMAGE}")]


def contained(folder: Path, *command: str) -> str:
    """Run a command of the image in a container without rights, network or a writable file system, and return its output."""
    rights = [
        *("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all"),
        "--security-opt=no-new-privileges",
    ]
    done = subprocess.run(
        [
            ENGINE,
            *("run", "--rm", "--init"),
            "--shm-size=1g",
            *rights,
            f"--volume={folder}:/data",
            IMAGE,
            *command,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of the image's user with a data set."""
    tmp_path.chmod(0o755)
    made = tmp_path / "data"
    made.mkdir()
    os.chown(made, USER, USER)
    contained(made, "data", "make", "shapes", "--out=my-data", "--images=32", "--val-images=8")
    yield made


def test_a_container_without_rights_trains_as_another_user(folder: Path) -> None:
    small = ["--model=yolov5n", "--img=160", "--batch=8", "--epochs=1", "--device=cpu:2", "--workers=1"]
    contained(folder, "train", "--data=my-data/data.yaml", *small, "--name=one")
    run = folder / "runs" / "train" / "one"
    assert json.loads((run / "results.json").read_text())["weights_sha256"]
    assert {path.stat().st_uid for path in run.rglob("*")} == {USER}
    picture = next((folder / "my-data" / "images" / "val").iterdir()).relative_to(folder)
    contained(folder, "predict", "--weights=runs/train/one/weights/best.safetensors", f"--source={picture}")


@pytest.mark.skipif(not shutil.which(COMPOSE[0]), reason="no compose command")
def test_two_containers_are_stopped_and_resume(folder: Path, tmp_path: Path) -> None:
    text = (ROOT / "packaging/docker" / "compose.yaml").read_text(encoding="utf-8")
    file = tmp_path / "compose.yaml"

    def compose(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMPOSE, "--file", str(file), *words],
            env={**os.environ, "DATA": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )

    run = folder / "runs" / "train" / "compose"
    try:
        file.write_text(text.replace("--epochs=20", "--epochs=1000"), encoding="utf-8")
        compose("up", "--detach")
        logs = subprocess.Popen(
            [*COMPOSE, "--file", str(file), "logs", "--follow", "node-0"],
            env={**os.environ, "DATA": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert logs.stdout is not None
        for line in logs.stdout:
            if "epoch 2/1000" in line:
                break
        compose("stop")
        said = logs.communicate(timeout=DEADLINE_S)[0]
        assert not (run / "results.json").exists()
        stopped = json.loads((run / "logs" / "status.json").read_text())
        assert stopped["state"] == "stopped" and stopped["why"], said
        compose("down")
        last = int(stopped["epoch"])
        file.write_text(text.replace("--epochs=20", f"--epochs={last + 2}"), encoding="utf-8")
        done = compose("up")
        assert json.loads((run / "results.json").read_text())["weights_sha256"], done.stdout
        rows = (run / "results.csv").read_text().splitlines()[1:]
        assert [int(row.split(",")[0]) for row in rows] == list(range(1, last + 3)), done.stdout
    finally:
        compose("down")
