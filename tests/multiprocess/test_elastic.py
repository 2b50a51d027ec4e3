"""Agents of the user's torchrun whose number changes during a run (``--nnodes=1:2``): real agents on addresses of loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import (
    DEADLINE_S,
    SMALL,
    environment,
    family,
    free_port,
    in_ranks,
    results,
    small_shapes,
    wait_until,
)

from yolofleet.support.system.proc import rank_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses all addresses of loopback, and /proc")
STEPS = 150
ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--save-every", "0min"]
SLOW = """
import time
from pathlib import Path
from yolofleet import Callback

class Slow(Callback):
    def step(self, step):
        if not Path(__file__).with_name("fast").exists():
            time.sleep(0.5)
"""


def train(folder: Path, name: str, steps: int = STEPS) -> list[str]:
    """A slow training, until ``folder`` has a file ``fast``."""
    data, slow = next(folder.rglob("data.yaml")), folder / "slow.py"
    job = ["train", "--data", str(data), *ARGS, "--callbacks", f"{slow}:Slow", "--epochs", "1000"]
    return [*job, "--max-steps", str(steps), "--name", name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "slow.py").write_text(SLOW)
    (folder / "fast").touch()
    small_shapes(folder)
    in_ranks(folder, 1, *train(folder, "quiet"))
    return folder


Agent = subprocess.Popen[bytes]


class Agents:
    """Torchrun's agents of one job, and what they print."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.port = folder, name, free_port()
        self.started: list[Agent] = []

    def start(self, address: str, *more: str, steps: int = STEPS, work: Path | None = None) -> Agent:
        """Start an agent; the first one has the store. Torch gives rank 0 to the least address."""
        store = f"is_host={int(not self.started)},last_call_timeout=1,keep_alive_interval=1"
        torchrun = f"--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=job --rdzv-conf={store}"
        torchrun += f" --rdzv-endpoint=127.0.0.1:{self.port} --local-addr={address} -m yolofleet"
        job = [*train(self.folder, self.name, steps), "--device", "cpu", *more]
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), *job],
                cwd=work or self.folder,
                env=environment(self.folder) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
            )
        self.started.append(agent)
        return agent

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, times: int = 1) -> None:
        wait_until(lambda: len(re.findall(words, self.said())) >= times or self.started[0].poll() is not None)
        assert len(re.findall(words, self.said())) >= times, self.said()

    def kill(self, agent: Agent) -> None:
        for pid in family(agent.pid) if agent.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        agent.wait()


@contextmanager
def agents(folder: Path, name: str) -> Iterator[Agents]:
    (folder / "fast").unlink(missing_ok=True)
    job = Agents(folder, name)
    try:
        yield job
    finally:
        for agent in job.started:
            job.kill(agent)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["127.0.0.1", "127.0.0.3"])
def test_a_machine_joins_is_lost_and_is_replaced(place: Path, first: str) -> None:
    with agents(place, f"joined {first}") as job:
        survivor = job.start(first)
        job.wait_for("epoch 2/")
        lost = job.start("127.0.0.2")
        job.wait_for("started again as 2 processes")
        job.wait_for(r"started again as 2 processes[^$]*epoch \d+/")
        job.kill(lost)
        job.wait_for(r"started again as 1 process[^$]*epoch \d+/")
        new = job.start("127.0.0.2")
        job.wait_for(
            r"started again as 2 processes[^$]*epoch \d+/[^$]*started again as 2 processes[^$]*epoch \d+/"
        )
        (place / "fast").touch()
        assert [agent.wait(DEADLINE_S) for agent in (survivor, new)] == [0, 0], job.said()
    runs = place / "runs" / "train"
    found, quiet = results(runs / job.name), results(runs / "quiet")
    assert found["weights_sha256"] == quiet["weights_sha256"], job.said()
    assert not [*runs.glob(f"{job.name}?*"), *runs.glob("*/checkpoints-before*")], "it did not go on"
    epochs = [
        int(n) for n in re.findall(r"^(\d+),", (runs / job.name / "results.csv").read_text(), re.MULTILINE)
    ]
    assert epochs == [*range(1, len(epochs) + 1)]


@pytest.mark.slow
def test_a_machine_leaves_in_order(place: Path) -> None:
    with agents(place, "left") as job:
        stays, leaves = job.start("127.0.0.2"), job.start("127.0.0.1")
        job.wait_for("epoch 2/")
        leaves.terminate()
        job.wait_for("started again as 1 process")
        (place / "fast").touch()
        assert stays.wait(DEADLINE_S) == 0, job.said()
    runs = place / "runs" / "train"
    assert results(runs / job.name)["weights_sha256"] == results(runs / "quiet")["weights_sha256"], job.said()


@pytest.mark.slow
def test_a_machine_that_joins_sets_aside_a_run_of_the_same_name_on_its_disk(
    place: Path, tmp_path: Path
) -> None:
    """Its state has more steps and fits, and its rank becomes rank 0."""
    in_ranks(tmp_path, 1, *train(place, "two-disks", STEPS + 10))
    with agents(place, "two-disks") as job:
        first = job.start("127.0.0.2")
        job.wait_for("epoch 2/")
        second = job.start("127.0.0.1", work=tmp_path)
        job.wait_for("started again as 2 processes")
        (place / "fast").touch()
        assert [agent.wait(DEADLINE_S) for agent in (first, second)] == [0, 0], job.said()
    runs, own = place / "runs" / "train", tmp_path / "runs" / "train" / job.name
    assert results(own)["weights_sha256"] == results(runs / "quiet")["weights_sha256"], job.said()
    assert (own / "checkpoints-before-1" / f"step-{STEPS + 10:08}.safetensors").exists()
    epochs = [int(row.partition(",")[0]) for row in (own / "results.csv").read_text().splitlines()[1:]]
    assert epochs == [*range(1, len(epochs) + 1)]


TWO_RUNS = """
import sys
from yolofleet.cli import main
for _ in range(2):
    if code := main(sys.argv[1:]):
        sys.exit(code)
"""


@pytest.mark.slow
def test_a_script_that_trains_twice_goes_on_with_the_second_run(place: Path) -> None:
    (place / "twice.py").write_text(TWO_RUNS)
    (place / "fast").unlink(missing_ok=True)
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=1"),
        "twice.py",
    ]
    runs = place / "runs" / "train"
    with subprocess.Popen(
        [sys.executable, *torchrun, *train(place, "pair", 12), "--save-every", "1steps", "--device", "cpu"],
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        wait_until(lambda: [*runs.glob("pair2/checkpoints/step-*")], agent)
        os.kill(next(pid for pid in family(agent.pid) if rank_of(pid) == 0), signal.SIGKILL)
        (place / "fast").touch()
        said = agent.communicate(timeout=DEADLINE_S)[0]
    assert agent.returncode == 0 and "resumed after step" in said, said
    assert sorted(path.name for path in runs.glob("pair*")) == ["pair", "pair2"]
    pair = [results(runs / name)["weights_sha256"] for name in ("pair", "pair2")]
    assert pair[0] == pair[1]


@pytest.mark.slow
def test_a_new_torchrun_does_not_go_on_with_the_run_of_an_earlier_one(place: Path) -> None:
    (place / "fast").touch()
    for steps in (6, 4):
        with agents(place, "twice") as job:
            (place / "fast").touch()
            assert job.start("127.0.0.1", "--exist-ok", steps=steps).wait(DEADLINE_S) == 0, job.said()
    assert "an earlier run in this folder: its files are in " in job.said()
    assert "started again" not in job.said()
    states = (place / "runs" / "train" / "twice" / "checkpoints").iterdir()
    assert max(path.name for path in states) == "step-00000004.safetensors"
