"""Gradients that are not finite: what ``--on-nan`` leaves out is the same for every fleet and after a resume."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
from commands import events_of, in_ranks, results, train_args, yolofleet
from safetensors.torch import load_file

from yolofleet.families.weights.format import non_finite

FAULTY = """
import os
import torch
from yolofleet import Callback

class Faulty(Callback):
    \"\"\"After N steps, FAULT=overflow:N makes the activations of the next step infinite, and FAULT=weight:N a weight. With
    overflow:N,M it happens twice.\"\"\"

    changes_training = True

    def start(self, run):
        self.state, self.hook = run.state, None
        self.kind, _, steps = os.environ.get("FAULT", "").partition(":")
        self.steps = [int(step) for step in steps.split(",") if step]

    def step(self, step):
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if self.state.step not in self.steps:
            return
        self.steps.remove(self.state.step)
        if self.kind == "weight":
            with torch.no_grad():
                next(self.state.model.parameters())[0, 0, 0, 0] = float("inf")
        else:
            first = next(m for m in self.state.model.modules() if isinstance(m, torch.nn.Conv2d))
            self.hook = first.register_forward_hook(lambda module, inputs, out: out * float("inf"))
"""


def faulty(folder: Path, fault: str, *args: str | Path, code: int = 0, ranks: int = 1) -> str:
    """Train with FAULTY in the folder, without a launcher; return what the ranks printed."""
    (folder / "faulty.py").write_text(FAULTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", fault)
        return in_ranks(folder, ranks, *args, "--callbacks", "faulty.py:Faulty", code=code)


def bad_tensors(run: Path) -> list[str]:
    """The tensors with NaN or infinity in all states and weights of a run."""
    files = [*run.glob("checkpoints/*.safetensors"), *run.glob("weights/*.safetensors")]
    assert files
    return [f"{file.name}: {name}" for file in files for name in non_finite(load_file(file))]


# 15 steps; the faults are those of FAULTY
EXACT = [
    *("--reduce", "exact", "--epochs", "6", "--save-every", "2steps", "--val-period", "0"),
    "--no-autoanchor",
]
TWICE = "overflow:3,8"


def trained(folder: Path, data: Path, name: str, *more: str, ranks: int = 1) -> Path:
    faulty(folder, TWICE, *train_args(data, *EXACT, "--name", name, *more), ranks=ranks)
    return folder / "runs/train" / name


@pytest.mark.slow
def test_steps_are_left_out_alike_by_one_and_two_processes(folder: Path, data: Path) -> None:
    one = trained(folder, data, "one", "--on-nan", "skip:3")
    two = trained(folder, data, "two", "--on-nan", "skip:3", ranks=2)
    left_out = [event["step"] for event in events_of(one, "left_out")]
    assert left_out == [3, 8]
    assert left_out == [event["step"] for event in events_of(two, "left_out")]
    assert results(one)["weights_sha256"] == results(two)["weights_sha256"]
    assert results(one)["steps"] == 15, "a step that is left out counts"
    with (one / "results.csv").open() as file:
        losses = [row["train/box_loss"] for row in csv.DictReader(file)]
    assert len(losses) == 6, "empty for an epoch without any other step"
    assert any(losses) and all(math.isfinite(float(loss)) and float(loss) > 0 for loss in losses if loss)


@pytest.mark.parametrize("rule", ["skip:1", pytest.param("rollback", marks=pytest.mark.slow)])
def test_files_written_after_an_overflow_in_an_activation_are_finite(
    folder: Path, data: Path, rule: str
) -> None:
    name = f"overflow {rule[:4]}"
    args = train_args(data, "--save-every", "1steps", "--name", name, "--on-nan", rule)
    said = faulty(folder, "overflow:2", *args, ranks=2)
    assert "the gradient of step 2 is not finite" in said
    run = folder / "runs/train" / name
    assert results(run)["steps"] == 5 and not bad_tensors(run)


def test_a_state_that_is_not_finite_is_not_written_and_the_run_goes_on_from_the_one_before(
    folder: Path, data: Path
) -> None:
    run = folder / "runs/train/weight"
    args = train_args(data, "--save-every", "1steps", "--name", "weight", "--on-nan", "skip:9")
    said = faulty(folder, "weight:2", *args, code=5, ranks=2)
    assert (
        "NumericsError: the training state after step 2 has NaN or infinity in model/model.0.conv.weight"
        in said
    )
    assert "yolofleet train --resume" in said and "step-00000001.safetensors" in said
    assert [path.name for path in run.glob("checkpoints/step-*")] == ["step-00000001.safetensors"]
    assert not bad_tensors(run) and not list(run.glob("weights/*"))
    faulty(folder, "", "train", "--resume", run, ranks=2)
    assert results(run)["steps"] == 5 and not bad_tensors(run)


@pytest.mark.slow
def test_a_run_that_ended_can_be_resumed_with_another_rule(folder: Path, data: Path) -> None:
    whole = trained(folder, data, "whole", "--on-nan", "skip:3")
    said = faulty(folder, TWICE, *train_args(data, *EXACT, "--name", "ended"), code=5)
    assert "the gradient of step 3 is not finite" in said
    # of --save-every 2steps, or of the end of the epoch if it was written in time
    assert re.search(r"step-0000000[23]\.safetensors", said), said
    run = folder / "runs/train/ended"
    faulty(folder, TWICE, "train", "--resume", run, "--on-nan", "skip:3", ranks=2)
    assert results(run)["weights_sha256"] == results(whole)["weights_sha256"]


@pytest.mark.slow
def test_a_rollback_leaves_the_step_out_alike_on_one_and_two_processes(folder: Path, data: Path) -> None:
    one = trained(folder, data, "one back", "--on-nan", "rollback")
    two = trained(folder, data, "two back", "--on-nan", "rollback", ranks=2)
    back = [(event["step"], event["why"]) for event in events_of(one, "rollback")]
    assert [step for step, _ in back] == [2, 8]
    assert back == [(event["step"], event["why"]) for event in events_of(two, "rollback")]
    assert all(step % 2 == 0 for step, _ in back), "--save-every 2steps, and an epoch of two or three steps"
    assert results(one)["weights_sha256"] == results(two)["weights_sha256"]
    assert results(one)["steps"] == 15
    with (one / "results.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.slow
def test_steps_that_a_rollback_left_out_stay_left_out_after_a_resume(folder: Path, data: Path) -> None:
    whole = trained(folder, data, "whole back", "--on-nan", "rollback")
    last = events_of(whole, "rollback")[-1]["step"]
    run = trained(folder, data, "short", "--on-nan", "rollback", "--max-steps", "12")
    assert last < 12
    faulty(folder, "", "train", "--resume", run, "--max-steps", "0", "--on-nan", "stop")
    assert results(run)["weights_sha256"] == results(whole)["weights_sha256"]


@pytest.mark.slow
def test_a_rollback_without_a_checkpoint_ends_the_run(folder: Path, data: Path) -> None:
    args = [*EXACT, "--save-every", "0", "--name", "none"]
    said = faulty(folder, TWICE, *train_args(data, *args, "--on-nan", "rollback"), code=5)
    assert "is not finite" in said and "no checkpoint of this run to go back to" in said


@pytest.mark.slow
def test_a_run_that_diverges_ends_after_a_few_rollbacks(folder: Path, data: Path) -> None:
    args = [
        *EXACT,
        *("--set", "warmup_epochs=0", "--set", "box=1e25", "--save-every", "1steps"),
        *("--nominal-batch", "4", "--batch", "4"),
    ]
    args += ["--set", "lr0=1e-9", "--name", "diverges", "--on-nan", "rollback"]
    said = yolofleet(folder, *train_args(data, *args), code=5).err
    assert "has already had 3 rollbacks" in said
