"""What ``yolofleet val`` writes beside the COCO metrics, and what it refuses."""

import csv
import json

import pytest
from small_weights import saved, untrained

from yolofleet.config.load import resolve_predict, resolve_val
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.val import validate


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    root = tmp_path_factory.mktemp("val")
    make_shapes(root / "set", images=2, val_images=4, img=64, seed=0)
    files = {"weights": str(saved(untrained(4), root / "w.safetensors")), "data": str(root / "set/data.yaml")}
    return files | {"img": 64, "plots": False, "device": "cpu", "workers": 0}


def test_error_analysis_voc_worst_images_and_tables_are_written(given, tmp_path, capsys):
    weights = [given["weights"]] * 2
    config = resolve_val(
        given
        | {"weights": weights, "augment": True, "merge": "wbf", "metric": "voc07", "verbose": True}
        | {"error_analysis": True, "worst": 2, "precision": "fp16"}
    )
    assert config.notes == ("--precision fp16 has no effect on a CPU, which computes in fp32; use bf16",)
    validate(config, None, World.single(), None, RunFolder(tmp_path))
    said = capsys.readouterr().out
    for words in (
        "PASCAL VOC07",
        "by size",
        "errors: AP50",
        "localisation",
        "number, score above 0.25",
        "no labels",  # no object of 64 px is large
        "test-time augmentation; ensemble of 2",
    ):
        assert words in said
    assert " -1" not in said
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"]["mAP-large"] == -1
    assert set(results["errors"]["counts"]) == set(results["errors"]["gains"]) and "mAP" in results["voc07"]
    assert results["errors"]["counts"]["missed"] > 0
    assert len(list((tmp_path / "worst").glob("*.jpg"))) == 2
    with (tmp_path / "per_class.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and {"class", "AP", "AP50", "AP-small", "labels"} <= set(rows[0])


def test_a_set_without_labels_has_no_accuracy(given, tmp_path, capsys):
    make_shapes(tmp_path / "set", images=2, val_images=2, img=64, seed=0)
    for file in (tmp_path / "set" / "labels" / "val").iterdir():
        file.write_text("")
    config = resolve_val(given | {"data": str(tmp_path / "set/data.yaml"), "verbose": True})
    validate(config, None, World.single(), None, RunFolder(tmp_path / "run"))
    said = capsys.readouterr().out
    assert "validated: mAP50 no labels, mAP50-95 no labels" in said
    table = [line.split() for line in said.splitlines() if line.split()[:1] in (["all"], ["circle"])]
    assert [row.count("labels") for row in table] == [4, 4] and not any("0.000" in row for row in table)


@pytest.mark.parametrize(
    ("resolver", "settings", "words"),
    [
        (resolve_val, {"merge": "mean"}, "there is one network"),
        (resolve_val, {"metric": "voc"}, "not one of coco, voc07, voc12"),
        (resolve_val, {"worst": -1}, "below 0"),
        (resolve_predict, {"tile": 16}, "below 32 pixels"),
        (resolve_predict, {"overlap": 0.5}, "no effect without --tile"),
        (resolve_predict, {"tile": 64, "overlap": 1}, "not below 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(resolver, settings, words):
    needed = {"weights": "w.pt"} | ({"data": "d"} if resolver is resolve_val else {"source": "s"})
    with pytest.raises(ConfigError, match=words):
        resolver(needed | settings)


def test_one_weights_file_may_be_written_as_a_text():
    assert resolve_val({"weights": "a.pt", "data": "d"}).value.weights == ("a.pt",)
    assert resolve_val({"weights": ["a.pt", "b.pt"], "data": "d"}).value.weights == ("a.pt", "b.pt")
