"""Addresses of copies: where they may come from, and what a resume takes from one. A folder stands for the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from yaml import safe_load

from yolofleet.config.load import resolve_train
from yolofleet.config.resolve import FIRST_START
from yolofleet.config.stored.job import dump_config
from yolofleet.support.errors import ConfigError

pytestmark = pytest.mark.skipif("os.name == 'nt'")
MINIMAL = {"data": "d.yaml", "model": "yolov5n"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """The address of a run."""
    folder = tmp_path / "store/night"
    (folder / "checkpoints").mkdir(parents=True)
    address = f"file://{folder}"
    given = {**MINIMAL, "epochs": "7", "name": "exp", "project": "/elsewhere/runs", "checkpoint_to": address}
    (folder / "config.yaml").write_text(dump_config(*resolve_train(given)))
    (folder / "checkpoints/step-00000010.safetensors").write_text("state")
    return address


def test_a_resume_at_an_address_gets_a_folder_of_its_own_and_copies_to_the_address(stored: str) -> None:
    for typed in (stored, f"{stored}/"):
        config, _ = resolve_train({"resume": typed})
        c = config.value
        assert (c.resume, c.checkpoint_to, c.epochs) == (stored, stored, 7)
        assert (c.name, c.project, c.exist_ok) == ("night", None, False)
        assert config.notes == ()
    config, _ = resolve_train({"resume": stored, "name": "b", "project": "p", "device": "cpu:3"})
    assert (config.value.name, config.value.project, config.value.device) == ("b", Path("p"), "cpu:3")


def test_a_resume_may_copy_to_another_address(stored: str) -> None:
    config, _ = resolve_train({"resume": stored, "checkpoint_to": f"{stored}2"})
    assert config.value.checkpoint_to == f"{stored}2" and config.sources["checkpoint_to"] == "command line"


def test_the_same_command_continues_the_run_at_its_address(stored: str) -> None:
    command = {**MINIMAL, "epochs": "7", "resume": "auto", "exist_ok": "true", "name": "exp"}
    config, _ = resolve_train({**command, "checkpoint_to": stored})
    assert (config.value.resume, config.value.name, config.value.exist_ok) == (stored, "exp", True)
    other = f"{stored}-new/"
    config, _ = resolve_train({**command, "checkpoint_to": other})
    # a state may come there before this run begins
    assert config.value.resume == other.removesuffix("/")
    assert any("nothing to resume in file://" in note for note in config.notes)
    with pytest.raises(ConfigError, match="has no run with a checkpoint"):
        resolve_train({"resume": "auto", "checkpoint_to": other})
    with pytest.raises(ConfigError, match="has no run with a checkpoint"):
        resolve_train({"resume": other})


def test_a_local_resume_copies_nothing_that_was_not_typed_again(stored: str, tmp_path: Path) -> None:
    folder = tmp_path / "store/night"
    config, _ = resolve_train({"resume": str(folder)})
    assert config.value.checkpoint_to == "" and len(config.notes) == 1
    assert config.notes[0].startswith("the run is no longer copied to file://")
    config, _ = resolve_train({"resume": str(folder), "checkpoint_to": f"{stored}/"})
    assert config.sources["checkpoint_to"] == FIRST_START and config.notes == ()
    config, _ = resolve_train({"resume": str(folder), "checkpoint_to": f"{stored}2"})
    assert config.sources["checkpoint_to"] == "command line"


def test_a_run_at_an_address_cannot_choose_where_it_is_copied(stored: str, tmp_path: Path) -> None:
    file = tmp_path / "store/night/config.yaml"
    values = safe_load(file.read_text())
    values["checkpoint_to"], values["results_to"] = "s3://stranger/a", "s3://stranger/b"
    file.write_text(str(values))
    config, _ = resolve_train({"resume": stored})
    assert config.value.checkpoint_to == stored
    assert [note for note in config.notes if "s3://stranger/a" in note and "results_to" not in note]
    assert any("results_to (" in note and "has no effect" in note for note in config.notes)
    with pytest.raises(ConfigError, match="a file must not choose a web server"):
        values["data"] = "http://169.254.169.254/latest/data.yaml"
        file.write_text(str(values))
        resolve_train({"resume": stored})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://server/run", "takes no files"),
        ("s3://user:secret@bucket/run", "could be a secret"),
        ("s3://bucket/run?token=secret", "could be a secret"),
        ("s3://bucket/../run", "not a plain address"),
        ("ftp://server/run", "is not supported"),
        ("run", "is not supported"),
    ],
)
def test_an_address_that_cannot_have_a_copy_is_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_train({**MINIMAL, "checkpoint_to": address})
    assert words in refused.value.what and "secret@" not in refused.value.render()
    assert "token=secret" not in refused.value.render()
