import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from reference import reference
from small_weights import saved, untrained

from yolofleet.config.load import predict_config, resolve_predict
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.inference.predict import results
from yolofleet.inference.predict.frames import Frame
from yolofleet.inference.predict.predictor import Predictor, class_numbers
from yolofleet.inference.predict.results import file_name, plural
from yolofleet.inference.predict.run import predict_command
from yolofleet.inference.predict.sources import Source, find_items
from yolofleet.support.errors import CheckpointError, ConfigError, DataError, StorageError

pytestmark = pytest.mark.long

NAMES = ("person", "dog", "traffic light")


@pytest.fixture(scope="module")
def model():
    return untrained(NAMES)


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    return saved(model, tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture
def pictures(tmp_path):
    """A folder with a space and an umlaut: two pictures, a broken one, and a text."""
    folder = tmp_path / "my pictures ü"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, shape in (("b.png", (60, 100, 3)), ("a.jpg", (100, 60, 3))):
        done, encoded = cv2.imencode(name[1:], rng.integers(0, 255, shape, np.uint8))
        assert done
        (folder / name).write_bytes(encoded.tobytes())
    (folder / "c.jpg").write_bytes(b"not a picture")
    (folder / "notes.md").write_text("hello")
    return folder


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, (96, 64))
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no video")
    for i in range(7):
        writer.write(np.full((64, 96, 3), i * 30, np.uint8))
    writer.release()
    return path


# -- sources ---------------------------------------------------------------------------------------------


def names_of(items):
    return [Path(item.name).name for item in items]


def test_a_folder_a_glob_and_a_list_name_the_same_pictures_in_order(pictures):
    assert names_of(find_items(str(pictures))) == ["a.jpg", "b.png", "c.jpg"]
    assert names_of(find_items(str(pictures / "[ab].*"))) == ["a.jpg", "b.png"]
    listing = pictures / "list.txt"
    listing.write_text("# mine\n\nb.png\n" + str(pictures / "a.jpg") + "\n")
    assert names_of(find_items(str(listing))) == ["b.png", "a.jpg"]
    assert [(item.kind, item.number) for item in find_items("0")] == [("camera", 0)]


def test_a_name_in_a_list_that_is_too_long_for_the_disk_is_a_problem_of_one_picture(pictures):
    listing = pictures / "list.txt"
    listing.write_text("9" * 300 + ".jpg\n")
    source = Source(str(listing))
    assert list(source) == [] and len(source.problems) == 1 and "999.jpg" in source.problems[0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.jpg", "does not exist"),
        ("*.nothing", "matches no file"),
        ("9" * 300, "does not exist"),
        ("https://example.org/a.jpg", "is a url"),
        ("empty", "no pictures or videos"),
        ("empty.txt", "lists no files"),
    ],
)
def test_a_source_that_names_nothing_says_why(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match=words) as caught:
        find_items(spec)
    assert caught.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that even root cannot read")
def test_sub_folders_that_cannot_be_read_are_left_out():
    with subprocess.Popen(["true"]) as ended:
        while Path(f"/proc/{ended.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        with pytest.raises(DataError, match="no pictures or videos"):
            find_items(f"/proc/{ended.pid}")  # its folder net cannot be read


def test_what_cannot_be_read_is_one_line_each_and_the_rest_goes_on(pictures):
    source = Source(str(pictures))
    assert [frame.item for frame in source] == [0, 1]
    assert len(source.problems) == 1 and "c.jpg" in source.problems[0]


def test_every_nth_frame_of_a_video_is_taken(video):
    frames = list(Source(str(video), vid_stride=3))
    assert [frame.number for frame in frames] == [0, 3, 6]
    clip = frames[0].video
    assert clip is not None and clip.rate_hz == 10 and clip.frames == 7
    assert [round(float(frame.image.mean()) / 30) for frame in frames] == [0, 3, 6]


# -- predictor -------------------------------------------------------------------------------------------


class Oracle(torch.nn.Module):
    """Stands in the place of a network: one sure box at the same place of the letterboxed image."""

    pads_to_square, needs_nms, task = False, True, "boxes"

    def __init__(self, box_cxcywh_px, class_idx=1):
        super().__init__()
        self.names, self.strides, self.training = NAMES, (8, 16, 32), False
        self.row = torch.tensor([*box_cxcywh_px, 1.0, *(0.9 * (c == class_idx) for c in range(3))])
        self.shapes = []

    def forward(self, images):
        self.shapes.append(tuple(images.shape))
        return images

    def decode(self, images):
        return Decoded(self.row.expand(len(images), 1, -1))


def predictor_of(oracle, **settings):
    """Return a predictor at 64 px on the CPU with the stand-in as its network."""
    return Predictor(oracle, PredictConfig(img=64, device="cpu", **settings))


def test_boxes_come_back_in_the_pixels_of_the_image():
    # 100 x 200 px at img 64: ratio 0.32 -> 32 x 64 px, no padding left or right, none above (32 is a stride)
    predictor = predictor_of(Oracle((32, 16, 16, 8)))
    (found,) = predictor.predict(np.zeros((100, 200, 3), np.uint8))
    assert predictor.model.shapes == [(1, 3, 32, 64)]
    # (24, 12, 40, 20) / 0.32
    assert found.boxes_xyxy_px.tolist() == [pytest.approx([75, 37.5, 125, 62.5])]
    assert found.boxes_xyxy_px.dtype == np.float32 and found.classes.tolist() == [1]
    assert found.scores.tolist() == [pytest.approx(0.9)]
    assert found.counts() == "1 dog" and len(found) == 1
    said = json.loads(json.dumps(found.to_json()))
    assert said["detections"] == [
        {"class": 1, "name": "dog", "score": 0.9, "box_xyxy_px": [75.0, 37.5, 125.0, 62.5]}
    ]
    assert (said["width"], said["height"], said["frame"]) == (200, 100, None)


def test_padding_is_taken_off_and_boxes_are_cut_at_the_border():
    # 50 x 64 px at img 64: ratio 1, height padded to 64: 7 px above
    predictor = predictor_of(Oracle((60, 10, 16, 16)))
    (found,) = predictor.predict(np.zeros((50, 64, 3), np.uint8))
    assert found.boxes_xyxy_px.tolist() == [[52, 0, 64, 11]]  # (52, 2, 68, 18) less 7 above


def test_the_network_sees_red_green_blue_between_0_and_1():
    predictor = predictor_of(Oracle((1, 1, 1, 1)))
    seen = []
    predictor.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    image = np.zeros((64, 64, 3), np.uint8)
    image[..., 2] = 255  # red in BGR
    predictor.predict(image)
    (images,) = seen
    assert images.dtype == torch.float32 and images.is_contiguous(memory_format=torch.channels_last)
    assert images.mean(dim=(0, 2, 3)).tolist() == [1, 0, 0]


def test_a_batch_changes_nothing_but_the_number_of_passes(model):
    rng = np.random.default_rng(0)
    shapes = [(64, 96), (64, 96), (96, 64), (64, 96), (64, 96)]
    frames = [Frame(f"{i}", rng.integers(0, 255, (*s, 3), np.uint8), i) for i, s in enumerate(shapes)]
    one = list(Predictor(model, PredictConfig(img=96, device="cpu", conf=0.003)).stream(frames))
    four = list(Predictor(model, PredictConfig(img=96, device="cpu", conf=0.003, batch=4)).stream(frames))
    assert [p.path for p in four] == ["0", "1", "2", "3", "4"]
    assert sum(map(len, one)) > 0
    for a, b in zip(one, four, strict=True):
        assert len(a) == len(b)
        assert np.allclose(a.scores, b.scores, atol=1e-5)
        assert np.allclose(a.boxes_xyxy_px, b.boxes_xyxy_px, atol=0.05)


def test_the_image_size_is_rounded_up_to_the_stride(model):
    assert Predictor(model, PredictConfig(img=65, device="cpu")).img == 96


def test_classes_are_chosen_by_number_or_name():
    assert class_numbers(("dog", "0", 2), NAMES) == [0, 1, 2]
    with pytest.raises(ConfigError, match="did you mean person"):
        class_numbers(("persn",), NAMES)
    with pytest.raises(ConfigError, match="0 to 2"):
        class_numbers((3,), NAMES)
    predictor = predictor_of(Oracle((32, 16, 16, 8)), classes=("person",))
    assert len(predictor.predict(np.zeros((64, 64, 3), np.uint8))[0]) == 0


@pytest.mark.parametrize("device", ["cpu:2", "0,1", "all", "gpu"])
def test_prediction_runs_on_one_device(model, device):
    with pytest.raises(ConfigError, match="device"):
        Predictor(model, predict_config(device=device))


def test_a_missing_picture_in_a_list_is_an_error_of_the_python_face(model, pictures):
    predictor = Predictor(model, PredictConfig(img=64, device="cpu"))
    assert len(predictor.predict([pictures / "a.jpg", str(pictures / "b.png")])) == 2
    with pytest.raises(DataError, match=r"c\.jpg"):
        predictor.predict(pictures / "c.jpg")


def test_plurals_and_folder_names_are_sane():
    assert [plural(n) for n in ("dog", "bus", "bench", "人", "class 3")] == [
        "dogs",
        "buses",
        "benches",
        "人",
        "class 3",
    ]
    assert file_name("a/b: c?", "x") == "a_b_ c_" and file_name("..", "class 2") == "class 2"


# -- the verb --------------------------------------------------------------------------------------------


def configured(weights, source, project, **more):
    given = {
        "weights": str(weights),
        "source": str(source),
        "project": str(project),
        "device": "cpu",
        "img": 64,
    }
    return resolve_predict(given | {"conf": 0.003, "max_det": 5} | more).value


def test_predict_writes_everything_that_is_asked_for(weights, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    config = configured(
        weights, pictures, out, save_txt=True, save_conf=True, save_json=True, save_csv=True, save_crop=True
    )
    assert predict_command(config) == 0
    said = capsys.readouterr().out
    assert "img 1/3" in said and "a.jpg: " in said and " ms\n" in said and "read" in said
    assert "skipped: " in said and "c.jpg" in said and "no box" not in said

    run = out / "exp"
    for name, shape in (("a.jpg", (100, 60, 3)), ("b.png", (60, 100, 3))):
        drawn = cv2.imread(str(run / name))
        assert drawn is not None and drawn.shape == shape
    assert not (run / "c.jpg").exists()
    boxes = json.loads((run / "predictions.json").read_text(encoding="utf-8"))
    assert len(boxes) == 2 and all(1 <= len(image["detections"]) <= 5 for image in boxes)
    with (run / "predictions.csv").open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == sum(len(image["detections"]) for image in boxes)
    assert rows[0]["path"].endswith("a.jpg") and rows[0]["name"] in NAMES
    first = boxes[0]["detections"][0]
    line = [float(x) for x in (run / "labels" / "a.txt").read_text().splitlines()[0].split()]
    x1, y1, x2, y2 = first["box_xyxy_px"]
    expected = [
        first["class"],
        (x1 + x2) / 120,
        (y1 + y2) / 200,
        (x2 - x1) / 60,
        (y2 - y1) / 100,
        first["score"],
    ]
    assert line == pytest.approx(expected, abs=2e-4)
    assert len(list((run / "crops").rglob("*.jpg"))) <= 10
    assert {path.name for path in (run / "crops").iterdir()} <= set(NAMES)


def test_voc_text_is_in_pixels(weights, pictures, tmp_path):
    config = configured(
        weights, pictures / "a.jpg", tmp_path, save_txt=True, txt_format="voc", save="none", save_json=True
    )
    assert predict_command(config) == 0
    run = tmp_path / "exp"
    assert sorted(path.name for path in run.iterdir()) == ["labels", "predictions.json"]
    (image,) = json.loads((run / "predictions.json").read_text(encoding="utf-8"))
    line = [float(x) for x in (run / "labels" / "a.txt").read_text().splitlines()[0].split()]
    assert line[1:] == pytest.approx(image["detections"][0]["box_xyxy_px"], abs=0.01)


def test_a_video_becomes_a_video(weights, video, tmp_path):
    assert predict_command(configured(weights, video, tmp_path, vid_stride=2, save_txt=True)) == 0
    (first, *rest) = Source(str(tmp_path / "exp" / "clip.mp4"))
    assert len(rest) == 3 and first.image.shape == (64, 96, 3)
    assert first.video is not None
    assert first.video.rate_hz == 5  # every second of 10 frames a second: the same speed
    names = sorted(path.name for path in (tmp_path / "exp" / "labels").iterdir())
    assert names == ["clip_0.txt", "clip_2.txt", "clip_4.txt", "clip_6.txt"]


def test_pictures_of_one_name_do_not_overwrite_each_other(weights, pictures, tmp_path):
    for part in ("x", "y"):
        (tmp_path / part).mkdir()
        shutil.copy(pictures / "a.jpg", tmp_path / part / "a.jpg")
    assert predict_command(configured(weights, tmp_path / "[xy]" / "*.jpg", tmp_path / "out")) == 0
    run = tmp_path / "out" / "exp"
    assert sorted(run.rglob("*.*")) == [run / part / "a.jpg" for part in ("x", "y")]


def test_a_source_of_which_nothing_can_be_read_is_exit_code_3(weights, pictures, tmp_path, capsys):
    with pytest.raises(DataError, match="cannot read any image of") as caught:
        predict_command(configured(weights, pictures / "c.jpg", tmp_path))
    assert caught.value.exit_code == 3 and "image viewer" in caught.value.hint
    assert "results" not in capsys.readouterr().out and not (tmp_path / "exp").exists()


@pytest.mark.parametrize("name", ["best", "last"])
def test_the_folder_of_a_run_stands_for_its_weights(weights, pictures, tmp_path, name):
    from yolofleet.config.load import resolve_bench, resolve_export, resolve_val

    file = tmp_path / "run" / "weights" / f"{name}.safetensors"
    file.parent.mkdir(parents=True)
    shutil.copy(weights, file)
    run = str(tmp_path / "run")
    assert predict_command(configured(run, pictures / "a.jpg", tmp_path / "out")) == 0
    assert resolve_val({"weights": (run, str(weights)), "data": "d"}).value.weights == (
        str(file),
        str(weights),
    )
    for resolved in (resolve_export({"weights": run}), resolve_bench({"weights": run})):
        assert resolved.value.weights == str(file)
    file.unlink()
    assert resolve_export({"weights": run}).value.weights == run  # and the error names the folder


def test_weights_that_are_not_there_are_said(pictures, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        predict_command(configured("nowhere.safetensors", pictures, tmp_path))


def test_a_class_that_is_not_in_the_weights_is_said_before_anything_is_written(weights, pictures, tmp_path):
    with pytest.raises(ConfigError, match="did you mean dog"):
        predict_command(configured(weights, pictures, tmp_path / "out", classes=["dogg"]))
    assert not (tmp_path / "out").exists()


def test_a_setting_without_effect_is_refused(weights, pictures, tmp_path):
    with pytest.raises(ConfigError, match="--workers"):
        predict_command(configured(weights, pictures, tmp_path, workers=4))


def test_a_video_that_does_not_reach_the_disk_is_said(weights, video, tmp_path, monkeypatch):
    monkeypatch.setattr(cv2, "VideoWriter", SilentWriter)
    with pytest.raises(StorageError, match="cannot write"):
        predict_command(configured(weights, video, tmp_path))


class SilentWriter:
    """What OpenCV does on a full disk: nothing, without a word."""

    fourcc = staticmethod(lambda *_: 0)

    def __init__(self, *_):
        pass

    def isOpened(self):
        return True

    def write(self, _):
        pass

    def release(self):
        pass


def test_a_window_that_cannot_be_opened_is_said(weights, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "WINDOW_TRIAL", "raise SystemExit(1)")
    results._check_windows.cache_clear()
    with pytest.raises(ConfigError, match="cannot open a window"):
        predict_command(configured(weights, pictures, tmp_path, show=True))


def test_official_weights_find_what_is_in_the_picture(tmp_path):
    from yolofleet.cli.api import load_model

    image = reference("data/coco128val/images/000000000285.jpg")  # a bear, large
    model = load_model(reference("weights/yolov5n.pt"), device="cpu", img=320)
    (found,) = model.predict(image)
    assert found.names[int(found.classes[0])] == "bear" and found.scores[0] > 0.5
    truth = [float(x) for x in reference("data/coco128val/labels/000000000285.txt").read_text().split()]
    height, width = found.image_bgr.shape[:2]
    cx, cy, w, h = np.array(truth[1:]) * (width, height, width, height)
    assert found.boxes_xyxy_px[0] == pytest.approx(
        [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], abs=0.1 * height
    )


def test_the_python_face_opens_a_run_folder_and_names_mistakes(weights, tmp_path):
    from yolofleet import Model, load_model

    (tmp_path / "weights").mkdir()
    shutil.copy(weights, tmp_path / "weights" / "last.safetensors")
    assert load_model(tmp_path, device="cpu").names == NAMES
    with pytest.raises(ConfigError, match="did you mean epochs"):
        Model("yolov5n").train(data="shapes", epoch=3)
    with pytest.raises(CheckpointError, match="neither here nor in"):
        Model("best.pt")


def test_a_training_returns_what_predict_takes(tmp_path, monkeypatch, capsys):
    from yolofleet import Model, load_model

    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for i in range(4):
        cv2.imwrite(str(tmp_path / "images" / f"{i}.png"), np.full((64, 64, 3), 60 * i, np.uint8))
        (tmp_path / "labels" / f"{i}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [box]\n")
    sizes = {"img": 32, "batch": 2, "micro_batch": 2, "nominal_batch": 2, "max_steps": 2, "workers": 0}
    result = Model("yolov5n").train(
        data=data, device="cpu", threads=1, project=tmp_path / "runs", plots=False, **sizes
    )
    assert result.folder == tmp_path / "runs" / "exp" and 0 <= result.metrics["mAP50"] <= 1
    assert load_model(result.weights, device="cpu").names == ("box",)
    assert (result.folder / "config.yaml").is_file() and (result.folder / "results.csv").is_file()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="has GPUs, or may")
def test_a_training_is_examined_before_it_starts_as_the_command_is(tmp_path):
    from yolofleet import Model

    with pytest.raises(ConfigError, match="no NVIDIA GPU here"):
        Model("yolov5n").train(data="shapes", device="0,1", project=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_training_under_torchrun_is_refused_with_what_to_do(monkeypatch):
    from yolofleet import Model

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if name != "WORLD_SIZE" else "1")
    with pytest.raises(ConfigError, match="torchrun"):
        Model("yolov5n").train(data="shapes")


@pytest.mark.parametrize(
    ("code", "kind"), [(2, "ConfigError"), (4, "ClusterError"), (75, "Stopped"), (9, "YolofleetError")]
)
def test_a_failed_job_is_the_error_of_its_exit_code(tmp_path, code, kind):
    from yolofleet.cli.api import failure
    from yolofleet.runs.report.folder import RunFolder

    assert type(failure(code, RunFolder(tmp_path))).__name__ == kind


def test_a_picture_with_the_longest_name_is_written_under_a_shorter_one(weights, pictures, tmp_path, capsys):
    for letter in "äb":  # two bytes in UTF-8, and one
        name = letter * ((254 - len(".jpg")) // len(letter.encode())) + ".jpg"
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes((pictures / "a.jpg").read_bytes())
    config = configured(weights, tmp_path / "in", tmp_path / "out", save_txt=True, save_crop=True)
    assert predict_command(config) == 0
    written = sorted(path.name for path in (tmp_path / "out" / "exp").glob("*.jpg"))
    assert written == ["b" * 200 + ".jpg", "ä" * 100 + ".jpg"]
    assert len(list((tmp_path / "out" / "exp" / "labels").iterdir())) == 2
