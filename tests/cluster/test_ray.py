"""Two workers of Ray train; one is killed, and the run resumes to the weights of a run that nobody disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import environment, results, small_shapes, yolofleet

pytest.importorskip("ray.train", reason="Ray is not installed (pip install 'yolofleet[ray]')")
SETTINGS = {"model": "yolov5n", "img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "plots": False, "epochs": 6,
            "max_steps": 24, "save_steps": 2, "val_period": 0, "threads": 1, "reduce": "exact"}  # fmt: skip
PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
import ray
from yolofleet.runs.ray_job import torch_trainer

settings, storage = json.loads(sys.argv[1]), Path(sys.argv[2])

def kill_one():
    while not list(storage.glob("*/run/checkpoints/step-*.safetensors")):
        time.sleep(0.1)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::RayTrainWorker") or title.startswith(b"ray::_RayTrainWorker"):
            os.kill(int(folder.name), signal.SIGKILL)
            print("killed", title, flush=True)
            return

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, address="local", _temp_dir=sys.argv[3])
threading.Thread(target=kill_one, daemon=True).start()
result = torch_trainer(settings, workers=2, gpus=False, resources={"CPU": 1}, storage=storage, failures=1).fit()
print("RESULT", json.dumps(result.metrics), flush=True)
assert {p.name for p in Path(result.checkpoint.path).iterdir()} >= {"best.safetensors", "last.safetensors"}
ray.shutdown()
"""


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
            [sys.executable, "-c", PROGRAM, settings, storage, sockets],
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
