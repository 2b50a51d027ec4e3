"""A file on disk is either whole and verified or not used."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from yolofleet.families.weights import format as file_format
from yolofleet.families.weights.format import read_tensors, write_tensors
from yolofleet.runs.checkpoint.store import (
    CheckpointStore,
    Snapshot,
    load_snapshot,
    set_aside,
    set_aside_later,
)
from yolofleet.support.errors import CheckpointError, NonFiniteError, NumericsError, StorageError

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


def test_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"n": 1})
    before = path.read_bytes()

    def full(*_: object) -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_format, "tensor_pieces", full)
    with pytest.raises(StorageError, match="No space left"):
        write_tensors(path, TENSORS, {"n": 2})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_what_the_disk_wrote_wrongly_replaces_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"n": 1})
    before, pieces = path.read_bytes(), file_format.tensor_pieces

    def flip(*given: Any) -> Iterator[bytes]:
        content = bytearray(b"".join(pieces(*given)))
        content[-3] ^= 1
        yield bytes(content)

    monkeypatch.setattr(file_format, "tensor_pieces", flip)
    with pytest.raises(CheckpointError, match="damaged"):
        write_tensors(path, TENSORS, {"n": 2})
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the names of open files")
def test_content_and_name_are_flushed_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, flush = [], os.fsync

    def record(file: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{file}").readlink())
        flush(file)

    monkeypatch.setattr(os, "fsync", record)
    write_tensors(tmp_path / "t.safetensors", TENSORS, {})
    content, name = flushed
    assert content.parent == tmp_path and content.name.endswith(".tmp") and name == tmp_path


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


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    bad = {
        "a": torch.ones(3),
        "b": torch.tensor([[1.0, value]]).half(),
        "c": torch.tensor(value),
        "d": torch.zeros(0),
    }
    with pytest.raises(NumericsError, match=r"t\.safetensors has NaN or infinity in b and 1 more tensors"):
        write_tensors(tmp_path / "t.safetensors", bad, {})
    assert not list(tmp_path.iterdir())
    large = {"w": torch.full((3,), 3e38)}  # finite, but their sum is not
    write_tensors(tmp_path / "t.safetensors", large, {})
    assert torch.equal(read_tensors(tmp_path / "t.safetensors")[0]["w"], large["w"])


def test_a_restart_passes_over_a_state_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(1))
    store.flush()
    monkeypatch.setattr(file_format, "check_finite", lambda *_: None)  # as in earlier versions
    store.save(replace(snapshot(2), tensors={"w": torch.full((4,), float("nan"))}))
    store.flush()
    assert [e.step for e in store.entries()] == [2, 1]
    path, passed_over = store.newest()
    assert load_snapshot(path).step == 1
    assert len(passed_over) == 1 and "step-00000002.safetensors has NaN or infinity in w" in passed_over[0]
    with pytest.raises(NonFiniteError):
        load_snapshot(store.entries()[0].path)


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


def test_a_folder_deleted_while_a_state_is_read_back_is_the_disks_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_a_deletion(path: Path) -> Any:
        path.unlink()
        return read_tensors(path)

    monkeypatch.setattr(file_format, "read_tensors", after_a_deletion)
    with pytest.raises(StorageError):  # a run then writes its folder again
        write_tensors(tmp_path / "t.safetensors", TENSORS, {})


def test_weights_are_not_a_training_state(tmp_path: Path) -> None:
    write_tensors(tmp_path / "best.safetensors", TENSORS, {"family": "yolov5"})
    with pytest.raises(CheckpointError, match="--weights"):
        load_snapshot(tmp_path / "best.safetensors")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_pruning_goes_by_the_order_of_writing_and_keeps_the_newest(tmp_path: Path) -> None:
    """Resumed from an older state while later ones lie there: the state just written must stay."""
    first = CheckpointStore(tmp_path)
    for step in (30, 40):
        first.save(snapshot(step))
    first.flush()
    second = CheckpointStore(tmp_path)
    for step, left in ((11, [11, 40]), (12, [11, 12]), (13, [12, 13])):
        second.save(snapshot(step))
        second.flush()
        assert sorted(entry.step for entry in second.entries()) == left


def test_a_run_that_goes_on_from_an_older_state_leaves_the_later_ones(tmp_path: Path) -> None:
    """A later resume of the folder takes the newest state, which must be of the run that went on."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=9)
    for step in (2, 4, 6):
        store.save(snapshot(step))
        store.flush()
    assert set_aside_later(tmp_path, 6) is None
    aside = set_aside_later(tmp_path, 2)
    assert aside == tmp_path / "checkpoints-before-1" and len(names_in(aside)) == 2
    store.save(snapshot(3))
    store.flush()
    assert load_snapshot(store.newest()[0]).step == 3
    assert set_aside_later(tmp_path, 2) == tmp_path / "checkpoints-before-2"


def test_states_and_weights_of_an_earlier_run_are_moved_aside_and_kept(tmp_path: Path) -> None:
    for time in (1, 2):
        for folder in ("checkpoints", "weights"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "step-00000009.safetensors").write_text(str(time))
        kept = set_aside(tmp_path)
        assert [path.name for path in kept] == [f"checkpoints-before-{time}", f"weights-before-{time}"]
        assert all((path / "step-00000009.safetensors").read_text() == str(time) for path in kept)
        assert names_in(tmp_path / "checkpoints") == names_in(tmp_path / "weights") == []
    assert set_aside(tmp_path) == []  # nothing in them
    assert set_aside(tmp_path / "new") == []


def test_a_link_in_the_place_of_the_states_folder_is_refused(tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other")
    for step in (1, 2):
        other.save(snapshot(step))
    other.flush()
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "other")
    store = CheckpointStore(run / "checkpoints", keep=1)
    store.save(snapshot(7))
    for use in (store.flush, store.newest, lambda: set_aside(run)):
        with pytest.raises(CheckpointError, match="symbolic link"):
            use()
    assert [entry.step for entry in other.entries()] == [2, 1]


@pytest.mark.parametrize("kind", ["dangling link", "link", "pipe", "folder"])
def test_what_is_no_regular_file_among_the_states_is_passed_over(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(snapshot(3))
    store.flush()
    odd = tmp_path / "checkpoints" / "step-00000009.safetensors"
    if kind == "folder":
        odd.mkdir()
    elif kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(
            tmp_path / ("nowhere" if kind == "dangling link" else "checkpoints/step-00000003.safetensors")
        )
    assert [entry.step for entry in store.entries()] == [3]
    assert store.newest()[0].name == "step-00000003.safetensors"
    if kind == "pipe":
        with pytest.raises(CheckpointError, match="named pipe"):
            load_snapshot(odd)


def test_states_get_the_mode_of_the_umask(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(snapshot(3))
    store.flush()
    (tmp_path / "plain").write_bytes(b"")
    assert store.entries()[0].path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    "header",
    [
        {"step": "[" * 100_000 + "]" * 100_000, "state": "{}"},
        {"step": "9" * 5000, "state": "{}"},
        {"step": "[]", "state": "{}"},
        {"step": '"abc"', "state": "{}"},
        {"step": "Infinity", "state": "{}"},
        {"step": "-1", "state": "{}"},
        {"step": "1", "state": "[]"},
        {"step": "1", "state": "5"},
        {"step": "1"},
        {"step": "{"},
    ],
    ids=lambda header: " ".join(f"{key} {text[:8]}" for key, text in header.items()),
)
def test_a_forged_state_is_a_message(tmp_path: Path, header: dict[str, str]) -> None:
    from safetensors.torch import save

    digest = file_format.tensors_sha256(TENSORS, header)
    path = tmp_path / "step-00000001.safetensors"
    path.write_bytes(save(TENSORS, {**header, file_format.DIGEST: digest}))
    with pytest.raises(CheckpointError):
        load_snapshot(path)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        CheckpointStore(tmp_path).newest()
