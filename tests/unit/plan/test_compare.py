"""`yolofleet plan compare` on a run folder as a training leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_training import narrow_cfg
from test_probe import VALUES

from yolofleet.checkpoint.weights import Weights, WeightsHeader, write_weights
from yolofleet.cli import main
from yolofleet.config.load import dump_config, resolve_train
from yolofleet.datasets.shapes import make_shapes
from yolofleet.errors import CheckpointError, DataError
from yolofleet.families import build_model
from yolofleet.models.description import describe
from yolofleet.plan.compare import compare
from yolofleet.plan.probe import probe_of, read_probe

HEADER = "epoch,seconds,images_per_s,data_share,compute_share,comm_share,val_seconds\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "exp"
    folder.mkdir()
    data = make_shapes(tmp_path / "data", images=20, val_images=10, img=64, seed=3)
    given = {
        "data": str(data),
        "model": "yolov5n",
        "img": "320",
        "batch": "8",
        "nominal_batch": "8",
        "epochs": "3",
    }
    (folder / "config.yaml").write_text(dump_config(*resolve_train(given)))
    (folder / "results.csv").write_text(
        HEADER + "1,9,2.0,0.5,0.5,0,0.3\n2,2,20.0,0.02,0.9,0.08,0.2\n3,2,22.0,0.02,0.9,0.08,0.2\n"
    )
    fleet = {"processes": 2, "device": "cpu", "hosts": ["a"]}
    (folder / "results.json").write_text(
        json.dumps({"fleet": fleet, "seconds": {"start": 3.0, "compute": 10.0}})
    )
    return folder


def test_the_error_of_a_prediction_is_told_and_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    probe_of(VALUES).write(path)
    assert main(["plan", "compare", str(run), "--probe", str(path), "--json", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    # without the first epoch
    assert found["happened"] == {"images_per_s": 21.0, "val_s": 0.2, "run_s": 13.0}
    assert found["predicted"]["images_per_s"] > 0 and found["binds"] == "network"
    assert "happened" in capsys.readouterr().out
    kept = read_probe(path).errors
    assert [(error.run, error.happened) for error in kept] == [("exp", 21.0)]
    compare(run, [path], keep=False)
    assert len(read_probe(path).errors) == 1


def test_a_prediction_after_errors_is_as_doubtful_as_they_were(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    probe_of(VALUES).write(path)
    before = compare(run, [path], keep=True).forecast
    after = compare(run, [path], keep=False).forecast
    assert after.likely.step == before.likely.step
    assert after.slow.rate_img_s < before.slow.rate_img_s  # unless the prediction was right by chance


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", "{"),
        ("results.json", '{"fleet": {"hosts": [], "processes": 1}, "seconds": {}}'),
        ("results.json", '{"fleet": 3}'),
        ("results.json", "[]"),
        ("results.json", f'{{"fleet": {{"hosts": ["a"], "processes": 1}}, "seconds": {{"a": {"9" * 400}}}}}'),
        ("results.csv", HEADER),
        ("results.csv", HEADER + "1,9,,0.5,0.5,0,0.3\n"),
    ],
)
def test_a_run_without_figures_gets_one_message(run: Path, tmp_path: Path, name: str, text: str) -> None:
    probe_of(VALUES).write(tmp_path / "a.json")
    (run / name).write_text(text)
    with pytest.raises(DataError):
        compare(run, [tmp_path / "a.json"], keep=True)


def test_a_folder_that_is_no_run_gets_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "compare", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_a_run_from_weights_alone_has_the_network_of_the_weights_that_it_wrote(
    run: Path, tmp_path: Path
) -> None:
    config, recipe = resolve_train({"data": str(tmp_path / "data"), "weights": "a.safetensors", "img": "320"})
    (run / "config.yaml").write_text(dump_config(config, recipe))
    (tmp_path / "narrow.cfg").write_text(narrow_cfg("darknet-narrow"))
    model = build_model(describe(str(tmp_path / "narrow.cfg")), 3)
    model.names = ("a", "b", "c")
    probe_of({**VALUES, "model": model.description.name}).write(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match=r"last\.safetensors"):
        compare(run, [tmp_path / "a.json"], keep=False)
    weights = Weights(model.state_dict(), WeightsHeader.of(model, img=320))
    write_weights(run / "weights" / "last.safetensors", weights)
    found = compare(run, [tmp_path / "a.json"], keep=False).forecast
    assert found.work.network.name == "narrow"
    assert found.work.network.parameters == sum(p.numel() for p in model.parameters())
    assert found.likely.rate_img_s > 0
