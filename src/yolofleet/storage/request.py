"""Send one HTTP request through the proxies of the environment."""

from __future__ import annotations

import email.utils
import http.client
import io
import ipaddress
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from typing import Any, cast
from urllib.parse import urlsplit

UNTIMED_S = 60.0  # longest time without content, if the caller sets no limit
OFFLINE = "YOLOFLEET_OFFLINE"


class Refused(Exception):
    """A failure that a retry would repeat."""


class Transient(Exception):
    """A failure after which a retry may succeed."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        super().__init__(what)
        self.wait_s = wait_s


def may_pass(status: int) -> bool:
    """Return whether a retry may succeed after this HTTP status."""
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))


def is_offline() -> bool:
    """Return whether the user forbids connections to other machines, except to the hosts of a run."""
    return os.environ.get(OFFLINE, "").lower() not in ("", "0", "no", "off", "false")


def is_forbidden(url: str) -> bool:
    """Return whether the user forbids a connection to this address; one of this machine is always allowed."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return is_offline() and not is_here


def check_redirect(url: str, target: str) -> None:
    """Raise Refused for a redirect that no request follows: to another scheme, without encryption after https, or if offline.

    Args:
        target: absolute.
    """
    old, new = urlsplit(url).scheme, urlsplit(target).scheme
    if new not in ("http", "https") or (old == "https" and new == "http"):
        raise Refused(f"it redirects from {old} to {_plain(target)!r}")
    if is_forbidden(target):
        raise Refused(f"it redirects to another machine, and {OFFLINE} is set")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows at most ten redirects, to http and https only, never from https to http, and none of a POST request."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.data is not None:
            raise Refused("it redirects a POST request")
        check_redirect(req.full_url, newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Timed(io.RawIOBase):
    """A connection with a deadline for content; an endless sequence of headers does not extend it."""

    def __init__(self, raw: io.RawIOBase, limit_s: float) -> None:
        self.raw, self.limit_s = raw, limit_s
        self.restart()

    def restart(self) -> None:
        self.until_s = time.monotonic() + self.limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.until_s:
            raise TimeoutError(f"it sent no content for {self.limit_s:.0f} s")
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that ends if a server sends ``100 Continue``, chunks or trailers without end."""

    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.timed = _Timed(
            cast(io.RawIOBase, sock.makefile("rb", buffering=0)), sock.gettimeout() or UNTIMED_S
        )
        self.fp = io.BufferedReader(self.timed)

    def read1(self, n: int = -1) -> bytes:
        piece = super().read1(n)
        if piece:
            self.timed.restart()
        return piece


class _Http(http.client.HTTPConnection):
    response_class = _Response


class _Https(http.client.HTTPSConnection):
    response_class = _Response


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


def _opener(redirects: Redirects) -> urllib.request.OpenerDirector:
    """Return an opener for HTTP and HTTPS with the proxies of the environment; no file, ftp or data urls."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _HttpHandler(),
        _HttpsHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        redirects,
    ):
        opener.add_handler(handler)
    return opener


def open_url(url: str, headers: dict[str, str], timeout_s: float, redirects: Redirects | None = None) -> Any:
    """Return an open response with a status below 300, or 416 (no such range). Raise Transient or Refused for another."""
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise Refused("only http and https are supported")
        if is_forbidden(url):
            raise Refused(f"{OFFLINE} is set")
        return _opener(redirects or Redirects()).open(
            urllib.request.Request(url, headers=headers), timeout=timeout_s
        )
    except urllib.error.HTTPError as problem:
        if problem.code == 416:
            return problem
        what = f"HTTP {problem.code} {_plain(problem.reason)}"
        problem.close()
        if may_pass(problem.code):
            raise Transient(what, retry_after_s(problem.headers.get("Retry-After"))) from None
        raise Refused(what) from None
    except urllib.error.URLError as problem:
        if isinstance(problem.reason, ssl.SSLCertVerificationError):
            raise Refused(f"its certificate is not trusted ({problem.reason.verify_message})") from None
        if isinstance(problem.reason, socket.gaierror) and "Range" not in headers:  # probably no network
            raise Refused(
                f"the name {urlsplit(url).hostname} is not found: {reason_text(problem.reason)}"
            ) from None
        raise Transient(f"not reachable: {reason_text(problem.reason)}") from None
    except (OSError, http.client.HTTPException) as problem:
        raise Transient(f"no answer: {reason_text(problem)}") from None
    except ValueError as problem:  # the url is not valid
        raise Refused(_plain(problem)) from None


def reason_text(problem: Any) -> str:
    """Return the reason of a failed connection as text."""
    return _plain(getattr(problem, "strerror", None) or str(problem) or type(problem).__name__)


def _plain(text: Any) -> str:
    """Return the first line of a server's text, with ``?`` for control characters."""
    first = (str(text).splitlines() or [""])[0][:200]
    return "".join(c if c.isprintable() else "?" for c in first)


def whole_number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,18}", text) else None


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header (a number or a date, RFC 9110); None if it is not valid."""
    if not text:
        return None
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
