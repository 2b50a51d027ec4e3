"""Export, then predict, val and bench with what came out, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import small_shapes
from exported import network, small
from reference import reference

from yolofleet.cli import main
from yolofleet.data.datasets.shapes import NAMES
from yolofleet.families.build import build_model
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights

CONF = "0.6"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """``data`` and ``best.safetensors``, a network of its classes whose predictions depend on the image."""
    folder = tmp_path_factory.mktemp("to be exported")
    data = small_shapes(folder, images=2, val_images=6)
    model = network(nc=len(NAMES))
    model.names = NAMES
    write_weights(folder / "best.safetensors", Weights(model.state_dict(), WeightsHeader.of(model, img=64)))
    return folder, data


@pytest.fixture(autouse=True)
def at(place, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(place[0] / "cache"))


def figures_of(*argv: str | Path) -> dict:
    assert main([*map(str, argv), "--json", "figures.json"]) == 0
    return json.loads(Path("figures.json").read_text(encoding="utf-8"))


def detections_of(weights: Path, data: Path, *more: str) -> list[np.ndarray]:
    """[n, 6] of each picture."""
    argv = ["predict", "--weights", weights, "--source", data.parent / "images" / "val", "--save", "none"]
    assert main([*map(str, argv), "--save-json", "--name", weights.name, "--exist-ok", *more]) == 0
    found = json.loads(Path("runs/predict", weights.name, "predictions.json").read_text(encoding="utf-8"))
    return [
        np.array([[*d["box_xyxy_px"], d["score"], d["class"]] for d in image["detections"]]).reshape(-1, 6)
        for image in found
    ]


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert sum(map(len, ours)) > 5
    for mine, found in zip(ours, theirs, strict=True):
        assert mine.shape == found.shape
        assert np.abs(mine - found).max(initial=0) < 0.5
        assert np.abs(mine[:, 4:] - found[:, 4:]).max(initial=0) < 1e-3


@pytest.mark.parametrize("format", ["onnx", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_files_find_and_score_what_the_weights_do(place, format, capsys):
    pytest.importorskip("onnxruntime")
    folder, data = place
    weights, out = folder / "best.safetensors", folder / f"best.{format}"
    exported = figures_of(
        "export", "--weights", weights, "--format", format, "--dynamic", "both", "--data", data
    )
    assert exported["verified"] and exported["file"] == str(out)
    assert "exported and verified" in capsys.readouterr().out
    settings = ("--img", "64", "--conf", CONF)
    assert_same(detections_of(weights, data, *settings), detections_of(out, data, *settings, "--batch", "2"))
    ours, theirs = (
        figures_of("val", "--weights", w, "--data", data, "--img", "64", "--no-plots", "--workers", "0")[
            "metrics"
        ]
        for w in (weights, out)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert theirs[name] == pytest.approx(value, abs=5e-4), name


def test_an_export_of_another_precision_has_another_name(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    weights = tmp_path / "best.safetensors"
    fresh = build_model(small("yolov5n"), 4)  # differs less in 16 bits than the network of the other tests
    write_weights(weights, Weights(fresh.state_dict(), WeightsHeader.of(fresh, img=64)))
    (tmp_path / "best.onnx").write_bytes(b"an earlier export")
    assert figures_of("export", "--weights", weights, "--half")["file"] == str(tmp_path / "best_half.onnx")
    assert (tmp_path / "best.onnx").read_bytes() == b"an earlier export"
    assert "replaces" not in capsys.readouterr().out
    assert figures_of("export", "--weights", weights)["file"] == str(tmp_path / "best.onnx")
    assert "best.onnx exists: this export replaces it" in capsys.readouterr().out
    assert (tmp_path / "best.onnx").read_bytes() != b"an earlier export"


@pytest.mark.slow
def test_a_file_of_fixed_size_is_given_pictures_of_that_size(place, capsys):
    pytest.importorskip("onnxruntime")
    folder, data = place
    weights, out = folder / "best.safetensors", folder / "fixed.onnx"
    assert (
        main(["export", "--weights", str(weights), "--img", "64,96", "--batch", "2", "--out", str(out)]) == 0
    )
    found = detections_of(out, data, "--conf", CONF)
    assert len(found) == 6 and sum(map(len, found)) > 5
    figures = figures_of("val", "--weights", out, "--data", data, "--no-plots", "--workers", "0")
    assert figures["images"] == 6
    bench = figures_of("bench", "--weights", out, "--passes", "2", "--threads", "1")
    assert (bench["height_px"], bench["width_px"], bench["exported"]) == (64, 96, True)
    assert set(bench["median_ms"]) == {"letterbox", "forward", "nms", "all"}
    capsys.readouterr()
    for argv, says in (
        (("val", "--img", "128"), "takes images of 64 x 96 px"),
        (("predict", "--precision", "bf16"), "was chosen when it was exported"),
        (("predict", "--cfg", "a.cfg"), "describes itself"),
    ):
        rest = ("--data", data) if argv[0] == "val" else ("--source", data.parent / "images" / "val")
        assert main([*map(str, (*argv, "--weights", out, *rest))]) == 2
        assert says in capsys.readouterr().err


def test_a_file_that_suppresses_gives_the_boxes_of_predict(place, capsys):
    pytest.importorskip("onnxruntime")
    folder, data = place
    weights, out = folder / "best.safetensors", folder / "nms.onnx"
    argv = ["export", "--weights", weights, "--nms", "--conf", CONF, "--max-det", "1000", "--out", out]
    assert main([*map(str, argv)]) == 0
    ours = detections_of(weights, data, "--img", "64", "--conf", CONF, "--classes", "0")
    assert_same(ours, detections_of(out, data, "--img", "64", "--classes", "0"))
    higher = detections_of(out, data, "--conf", "0.7")
    assert all((found[:, 4] > 0.7).all() for found in higher)
    capsys.readouterr()
    source = str(data.parent / "images" / "val")
    for flag, value, says in (
        ("--conf", "0.1", "keeps only scores above 0.6"),
        ("--iou", "0.3", "suppresses inside, with 0.45"),
    ):
        assert main(["predict", "--weights", str(out), "--source", source, flag, value]) == 2
        assert says in capsys.readouterr().err
    assert main(["val", "--weights", str(out), "--data", str(data)]) == 2
    assert "export without --nms" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "network",
    [
        ("--weights", "weights/yolov5n.pt", "--img", "640"),
        ("--weights", "weights/yolov3-tiny.weights", "--cfg", "weights/yolov3-tiny.mask123.cfg", "--img", "416"),
        ("--weights", "weights/yolov5n.pt", "--img", "640", "--formats", "onnx,openvino,tflite", "--int8"),
    ],
    ids=["yolov5", "darknet", "yolov5 in 8 bits"],
)  # fmt: skip
def test_files_score_what_trained_networks_score_on_real_pictures(network):
    """Boxes within 0.5 px, scores within 0.001, COCO's figures to three digits (8 bits: to 0.02), on 128 images."""
    pytest.importorskip("onnxruntime")
    argv = [str(reference(word)) if word.startswith("weights/") else word for word in network]
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "exports.py"
    data = reference("data/coco128val/data.yaml")
    done = subprocess.run(
        [sys.executable, str(script), *argv, "--data", str(data)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout
    print(done.stdout)  # the table of docs/inference.md, with -s
