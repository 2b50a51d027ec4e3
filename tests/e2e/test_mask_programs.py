"""Exported files with masks: the programs of inference.md, ``predict`` and ``val`` find in them what the network finds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from commands import called, ran, working_in
from exported import network, spread
from mask_data import small_masks
from pages import BLOCKS
from small_weights import saved
from walks import sampled

from yolofleet.data.geometry import rle
from yolofleet.inference.export.verify import generated_images

pytestmark = [pytest.mark.long, *(pytest.mark.slow,) * (sys.platform == "win32")]

IMG = 96
PICTURES = {"square": (120, 120), "wide": (100, 150), "high": (97, 64)}  # height, width
EXPORT, PROGRAM, OPENVINO = (block.text for block in BLOCKS if "test_mask_programs" in block.remark)
SAVE = """
import sys
assert "torch" not in sys.modules and "yolofleet" not in sys.modules
for name in {pictures}:
    np.savez(name, *detect(cv2.imread(name + ".png"), conf={conf}))
"""


def with_openvino(program: str) -> str:
    """Return the program for ONNX Runtime with the lines of the page that open and run a file with OpenVINO."""
    *opening, running = OPENVINO.strip().splitlines()
    start = program.index("session = ")
    lines = [
        " " * 4 + running if "session.run(" in line else line
        for line in program[program.index("\n\n\ndef detect") :].splitlines()
    ]
    head = program[:start].replace("import onnxruntime", "")
    return "\n".join([head, *opening, *lines])


def expected(folder: Path) -> dict[str, list[Any]]:
    """Return what ``predict`` wrote: class, score, box and mask of each object, by the name of the picture."""
    return {
        Path(image["path"]).stem: [
            (
                one["class"],
                one["score"],
                one["box_xyxy_px"],
                rle.decode(rle.from_text(one["segmentation"]["counts"], size), size),
            )
            for one in image["detections"]
            for size in [tuple(one["segmentation"]["size"])]
        ]
        for image in json.loads((folder / "predictions.json").read_text())
    }


def assert_equal(found: list[Any], others: list[Any]) -> None:
    """Compare what two programs find. Scores that are equal but for rounding may come in either order."""
    assert len(found) == len(others) > 0
    left = list(others)
    for number, score, box, mask in found:
        same = [
            k
            for k, (other, other_score, other_box, _) in enumerate(left)
            if (other, other_score) == (number, pytest.approx(score, abs=1e-3))
            and list(other_box) == pytest.approx(list(box), abs=0.05)
        ]
        assert same, (number, score, box)
        *_, other_mask = left.pop(same[0])
        assert (mask & other_mask).sum() >= 0.999 * (mask | other_mask).sum()
        assert mask.shape == other_mask.shape


@pytest.mark.parametrize(("name", "conf"), sampled([("yolov5n-seg", 0.25), ("dfine-toy-seg", 0.02)], 2))
def test_programs_without_yolofleet_find_the_boxes_and_masks_that_predict_finds(name, conf, tmp_path):
    pytest.importorskip("onnxruntime")
    images = generated_images()
    for picture, (height, width) in PICTURES.items():
        cv2.imwrite(str(tmp_path / f"{picture}.png"), next(images)[100 : 100 + height, 200 : 200 + width])
    cv2.imwrite(str(tmp_path / "street.jpg"), next(images)[:90])
    saved(spread(name, 0), tmp_path / "best-seg.safetensors", IMG)
    results = {}
    with working_in(tmp_path):
        (tmp_path / "pictures").mkdir()
        for picture in PICTURES:
            (tmp_path / f"pictures/{picture}.png").symlink_to(tmp_path / f"{picture}.png")
        export = EXPORT.split("#")[0].replace("--img 640", f"--img {IMG}").split()[1:]
        assert called(*export).code == 0
        assert called("export", "--weights", "best-seg.safetensors", "--format", "openvino").code == 0
        for file in ("best-seg.safetensors", "best-seg.onnx", "best-seg_openvino"):
            done = called(
                *("predict", "--weights", file, "--source", "pictures", "--save", "none", "--save-json"),
                *("--name", file, "--conf", str(conf)),
            )
            assert done.code == 0, done.err
            results[file] = expected(tmp_path / "runs/predict" / file)
    assert_equal(results["best-seg.safetensors"]["square"], results["best-seg.onnx"]["square"])
    for file, program in (("best-seg.onnx", PROGRAM), ("best-seg_openvino", with_openvino(PROGRAM))):
        ran(tmp_path, sys.executable, "-c", program + SAVE.format(pictures=list(PICTURES), conf=conf))
        for picture in PICTURES:
            with np.load(tmp_path / f"{picture}.npz") as arrays:
                found = list(zip(*(arrays[f"arr_{n}"] for n in range(4)), strict=True))
            assert_equal(found, results[file][picture])


@pytest.mark.slow
def test_a_validation_of_an_exported_file_has_the_figures_of_the_network(tmp_path):
    pytest.importorskip("onnxruntime")
    data = small_masks(tmp_path)
    saved(network("yolov5n-seg", nc=4), tmp_path / "best.safetensors")
    figures = []
    with working_in(tmp_path):
        assert called("export", "--weights", "best.safetensors", "--format", "onnx").code == 0
        for file in ("best.safetensors", "best.onnx"):
            done = called("val", "--weights", file, "--data", data, "--json", "-", "--device", "cpu")
            assert done.code == 0, done.err
            figures.append(json.loads(done.out)["metrics"])
    names = [f"{of}{name}" for of in ("", "mask ") for name in ("mAP50-95", "mAP50", "AR100")]
    network_s, files = ([found[name] for name in names] for found in figures)
    assert files == pytest.approx(network_s, abs=1e-3) and min(files) > 0, names
