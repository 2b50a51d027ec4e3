"""An S3 server that checks credentials (moto), and a proxy before it that fails as networks and stores do."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for main

from commands import free_port

BUCKET = "bucket"
PORT = 5000  # on a machine of its own
_SETUP_ACTIONS = 4  # requests before the server begins to check credentials
# moto computes the ETag of an object at the first request for it, from a file that all its threads share, and keeps it. Without
# the lock, two requests at the same time can give an object a wrong ETag for ever.
_SERVER = """
from moto.s3.models import FakeKey
from moto.server import main

unlocked = FakeKey.etag.fget

def etag(key):
    with key.lock:
        return unlocked(key)

FakeKey.etag = property(etag)
main()
"""


def missing() -> str:
    """Why there can be no server here; empty when there can."""
    absent = [name for name in ("moto", "flask", "s3fs") if find_spec(name) is None]
    return f"{', '.join(absent)} missing (make test-store installs them)" if absent else ""


@dataclass
class Store:
    """A running server.

    Attributes:
        key, secret: of the only user.
    """

    host: str
    port: int
    key: str = ""
    secret: str = ""

    def environment(self, port: int = 0, host: str = "") -> dict[str, str]:
        """What a machine needs to reach it, directly or through a proxy."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host or self.host}:{port or self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str = "s3", **more: Any) -> Any:
        import botocore.session

        values = {"key": self.key or "setup", "secret": self.secret or "setup", **more}
        return botocore.session.Session().create_client(
            service,
            region_name="us-east-1",
            endpoint_url=f"http://{self.host}:{self.port}",
            aws_access_key_id=values["key"],
            aws_secret_access_key=values["secret"],
        )

    def upload(self, folder: Path, prefix: str) -> None:
        client = self.client()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())


@contextmanager
def s3_server(log: Path) -> Iterator[Store]:
    """Run a server with one bucket and one user, who may do everything with it."""
    store = Store("127.0.0.1", free_port())
    command = [sys.executable, "-c", _SERVER, "-H", store.host, "-p", str(store.port)]
    environment = os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": str(_SETUP_ACTIONS)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, stdin=subprocess.DEVNULL
        )
    try:
        yield _with_user(store, process)
    finally:
        process.terminate()
        process.wait()


def _with_user(store: Store, process: subprocess.Popen[bytes]) -> Store:
    deadline_s = time.monotonic() + 900
    while True:
        try:
            http.client.HTTPConnection(store.host, store.port, timeout=5).connect()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline_s, "no S3 server"
            time.sleep(0.1)
    iam = store.client("iam")
    iam.create_user(UserName="trainer")
    policy = (
        '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
    )
    iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=policy)
    key = iam.create_access_key(UserName="trainer")["AccessKey"]
    store.client().create_bucket(Bucket=BUCKET)
    store.key, store.secret = key["AccessKeyId"], key["SecretAccessKey"]
    return store


@dataclass
class Faults:
    """What the proxy does to requests.

    Attributes:
        down: connections are closed without an answer.
        status: of every answer; 0: that of the server.
        flip: so many answers with content get a flipped bit; -1: all.
        flip_put: so many objects that are written, likewise.
        put_status: of every answer to a write; 0: that of the server.
        cut: so many answers with content end early.
        delay_s: before each answer.
        counts: requests by method and kind: GET object, GET list, HEAD, PUT ...
    """

    down: bool = False
    status: int = 0
    flip: int = 0
    flip_put: int = 0
    cut: int = 0
    put_status: int = 0
    delay_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str) -> bool:
        """Return whether a fault applies to this answer, and count it."""
        with self.lock:
            left = getattr(self, name)
            if left > 0:
                setattr(self, name, left - 1)
            return bool(left)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def _any(self) -> None:
        faults: Faults = self.server.faults
        store: Store = self.server.store
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_list = "list-type=" in self.path or self.path.rstrip("/") == f"/{BUCKET}"
        faults.counts[f"{self.command} {'list' if is_list else 'object'}"] += 1
        time.sleep(faults.delay_s)
        if faults.down:
            self.close_connection = True
            return
        status = faults.status or (faults.put_status if self.command in ("PUT", "POST") else 0)
        if status:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.command == "PUT" and len(body) > 1000 and faults.take("flip_put"):
            body = body[:500] + bytes([body[500] ^ 4]) + body[501:]
        connection = http.client.HTTPConnection(store.host, store.port, timeout=900)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        is_object = (
            self.command == "GET" and not is_list and answer.status in (200, 206) and len(content) > 20
        )
        if is_object and faults.take("flip"):
            content = content[:10] + bytes([content[10] ^ 4]) + content[11:]
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        if self.command != "HEAD" and "Content-Length" not in dict(answer.getheaders()):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if is_object and faults.take("cut"):
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler._any)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections = set[socket.socket]()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def close(self) -> None:
        """End, with the connections that clients keep for later requests: a thread waits at each.

        First the clients are told, so that they close their ends; one that was switched off cannot.
        """
        self.shutdown()
        self.server_close()
        for how, wait_s in ((socket.SHUT_WR, 5), (socket.SHUT_RDWR, 900)):
            gives_up_at_s = time.monotonic() + wait_s
            for connection in list(self.connections):
                with suppress(OSError):
                    connection.shutdown(how)
            while self.connections and time.monotonic() < gives_up_at_s:
                time.sleep(0.01)

    def handle_error(self, *_: object) -> None:
        pass  # a client that has gone


@contextmanager
def proxy(store: Store, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[int, Faults]]:
    """Run a proxy before ``store`` on this machine, at its address ``host``; yield its port, and what it does to requests."""
    server = _Server((host, port), _Handler)
    faults = Faults()
    vars(server).update(store=store, faults=faults)
    try:
        yield server.server_address[1], faults
    finally:
        with suppress(OSError):
            server.close()


@contextmanager
def web_server(
    folder: Path, *, has_ranges: bool, absent: int = 404, redirects: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Serve the files of a folder on this machine; yield the port.

    Args:
        has_ranges: answer requests for a part of a file with that part.
        absent: status for a file that does not exist.
        redirects: where a path that begins so is redirected, with the rest of the path.
    """

    class Files(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            for begin, target in (redirects or {}).items():
                if self.path.startswith(begin):
                    self.send_response(302)
                    self.send_header("Location", target + self.path.removeprefix(begin))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
            path = Path(self.translate_path(self.path))
            if not path.is_file():
                self.send_error(absent)
                return
            content = path.read_bytes()
            if not content and "Range" in self.headers:
                self.send_error(416)
                return
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            is_part = has_ranges and part is not None
            if part is not None and has_ranges:
                content = content[int(part[1]) : int(part[2]) + 1]
            self.send_response(206 if is_part else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    try:
        yield server.server_address[1]
    finally:
        server.close()


def main(host: str, log: str, delay_ms: str, *folders: str) -> None:
    """Run a server with the folders in its bucket, each under its name; print a line of JSON when it is ready.

    A line ``[FOLDER, NAME]`` of standard input uploads another folder under that name, and a line answers.

    Args:
        delay_ms: before each answer.
    """
    with s3_server(Path(log)) as store, proxy(store, host, PORT) as (port, faults):
        for folder in folders:
            store.upload(Path(folder), Path(folder).name)
        faults.delay_s = float(delay_ms) / 1000
        print(json.dumps({"key": store.key, "secret": store.secret, "port": port}), flush=True)
        for line in sys.stdin:  # until the test closes it
            folder, name = json.loads(line)
            store.upload(Path(folder), name)
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
