"""The HTTP server of `yolofleet serve`: its addresses, and the limits of what strangers send.

    POST /predict   an image in the body, or in the field `file` of a form; or tasks of Label Studio as JSON
    POST /setup     of Label Studio
    GET  /health    whether the network works; / is the same
    GET  /metrics   figures for Prometheus

A request never names a file, and an address only below ``--label-studio-url``. Every error is one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from yolofleet.config.schema.serve import ServeConfig
from yolofleet.data.images.decode import decode_image
from yolofleet.data.images.header import MAX_PIXELS, read_header
from yolofleet.inference.predict.frames import Frame
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.inference.predict.results import Prediction
from yolofleet.inference.serve.batcher import Batcher
from yolofleet.inference.serve.label_studio import picture_of, read_request, result_of
from yolofleet.inference.serve.metrics import Metrics
from yolofleet.support import http_server
from yolofleet.support.closing import Closing
from yolofleet.support.errors import ConfigError, DataError
from yolofleet.support.text import echo, listed, screen_line, shown, size_text

BODY_S = 60.0  # until the body of a request is complete
DRAIN_S = 5.0  # to read and drop a refused body: most clients read no answer before they have sent all
ANSWER_S = 60.0  # from the complete body to the prediction of an image, and for a client to take the answer
IDLE_S = 75  # that an open connection may have no request: longer than proxies keep theirs, usually 60 s
END_S = 25  # for the requests that have begun, when the server must end: Kubernetes kills after 30 s
HELD_BYTES = 256 << 20  # of the bodies of all requests
T = TypeVar("T")
PARAMETERS = ("conf", "iou", "max_det")
ROUTES = {"/": "GET", "/health": "GET", "/metrics": "GET", "/setup": "POST", "/predict": "POST"}
FILE_FIELD = re.compile(rb'^content-disposition:[^\r\n]*;[ \t]*name="?file"?[ \t]*(;|\r?$)', re.I | re.M)


class Refusal(Exception):
    """An answer other than 200: what is wrong, and what to do."""

    def __init__(self, status: int, what: str, hint: str, **headers: str) -> None:
        super().__init__(what)
        self.status, self.what, self.hint, self.headers = status, what, hint, headers

    def answer(self) -> Response:
        told = {"error": screen_line(self.what, limit=500), "try": screen_line(self.hint, limit=500)}
        return _json(told, self.status, Connection="close", **self.headers)


class Service(Closing):
    """The application: an ASGI callable.

    Args:
        version: of the model, for Label Studio.
        names, any_address: see :func:`http_server.own_host`.
    """

    def __init__(
        self,
        config: ServeConfig,
        predictor: Predictor,
        version: str,
        names: Collection[str] = http_server.LOOPBACK_NAMES,
        any_address: bool = False,
    ) -> None:
        self.config, self.predictor, self.version = config, predictor, version
        self.names, self.any_address = [*names, *map(str.lower, config.allow_host)], any_address
        self.metrics = Metrics()
        self.batcher = Batcher(config.batch, config.wait_ms / 1000, self.metrics.images.add)
        # requests with equal settings get one object, and so share a pass
        self._changed = lru_cache(maxsize=64)(lambda *pairs: predictor.changed(**dict(pairs)))
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "decode")
        self._requests = self._bytes = self._pixels = 0  # now
        self._has_said_missing = False
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    def close(self) -> None:
        self.batcher.close()
        self._threads.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def received() -> Message:
            message = await receive()
            request.state.is_unread &= message.get("more_body", False)
            return message

        request, began_s = Request(scope, received), time.monotonic()
        request.state.is_unread = "expect" not in request.headers
        try:
            answer = await self._answer(request)
        except ClientDisconnect:
            return
        except Refusal as refusal:
            answer = refusal.answer()
            await self._drain(request)
        except DataError as problem:
            answer = Refusal(422, problem.what, problem.hint).answer()
        except Exception as problem:  # of the network or the machine: strangers do not get its text
            what = f"{type(problem).__name__}: {screen_line(problem, limit=500)}"
            echo(f"serve: a request failed: {what}", to=sys.stderr)
            answer = Refusal(500, "the prediction failed", "the messages of the server say why").answer()
        path = scope["path"] if scope["path"] in ROUTES else "other"
        self.metrics.requests[path, answer.status_code] += 1
        if path == "/predict":
            self.metrics.seconds.add(time.monotonic() - began_s)
        with suppress(asyncio.TimeoutError):  # uvicorn closes the connection of an incomplete answer
            await asyncio.wait_for(answer(scope, receive, send), ANSWER_S)

    async def _answer(self, request: Request) -> Response:
        host = http_server.own_host(request, self.names, any_address=self.any_address)
        if host is None:
            hint = "start the server with --allow-host and the name of the header Host"
            raise Refusal(421, "this server does not answer to that name", hint)
        if request.headers.getlist("origin") not in ([], [f"http://{host}"]):
            raise Refusal(403, "a request from a page of another site", "send requests from a program")
        path = request.url.path
        method = ROUTES.get(path)
        if method is None:
            raise Refusal(404, "there is no such address", ", ".join(ROUTES))
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise Refusal(405, f"{path} takes {method} only", f"{method} {path}", Allow=method)
        if path == "/metrics":
            now = self.metrics.text(requests=self._requests, queue_images=self.batcher.waiting())
            return Response(now, media_type="text/plain; version=0.0.4")
        if path == "/predict":
            return await self._predict(request)
        if path == "/setup":
            return _json({"model_version": self.version})
        if self.batcher.has_failed:
            raise Refusal(503, "the last prediction failed", "the messages of the server say why")
        return _json({"status": "UP", "model_version": self.version})

    # -- requests ----------------------------------------------------------------------------------

    async def _predict(self, request: Request) -> Response:
        predictor = self._predictor(request)
        self._check_queue()
        request.state.bytes = 0
        try:
            body = await asyncio.wait_for(self._body(request), BODY_S)
            self._check_queue()
            self._requests += 1
            request.scope["state"]["connection"].admit()
            try:
                return await self._result(request, body, predictor)
            finally:
                self._requests -= 1
        except asyncio.TimeoutError:
            request.state.is_unread = False  # enough time was given
            raise Refusal(408, f"the body took more than {BODY_S:g} s", "send smaller images") from None
        finally:
            self._bytes -= request.state.bytes

    def _predictor(self, request: Request) -> Predictor:
        """Return the predictor with the settings of a request. Raise Refusal for an invalid one."""
        given = request.query_params.multi_items()
        settings = dict(given)
        wrong = next((name for name in settings if name not in PARAMETERS), None)
        if wrong is not None or len(settings) < len(given):
            what = "a parameter twice" if wrong is None else f"an unknown parameter {wrong}"
            raise Refusal(400, f"the address has {what}", f"{', '.join(PARAMETERS)}, each once")
        try:
            predictor: Predictor = self._changed(*sorted(settings.items())) if settings else self.predictor
        except ConfigError as problem:
            raise Refusal(400, problem.what, problem.hint) from None
        if predictor.config.max_det > self.config.max_det:
            raise Refusal(
                400, f"max_det is above {self.config.max_det}", "or start it with a larger --max-det"
            )
        return predictor

    def _check_queue(self) -> None:
        if self._requests >= self.config.queue:
            raise _busy(f"{self.config.queue} requests wait for an answer")

    async def _body(self, request: Request) -> bytes:
        """Return the body. Raise Refusal if it is too large, or those of all requests together are."""
        limit = self.config.max_mib << 20
        what = f"the body has more than {size_text(limit)}"
        large = Refusal(413, what, "a smaller image, or a larger --max-mib")
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > limit:
            raise large
        body = bytearray()
        async for part in request.stream():
            body += part
            request.state.bytes += len(part)
            self._bytes += len(part)
            if len(body) > limit:
                raise large
            if self._bytes > HELD_BYTES:
                raise _busy(f"the bodies of all requests have more than {size_text(HELD_BYTES)}")
        return bytes(body)

    async def _drain(self, request: Request) -> None:
        """Read the rest of a refused body, so that the client gets to the answer; not that of ``Expect: 100-continue``."""

        async def dropped() -> None:
            while request.state.is_unread:
                await request.receive()

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(dropped(), DRAIN_S)

    async def _result(self, request: Request, body: bytes, predictor: Predictor) -> Response:
        kind, _, parameters = request.headers.get("content-type", "").partition(";")
        if kind.strip().lower() == "application/json":
            results = await self._results_of_tasks(body, predictor)
            return await self._in_thread(_json, {"results": results, "model_version": self.version})
        if kind.strip().lower() == "multipart/form-data":
            body = file_of_form(body, parameters)
        found = await self._found(body, "of the request", predictor)
        return await self._in_thread(_answer_of, found, self.version)

    async def _results_of_tasks(self, body: bytes, predictor: Predictor) -> list[dict[str, Any]]:
        """Return the predictions of all tasks. Raise DataError or Refusal for the first that cannot be predicted."""
        tasks, interface = await self._in_thread(read_request, body)
        every, wanted = self.predictor.names, self.predictor.classes
        names = [every[number] for number in wanted] if wanted else every
        if missing := interface.missing(names, masks=self.predictor.task.name == "masks"):
            self._say_missing(missing)
        config, results = self.config, list[dict[str, Any]]()

        async def result(number: int) -> dict[str, Any]:
            what, limit = f"task {number + 1}", config.max_mib << 20
            given = (tasks[number], what, interface.key, config.label_studio_url, limit)
            found = await self._found(await asyncio.to_thread(picture_of, *given), f"of {what}", predictor)
            return await self._in_thread(result_of, found, interface, number, self.version)

        for start in range(0, len(tasks), config.batch):
            coming = map(result, range(start, min(start + config.batch, len(tasks))))
            for one in await asyncio.gather(*coming, return_exceptions=True):
                if isinstance(one, BaseException):
                    raise one
                results.append(one)
        return results

    def _say_missing(self, names: list[str]) -> None:
        """Print once that people will not see some objects: a client could fill a log with it."""
        if not self._has_said_missing:
            what = f"the labelling interface has no label for {listed([*map(shown, names)])}: Label Studio cannot show such objects"
            echo(f"serve: {what}; predict --save-as label-studio writes an interface", to=sys.stderr)
        self._has_said_missing = True

    # -- images ------------------------------------------------------------------------------------

    async def _found(self, content: bytes, what: str, predictor: Predictor) -> Prediction:
        """Return the prediction of an image file. Raise DataError or Refusal if it cannot be decoded, or not in time."""
        header = read_header(content)
        width, height = header.stored_wh if header else (0, 0)
        if width * height > self.config.max_megapixels * 1e6:
            large = f"{width} x {height} pixels, more than {self.config.max_megapixels} million"
            raise Refusal(413, f"image {what} has {large}", "a smaller image, or a larger --max-megapixels")
        try:
            return await asyncio.wait_for(self._in_turn(content, width * height, what, predictor), ANSWER_S)
        except asyncio.TimeoutError:
            raise _busy(f"image {what} had no answer within {ANSWER_S:g} s") from None
        except DataError as problem:
            problem.hint = "send a JPEG, PNG, WebP, BMP, TIFF or GIF file that an image viewer opens"
            raise

    async def _in_turn(self, content: bytes, pixels: int, what: str, predictor: Predictor) -> Prediction:
        async with self._room(pixels):
            image = await self._in_thread(decode_image, content, what)
            return await asyncio.wrap_future(self.batcher.ask(Frame(what, image, is_file=False), predictor))

    @asynccontextmanager
    async def _room(self, pixels: int) -> AsyncIterator[None]:
        """Let in images as long as all have at most ``MAX_PIXELS`` together, in the order of their requests."""
        async with self._turn:
            while self._pixels and self._pixels + pixels > MAX_PIXELS:
                self._freed.clear()
                await self._freed.wait()
            self._pixels += pixels
        try:
            yield
        finally:
            self._pixels -= pixels
            self._freed.set()

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))


def file_of_form(body: bytes, parameters: str) -> bytes:
    """Return the bytes of a form's field ``file``. Raise DataError if the form has no such field, or several.

    Args:
        parameters: of its Content-Type. RFC 7578 and 2046; the name of the file is not used.
    """
    boundary = re.search(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', parameters, re.I)
    parts = list[bytes]()
    if boundary is not None:
        mark = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1")
        parts = (b"\r\n" + body).split(mark, 20)[1:]
    found = [part.partition(b"\r\n\r\n") for part in parts]
    files = [content for head, _, content in found if FILE_FIELD.search(head[:4096])]
    if len(files) != 1:
        what = f"the form has {len(files)} fields `file`"
        raise DataError(what, hint="send one image in each request: curl -F file=@street.jpg ADDRESS/predict")
    return files[0]


def _busy(what: str) -> Refusal:
    return Refusal(503, what, "send the request again later", **{"Retry-After": "1"})


def _answer_of(prediction: Prediction, version: str) -> Response:
    found = {key: value for key, value in prediction.to_json().items() if key not in ("path", "frame")}
    return _json({**found, "model_version": version})


def _json(values: dict[str, Any], status: int = 200, **headers: str) -> Response:
    return Response(json.dumps(values) + "\n", status, headers, "application/json")


class _Connection(http_server.PromptProtocol):
    """A connection is admitted while its request is in progress: only one that waits is closed for a new one."""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.wait()

    def send_400_response(self, msg: str) -> None:
        answer = Refusal(400, msg, "RFC 9112 describes HTTP; a header has at most 16 KiB").answer()
        lines = [b"HTTP/1.1 400 Bad Request", *(b"%b: %b" % pair for pair in answer.raw_headers), b""]
        self.transport.write(b"\r\n".join([*lines, bytes(answer.body)]))
        self.transport.close()


def server_of(service: Service) -> uvicorn.Server:
    """Return the server of a service."""
    return http_server.server_of(service, _Connection, end_s=END_S, idle_s=IDLE_S)
