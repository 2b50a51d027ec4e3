"""A resume from a state that is not the newest one: what the next resume of the run goes on from."""

from __future__ import annotations

from pathlib import Path

from commands import SMALL, called, small_shapes, working_in

ARGS = [*SMALL, "--threads", "1", "--device", "cpu", "--val-period", "0", "--save-every", "1epochs"]


def states(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_the_states_that_a_run_leaves_are_not_those_of_the_next_resume(tmp_path: Path) -> None:
    small_shapes(tmp_path, images=12).parent.rename(tmp_path / "data")
    run = tmp_path / "runs/train/run"
    with working_in(tmp_path):
        done = called("train", "--data", "data", *ARGS, "--epochs", "2", "--name", "run")
        assert done.code == 0, done.err
        older, newer = states(run)
        done = called("train", "--resume", run / "checkpoints" / older, "--epochs", "1")
    said = done.out + done.err
    assert done.code == 0, said
    assert f"are in {run}/checkpoints-before-1" in said
    assert states(run) == [older] and (run / "checkpoints-before-1" / newer).is_file()
