"""The examples of ONNX Runtime in C++ and JavaScript find the boxes that ``predict`` finds."""

from __future__ import annotations

import json
import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from browser import browser, missing
from commands import called, ran, working_in
from exported import network
from reference import reference
from small_weights import saved

from yolofleet.data.geometry.boxes import iou_matrix
from yolofleet.data.images.decode import read_image
from yolofleet.inference.export.verify import generated_images

pytestmark = [pytest.mark.slow, pytest.mark.long]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPP, JS = EXAMPLES / "onnxruntime-cpp", EXAMPLES / "onnxruntime-js"
SIDES_HW = {
    "wide.png": (118, 192),
    "high.png": (192, 122),
    "square.png": (96, 96),
}  # resized by 1/2 without rounding
REAL = 3  # photographs of other sizes, for a trained network, which rounded pixels change little
needs_packages = pytest.mark.skipif(
    not (JS / "node_modules").is_dir() or not shutil.which("node"),
    reason="needs Node.js, and npm install in examples/onnxruntime-js",
)


@pytest.fixture(scope="module", params=["small", "trained"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[Any]]]:
    """Return a folder with ``best.onnx`` and pictures, and what ``predict`` finds in each picture."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("pictures")
    if request.param == "small":
        images = generated_images()
        for name, (height, width) in SIDES_HW.items():
            cv2.imwrite(str(folder / name), next(images)[100 : 100 + height, 200 : 200 + width])
        weights, img, conf = saved(network(), folder / "best.safetensors", 96), "96", "0.5"
    else:
        weights, img, conf = reference("weights/yolov5n.pt"), "320", "0.3"
        for file in sorted(reference("data/coco128val/images").iterdir())[:REAL]:
            cv2.imwrite(str(folder / f"{file.stem}.png"), read_image(file))  # decoders of JPEG differ
    with working_in(folder):
        words = ("--weights", weights, "--img", img, "--nms", "--conf", conf, "--out", "best.onnx")
        assert called("export", *words).code == 0
        options = ("--source", "*.png", "--save", "none", "--save-json", "--name", "all")
        assert called("predict", "--weights", "best.onnx", *options).code == 0
    found = json.loads((folder / "runs/predict/all/predictions.json").read_text(encoding="utf-8"))
    return folder, {Path(image["path"]).name: image["detections"] for image in found}


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    """Compare objects with those of ``predict``; rounding may change their order."""
    assert len(ours) == len(theirs) > 0
    left = list(theirs)
    for one in ours:
        alike = [other for other in left if abs(one["score"] - other["score"]) < 1e-3]
        boxes = torch.tensor([other["box_xyxy_px"] for other in alike]).reshape(-1, 4)
        (overlaps,) = iou_matrix(torch.tensor([one["box"]]), boxes)
        # also without area
        equal = (overlaps > 0.99) | ((boxes - torch.tensor(one["box"])).abs().amax(1) < 0.02)
        found = [
            other for other, yes in zip(alike, equal, strict=True) if yes and other["name"] == one["name"]
        ]
        assert found, (one, theirs)
        left.remove(found[0])


def assert_lines(out: str, expected: dict[str, list[Any]]) -> None:
    """Compare the lines of JSON that a program has printed."""
    found = [json.loads(line) for line in out.splitlines()]
    assert {one["file"] for one in found} == set(expected)
    for name, theirs in expected.items():
        assert_same([one for one in found if one["file"] == name], theirs)


@needs_packages
def test_node_finds_the_boxes_of_predict(place):
    folder, expected = place
    assert_lines(ran(folder, "node", JS / "node.js", "best.onnx", *expected).out, expected)


@needs_packages
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_page_finds_the_boxes_of_predict(place, tmp_path):
    folder, expected = place
    for path in (*JS.iterdir(), folder / "best.onnx", *map(folder.joinpath, expected)):
        (tmp_path / path.name).symlink_to(path)
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with browser(folder) as chromium:
                chromium.open(f"http://127.0.0.1:{server.server_port}/")
                for name, theirs in expected.items():
                    found = chromium.run(  # a module has run when its page is loaded, but perhaps not what it waits for
                        "return (async () => { while (!window.show) await new Promise((done) => setTimeout(done, 50));"
                        f"return window.show(await (await fetch('{name}')).blob()); }})()"
                    )
                    assert_same(found, theirs)
                    width = read_image(folder / name).shape[1]
                    assert chromium.run("return document.querySelector('canvas').width") == width
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the program with the command in its first lines."""
    folder = tmp_path_factory.mktemp("built")
    root = os.environ.get("ONNXRUNTIME_ROOT")
    if shutil.which("g++") is None or root is None:
        pytest.skip("needs g++, and ONNXRUNTIME_ROOT with the folders include and lib of ONNX Runtime")
    lines = (CPP / "detect.cpp").read_text(encoding="utf-8").splitlines()
    (command,) = [line.removeprefix("// ") for line in lines if line.startswith("// g++ ")]
    words = command.replace("$ORT", root).replace("detect.cpp", str(CPP / "detect.cpp")).split()
    done = ran(folder, *words, code=None)
    if "No such file" in done.err:
        pytest.skip(f"a header is missing: {done.err.splitlines()[0]}")
    assert done.code == 0, done.err
    return folder / "detect"


def test_cpp_finds_the_boxes_of_predict(place, program):
    folder, expected = place
    assert_lines(ran(folder, program, "best.onnx", *expected).out, expected)
    assert "best.onnx: " in ran(folder, program, "best.onnx", "best.onnx", code=1).err
