"""A file on disk is either whole and verified or not used."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from yolofleet.checkpoint import format as file_format
from yolofleet.checkpoint.format import read_tensors, write_tensors
from yolofleet.checkpoint.store import CheckpointStore, Snapshot, load_snapshot
from yolofleet.errors import CheckpointError, StorageError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b/c": torch.tensor(7)}


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, {"w": torch.full((4,), float(step))}, {"images_seen": step * 8, "note": "größe"})


def test_round_trip_keeps_bits_types_and_values(tmp_path: Path) -> None:
    path = tmp_path / "with space" / "t.safetensors"
    write_tensors(path, TENSORS, {"names": ["a", "b'ü"], "n": 3})
    tensors, header = read_tensors(path)
    assert header == {"names": ["a", "b'ü"], "n": 3}
    assert all(torch.equal(tensors[n], t) and tensors[n].dtype == t.dtype for n, t in TENSORS.items())
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]  # nothing temporary stays


def test_channels_last_and_shared_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(48.0).reshape(1, 3, 4, 4)
    both = {"x": base.to(memory_format=torch.channels_last), "y": base[:, :1]}
    write_tensors(tmp_path / "t.safetensors", both, {})
    tensors, _ = read_tensors(tmp_path / "t.safetensors")
    assert torch.equal(tensors["x"], base) and torch.equal(tensors["y"], base[:, :1])


@pytest.mark.parametrize("where", ["cut", "flipped bit", "empty", "text", "changed header"])
def test_damage_is_noticed(tmp_path: Path, where: str) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"n": 3})
    content = bytearray(path.read_bytes())
    if where == "cut":
        content = content[: len(content) // 2]
    elif where == "flipped bit":
        content[-3] ^= 1
    elif where == "empty":
        content = bytearray()
    elif where == "text":
        content = bytearray(b"not a checkpoint")
    else:
        content = content.replace(b'"n":"3"', b'"n":"4"')
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_tensors(path)


def test_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"n": 1})
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_format, "save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        write_tensors(path, TENSORS, {"n": 2})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_restart_falls_back_to_the_newest_whole_state_and_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (5, 10, 15, 20):
        store.save(snapshot(step))
    store.flush()
    assert [e.step for e in store.entries()] == [20, 15, 10]  # the oldest went
    newest = store.entries()[0].path
    newest.write_bytes(newest.read_bytes()[:-5])
    path, passed_over = store.newest()
    found = load_snapshot(path)
    assert found.step == 15 and found.values["images_seen"] == 120
    assert len(passed_over) == 1 and "step-00000020" in passed_over[0]


def test_without_any_whole_state_all_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        store.newest()
    store.save(snapshot(1))
    store.flush()
    store.entries()[0].path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="step-00000001"):
        store.newest()


def test_a_failed_background_write_is_told_at_the_next_save(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    store = CheckpointStore(blocker / "checkpoints")
    store.save(snapshot(1))
    with pytest.raises(StorageError):
        store.save(snapshot(2))


def test_weights_are_not_a_training_state(tmp_path: Path) -> None:
    write_tensors(tmp_path / "best.safetensors", TENSORS, {"family": "yolov5"})
    with pytest.raises(CheckpointError, match="--weights"):
        load_snapshot(tmp_path / "best.safetensors")
