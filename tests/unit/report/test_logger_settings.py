"""What --log accepts, and what a run says when a logger cannot be used."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from yolofleet.config import loggers
from yolofleet.config.load import resolve_train, resolve_tune
from yolofleet.config.stored.job import dump_config, load_config_yaml
from yolofleet.config.stored.resume_study import STUDY
from yolofleet.fleet.launch.machines import resume_options
from yolofleet.runs.loggers.loggers import LoggedRun
from yolofleet.support.errors import ConfigError

TRAIN = {"data": "shapes", "model": "yolov5n"}


@pytest.mark.parametrize(
    ("settings", "what", "hint"),
    [
        ({"log": "tensorbord"}, "tensorbord'? is not a logger", "tensorboard"),
        ({"log": "clearml"}, "clearml is not a logger", "one or more of tensorboard, wandb, mlflow"),
        ({"log": "wandb,comet"}, "comet is not a logger", "one or more of tensorboard, wandb, mlflow"),
        ({"log": "csv,wandb"}, "csv'? is not a logger", "every run writes results.csv"),
        ({"log": "mlflow=ftp://a.b"}, "expected NAME=ADDRESS", "mlflow=http"),
        ({"log": "wandb,tensorboard=http://a.b"}, "expected NAME=ADDRESS", "mlflow=http"),
    ],
)  # fmt: skip
def test_a_logger_that_cannot_be_is_refused(settings: dict[str, str], what: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        resolve_train({**TRAIN, **settings})
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    "address", ["https://user:pa55word@a.b", "https://a.b/x?key=pa55word", "http://a.b#pa55word"]
)
def test_an_address_with_a_secret_is_refused_without_showing_it(address: str) -> None:
    with pytest.raises(ConfigError, match="may hold a secret") as caught:
        resolve_train({**TRAIN, "log": f"mlflow={address}"})
    assert "pa55word" not in caught.value.render()
    with pytest.raises(ConfigError, match="may hold a secret") as caught:  # without NAME=
        resolve_train({**TRAIN, "log": address})
    assert "pa55word" not in caught.value.render()


def test_a_study_goes_on_with_or_without_its_server(tmp_path: Path) -> None:
    given = {**TRAIN, "log": ("tensorboard", "mlflow=http://a.b")}
    config, recipe = resolve_tune(given)
    (tmp_path / "config.yaml").write_text(dump_config(config, recipe))
    (tmp_path / STUDY).touch()
    resumed, _ = resolve_tune({"resume": str(tmp_path), "log": ("mlflow=http://a.b",)})
    assert resumed.value.log == ("mlflow=http://a.b",)
    assert resumed.notes == ("--log changes from tensorboard mlflow=http://a.b to mlflow=http://a.b",)
    resumed, _ = resolve_tune({"resume": str(tmp_path)})
    assert resumed.value.log == ("tensorboard", "mlflow")
    assert "to send them: --log tensorboard --log mlflow=http://a.b" in resumed.notes[0]


def test_a_file_may_choose_loggers_but_no_server(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("log: mlflow\n")
    config, _ = resolve_train(TRAIN, config_file=str(file))
    assert config.value.log == ("mlflow",)
    file.write_text("log: [tensorboard, mlflow=http://a.b]\n")
    with pytest.raises(ConfigError, match="cannot be set in a file"):
        resolve_train(TRAIN, config_file=str(file))


def test_the_resume_command_of_a_fleet_names_the_server() -> None:
    config, _ = resolve_train({**TRAIN, "log": "mlflow=http://a.b", "hosts": "n0:1"})
    options = resume_options(config.value)
    assert options[options.index("--log") + 1] == "mlflow=http://a.b"


def test_a_missing_package_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, _ = resolve_train({**TRAIN, "log": ("tensorboard", "wandb")})
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--log tensorboard needs the package") as caught:
        loggers.check_usable(config.value)
    assert caught.value.hint == 'pip install "tensorboard>=2.15"'
    monkeypatch.undo()
    (tmp_path / "wandb").mkdir()  # a folder is no package
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorboard", pytest)
    if loggers.find_spec("wandb").origin is None:  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="--log wandb needs the package wandb"):
            loggers.check_usable(config.value.model_copy(update={"log": ("wandb",)}))


def test_an_identifier_is_used_again_only_by_a_resumed_run_on_the_same_server(tmp_path: Path) -> None:
    def run(server: str = "", resumed: bool = True) -> LoggedRun:
        return LoggedRun(tmp_path, "exp", "train", {}, server, resumed)

    assert run().known_id() == ""
    run().keep_id("a1b2")
    assert run().known_id() == "a1b2"
    assert run(resumed=False).known_id() == "" and run(server="http://a.b").known_id() == ""
    run().keep_id("../../evil")
    assert run().known_id() == ""
    (tmp_path / "run-id.json").write_text("[]")
    assert run().known_id() == ""


def test_the_run_of_an_earlier_version_goes_on_with_tensorboard(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "golden" / "run" / "exp" / "config.yaml"
    config, _ = load_config_yaml(stored)
    assert loggers.logger_names(config.value) == []
    file = tmp_path / "config.yaml"
    file.write_text(stored.read_text().replace("tensorboard: false", "tensorboard: true"))
    assert loggers.logger_names(load_config_yaml(file)[0].value) == ["tensorboard"]


def test_tensorboard_shows_the_newest_row_of_each_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from yolofleet.runs.loggers.loggers import TensorboardLogger

    logger = TensorboardLogger(LoggedRun(tmp_path, "exp", "train", {}, "", False))
    for row in (
        {"epoch": 1, "a": 1.0},
        {"epoch": 1, "a": 1.5, "b": 5.0},
        {"epoch": 2, "a": 2.0},
        {"epoch": 3, "a": 3.0},
    ):
        logger.row(row)
    logger.row({"epoch": 2, "a": 2.5})  # after a rollback
    logger.close(finished=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {name: [(s.step, s.value) for s in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == {"a": [(1, 1.5), (2, 2.5)], "b": [(1, 5.0)]}


def test_offline_a_run_refuses_a_server_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    monkeypatch.setattr(loggers, "find_spec", lambda name: sys.__spec__)
    for address, is_here in (
        ("http://127.0.0.1:1/rows", True),
        ("http://[::1]:1/", True),
        ("https://a.b/", False),
    ):
        config, _ = resolve_train({**TRAIN, "log": f"mlflow={address}"})
        with nullcontext() if is_here else pytest.raises(ConfigError, match="YOLOFLEET_OFFLINE is set"):
            loggers.check_usable(config.value)


@pytest.mark.parametrize(
    ("variables", "server", "words"),
    [
        ({}, "", "there is no key in WANDB_API_KEY or netrc"),
        ({"WANDB_API_KEY": "k3y"}, "https://api.wandb.ai", "sends the run to https://api.wandb.ai"),
        ({"WANDB_API_KEY": "k3y", "WANDB_BASE_URL": "http://a.b"}, "http://a.b", "WANDB_MODE=offline keeps it"),
        ({"WANDB_API_KEY": "k3y", "WANDB_MODE": "offline"}, "", "sends nothing: WANDB_MODE=offline"),
        ({"NETRC": "netrc"}, "https://api.wandb.ai", "sends the run to https://api.wandb.ai"),
        ({"NETRC": "netrc", "WANDB_BASE_URL": "http://a.b"}, "", "there is no key"),
        ({"NETRC": "broken"}, "", "there is no key"),
    ],
)  # fmt: skip
def test_wandb_is_online_for_a_user_with_a_key(
    variables: dict[str, str], server: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("YOLOFLEET_OFFLINE", raising=False)
    Path("netrc").write_text("machine api.wandb.ai login user password k3y\n")
    Path("broken").write_text("machine\nnonsense")
    address, note = loggers.wandb_server(variables)
    assert address == server and words in note and "k3y" not in note
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    assert loggers.wandb_server({"WANDB_API_KEY": "k3y"})[0] == ""
