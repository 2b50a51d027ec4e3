"""A study: the same trials however often it is opened again, pruning by earlier generations, and groups of devices."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from yolofleet.config.load import resolve_tune
from yolofleet.config.resolve import training_of
from yolofleet.config.schema import TrainConfig
from yolofleet.config.stored.job import dump_config
from yolofleet.config.stored.resume_options import options_to_repeat
from yolofleet.families.family import Family
from yolofleet.families.table import FAMILIES
from yolofleet.fleet.launch.machines import resume_options
from yolofleet.measure.tune import search
from yolofleet.measure.tune.space import Choices, Range, Value
from yolofleet.measure.tune.study import Result, Study, Trial, best_of
from yolofleet.measure.tune.trials import DeviceGroup, TrialRun, base_arguments, local_groups
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import Judgement
from yolofleet.support.errors import CheckpointError, ConfigError

pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")

SPACE: dict[str, Range | Choices] = {
    "lr0": Range(1e-4, 0.1, True),
    "momentum": Range(0.6, 0.98),
    "denoising": Range(0, 5),
    "nesterov": Choices((True, False)),
}
GENERATION = 4


def opened(file: Path) -> Study:
    return Study(file, SPACE, 0, GENERATION)


def result_of(trial: Trial) -> Result:
    """The result that a trial has by its values; trial 5 fails."""
    if trial.number == 5:
        return Result("failed", reason="NumericsError: NaN")
    value = 1 - abs(math.log10(float(trial.values["lr0"])) + 2) / 3
    return Result("complete", {1: value / 2, 2: value})


def changes(study: Study, trials: int) -> Iterator[None]:
    """Run a study as `yolofleet tune` does, and pause after each change of its file."""
    while True:
        known = study.trials()
        waiting = [trial for trial in known if trial.result.state == "open"]
        if not waiting and len(known) == trials:
            return
        if not waiting or (len(known) % GENERATION and len(known) < trials):
            study.add(study.suggest() if known else {"lr0": 0.01, "momentum": 0.937})
            yield
            continue
        for trial in waiting:
            study.tell(trial, result_of(trial))
            yield


def trials_of(file: Path, trials: int, killed_after: tuple[int, ...] = ()) -> list[Trial]:
    done = 0
    while True:
        study = opened(file)
        for _ in changes(study, trials):
            done += 1
            if done in killed_after:
                break
        else:
            return study.trials()


def test_a_study_that_is_opened_again_goes_on_with_the_same_trials(tmp_path: Path) -> None:
    whole = trials_of(tmp_path / "whole", 14)
    assert trials_of(tmp_path / "killed", 14, killed_after=(1, 3, 6, 7, 11, 18)) == whole
    trials_of(tmp_path / "longer", 6)
    assert trials_of(tmp_path / "longer", 14) == whole, (
        "a larger --trials must not change earlier generations"
    )
    assert len({trial.values["lr0"] for trial in whole}) == 14
    assert best_of(whole) == whole[0]


def test_a_torn_line_and_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "study"
    whole = trials_of(tmp_path / "whole", 6)
    trials_of(file, 4)
    with file.open("a") as journal:
        journal.write('{"op_code":4,"wor')
    assert trials_of(file, 6) == whole
    for text in ("[1, 2]\n", "ssh-rsa AAAA my only key", "a\nb", "[" * 100_000 + "\n", '{"op_code":0,"wor'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match="not a study that can be read"):
            opened(file)
        assert file.read_text() == text


def test_a_journal_is_neither_followed_nor_read_without_limit(tmp_path: Path) -> None:
    file = tmp_path / "study"
    trials_of(tmp_path / "whole", 2)
    before = (tmp_path / "whole").read_bytes() + b'{"torn'
    (tmp_path / "whole").write_bytes(before)
    file.symlink_to(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="it is a symbolic link"):
        opened(file)
    assert (tmp_path / "whole").read_bytes() == before
    file.unlink()
    with file.open("wb") as sparse:
        sparse.truncate(3 << 30)
    with pytest.raises(CheckpointError, match=r"it has 3\.0 GiB, the limit is 64\.0 MiB"):
        opened(file)
    assert file.stat().st_size == 3 << 30


def test_pruning_knows_complete_trials_of_earlier_generations_only(tmp_path: Path) -> None:
    study = opened(tmp_path / "study")
    values: dict[str, Value] = {"lr0": 0.01}
    for fitness in (0.1, 0.2, 0.3, 0.4):
        study.add(values)
        study.tell(study.trials()[-1], Result("complete", {4: fitness, 9: 1.0}))
    late = study.add(values)
    same = study.add(values)
    assert study.is_pruned(same, 4, best=0.24, epochs=9)
    assert not study.is_pruned(same, 4, best=0.25, epochs=9), "the median of 0.1, 0.2, 0.3 and 0.4"
    study.tell(late, Result("complete", {4: 0.9, 9: 1.0}))
    assert not study.is_pruned(same, 4, best=0.25, epochs=9), "a trial of its own generation counts"
    assert not study.is_pruned(same, 3, best=0.0, epochs=9), "within the first third"
    assert not study.is_pruned(same, 9, best=0.0, epochs=9), "the last epoch"
    assert not study.is_pruned(same, 5, best=0.0, epochs=9), "no figures of that epoch"


def test_importances_add_up_and_need_different_results(tmp_path: Path) -> None:
    study = opened(tmp_path / "study")
    assert study.importances() == {}
    trials_of(tmp_path / "study", 12)
    found = opened(tmp_path / "study").importances()
    assert set(found) == set(SPACE) and sum(found.values()) == pytest.approx(1)
    assert max(found, key=lambda name: found[name]) == "lr0"


# -- groups of devices -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "each", "groups"),
    [
        ("cpu:2", 1, ["cpu", "cpu"]),
        ("cpu:4", 2, ["cpu:2", "cpu:2"]),
        ("0,1,2,3", 1, ["0", "1", "2", "3"]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("0:2,1:2", 2, ["0:2", "1:2"]),
        ("auto", 1, ["0", "1"]),
        ("mps", 1, ["mps"]),
    ],
)
def test_devices_are_cut_into_groups(
    device: str, each: int, groups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "mps":
        monkeypatch.setattr(sys, "platform", "darwin")
    given = {"data": "d", "model": "yolov5n", "device": device, "devices_per_trial": each, "reduce": "fast"}
    config, _ = resolve_tune(given)
    found = local_groups(config.value, 2, 16)
    assert [group.text for group in found] == groups
    is_cpu = "cpu" in device
    assert ("--workers" in " ".join(found[0].arguments)) != is_cpu, "GPUs of a machine share its cores"


def test_devices_that_do_not_divide_are_an_error() -> None:
    config, _ = resolve_tune({"data": "d", "model": "yolov5n", "device": "cpu:3", "devices_per_trial": 2})
    with pytest.raises(ConfigError, match="has 3 devices, which cannot be cut into groups of 2"):
        local_groups(config.value, 0, 4)


def test_trials_get_the_settings_that_differ_from_those_of_train(tmp_path: Path) -> None:
    config, _ = resolve_tune(
        {"data": "a b", "model": "yolov5n", "epochs": 3, "autoanchor": False, "set": ("lr0=1",), "trials": 4}
    )
    words = base_arguments(config, tmp_path / "recipe.yaml")
    assert sorted(words[1:]) == [
        "--data=a b",
        *("--epochs=3", "--micro-batch=8", "--model=yolov5n", "--no-autoanchor", "--no-plots"),
        "--reduce=exact",
    ]


def test_code_is_named_at_each_start_of_a_trial(tmp_path: Path) -> None:
    code = {"recipe_class": "module:All", "callbacks": ("module:A", "module:B")}
    config, _ = resolve_tune({"data": "d", **code})
    assert not [word for word in base_arguments(config, tmp_path / "recipe.yaml") if "module" in word]
    words = "--recipe-class module:All --callbacks module:A --callbacks module:B"
    assert options_to_repeat(config.value) == words.split()


def test_a_resumed_study_has_the_same_code(tmp_path: Path) -> None:
    config, recipe = resolve_tune({"data": "d", "recipe_class": "module:All", "callbacks": ("module:A",)})
    (tmp_path / "config.yaml").write_text(dump_config(config, recipe))
    (tmp_path / "study.journal").touch()
    resume = {"resume": str(tmp_path)}
    with pytest.raises(
        ConfigError, match="the study uses the code module:All, and a resume loads only"
    ) as error:
        resolve_tune(resume)
    assert error.value.hint == "--recipe-class module:All"
    with pytest.raises(ConfigError, match="the study uses the code module:A") as error:
        resolve_tune({**resume, "recipe_class": "module:All"})
    assert error.value.hint == "--callbacks module:A"
    with pytest.raises(ConfigError, match="module:B differs from the study's module:A"):
        resolve_tune({**resume, "recipe_class": "module:All", "callbacks": ("module:B",)})
    found, _ = resolve_tune({**resume, "recipe_class": "module:All", "callbacks": ("module:A",)})
    assert found.value.recipe_class == "module:All" and found.value.callbacks == ("module:A",)
    options = ["--hosts", "a:1", "--recipe-class", "module:All", "--callbacks", "module:A"]
    found, _ = resolve_tune(
        {**resume, "hosts": "a:1", **{"recipe_class": "module:All", "callbacks": ("module:A",)}}
    )
    assert resume_options(training_of(found, TrainConfig).value) == options


def run_of(folder: Path) -> TrialRun:
    return TrialRun(0, {}, RunFolder(folder), folder / "log", [], [], group=DeviceGroup("cpu", ()))


@pytest.mark.parametrize(
    ("is_resumed", "code", "again", "keeps_state"),
    [
        (False, 4, True, True),  # a lost host or a killed process
        (False, 3, True, True),  # a disk without the data
        (False, 2, False, True),
        (False, 5, False, True),
        (True, 5, False, True),
        (True, 4, True, True),
        (True, 3, True, False),  # a checkpoint that is refused
        (True, 2, True, False),
    ],
)
def test_failures_that_do_not_follow_from_the_values(
    tmp_path: Path, is_resumed: bool, code: int, again: bool, keeps_state: bool
) -> None:
    run = run_of(tmp_path)
    run.is_resumed = is_resumed
    run.folder.checkpoints.mkdir()
    assert run.record_failure(code) == again and run.folder.checkpoints.exists() == keeps_state
    run.record_failure(4)
    assert not run.record_failure(4), "the third failure is the last"


def test_the_reason_of_a_failure_is_of_the_last_start_also_after_other_letters(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    before = "DataError: /home/jos\u00e9\u2026 first\n".encode() + b"\xff\n"
    run.log.write_bytes(before + b"Unreachable: node-b does not answer\n")
    run.log_offset = len(before)
    assert run.reason(4) == "Unreachable: node-b does not answer"


def test_a_task_of_a_user_is_compared_by_its_own_fitness(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.folder.results_csv.write_text("epoch,metrics/overlap\n1,0.5\n2,\n3,0.25\n4,0.75\n")
    run.folder.logs.mkdir()
    task = Judgement({"metrics/overlap": "overlap"}, {}, {"overlap": 2.0})
    run.folder.status.write_text(json.dumps({"task": task.stored()}))
    assert list(run.curve()) == [(1, 1.0), (3, 1.0), (4, 1.5)]


def test_a_fitness_without_its_column_is_refused_before_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "circles", Family("circles", list, list, list))  # forgotten after the test
    circles = Path(__file__).resolve().parents[2] / "toy_task" / "circles.py"
    code = circles.read_text().replace('{"metrics/overlap": "overlap"}', "{}")
    (tmp_path / "blind.py").write_text(code)
    settings = {"data": "d", "model": "circles-n", "recipe_class": f"{tmp_path / 'blind.py'}:Circular"}
    config, _ = resolve_tune(settings)
    with pytest.raises(ConfigError, match=r"results\.csv, which has no column of overlap") as refused:
        search._network(training_of(config, TrainConfig).value)
    assert refused.value.source == "the attribute columns of CircleTask"
