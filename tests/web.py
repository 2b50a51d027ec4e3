"""A web server on this machine that behaves as badly as a test asks for."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from yolofleet.storage.fetch import Item

Route = Callable[["Answer"], None]


@dataclass
class Web:
    """
    Attributes:
        routes: what answers a path.
        asked: (path, Range header or "") of each request, in order.
        stop: set when the test ends, so that no answer outlives it.
    """

    address: str = ""
    routes: dict[str, Route] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def put(self, path: str, route: Route) -> str:
        """The url."""
        self.routes[path] = route
        return self.address + path

    def ranges(self) -> list[str]:
        return [wanted for _, wanted in self.asked]


class Answer(BaseHTTPRequestHandler):
    """What a route may use, beside the base class: ``web``, ``number`` (0 for the first request of its path), ``start``
    (first byte asked for)."""

    web: Web
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.number = sum(path == self.path for path, _ in self.web.asked)
        self.wanted = self.headers.get("Range", "")
        self.web.asked.append((self.path, self.wanted))
        match = re.fullmatch(r"bytes=(\d+)-", self.wanted)
        self.start = int(match[1]) if match else 0
        self.close_connection = True
        try:
            self.web.routes[self.path](self)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def head(self, status: int = 200, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web() -> Iterator[Web]:
    state = Web()
    handler = type("Handler", (Answer,), {"web": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="web")
    thread.start()
    try:
        yield state
    finally:
        state.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def whole(body: bytes, *, upto: int | None = None, tag: str = "", ranges: bool = True) -> Route:
    """A good server; or one whose connection ends at byte ``upto`` of the file, or that ignores Range."""

    def route(answer: Answer) -> None:
        start = answer.start if ranges else 0
        headers: dict[str, object] = {"ETag": tag} if tag else {}
        if start and answer.headers.get("If-Range", tag) == tag:
            if start >= len(body):
                answer.head(416, Content_Range=f"bytes */{len(body)}", Content_Length=0)
                return
            headers["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            answer.head(206, Content_Length=len(body) - start, **headers)
        else:
            start = 0
            answer.head(200, Content_Length=len(body), **headers)
        answer.wfile.write(body[start:upto])

    return route


def in_turn(*routes: Route) -> Route:
    """The first request is for the first route, and so on; the last one stays."""
    return lambda answer: routes[min(answer.number, len(routes) - 1)](answer)


def status(code: int, **headers: object) -> Route:
    return lambda answer: answer.head(code, Content_Length=0, **headers)


def item_of(
    body: bytes, *urls: str, name: str = "file.bin", digest: str | None = "", size: int | None = -1
) -> Item:
    """A published file; digest and size are right unless given."""
    right = "sha256:" + hashlib.sha256(body).hexdigest()
    return Item(
        name,
        urls,
        len(body) if size == -1 else size,
        right if digest == "" else digest,
        "free for tests",
        "https://example.org/page",
    )
