"""Sources that are not files, pictures in memory, settings of one call, and what results can do."""

import io
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest
from small_data import encoded, write_picture
from small_weights import saved, untrained

from yolofleet.config.load import resolve_predict
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.inference.predict import frames as reading
from yolofleet.inference.predict import pictures, sources
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.inference.predict.sources import Source, hint_for
from yolofleet.storage.request import Refused, open_url
from yolofleet.support.errors import ConfigError, DataError

PICTURE = np.full((40, 60, 3), (10, 120, 240), np.uint8)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/camera":
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            for _ in range(30):
                part = encoded(PICTURE)
                self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\n")
                self.wfile.write(b"Content-Length: %d\r\n\r\n" % len(part) + part + b"\r\n")
            return
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.wfile.write(encoded(PICTURE, ".png"))

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    web = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{web.server_address[1]}"
    web.shutdown()
    web.server_close()
    thread.join()


@pytest.fixture(scope="module")
def model():
    return untrained(("person", "dog", "cat"))


def test_a_picture_is_read_from_a_url(server):
    (frame,) = Source(f"{server}/a.png", is_argument=True)
    assert (frame.image == PICTURE).all() and frame.path == f"{server}/a.png" and not frame.is_file


def test_a_stream_of_pictures_is_read_from_a_url(server):
    frames = list(Source(f"{server}/camera", is_argument=True, vid_stride=10))
    if not frames:
        pytest.skip("this OpenCV reads no MJPEG from the network")
    assert 1 <= len(frames) <= 3 and frames[0].image.shape == PICTURE.shape
    assert np.abs(frames[0].image.astype(int) - PICTURE).max() < 12


def test_a_redirect_to_a_file_and_a_picture_that_is_too_large_are_problems(server, monkeypatch):
    for address in ("/away.png", "/away"):
        source = Source(server + address, is_argument=True)
        assert list(source) == [] and "not allowed" in source.problems[0]
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 10)
    source = Source(f"{server}/a.png", is_argument=True)
    assert list(source) == [] and "has more than" in source.problems[0]


def test_a_stream_without_a_server_is_a_problem(monkeypatch):
    monkeypatch.setattr(reading, "WAIT_MS", 2000)
    source = Source("rtsp://127.0.0.1:1/none", is_argument=True)
    assert list(source) == [] and "cannot open rtsp" in source.problems[0]


@pytest.mark.parametrize(
    "address", ["https://example.org/a.jpg", "HTTP://10.0.0.1/a.jpg", "rtsp://u:secret@10.0.0.1/1"]
)
def test_offline_no_source_on_another_machine_is_opened(address, server, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(DataError, match="YOLOFLEET_OFFLINE is set") as caught:
        Source(address, is_argument=True)
    assert "secret" not in caught.value.render()
    monkeypatch.undo()
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    assert len(list(Source(f"{server}/a.png", is_argument=True))) == 1  # of this machine
    with pytest.raises(Refused, match="YOLOFLEET_OFFLINE is set"):
        open_url(address.replace("rtsp", "http"), {}, 1.0)


def test_a_source_that_cannot_be_read_has_a_hint_of_its_kind(tmp_path):
    broken = tmp_path / "a.jpg"
    broken.write_bytes(b"no picture")
    for spec, words in (
        ("87", "camera that no other program uses"),
        ("http://127.0.0.1:1/a.jpg", "check the address"),
        (str(broken), "image viewer"),
        (str(tmp_path / "notes.docx"), "a list of paths as a .txt file"),
    ):
        Path(spec).write_bytes(b"x") if spec.startswith(str(tmp_path)) else None
        source = Source(spec, is_argument=True)
        assert list(source) == [] and words in hint_for(source.items)


def test_a_list_and_a_configuration_file_cannot_name_a_url(tmp_path, server):
    (tmp_path / "list.txt").write_text(f"{server}/a.png\n")
    source = Source(str(tmp_path / "list.txt"), is_argument=True)
    assert list(source) == [] and len(source.problems) == 1
    for value in ("https://example.org/a.jpg", "s3://bucket/a.jpg", "screen", "-"):
        file = tmp_path / "c.yaml"
        file.write_text(f"source: '{value}'\nweights: w.pt\n")
        with pytest.raises(ConfigError, match="must not choose"):
            resolve_predict({}, config_file=str(file))


def given_on_stdin(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    return Source("-", is_argument=True)


def test_standard_input_is_a_picture_or_a_list_of_paths(monkeypatch, tmp_path):
    (frame,) = given_on_stdin(monkeypatch, encoded(PICTURE, ".png"))
    assert (frame.image == PICTURE).all() and frame.path == "standard input"
    (tmp_path / "ä b.png").write_bytes(encoded(PICTURE, ".png"))
    (frame,) = given_on_stdin(monkeypatch, f"# pictures\n{tmp_path / 'ä b.png'}\n".encode())
    assert frame.is_file and (frame.image == PICTURE).all()
    for wrong in (b"", b"\xff\xfe\x00", b"a\0b"):
        with pytest.raises(DataError, match="standard input has no picture"):
            given_on_stdin(monkeypatch, wrong)


def test_a_screen_needs_mss(monkeypatch):
    monkeypatch.setitem(sys.modules, "mss", None)
    with pytest.raises(ConfigError, match="mss"):
        list(Source("screen", is_argument=True))


def test_settings_of_one_call_do_not_change_the_predictor(model):
    predictor = Predictor(model, PredictConfig(img=64, device="cpu", conf=0.003))
    (many,) = predictor.predict(PICTURE)
    (few,) = predictor.predict(PICTURE, max_det=2, classes=["dog"])
    assert len(many) > 2 and len(few) <= 2 and set(few.classes.tolist()) <= {1}
    assert len(predictor(PICTURE, conf=1.0)[0]) == 0 and len(predictor(PICTURE)[0]) == len(many)
    for settings, words in (
        ({"cnf": 0.1}, "did you mean conf"),
        ({"conf": 2}, "is above 1"),
        ({"max_det": 0}, "is below 1"),
    ):
        with pytest.raises(ConfigError) as caught:
            predictor.predict(PICTURE, **settings)
        assert words in caught.value.render()


def test_the_python_interface_reads_urls_and_refuses_sources_without_an_end(server, model, tmp_path):
    from yolofleet import Model

    path = saved(model, tmp_path / "best.safetensors")
    (result,) = Model(path).predict(f"{server}/a.png", device="cpu", img=64)
    assert (result.image_bgr == PICTURE).all()
    for predict in (Model(path).predict, Predictor(model, PredictConfig(img=64, device="cpu")).predict):
        with pytest.raises(ConfigError, match="may have no end"):
            predict("rtsp://127.0.0.1:1/x")


def test_results_draw_write_cut_and_list(model, tmp_path):
    predictor = Predictor(model, PredictConfig(img=64, device="cpu", conf=0.003, max_det=3))
    results = predictor.predict([PICTURE, encoded(PICTURE, ".png")])
    assert [image.shape for image in results.render()] == [PICTURE.shape] * 2
    assert "array" not in str(results)
    assert f"<Prediction of image 0, 60 x 40 px: {results[0].counts()}>" in str(results)
    assert [path.name for path in results.save(tmp_path)] == ["image 0.jpg", "image 1.jpg"]
    assert all(cv2.imread(str(path)) is not None for path in tmp_path.iterdir())
    boxes = sum(map(len, results))
    assert boxes > 0 and len(results.rows()) == boxes and sum(map(len, results.crop())) <= boxes
    head, *lines = results.table().splitlines()
    assert head.split()[:3] == ["image", "path", "xmin"] and len(lines) == boxes
    assert [len(image["detections"]) for image in json.loads(results.json())] == list(map(len, results))
    if sys.modules.get("pandas") is None:
        try:
            import pandas  # noqa: F401
        except ImportError:
            with pytest.raises(ConfigError, match="pandas"):
                results.pandas()
            return
    frame = results.pandas()
    assert list(frame.columns) == head.split() and frame.to_dict("records") == results.rows()


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A folder of a store: two pictures, a video and a list; its cache is elsewhere."""
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "bucket"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("b.jpg", "a.png", "more/c.jpg")):
        write_picture(folder / name, 64, 48, number)
    video = cv2.VideoWriter(str(folder / "v.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 5.0, (64, 48))
    for number in range(3):
        video.write(np.full((48, 64, 3), 80 * number, np.uint8))
    video.release()
    (folder / "list.txt").write_text("b.jpg\nmore/c.jpg\n")
    return folder


def test_a_folder_of_a_store_is_read_like_one_of_a_disk(stored):
    source, plain = Source(f"file://{stored}/", is_argument=True), Source(str(stored))
    theirs, ours = list(source), list(plain)
    assert [frame.path for frame in theirs] == [f"file://{frame.path}" for frame in ours]
    assert len(theirs) == 5 and all((a.image == b.image).all() for a, b in zip(theirs, ours, strict=True))
    assert [(f.item, f.number, f.is_file, f.video) for f in theirs] == [
        (f.item, f.number, f.is_file, f.video) for f in ours
    ]
    (one,) = Source(f"file://{stored}/b.jpg", is_argument=True)
    assert one.path == f"file://{stored}/b.jpg"
    assert [frame.path for frame in Source(f"file://{stored}/list.txt", is_argument=True)] == [
        f"file://{stored}/b.jpg",
        f"file://{stored}/more/c.jpg",
    ]


def test_problems_name_the_address(stored):
    (stored / "b.jpg").write_bytes(b"no picture")
    source = Source(f"file://{stored}/", is_argument=True)
    assert len(list(source)) == 4
    (problem,) = source.problems
    assert f"file://{stored}/b.jpg" in problem and "cache" not in problem


def test_pictures_of_a_store_are_read_together(stored, monkeypatch):
    groups: list[list[str]] = []
    monkeypatch.setattr(sources, "download", lambda paths: groups.append(list(paths)))
    monkeypatch.setattr(sources, "READ_AT_ONCE", 2)
    assert len(list(Source(f"file://{stored}/", is_argument=True))) == 5
    assert [[Path(path).name for path in group] for group in groups] == [["a.png", "b.jpg"], []]


@pytest.mark.parametrize("entry", ["/etc/hostname", "../secret.jpg", "s3://other/a.jpg", "\0", "missing.jpg"])
def test_a_list_in_a_store_names_its_own_pictures_only(stored, entry):
    write_picture(stored.parent / "secret.jpg", 64, 48, 1)
    (stored / "list.txt").write_text(f"b.jpg\n{entry}\n")
    with pytest.raises(DataError, match="does not exist below"):
        Source(f"file://{stored}/list.txt", is_argument=True)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://key:word@bucket/a.jpg", "could be a secret"),
        ("s3://bucket/a.jpg?X-Amz-Signature=word", "could be a secret"),
        ("file:///no/such/folder/a.jpg", "does not exist"),
    ],
)
def test_an_address_that_cannot_be_a_source_is_refused(address, words, tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=words) as refused:
        Source(address, is_argument=True)
    assert "word" not in refused.value.render()
