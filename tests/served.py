"""A prediction server in a thread of this process, and requests to it, also such as no library sends."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra yolofleet[serve] is not installed")

import uvicorn

from yolofleet.config.schema.serve import ServeConfig
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.inference.serve.service import Service, server_of
from yolofleet.support.listener import open_listener

END_S = 900
VERSION = "small-0123"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def refusal(self) -> str:
        """The text of an error, after checking that it is one line of JSON without control characters."""
        told = self.json()
        assert set(told) == {"error", "try"} and self.body.endswith(b"}\n") and self.body.count(b"\n") == 1
        for text in told.values():
            assert text and text.isprintable() and "Traceback" not in text and len(text) <= 500
        assert self.headers["content-type"] == "application/json"
        return f"{told['error']}; {told['try']}"


@dataclass(frozen=True)
class Served:
    service: Service
    server: uvicorn.Server
    port: int

    def ask(
        self, path: str = "/predict", body: bytes | None = None, method: str = "", **headers: str
    ) -> Answer:
        """Send a request. ``headers``: by name, with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_S)
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {n.lower(): text for n, text in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def ask_tasks(self, tasks: object, path: str = "/predict", **more: object) -> Answer:
        body = json.dumps({"tasks": tasks, **more}).encode()
        return self.ask(path, body, Content_Type="application/json")

    def send(self, sent: bytes) -> Answer:
        """Send these bytes, and return the answer."""
        with socket.create_connection(("127.0.0.1", self.port), END_S) as connection:
            connection.sendall(sent)
            answer = http.client.HTTPResponse(connection)
            try:
                answer.begin()
                headers = {name.lower(): text for name, text in answer.getheaders()}
                return Answer(answer.status, headers, answer.read())
            finally:
                answer.close()


@contextmanager
def served(predictor: Predictor, **settings: Any) -> Iterator[Served]:
    """Serve from a thread for the block."""
    config = ServeConfig(weights=("w",), conf=predictor.config.conf, **settings)
    with open_listener("127.0.0.1") as listener, Service(config, predictor, VERSION) as service:
        server = server_of(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            # all threads belong to the block, not to a test in it
            begun = threading.Barrier(service._threads._max_workers)
            assert all(list(service._threads.map(lambda _: begun.wait(END_S) >= 0, range(begun.parties))))
            yield Served(service, server, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(END_S)
    assert not thread.is_alive()
