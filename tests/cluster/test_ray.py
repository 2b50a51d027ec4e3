"""The script of docs/schedulers.md trains with two workers of Ray. One is killed, and the run goes on to the weights of a
run that nobody disturbed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import environment, results, small_shapes, yolofleet
from guides import ROOT

pytest.importorskip(
    "ray.train", exc_type=ImportError, reason="Ray is not installed (pip install 'yolofleet[ray]')"
)
SETTINGS = {"model": "yolov5n", "img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "plots": False, "epochs": 6,
            "max_steps": 24, "save_every": "2steps", "val_period": 0, "threads": 1, "reduce": "exact"}  # fmt: skip
HERE = {
    '{"data": "/shared/coco.yaml", "model": "yolov5s", "batch": 128}': "json.loads(sys.argv[1])",
    '"/shared/runs"': "sys.argv[2]",
    "workers=8": "workers=2, gpus=False",
    '{"CPU": 4, "GPU": 1}': '{"CPU": 1}',
    "ray.init()": (
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, address='local',"
        " _temp_dir=sys.argv[3])"
    ),
}
BEFORE = """
import json, os, signal, sys, threading, time
from pathlib import Path

def kill_one():
    while not list(Path(sys.argv[2]).glob("*/run/checkpoints/step-*.safetensors")):
        time.sleep(0.1)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            raylet = Path("/proc", parent, "cmdline").read_bytes()
        except OSError:
            continue
        if sys.argv[3].encode() in raylet and title.startswith((b"ray::RayTrainWorker", b"ray::_RayTrainWorker")):
            os.kill(int(folder.name), signal.SIGKILL)
            print("killed", title, flush=True)
            return

threading.Thread(target=kill_one, daemon=True).start()
"""
AFTER = """
print("RESULT", json.dumps(result.metrics), flush=True)
assert {p.name for p in Path(result.checkpoint.path).iterdir()} >= {"best.safetensors", "last.safetensors"}
ray.shutdown()
"""


def program() -> str:
    """The script of the page, made small, while something kills a worker."""
    page = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(import ray\n.*?)```", page, re.DOTALL)
    for there, here in HERE.items():
        assert there in script
        script = script.replace(there, here)
    return BEFORE + script + AFTER


def test_a_lost_worker_is_replaced_and_the_run_resumes(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    storage = tmp_path / "storage"
    storage.mkdir()
    variables = environment(tmp_path) | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_raylet_start_wait_time_s": "120",  # a busy machine
        "RAY_agent_register_timeout_ms": "100000",
    }
    settings = json.dumps(SETTINGS | {"data": str(data)})
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sockets:  # their paths must be short
        done = subprocess.run(
            [sys.executable, "-c", program(), settings, storage, sockets],
            cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert "killed" in done.stdout
    metrics = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
    run = Path(metrics["folder"])
    assert run.parent.parent == storage and "resumed after step" in (run / "logs" / "rank-0.log").read_text()

    words = [word for name, value in SETTINGS.items() if name != "plots"
             for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    yolofleet(tmp_path, "train", "--data", data, "--no-plots", "--name", "one", *words)
    assert results(run)["weights_sha256"] == results(tmp_path / "runs" / "train" / "one")["weights_sha256"]
