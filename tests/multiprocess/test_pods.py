"""Processes that join by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone, as the pods of a PyTorchJob."""

from __future__ import annotations

import json
import os
from pathlib import Path

from commands import SMALL, in_ranks, kill, small_shapes, started_ranks


def test_two_pods_train_one_run_with_the_weights_of_one_process(tmp_path: Path) -> None:
    options = [*SMALL, "--epochs", "1", "--val-period", "0", "--reduce", "exact", "--device", "cpu"]
    argv: list[str | Path] = ["train", "--data", small_shapes(tmp_path), *options]
    in_ranks(tmp_path, 1, *argv, "--name", "alone")

    def as_in_a_pod() -> None:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]

    log = tmp_path / "pods.log"
    pods = started_ranks([tmp_path] * 2, *argv, "--name", "pods", home=tmp_path, log=log, first=as_in_a_pod)
    try:
        assert [pod.wait() for pod in pods] == [0, 0], log.read_text()
    finally:
        kill(pods)
    assert "2 processes (env://)" in log.read_text()
    found = [
        json.loads((tmp_path / "runs/train" / name / "results.json").read_text())["weights_sha256"]
        for name in ("alone", "pods")
    ]
    assert found[0] == found[1]
    assert sorted(path.name for path in (tmp_path / "runs/train").iterdir()) == ["alone", "pods"]
