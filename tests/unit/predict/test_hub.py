"""YOLOv5's hub interface, as torch.hub opens it from this checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from reference import reference
from small_weights import saved, untrained

from yolofleet.cli import hub
from yolofleet.support.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return saved(untrained(("cat", "dog")), tmp_path_factory.mktemp("weights") / "best.safetensors")


def loaded(name, *args, **more):
    return torch.hub.load(str(ROOT), name, *args, source="local", trust_repo=True, **more)


def test_custom_weights_are_called_with_paths_arrays_and_lists(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    picture = np.random.default_rng(0).integers(0, 255, (40, 80, 3), np.uint8)  # BGR
    cv2.imwrite("a.png", picture)
    model = loaded("custom", str(weights), device="cpu")
    model.conf, model.max_det = 0.0, 7
    of_file = model("a.png", size=64)
    of_array = model(picture[..., ::-1], size=64)  # RGB, as in YOLOv5's hub
    assert of_file.xyxy[0].shape == (7, 6) and torch.equal(of_file.xyxy[0], of_array.xyxy[0])
    both = model(["a.png", picture[..., ::-1]])
    assert [len(boxes) for boxes in both.xyxy] == [7, 7]

    # left 8, top 4, right 24, bottom 20 of 80 x 40 pixels
    both[0].boxes_xyxy_px[0] = 8, 4, 24, 20
    assert both.xywh[0][0, :4].tolist() == [16, 12, 16, 16]
    assert both.xyxyn[0][0, :4].tolist() == pytest.approx([0.1, 0.1, 0.3, 0.5])
    assert both.xywhn[0][0, :4].tolist() == pytest.approx([0.2, 0.3, 0.2, 0.4])
    assert both.xyxy[0][0, 4] == pytest.approx(float(both[0].scores[0]))

    capsys.readouterr()
    both.print()
    assert capsys.readouterr().out.startswith("image 1/2: 80x40 ")
    assert [path.parent for path in both.save()] == [Path("runs/detect/exp")] * 2
    assert both.save()[0].parent == Path("runs/detect/exp2") and both.save("here")[0].is_file()


def test_settings_of_the_model_count_for_the_next_call(weights):
    model = loaded("custom", weights)
    picture = np.zeros((64, 64, 3), np.uint8)
    model.conf, model.max_det, model.classes = 0.0, 5, [1]
    assert set(model(picture, size=64).xyxy[0][:, 5].tolist()) == {1.0}
    model.conf, model.classes = 1.0, None
    assert len(model(picture, size=64).xyxy[0]) == 0
    model.classes = ["bird"]
    with pytest.raises(ConfigError, match="class bird does not exist"):
        model(picture)


def test_a_network_without_weights_is_refused():
    with pytest.raises(ConfigError, match="a network without weights finds nothing"):
        loaded("yolov5n", pretrained=False)


def test_a_published_name_finds_weights_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("yolov5n.pt").symlink_to(reference("weights/yolov5n.pt"))
    found = loaded("yolov5n")(np.full((64, 64, 3), 114, np.uint8))
    assert found.xyxy[0].shape[1] == 6 and found.rows() == []


def test_a_wrong_path_or_device_is_an_error_at_once(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere/best.pt", "nowhere.safetensors"):
        with pytest.raises(CheckpointError, match="nowhere"):
            loaded("custom", name)
    for device in ("gpu", "cuda:77", "0,1"):
        with pytest.raises(ConfigError, match=r"device|CUDA|GPU"):
            loaded("custom", weights, device=device)


def test_a_size_without_memory_is_a_clear_error(weights):
    model = loaded("custom", weights, device="cpu")
    picture = np.zeros((64, 64, 3), np.uint8)
    with pytest.raises(ConfigError, match="1000000000 is above 32768"):
        model(picture, size=10**9)
    if sys.platform != "linux":
        pytest.skip("/proc and limits of memory")
    import resource

    model(picture, size=64)
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), before[1]))
    try:
        with pytest.raises(ConfigError, match="images of 32768 px, 1 in a pass, need more memory"):
            model(picture, size=32768)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(model(picture, size=64)) == 1


def test_arrays_of_a_hub_model_are_rgb_with_or_without_alpha(weights):
    model = hub.HubModel(weights)
    rgb = np.zeros((40, 60, 3), np.uint8)
    rgb[..., 0], rgb[10:30, 10:40, 2] = 200, 90
    rgba = np.dstack([rgb, np.full((40, 60), 7, np.uint8)])
    plain, with_alpha = (model.predict(hub._bgr(one))[0] for one in (rgb, rgba))
    assert np.array_equal(plain.image_bgr, rgb[..., ::-1])
    assert np.array_equal(with_alpha.image_bgr, plain.image_bgr)
    (batch,) = model.predict(hub._bgr(rgb[None]))
    assert np.array_equal(batch.image_bgr, plain.image_bgr)
