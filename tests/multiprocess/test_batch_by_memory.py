"""`--batch auto` on two processes with unequal memory: the smaller one decides and is filled, nothing runs out of memory, and
a resumed run has the stored batch.

Two ways limit a process: a limit of its own on its data (ulimit), and a control group, which needs root.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import DEADLINE_S, environment, free_port, results, yolofleet

from yolofleet.config.job import load_config_yaml
from yolofleet.data.datasets.shapes import make_shapes

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="limits the memory of a process by Linux's means"
)
MIB = 1 << 20
LITTLE, MUCH = 450 * MIB, 900 * MIB
# the limit begins when all modules are loaded, so it does not depend on their size
LIMITED = """
import resource, sys
import yolofleet.training.rank.worker
from yolofleet.cli import main

room = int(sys.argv.pop(1))
if room:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    most = 1024 * int(status["VmData"].split()[0]) + room
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
sys.exit(main(sys.argv[1:]))
"""
COMMON = [
    "--img",
    "256",
    "--nominal-batch",
    "40",  # images, so that the memory limits the batch and not the recipe
    "--reduce",
    "exact",
    "--cache",
    "none",
    "--threads",
    "1",
    "--no-plots",
]
RUN = [
    "--model",
    "yolov5n",
    *COMMON,
    "--val-batch",
    "1",
    "--val-period",
    "0",
    "--save-steps",
    "1",
    "--epochs",
    "9",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("auto") / "set", images=40, val_images=2, img=64, seed=3)


@contextmanager
def limited_group(name: str, most: int) -> Iterator[Path]:
    """A control group with a limit on its memory."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory" / "memory.limit_in_bytes").exists()
    group = (root / "memory" if old else root) / f"yolofleet-test-{os.getpid()}-{name}"
    try:
        group.mkdir()
    except OSError as problem:
        pytest.skip(f"control groups cannot be made here: {problem}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(most))
        except OSError as problem:
            pytest.skip(f"control groups cannot be limited here: {problem}")
        yield group
    finally:
        group.rmdir()


def started_by_hand(
    folder: Path, args: list[str], ranks: list[tuple[int, Path | None]]
) -> list[subprocess.Popen[str]]:
    """Start a rank for each (room in bytes or 0, control group), each as if on a machine of its own."""
    place = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port())}  # fmt: skip
    found = []
    for rank, (room, group) in enumerate(ranks):
        join = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"] if group else []
        found.append(
            subprocess.Popen(
                [*join, sys.executable, "-c", LIMITED, str(room), *args],
                cwd=folder,
                env=environment(folder) | place | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return found


def chosen(run: Path) -> tuple[int, int]:
    """The batch of a run, and the measured share of the memory of the rank that limits."""
    told = [(run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    lines = {re.search(r"batch \d+: .*", text)[0] for text in told}  # type: ignore[index]
    (line,) = lines  # every rank says the same
    found = re.fullmatch(r"batch (\d+): (\d+) images fit .* that of rank 1 .*\((\d+)%\)", line)
    assert found, line
    batch, images, share = map(int, found.groups())
    assert batch == 2 * images
    return batch, share


def check_filled(run: Path) -> int:
    batch, share = chosen(run)
    assert 60 <= share <= 100  # of so little memory, one image is a large part
    config, _ = load_config_yaml(run / "config.yaml")
    assert config.value.batch == batch and config.value.micro_batch == batch // 2
    return batch


@needs_linux
@pytest.mark.slow
def test_the_process_with_less_memory_decides_and_a_killed_run_keeps_its_batch(
    tmp_path: Path, data: Path
) -> None:
    args = ["train", "--data", str(data), *RUN, "--max-steps", "2", "--device", "cpu"]
    run = tmp_path / "runs/train/killed"
    ranks = started_by_hand(
        tmp_path, [*args, "--batch", "auto", "--name", run.name], [(MUCH, None), (LITTLE, None)]
    )
    deadline = time.monotonic() + DEADLINE_S
    while not list(run.glob("checkpoints/step-*.safetensors")):
        ended = [rank.communicate()[0] for rank in ranks if rank.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.02)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.communicate()
    batch = check_filled(run)
    yolofleet(tmp_path, "train", "--resume", run, "--device", "cpu")
    given = ["--batch", str(batch), "--micro-batch", str(batch // 2), "--name", "given"]
    yolofleet(tmp_path, *args[:-1], "cpu:2", *given)
    assert results(run)["steps"] == 2
    assert results(run)["weights_sha256"] == results(run.with_name("given"))["weights_sha256"]


@needs_linux
@pytest.mark.slow
def test_two_control_groups_with_unequal_limits_are_not_exceeded(tmp_path: Path, data: Path) -> None:
    with ExitStack() as groups:
        sizes = [250 * MIB + MUCH, 250 * MIB + LITTLE]  # a process with torch has 270 MiB, part of it shared
        made = [groups.enter_context(limited_group(str(k), size)) for k, size in enumerate(sizes)]
        args = ["train", "--data", str(data), *RUN, "--max-steps", "6", "--batch", "auto", "--device", "cpu"]
        ranks = started_by_hand(tmp_path, args, [(0, group) for group in made])
        told = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
        kills = [
            re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            for group in made
            for file in (group / "memory.oom_control", group / "memory.events")
            if file.exists()
        ]
        peaks = [
            int(file.read_text())
            for file in (made[1] / "memory.max_usage_in_bytes", made[1] / "memory.peak")
            if file.exists()
        ]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert all(kill is None or kill[1] == "0" for kill in kills)
    check_filled(tmp_path / "runs/train/exp")
    assert all(peak >= 0.8 * sizes[1] for peak in peaks)
    assert json.loads((tmp_path / "runs/train/exp/results.json").read_text())["steps"] == 6
