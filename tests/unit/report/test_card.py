"""The card of a training: its front matter, its Markdown, and what it says of weights, licences and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from report_runs import made_run, split_of

from yolofleet.cli.report import run_command
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.page import write_report
from yolofleet.storage.foreign import digest_of
from yolofleet.tasks.boxes.plots import SHOWN_SCORE
from yolofleet.training.start_facts import SCRATCH, start_facts

NAMES = ("cat", "dog")
HOSTILE = (
    "a|b", "`x`", "<script>alert(1)</script>", "\n# heading", "---", "\x1b[31mred", "[x](javascript:alert(1))",
    "see http://evil.example", '"', "'", ": {", "!!python/object:os.system", "&a *a", "www.evil.example", "\u202egnp",
)  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))

    def make(
        names: tuple[str, ...] | None = NAMES, start: dict[str, Any] | None = None, **more: Any
    ) -> RunFolder:
        index = None if names is None else split_of(tmp_path / "set", names)
        folder = made_run(tmp_path / "exp", index, **more)
        lines = [json.loads(line) for line in folder.events(0).read_text().splitlines()]
        lines[0] |= start or {}
        folder.events(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_report(folder)
        return folder

    return make


def parts(folder: RunFolder) -> tuple[dict[str, Any], str]:
    """The front matter, and the text between it and the last line."""
    before, front, text = folder.card.read_text(encoding="utf-8").split("---\n", 2)
    text, _, seal = text.rpartition("\n<!--")
    assert before == "" and re.fullmatch(r"[\w :]* [0-9a-f]{64} -->\n", seal)
    return yaml.safe_load(front), text


def test_the_front_matter_is_that_of_model_hubs(made):
    start = {
        "data": {"train": "ab12", "val": "cd34"},
        "data_images": {"train": 190},
    }  # older runs have no counts
    folder = made(start={**start, "kernels": {"device": "cpu x86_64"}})
    front, text = parts(folder)
    assert front["license"] == "unknown"  # the run has no start weights, so its user chooses
    assert front["library_name"] == "yolofleet"
    assert front["pipeline_tag"] == "object-detection" and front["pipeline_tag"] in front["tags"]
    result = front["model-index"][0]["results"][0]
    figures = {figure["type"]: figure["value"] for figure in result["metrics"]}
    assert figures["mAP50"] == pytest.approx(1 - 0.9**6, abs=1e-5)  # of the sixth epoch, the best one
    assert list(figures) == front["metrics"]
    for expected in (
        "of 2 classes: cat, dog",
        "| cat |",
        "index of `train`, 190 images, BLAKE2b | `ab12`",
        "index of `val`, BLAKE2b | `cd34`",
        "2 processes on 2 machines, cpu",
        "cpu x86\\_64",
    ):
        assert expected in text
    assert "random weights" in text


def test_hostile_names_of_classes_and_runs_stay_text(made, tmp_path):
    folder = made(HOSTILE, settings=["name=`evil` | <b>", "data=x; echo `id` ```.yaml"])
    front, text = parts(folder)
    assert re.fullmatch(r"[\w.-]+", front["model-index"][0]["results"][0]["dataset"]["name"])
    assert "datasets" not in front  # the hub would link another data set of that name
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", text)  # Markdown takes these as plain letters
    outside = re.sub(r"(?ms)^(`{3,})sh\n.*?^\1$", "", bare)
    assert "<" not in outside and "http:" not in outside and "www." not in outside and "](" not in outside
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    assert headings == ["exp", "Figures", "Data and weights", "Use", "Licence", "Repeat this training"]
    table = [line for line in outside.splitlines() if line.startswith("| ")]
    of_classes = table[table.index(next(line for line in table if line.startswith("| class"))) :][
        : len(HOSTILE) + 2
    ]
    assert {line.count("|") for line in of_classes} == {of_classes[0].count("|")}
    assert text.count("````") == 2  # the fence is longer than that in the name of the data set


@pytest.mark.parametrize(
    ("licence", "hub", "says"),
    [
        ("AGPL-3.0 (GPL-3.0 when they were released): conditions", "agpl-3.0", "under AGPL-3.0, or train"),
        ("Apache-2.0", "apache-2.0", "with a notice"),
        ("apache-2.0", "apache-2.0", "with a notice"),  # as a card of the hub spells it
        ("public domain (YOLO licence)", "other", "no conditions"),
        ("cc-by-4.0", "cc-by-4.0", "hold for the result"),
        ("none (random start weights)", "unknown", "Choose a licence"),
        ("", "unknown", "Ask its authors"),
        ("\n- x: `y`", "unknown", "Ask its authors"),
    ],
)
def test_the_licence_of_the_start_weights_decides_that_of_the_result(made, licence, hub, says):
    folder = made(None, start={"weights": {"given": "w.pt", "sha256": "ab" * 32, "licence": licence}})
    front, text = parts(folder)
    assert front["license"] == hub and says in text
    assert "ab" * 32 in text
    assert ("license_name" in front) == (hub == "other")


@pytest.mark.parametrize(
    ("start", "licence"),
    [
        ({"weights": {"given": "yolov5s", "licence": "AGPL-3.0 (x)", "origin": "o"}}, "AGPL-3.0 (x)"),
        ({"data": {"train": "ab"}}, SCRATCH),
        ({}, None),  # of an older version, whose events do not say it
    ],
)
def test_weights_of_an_earlier_run_pass_the_licence_on(made, monkeypatch, start, licence):
    folder = made(None, start=start)
    file = folder.weights / "best.safetensors"
    file.write_bytes(b"weights")
    monkeypatch.chdir(folder.path.parent)
    facts = start_facts("exp/weights/best.safetensors")
    assert facts.get("licence") == licence and facts["sha256"] == digest_of(file)


def test_weights_of_the_hub_are_named_with_their_commit(made):
    name = f"hf:someone/net@{COMMIT}"
    folder = made(
        None, start={"weights": {"given": name, "sha256": "ab" * 32}}, settings=[f"weights={name}", "model="]
    )
    front, text = parts(folder)
    assert front["base_model"] == "someone/net"
    assert f"--weights {name}" in text


def test_a_card_says_how_to_get_the_weights_and_which_run_they_started_from(made, tmp_path):
    given = "/mnt/customer/runs/first/weights/best.safetensors"
    folder = made(start={"weights": {"given": given, "sha256": "ab" * 32}}, settings=[f"weights={given}"])
    folder.plots.joinpath("val_predictions.jpg").write_bytes(b"picture")
    write_report(folder)
    _, text = parts(folder)
    assert "Start weights: first/weights/best.safetensors," in text and "customer" not in text
    assert "--weights first/weights/best.safetensors" in text
    assert "not on PyPI" in text and "`--weights hf:USER/NAME`" in text
    assert f"score of at least {SHOWN_SCORE}" in text


def test_a_card_has_no_secret(made, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecret")
    start = {"weights": {"given": "/mnt/customer/of/hf_verysecretverysecret.pt", "sha256": ""}}
    folder = made(None, start=start, settings=["data=/home/bob/password=letmein/data.yaml"])
    content = folder.card.read_text()
    for secret in ("hf_very", "letmein", "/home", "bob", "customer"):
        assert secret not in content


def test_a_readme_that_a_person_wrote_or_changed_stays(made, capsys):
    folder = made()
    written = folder.card.read_text()
    write_report(folder)
    assert folder.card.read_text() == written and "stays" not in capsys.readouterr().err
    for mine in (written.replace("license: unknown", "license: mit"), "# My notes\n", ""):
        folder.card.write_text(mine)
        write_report(folder)
        folder.discard_report()
        assert folder.card.read_text() == mine and "delete it" in capsys.readouterr().err
    folder.card.unlink()
    write_report(folder)
    assert folder.card.read_text().startswith("---\n")


def test_a_run_that_has_not_finished_or_validated_says_so(made):
    folder = made(None, epochs=2, finished=False)
    content = folder.card.read_text()
    assert "has not finished" in content and "same SHA-256 on any fleet:" not in content
    table = folder.results_csv.read_text().splitlines()
    names = table[0].split(",")
    rows = [
        [("" if "metrics" in n else v) for n, v in zip(names, row.split(","), strict=True)]
        for row in table[1:]
    ]
    folder.results_csv.write_text("\n".join([table[0], *map(",".join, rows)]) + "\n")
    write_report(folder)
    front, text = parts(folder)
    assert "model-index" not in front and "metrics" not in front and "## Figures" not in text


@pytest.mark.parametrize(("figure", "kind"), [("mask mAP50", "image-segmentation"), ("radius error", None)])
def test_masks_and_tasks_of_a_user_have_their_own_words(made, figure, kind):
    folder = made(None)
    results = {"task": {"columns": {"metrics/mAP50": figure}, "of_class": {}, "fitness_of": {figure: 1.0}}}
    folder.results_json.write_text(json.dumps(results))
    (folder.plots / "val_predictions.jpg").write_bytes(b"picture")
    write_report(folder)
    front, text = parts(folder)
    assert front.get("pipeline_tag") == kind
    assert front["model-index"][0]["results"][0]["task"]["type"] == (kind or "other")
    assert "](plots/val_predictions.jpg)" in text


def test_exact_sums_promise_the_same_sha256_and_the_command_has_every_setting_of_the_result(made):
    given = ["reduce=exact", "batch=8", "rect=true", "device=cpu:2", "workers=3"]
    folder = made(settings=given)
    _, text = parts(folder)
    command = (
        "yolofleet train --data data.yaml --model yolov5n --batch 8 --reduce exact --rect --epochs 6 --seed 0"
    )
    shown = text.split("```sh\n")[2].partition("\n")[0]
    assert sorted(shown.split()) == sorted(command.split())
    assert "**The same SHA-256 on any fleet:**" in text and f"`{0:064x}`" in text


def test_the_verb_writes_the_card_of_a_training_and_a_target_gets_the_page_only(made, tmp_path):
    folder = made()
    folder.card.unlink()
    CliRunner().invoke(
        run_command, [str(folder.path), "--out", str(tmp_path / "page.html")], catch_exceptions=False
    )
    assert not folder.card.exists()
    CliRunner().invoke(run_command, [str(folder.path)], catch_exceptions=False)
    assert folder.card.exists()
    folder.discard_report()
    assert not folder.card.exists()
