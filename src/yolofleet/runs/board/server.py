"""The HTTP server of `yolofleet board`: access rules, pages, their values, and a stream of changes.

A page carries the values of the moment, so that it is complete when it arrives; the stream brings what changes.

A browser that knows the token may read; it may ask runs to stop or to save only if the command allowed it. No part of an
address reaches the file system: a run is found by its id in the table of :class:`Runs`.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from yolofleet.runs.board.runs import PARTS, Run, Runs
from yolofleet.runs.report.folder import REQUESTS
from yolofleet.runs.report.page import page, policy
from yolofleet.support import http_server
from yolofleet.support.errors import ConfigError, StorageError
from yolofleet.support.text import echo, screen_line

PERIOD_S = 1.0  # between two looks at the files, while a page is open
HEARTBEAT_S = 15.0  # at most, between two messages of a stream: a proxy may close a silent connection
RETRY_MS = 2000  # after which a browser connects again
MOST_CONNECTIONS = 100  # that have shown the token
CONNECT = "'self'"
WITHOUT_TOKEN = (
    "this browser has not shown the token of this board: open the address that `yolofleet board` has printed, "
    "or add its ?token=... to this address"
)
HEADERS = {
    "Content-Security-Policy": f"{policy(connect=CONNECT)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass
class Board:
    """The application: an ASGI callable."""

    runs: Runs  # what it shows
    allow: Collection[str] = ()  # requests to runs that it passes on, of ``REQUESTS``
    # names, any_address: the values of the header ``Host`` that are accepted, see :func:`own_host`
    names: Collection[str] = http_server.LOOPBACK_NAMES
    any_address: bool = False
    is_closing: Callable[[], bool] = lambda: False  # returns whether the streams must end
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    cookie: str = field(default_factory=lambda: f"yolofleet_board_{secrets.token_hex(4)}")

    def __post_init__(self) -> None:
        self._looked_at_s = float("-inf")
        self._looking = asyncio.Lock()
        self._router = Router(
            [
                Route("/", self._list),
                Route("/updates", self._list_updates),
                Route("/runs/{id}", self._run),
                Route("/runs/{id}/updates", self._run_updates),
                Route("/runs/{id}/{part}", self._values, methods=["GET"]),
                Route("/runs/{id}/{kind}", self._ask, methods=["POST"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        is_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                message["headers"] += [
                    (name.lower().encode(), text.encode()) for name, text in HEADERS.items()
                ]
            await send(message)

        answer = self._refusal(Request(scope)) or self._router
        try:
            await answer(scope, receive, send_with_headers)
        except Exception as problem:  # uvicorn would log the address, which may hold the token
            what = f"{type(problem).__name__}: {screen_line(problem, limit=300)}"
            echo(f"board: a request failed: {what}", to=sys.stderr)
            if not is_begun:
                await _refused(500, "this request failed")(scope, receive, send_with_headers)

    # -- access rules ------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not for this board, or None if it may be answered."""
        host = http_server.own_host(request, self.names, any_address=self.any_address)
        origins = request.headers.getlist("origin")
        if host is None:
            return _refused(421, "this board does not answer to that name")
        if origins != [f"http://{host}"] and (origins or request.method not in ("GET", "HEAD")):
            return _refused(403, "a request from another site")
        given = request.query_params.get("token")
        page_path = re.fullmatch(r"/(runs/[0-9a-f]{16})?", request.url.path)
        if given is not None and page_path and self._is_token(given):
            answer = RedirectResponse(page_path[0], 303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return answer
        if not self._is_token(request.cookies.get(self.cookie, "")):
            return _refused(401, WITHOUT_TOKEN)
        connection: http_server.PromptProtocol = request.scope["state"]["connection"]
        if connection not in connection.admitted and len(connection.admitted) >= MOST_CONNECTIONS:
            return _refused(503, f"{MOST_CONNECTIONS} connections are open: close some pages")
        connection.admit()
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    # -- pages and values --------------------------------------------------------------------------

    async def _look(self) -> None:
        """Bring the runs up to date, at most once in ``PERIOD_S`` for all streams together."""
        async with self._looking:
            if time.monotonic() - self._looked_at_s >= PERIOD_S:
                await run_in_threadpool(self.runs.look)
                self._looked_at_s = time.monotonic()

    async def _list(self, _: Request) -> Response:
        await self._look()
        values = {"kind": "board", "now": self._list_values()}
        return HTMLResponse(page("yolofleet board", values, connect=CONNECT))

    async def _run(self, request: Request) -> Response:
        run = await self._found(request)
        if run is None:
            return _refused(404, "no such run")
        now = self._run_values(run.id)
        values = {"kind": "live", "id": run.id, "name": run.name, "allow": self._allowed(), "now": now}
        return HTMLResponse(page(f"{run.name}: yolofleet board", values, connect=CONNECT))

    async def _values(self, request: Request) -> Response:
        run, part = await self._found(request), request.path_params["part"]
        if run is None or part not in PARTS:
            return _refused(404, "no such run, or no such part of it")
        return Response(await run_in_threadpool(self.runs.values, run, part), media_type="application/json")

    async def _ask(self, request: Request) -> Response:
        run, kind = await self._found(request), request.path_params["kind"]
        if run is None or kind not in REQUESTS:
            return _refused(404, "no such run, or no such request")
        if kind not in self.allow:
            return _refused(403, f"start the board with --allow {kind}")
        try:
            await run_in_threadpool(run.ask, kind)
        except (ConfigError, StorageError) as problem:
            return _refused(409, problem.what)
        self._looked_at_s = float("-inf")
        return Response(status_code=204)

    async def _found(self, request: Request) -> Run | None:
        await self._look()
        return self.runs.get(request.path_params["id"])

    def _allowed(self) -> list[str]:
        return [kind for kind in REQUESTS if kind in self.allow]

    # -- streams -----------------------------------------------------------------------------------

    async def _list_updates(self, request: Request) -> Response:
        return self._stream(request, self._list_values)

    async def _run_updates(self, request: Request) -> Response:
        return self._stream(request, partial(self._run_values, request.path_params["id"]))

    def _list_values(self) -> dict[str, object]:
        return {"rows": self.runs.rows()}

    def _run_values(self, id: str) -> dict[str, object]:
        run = self.runs.get(id)
        return {"row": run and run.row, **{part: getattr(run, part, "") for part in PARTS}}

    def _stream(self, request: Request, values: Callable[[], dict[str, object]]) -> Response:
        """Return a stream of server-sent events: the values, whenever they have changed."""

        async def events() -> AsyncIterator[str]:
            yield f"retry: {RETRY_MS}\n\n"
            sent, sent_at_s = "", time.monotonic()
            while not self.is_closing() and not await request.is_disconnected():
                await self._look()
                text = json.dumps(values(), separators=(",", ":"))
                if text != sent:
                    yield f"data: {text}\n\n"
                    sent, sent_at_s = text, time.monotonic()
                elif time.monotonic() - sent_at_s > HEARTBEAT_S:
                    yield ": heartbeat\n\n"
                    sent_at_s = time.monotonic()
                await asyncio.sleep(PERIOD_S)

        return StreamingResponse(events(), media_type="text/event-stream")


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status, {"Connection": "close"})


def server_of(board: Board) -> uvicorn.Server:
    """Return the server of a board."""
    server = http_server.server_of(board, http_server.PromptProtocol, end_s=2)
    board.is_closing = lambda: server.should_exit
    return server
