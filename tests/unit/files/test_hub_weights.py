"""Weights by their names on the Hugging Face hub: asked, downloaded, checked, and uploaded; and from the client's cache."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest
from click.testing import CliRunner
from hub_server import TOKEN, Hub, Repository
from report_runs import made_run
from small_weights import saved, untrained

from yolofleet import Model
from yolofleet.cli.weights import inspect_command, push_command
from yolofleet.config.load import resolve_train, resolve_tune, resolve_val
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.families.weights.hub import hub_weights, known_files, pinned_name
from yolofleet.fleet.launch.plan import plan_run
from yolofleet.measure.tune.search import tune
from yolofleet.storage.fetch import DownloadError
from yolofleet.storage.foreign import digest_of
from yolofleet.support.errors import CheckpointError, ConfigError, YolofleetError
from yolofleet.training.start_facts import start_facts

pytest.importorskip("huggingface_hub", reason="needs the extra hub")

CARD = b"---\nlicense: apache-2.0\n---\n# net\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "YOLOFLEET_OFFLINE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # the server has no Xet
    with hub_server.hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return saved(
        untrained(["cat", "dog"]), tmp_path_factory.mktemp("weights") / "best.safetensors"
    ).read_bytes()


def published(hub: Hub, files: dict[str, bytes], name: str = "me/net") -> tuple[Repository, str]:
    repository = hub.repositories.setdefault(name, Repository())
    return repository, repository.add(files)


def test_weights_come_from_the_hub_once_and_later_from_the_cache(hub, weights, monkeypatch, capsys):
    _, commit = published(hub, {"best.safetensors": weights, "README.md": CARD, "train.py": b"raise"})
    found = hub_weights("hf:me/net")
    assert found.name == f"hf:me/net@{commit}" and found.path.read_bytes() == weights
    assert found.sha256 == digest_of(found.path) and found.licence == "apache-2.0"
    said = capsys.readouterr().err
    assert commit in said and found.sha256 in said
    assert not any("train.py" in path for path in hub.paths())  # only known files
    asked = len(hub.asked)
    assert hub_weights(found.name) == found  # a commit does not change
    assert len(hub.asked) == asked
    published(hub, {"best.safetensors": b"newer"})
    assert hub_weights(f"hf:me/net@{commit}") == found
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an offline machine needs no client
    assert hub_weights(found.name) == found
    assert hub_weights("hf:me/net") == found
    with pytest.raises(DownloadError, match="does not know hf:me/net@other"):
        pinned_name("hf:me/net@other")


def test_an_export_is_written_into_the_working_folder_and_not_into_the_cache(
    hub, weights, tmp_path, monkeypatch
):
    published(hub, {"best.safetensors": weights}, "me/net.v2")
    monkeypatch.chdir(tmp_path)
    (done,) = Model("hf:me/net.v2").export(format="torchscript")
    assert str(done.file) == "net.v2.torchscript" and done.file.is_file()


def test_a_run_records_the_commit_the_digest_and_the_licence(hub, weights):
    _, commit = published(hub, {"best.safetensors": weights, "README.md": CARD})
    planned = plan_run(*resolve_train({"data": "shapes", "weights": "hf:me/net"}))
    assert planned.config.value.weights == f"hf:me/net@{commit}"
    assert not any("resolve" in path for path in hub.paths())  # the ranks download
    facts = start_facts(planned.config.value.weights)
    assert facts["given"] == f"hf:me/net@{commit}" and facts["licence"] == "apache-2.0"
    assert facts["origin"] == f"{hub.address}/me/net/tree/{commit}"
    assert plan_run(resolve_val({"data": "shapes", "weights": "hf:me/net"})).config.value.weights == (
        f"hf:me/net@{commit}",
    )


def test_processes_of_another_launcher_need_the_commit(hub, weights, monkeypatch):
    _, commit = published(hub, {"best.safetensors": weights})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0" if name != "WORLD_SIZE" else "2")
    with pytest.raises(ConfigError) as error:
        plan_run(*resolve_train({"data": "shapes", "weights": "hf:me/net"}))
    assert error.value.hint == f"--weights hf:me/net@{commit}"
    plan_run(*resolve_train({"data": "shapes", "weights": f"hf:me/net@{commit}"}))


def test_all_trials_of_a_study_get_the_commit_of_its_start(hub):
    pytest.importorskip("optuna")
    published(hub, {"best.safetensors": b"no weights"})
    with pytest.raises(CheckpointError):
        tune(*resolve_tune({"data": "shapes", "weights": "hf:me/net"}))
    assert len([path for path in hub.paths() if path.endswith("/revision/main")]) == 1


def test_a_folder_of_a_clone_works_without_the_client(hub, weights, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "best.safetensors").write_bytes(weights)
    assert resolve_weights(str(tmp_path / "net")) == tmp_path / "net" / "best.safetensors"
    with pytest.raises(ConfigError, match="client of the hub") as error:
        hub_weights("hf:me/net")
    assert "huggingface-hub" in error.value.hint


def test_the_known_files_of_a_repository():
    assert known_files(["a.py", "best.safetensors", "README.md"]) == ["best.safetensors", "README.md"]
    assert known_files(["config.json", "model.safetensors"]) == ["model.safetensors", "config.json"]
    assert known_files(["x/net.pth", "net.pth"]) == ["net.pth"]
    for nothing in (
        ["a.pth", "b.pth"],
        ["model.safetensors"],
        ["../best.safetensors"],
        ["pytorch_model.bin"],
        [],
    ):
        assert known_files(nothing) == []


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("hf:net", CheckpointError, "is not a name of weights on the hub"),
        ("hf:../../etc", CheckpointError, "is not a name"),
        ("hf:me/net@a b", CheckpointError, "is not a name"),
        ("hf:me/net@..", CheckpointError, "is not a name"),
        ("hf:me/other", DownloadError, "does not exist, or is private"),
        ("hf:me/private", DownloadError, "does not exist, or is private"),
        ("hf:me/gated", DownloadError, "ask for an agreement"),
        (f"hf:me/net@{'0' * 40}", DownloadError, "no such revision"),
        ("hf:me/net@gone", DownloadError, "no such revision"),
        (
            "hf:me/empty",
            CheckpointError,
            "has no weights that yolofleet reads: 'a.bin'|has no weights that yolofleet reads: a.bin",
        ),
    ],
)
def test_what_cannot_be_had_gives_one_clear_error(hub, name, kind, says):
    published(hub, {"best.safetensors": b"weights"})
    published(hub, {"a.bin": b"1"}, "me/empty")
    for other, error in (("private", "RepoNotFound"), ("gated", "GatedRepo")):
        published(hub, {"best.safetensors": b"weights"}, f"me/{other}")[0].error = error
    with pytest.raises(kind, match=says) as raised:
        hub_weights(name)
    assert raised.value.hint


def test_a_token_opens_a_private_repository_and_is_never_shown(hub, weights, monkeypatch, capfd):
    published(hub, {"best.safetensors": weights}, "me/private")[0].error = "RepoNotFound"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = hub_weights("hf:me/private")
    assert TOKEN not in f"{found} {start_facts(found.name)} {''.join(capfd.readouterr())}"
    hub.repositories["me/private"].error = ""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nothing answers
    with pytest.raises(DownloadError) as error:
        pinned_name("hf:me/private")
    assert TOKEN not in str(error.value)


def test_a_file_with_another_digest_than_the_hub_states_is_refused(hub, weights, monkeypatch):
    repository, _ = published(hub, {"best.safetensors": weights})
    repository.stated["best.safetensors"] = "ab" * 32
    with pytest.raises(YolofleetError, match=f"the hub states {'ab' * 32}") as error:
        hub_weights("hf:me/net")
    del repository.stated["best.safetensors"]
    Path(error.value.hint.removeprefix("delete ").partition(",")[0]).unlink()  # as the hint says
    assert hub_weights("hf:me/net").path.read_bytes() == weights


def test_a_file_that_is_not_in_lfs_has_no_known_digest(hub, weights):
    published(hub, {"best.safetensors": weights})[0].stated["best.safetensors"] = "cd" * 20
    with pytest.raises(CheckpointError, match="states no SHA-256"):
        hub_weights("hf:me/net")


def test_a_push_uploads_weights_card_and_picture_and_the_name_loads_them(hub, weights, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = made_run(tmp_path / "exp", None)
    folder.weights.joinpath("best.safetensors").write_bytes(weights)
    folder.plots.joinpath("val_predictions.jpg").write_bytes(b"picture")
    run = CliRunner()
    done = run.invoke(push_command, [str(folder.path), "hf:me/mine"], catch_exceptions=False)
    commit = next(iter(hub.repositories["me/mine"].commits))
    assert f"--weights hf:me/mine@{commit}" in done.output
    files = hub.repositories["me/mine"].commits[commit]
    assert sorted(files) == ["README.md", "best.safetensors", "plots/val_predictions.jpg"]
    assert files["best.safetensors"] == weights and b"license: unknown" in files["README.md"]
    assert hub.made["me/mine"]["visibility"] == "private"
    assert TOKEN not in done.output
    shown = run.invoke(inspect_command, [f"hf:me/mine@{commit}"], catch_exceptions=False)
    assert "cat" in shown.output and digest_of(folder.weights / "best.safetensors") in shown.output
    run.invoke(push_command, [str(folder.path), "hf:me/shown", "--public"], catch_exceptions=False)
    assert hub.made["me/shown"]["visibility"] == "public"
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    run.invoke(push_command, [f"file://{folder.path}", "hf:me/stored"], catch_exceptions=False)
    stored = hub.repositories["me/stored"].commits.popitem()[1]
    assert stored["best.safetensors"] == weights and stored["plots/val_predictions.jpg"] == b"picture"
    with pytest.raises(CheckpointError, match="names a revision"):
        run.invoke(push_command, [str(folder.path), f"hf:me/mine@{commit}"], catch_exceptions=False)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DownloadError) as refused:
        run.invoke(push_command, [str(folder.path), "hf:me/new"], catch_exceptions=False)
    assert "hf auth login" in str(refused.value) and "network" not in str(refused.value)
    shutil.rmtree(folder.weights)
    with pytest.raises(ConfigError, match="has no weights/best"):
        run.invoke(push_command, [str(folder.path), "hf:me/mine"], catch_exceptions=False)
