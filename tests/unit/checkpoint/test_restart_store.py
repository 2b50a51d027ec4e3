"""States in memory that outlive the process that wrote them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from yolofleet.families.weights.format import decode_tensors
from yolofleet.fleet.hosts.agent_process import MemoryFiles
from yolofleet.runs.checkpoint.restart_store import RestartStore
from yolofleet.runs.checkpoint.store import Snapshot, decode_snapshot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory need Linux")
TENSORS = {
    "a": torch.randn(3, 5),
    "half": torch.randn(4).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.arange(7),
    "none": torch.zeros(0, 3),
}


def state(step: int) -> Snapshot:
    return Snapshot(step, {name: (t + step).to(t.dtype) for name, t in TENSORS.items()}, {"seen": step * 10})


def read(memory: RestartStore) -> Snapshot:
    return decode_snapshot(decode_tensors(memory.newest(), "memory"), "memory")


@pytest.fixture
def files() -> Iterator[MemoryFiles]:
    made = MemoryFiles()
    yield made
    made.close()


@pytest.fixture
def memory(files: MemoryFiles) -> Iterator[RestartStore]:
    opened = RestartStore.of(files.environment)
    assert opened is not None
    yield opened
    opened.close()


def test_another_process_reads_what_the_last_one_wrote(files: MemoryFiles, memory: RestartStore) -> None:
    if (child := os.fork()) == 0:
        for step in (3, 4, 5):
            memory.save(state(step))
        memory.finish_writing()
        memory.done(6)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory.step() == 5 and files.steps_done() == 6
    found, wanted = read(memory), state(5)
    assert found.values == wanted.values and found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype


def test_a_state_that_was_not_written_to_its_end_does_not_count(
    files: MemoryFiles, memory: RestartStore
) -> None:
    assert memory.step() == -1 and memory.newest() == b"" and files.steps_done() == -1
    memory.save(state(3))
    memory.save(state(4))
    memory.finish_writing()
    newest = next(slot for slot in memory._slots if os.pread(slot, 8, 0) == (4).to_bytes(8, "little"))
    os.pwrite(newest, (-1).to_bytes(8, "little", signed=True), 0)  # as while the next state is written
    assert memory.step() == 3 and read(memory).step == 3


def test_a_shorter_state_leaves_nothing_of_a_longer_one(memory: RestartStore) -> None:
    for step, size in ((1, 1000), (2, 1000), (3, 10), (4, 10)):
        memory.save(Snapshot(step, {"a": torch.full((size,), float(step))}, {}))
    memory.finish_writing()
    assert read(memory).tensors["a"].tolist() == [4.0] * 10
