"""`yolofleet serve`: its predictions, the requests that share a pass, what it refuses, and its end."""

from __future__ import annotations

import base64
import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import small_data
from commands import wait_until
from exported import NAMES, network
from served import VERSION, Answer, Served, served
from web import Answer as Route
from web import web

from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.inference.predict.frames import Frame
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.inference.predict.results import Prediction
from yolofleet.inference.serve import service
from yolofleet.inference.serve.batcher import Batcher

CONF = 0.1


def pixels(seed: int, size_wh: tuple[int, int] = (160, 120)) -> np.ndarray:
    return small_data.picture(*size_wh, seed)


def picture(seed: int = 0, size_wh: tuple[int, int] = (160, 120)) -> bytes:
    return small_data.encoded(pixels(seed, size_wh), ".png")


def as_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(network(), PredictConfig(img=64, device="cpu", conf=CONF))


@pytest.fixture
def server(predictor: Predictor) -> Iterator[Served]:
    with served(predictor) as made:
        yield made


def expected(predictor: Predictor, content: bytes, **settings: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = predictor.predict(content, **settings)[0].to_json()["detections"]
    return found


def test_an_image_gets_the_objects_that_predict_finds(server: Served, predictor: Predictor) -> None:
    found = expected(predictor, picture())
    assert len(found) > 1 and max(found[0]["box_xyxy_px"]) > 64  # pixels of the image, not of the network
    answer = server.ask(body=picture())
    assert answer.status == 200 and answer.json() == {
        "width": 160, "height": 120, "detections": found, "model_version": VERSION,
    }  # fmt: skip
    form = (
        b'--b\r\nContent-Disposition: form-data; name="note"\r\n\r\nx\r\n--b\r\nContent-Type: text/html\r\n'
    )
    form += b'Content-Disposition: form-data; name="file"; filename="../../etc/passwd"\r\n\r\n'
    form += picture() + b"\r\n--b--\r\n"
    for kind in ("multipart/form-data; boundary=b", 'Multipart/Form-Data;charset=x; boundary="b"'):
        assert server.ask(body=form, Content_Type=kind).json()["detections"] == found
    assert server.ask("/predict?max_det=1&conf=0.2", picture(), Content_Type="text/html").json()[
        "detections"
    ] == expected(predictor, picture(), max_det=1, conf=0.2)


def test_figures_and_health(predictor: Predictor) -> None:
    with served(predictor) as server:
        assert (
            server.ask("/health").json()
            == {"status": "UP", "model_version": VERSION}
            == server.ask("/").json()
        )
        for body in (picture(), picture(1), b"junk"):
            server.ask(body=body)
        text = server.ask("/metrics").body.decode()
        server.service.batcher.has_failed = True
        assert server.ask("/health").status == 503
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert all(re.fullmatch(r"[a-z_]+(\{([a-z]+=\"[^\"]*\",?)+\})?", name) for name in values)
    assert values['yolofleet_requests_total{path="/predict",status="200"}'] == "2"
    assert values['yolofleet_requests_total{path="/predict",status="422"}'] == "1"
    for name, count in (("yolofleet_predict_seconds", "3"), ("yolofleet_batch_images", "2")):
        buckets = [int(value) for key, value in values.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets) and values[f'{name}_bucket{{le="+Inf"}}'] == count
        assert values[f"{name}_count"] == count
    assert values["yolofleet_batch_images_sum"] == "2" and values["yolofleet_requests"] == "0"


class Held(Predictor):
    """A predictor that waits before it predicts."""

    def __init__(self) -> None:
        super().__init__(network(), PredictConfig(img=64, device="cpu", conf=CONF, batch=8))
        self.goes_on, self.passes = threading.Event(), list[int]()

    def stream(self, frames: Any) -> Iterator[Prediction]:
        taken = list(frames)
        self.passes.append(len(taken))
        assert self.goes_on.wait(900)
        yield from super().stream(taken)


def test_images_that_wait_share_a_pass_and_each_gets_its_own_objects() -> None:
    held, taken = Held(), list[float]()
    with Batcher(8, 0, taken.append) as batcher:
        first = batcher.ask(Frame("0", pixels(0)), held)
        wait_until(lambda: held.passes == [1])
        sizes = [(160, 120), (60, 120), (160, 120), (64, 64)]
        asked = [batcher.ask(Frame(f"{n}", pixels(n, size)), held) for n, size in enumerate(sizes, 1)]
        other = held.changed(max_det=1)
        few = batcher.ask(Frame("few", pixels(2)), other)
        cancelled = batcher.ask(Frame("cancelled", pixels(3)), held)
        assert cancelled.cancel() and batcher.waiting() == 6
        held.goes_on.set()
        results = [one.result(900) for one in (first, *asked)]
        assert len(few.result(900)) == 1
    assert taken == [1, 6] and held.passes == [1, 4, 1]
    for n, (found, size) in enumerate(zip(results, [(160, 120), *sizes], strict=True)):
        assert found.path == str(n)
        (alone,) = held.predict(picture(n, size), batch=1)
        assert np.array_equal(found.classes, alone.classes)
        assert np.allclose(found.boxes_xyxy_px, alone.boxes_xyxy_px, atol=0.01)


def test_a_failure_reaches_the_images_of_its_pass_alone(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(predictor) as server:
        with monkeypatch.context() as patched:
            patched.setattr(Predictor, "stream", lambda *_: iter([][0]))
            answer = server.ask(body=picture())
        assert (answer.status, answer.refusal()) == (
            500, "the prediction failed; the messages of the server say why",
        )  # fmt: skip
        assert server.ask("/health").status == 503
        assert server.ask(body=picture()).status == 200 and server.ask("/health").status == 200


def test_a_full_queue_answers_503_and_loses_no_request() -> None:
    held = Held()
    with served(held, queue=2) as server, ThreadPoolExecutor(3) as clients:
        began = [clients.submit(server.ask, "/predict", picture(n)) for n in range(2)]
        wait_until(lambda: server.service._requests == 2)
        answer = server.ask(body=picture(2))
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        assert "2 requests wait" in answer.refusal()
        assert server.ask("/health").status == 200
        assert b"yolofleet_requests 2\n" in server.ask("/metrics").body
        held.goes_on.set()
        assert [one.result(900).status for one in began] == [200, 200]
        assert server.ask(body=picture(2)).status == 200


def test_a_server_that_must_end_answers_what_has_begun() -> None:
    held = Held()
    with served(held) as server, ThreadPoolExecutor(1) as clients:
        began = clients.submit(server.ask, "/predict", picture())
        wait_until(lambda: bool(held.passes))
        server.server.should_exit = True
        wait_until(lambda: not server.server.servers[0].is_serving())
        held.goes_on.set()
        assert began.result(900).status == 200


def test_an_image_that_waits_too_long_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    with served(held) as server:
        with monkeypatch.context() as patched:
            patched.setattr(service, "ANSWER_S", 0.3)
            answer = server.ask(body=picture())
            assert answer.status == 503 and "no answer within 0.3 s" in answer.refusal()
        held.goes_on.set()
        assert server.ask(body=picture()).status == 200 and server.service._pixels == 0


# -- strangers -----------------------------------------------------------------------------------------------------


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size and has the pixels of few rows."""
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0),
        b"IDAT": zlib.compress(bytes(9999)),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(small_data.png_chunk(*part) for part in parts.items())


JPEG = small_data.encoded(pixels(0))
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
BODIES = {  # what is sent, the kind, status, and a part of the message
    "nothing": (b"", "image/png", 422, "is empty"),
    "junk": (b"\x1b[2Jjunk" * 9, "image/png", 422, "not in a known image format"),
    "cut off": (JPEG[: len(JPEG) // 2], "image/jpeg", 422, "cut off"),
    "bomb": (png_of(16000, 16000), "image/png", 422, "16000 x 16000 pixels, in"),
    "many pixels": (png_of(7200, 7200), "image/png", 413, "7200 x 7200 pixels, more than 50 million"),
    "larger bomb": (png_of(1 << 30, 1 << 30), "image/png", 422, "more than 268435456"),
    "not JSON": (JPEG, "application/json", 422, "not JSON"),
    "deep JSON": (b'{"tasks":' + b"[" * 100_000, "application/json", 422, "too deep"),
    "many values": (b"[" + b"{}," * 2_100_000, "application/json", 422, "more than 2,000,000 values"),
    "no tasks": (b'{"tasks": []}', "application/json; charset=utf-8", 422, "1 to 1000 tasks"),
    "a list": (b"[1e400, NaN]", "APPLICATION/JSON", 422, "no list `tasks`"),
    "many tasks": (json.dumps({"tasks": [{}] * 1001}).encode(), "application/json", 422, "1 to 1000 tasks"),
    "no boundary": (JPEG, "multipart/form-data", 422, "0 fields `file`"),
    "short boundary": (b"-\r\n--a" * 300_000, "multipart/form-data; boundary=a", 422, "0 fields `file`"),
    "a string": (b'"' + b"a" * 1_000_000 + b'"', "application/json", 422, "no list `tasks`"),
}  # fmt: skip


def test_what_is_no_image_is_refused(server: Served) -> None:
    for name, (body, kind, status, says) in BODIES.items():
        answer = server.ask(body=body, Content_Type=kind)
        assert answer.status == status and says in answer.refusal(), name
    assert server.service._bytes == 0 == server.service._pixels and server.ask(body=picture()).status == 200


QUERIES = {
    "conf=2": "conf: 2 is above 1",
    "conf=nan": "not a finite number",
    "iou=1&iou=1": "a parameter twice",
    "max_det=0": "max_det: 0 is below 1",
    "max_det=1001": "max_det is above 1000",
    "batch=9": "unknown parameter batch",
    "a%1b%5b2J%0a=9": "unknown parameter a\\x1b[2J\\n",
    "conf=" + "9" * 5000: "conf",
}


def test_a_wrong_parameter_is_refused_before_the_body(server: Served) -> None:
    for query, says in QUERIES.items():
        head = HEAD.replace(b"predict", f"predict?{query}".encode())
        answer = server.send(head + b"Content-Length: 99\r\n\r\n" + b"x" * 99)
        assert answer.status == 400 and says in answer.refusal(), query


REQUESTS = {
    "a large Content-Length": (HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n", 413, "32.0 MiB"),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Invalid HTTP"),
    "no length that counts": (HEAD + b"Content-Length: -1\r\n\r\n", 400, "Invalid HTTP"),
    "many headers": (HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n", 422, "is empty"),
    "a long header": (HEAD + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n", 400, "Invalid HTTP"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "Invalid HTTP"),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400, "Invalid HTTP"),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421, "--allow-host"),
    "another site": (HEAD + b"Origin: http://evil.example\r\nContent-Length: 0\r\n\r\n", 403, "another site"),
    "a path": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, "no such address"),
    "another method": (b"TRACE /predict HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "POST only"),
}  # fmt: skip


def test_what_is_no_request_is_refused(server: Served) -> None:
    for name, (sent, status, says) in REQUESTS.items():
        try:
            answer = server.send(sent)
        except ConnectionError:  # it closes the connection of a client that goes on to send
            assert name == "a long header"
            continue
        assert answer.status == status and says in answer.refusal(), name
        assert "server" not in answer.headers and "access-control-allow-origin" not in answer.headers
    assert server.ask("/health").status == 200


def test_a_body_that_is_too_large_or_too_slow_is_refused(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(predictor, max_mib=1) as server:
        answer = server.ask(body=bytes(3 << 20))  # all of it is sent before the client reads
        assert answer.status == 413 and "1.0 MiB" in answer.refusal()
        chunks = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + bytes(65536) + b"\r\n") * 17
        assert server.send(chunks + b"0\r\n\r\n").status == 413
        with monkeypatch.context() as patched:
            patched.setattr(service, "HELD_BYTES", 1000)
            assert server.ask(body=bytes(2000)).status == 503
            patched.setattr(service, "BODY_S", 0.2)
            answer = server.send(HEAD + b"Content-Length: 9\r\n\r\nx")
            assert answer.status == 408 and "more than 0.2 s" in answer.refusal()
        assert server.service._bytes == 0 and server.ask(body=picture()).status == 200


# -- Label Studio --------------------------------------------------------------------------------------------------

INTERFACE = """<View><Image name="photo" value="$url"/><Header value="x"/>
<RectangleLabels name="things" toName="photo"><Label value="dog"/></RectangleLabels></View>"""


def test_label_studio_gets_results_in_the_words_of_its_interface(
    server: Served, predictor: Predictor
) -> None:
    assert server.ask("/setup", b'{"project": "1", "schema": "<View/>"}').json() == {"model_version": VERSION}
    tasks = [{"id": n, "data": {"text": "x", "url": as_url(picture(n))}} for n in range(10)]  # two groups
    answer = server.ask_tasks(tasks, label_config=INTERFACE).json()
    assert answer["model_version"] == VERSION and len(answer["results"]) == 10
    for n, task in enumerate(answer["results"]):
        found = expected(predictor, picture(n))
        assert task["model_version"] == VERSION and len(task["result"]) == len(found) > 0
        assert task["score"] == min(one["score"] for one in found)
        for row, one in zip(task["result"], found, strict=True):
            assert (row["from_name"], row["to_name"], row["type"]) == ("things", "photo", "rectanglelabels")
            value = row["value"]
            assert value["rectanglelabels"] == [one["name"]] and one["name"] in NAMES
            percent = np.array([row["original_width"], row["original_height"]] * 2) / 100
            corners = [value["x"], value["y"], value["x"] + value["width"], value["y"] + value["height"]]
            assert np.allclose(np.array(corners) * percent, one["box_xyxy_px"], atol=0.02)
    alone = server.ask_tasks([{"data": {"image": as_url(picture())}}], "/predict?max_det=1").json()
    assert [row["from_name"] for row in alone["results"][0]["result"]] == ["rectanglelabels"]


TASKS: list[tuple[Any, str]] = [
    ({"data": {"image": "file:///etc/passwd"}}, "does not open: file:///etc/passwd"),
    ({"data": {"image": "/etc/passwd"}}, "does not open: /etc/passwd"),
    ({"data": {"image": "http://169.254.169.254/latest/meta-data"}}, "does not open: http://169.254"),
    ({"data": {"image": "s3://bucket/\x1b[2Jkey\n"}}, "--label-studio-url"),
    ({"data": {"image": "data:image/png;base64,%%%"}}, "not base64"),
    ({"data": {"image": "data:image/png,abc"}}, "not base64"),
    ({"data": {"image": as_url(b"junk")}}, "image of task 1 is not in a known image format"),
    ({"data": {"image": 7}}, "task 1 has no image"),
    ({"data": []}, "task 1 has no image"),
    (None, "task 1 has no image"),
]
INTERFACES = [
    ("<View><Image", "label_config cannot be read"),
    ('<!DOCTYPE x [<!ENTITY a "b">]><View/>', "it has a document type"),
    ("<View>" * 200_000, "label_config cannot be read"),
    ('<View><Image name="i" value="$image"/><BrushLabels name="b"/></View>', "has no <RectangleLabels>"),
    (INTERFACE.replace("dog", "Dog"), "<RectangleLabels> of the labelling interface has no label for"),
]


def test_a_task_opens_no_file_and_no_address(server: Served) -> None:
    for task, says in TASKS:
        answer = server.ask_tasks([task, {"data": {"image": as_url(picture())}}])
        assert answer.status == 422 and says in answer.refusal(), task


def test_an_interface_without_a_place_for_boxes_is_refused(server: Served) -> None:
    for interface, says in INTERFACES:
        answer = server.ask_tasks([{"data": {"image": as_url(picture())}}], label_config=interface)
        assert answer.status == 422 and says in answer.refusal(), interface[:80]


def test_the_server_says_once_which_classes_an_interface_lacks(server: Served, capfd: Any) -> None:
    task = [{"data": {"url": as_url(picture())}}]
    whole = "".join(f'<Label value="x" alias="{name}"/>' for name in NAMES)
    assert server.ask_tasks(task, label_config=INTERFACE.replace('<Label value="dog"/>', whole)).status == 200
    assert server.ask_tasks(task, label_config=INTERFACE.replace('<Label value="dog"/>', "")).status == 200
    assert "no label" not in capfd.readouterr().err
    lacking = INTERFACE.replace("</View>", f'<PolygonLabels name="p">{whole}</PolygonLabels></View>')
    assert [server.ask_tasks(task, label_config=lacking).status for _ in range(2)] == [200, 200]
    said = capfd.readouterr().err
    assert said.count("has no label for") == 1 and all(name in said for name in NAMES if name != "dog")


def test_only_addresses_below_that_of_label_studio_are_opened(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = list[str | None]()

    def image(route: Route) -> None:
        keys.append(route.headers["Authorization"])
        route.head(Content_Length=len(picture()))
        route.wfile.write(picture())

    with web() as studio, web() as other:
        studio.put("/ls/data/upload/1/a.png", image)
        studio.put("/ls/redirects", lambda route: route.head(302, Location=other.address, Content_Length=0))
        studio.put("/ls/large", lambda route: (route.head(), route.wfile.write(bytes((1 << 20) + 1))))  # type: ignore[arg-type, func-returns-value]
        monkeypatch.setenv("LABEL_STUDIO_API_KEY", "key")
        with served(predictor, label_studio_url=f"{studio.address}/ls", max_mib=1) as server:

            def ask(value: str) -> Answer:
                return server.ask_tasks([{"data": {"image": value}}])

            for value in ("/data/upload/1/a.png", f"{studio.address}/ls/data/upload/1/a.png"):
                assert len(ask(value).json()["results"][0]["result"]) > 1
            assert keys == ["Token key", "Token key"]
            studio.asked.clear()
            for value in (
                f"{other.address}/a.png",
                f"{studio.address}/secret",
                f"{studio.address}/ls/../secret",
                f"{studio.address}/ls/%2E%2e/secret",
                f"{studio.address}/lsx/a.png",
                f"{studio.address}@{other.address[7:]}/ls/a.png",
                f"{studio.address}/ls/a\r\nX: y",
                f"{studio.address}/ls\\..\\secret",
                "//" + other.address[7:] + "/a.png",
                "/../secret",
            ):
                answer = ask(value)
                assert answer.status == 422 and answer.refusal(), value
            assert [path for path, _ in studio.asked] in ([], [f"/ls//{other.address[7:]}/a.png"])
            answer = ask("/redirects")
            assert answer.status == 422 and "it redirects to another address" in answer.refusal()
            assert "more than 1.0 MiB" in ask("/large").refusal()
        assert other.asked == []


@pytest.mark.long
def test_masks_are_run_lengths_and_polygons() -> None:
    masks = Predictor(network("yolov5n-seg"), PredictConfig(img=64, device="cpu", conf=CONF))
    with served(masks) as server:
        found = server.ask(body=picture()).json()["detections"]
        assert found == expected(masks, picture()) and found[0]["segmentation"]["size"] == [120, 160]
        task = [{"data": {"url": as_url(picture())}}]
        refused = server.ask_tasks(task, label_config=INTERFACE)
        assert refused.status == 422 and "has no <PolygonLabels>" in refused.refusal()
        rows = server.ask_tasks(task, label_config=INTERFACE.replace("Rectangle", "Polygon")).json()[
            "results"
        ][0]
        assert {(row["type"], row["from_name"]) for row in rows["result"]} == {("polygonlabels", "things")}
