"""Training on a data set without a val split: from the start to the report, the best weights, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import called, in_ranks, results, small_shapes, train_args, working_in

from yolofleet.support.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    with working_in(tmp_path, YOLOFLEET_CACHE=str(tmp_path / "cache")):
        yield tmp_path


@pytest.fixture
def data(folder: Path) -> Path:
    description = small_shapes(folder).parent / "all.yaml"
    description.write_text("train: images/train\nnames: [circle, square, triangle, star]\n")
    return description


def test_a_training_on_all_images_ends_with_weights_and_a_report_and_goes_on(folder, data):
    run = folder / "runs" / "train" / "run"
    done = called(*[word for word in train_args(data, "--name", "run") if word != "--no-plots"])
    assert done.code == 0, done.err
    assert "20 images to train" in done.out and "none to validate" in done.out
    assert done.out.count("no val split") == 1
    assert "best.safetensors (the last weights)" in done.out
    assert results(run)["best"] == {"epoch": 2, "fitness": None} and "metrics" not in results(run)
    assert (run / "report.html").exists()
    best, last = (run / "weights" / f"{name}.safetensors" for name in ("best", "last"))
    assert best.read_bytes() == last.read_bytes()
    before = best.read_bytes()
    assert called("train", "--resume", run, "--epochs", "3").code == 0
    assert results(run)["best"]["epoch"] == 3 and best.read_bytes() == last.read_bytes() != before
    ended = called("train", "--resume", run)
    assert ended.code == 0 and "had ended already" in ended.out
    assert called("report", run).code == 0
    assert called("val", "--weights", run, "--data", data.parent, "--img", "64").code == 0


@pytest.mark.parametrize(
    "more",
    [["--val-period", "0"], ["--val-overlap", "--stage", "staged", "--cache", "disk", "--fraction", "0.5"]],
)
def test_settings_of_validations_have_no_effect(folder, data, more):
    done = called(*train_args(data, "--epochs", "1", "--name", "run", *more))
    assert done.code == 0, done.err
    assert ("note: --fraction 0.5 trains on 10 of 20 images" in done.out + done.err) == ("0.5" in more)


def test_two_ranks_agree(folder, data):
    in_ranks(folder, 2, *train_args(data, "--epochs", "1", "--name", "run"))
    assert results(folder / "runs" / "train" / "run")["best"]["epoch"] == 1


@pytest.mark.parametrize(("flag", "value"), [("--patience", "5"), ("--sampler", "weights")])
def test_what_follows_the_accuracy_is_refused(folder, data, flag, value):
    done = called(*train_args(data, flag, value))
    assert done.code == 2 and f"{flag}" in done.err and "has no val split" in done.err


def test_a_dry_run_a_plan_and_a_study_know_it(folder, data):
    assert called(*train_args(data, "--dry-run")).code == 0
    from yolofleet.config.schema.measure import PlanConfig
    from yolofleet.fleet.plan.forecast import data_facts

    assert data_facts(PlanConfig(data=str(data)))[:2] == (20, 0)
    done = called("tune", *train_args(data, "--trials", "1")[1:])
    assert done.code == ConfigError.exit_code and "no split 'val'" in done.err


def test_missing_files_of_a_val_split_are_still_an_error(folder, data):
    data.write_text(data.read_text() + "val: images/nothing\n")
    assert called(*train_args(data)).code == 3
