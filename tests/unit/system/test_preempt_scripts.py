"""The scripts of docs/failures.md, as they stand there, against a server that answers as a metadata service does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import DEADLINE_S, environment

PAGE = Path(__file__).resolve().parents[3] / "docs" / "failures.md"
COMMANDS = {"aws_notice.sh": ["sh"], "gcp_notice.sh": ["sh"], "azure_notice.py": [sys.executable]}
AWS, GCP = "/latest/meta-data/spot/instance-action", "/computeMetadata/v1/instance/preempted"
AZURE, AZURE_NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not shutil.which("curl"), reason="needs sh and curl"
)


def scripts() -> dict[str, str]:
    """Return the blocks of the page that follow the name of a file."""
    found = re.findall(
        r"^`(\w+\.(?:sh|py))`[^\n]*:\n\n<!-- test: [^\n]+ -->\n```\w+\n(.*?)^```$",
        PAGE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return dict(found)


@contextmanager
def metadata_service(answers: dict[str, str]) -> Iterator[str]:
    """Answer GET requests with the right header by path; AWS's needs a token from a PUT request first."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            is_right = (
                self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            )
            self.answer("the token" if is_right else None)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            is_allowed = {
                AWS: self.headers["X-aws-ec2-metadata-token"] == "the token",
                GCP: self.headers["Metadata-Flavor"] == "Google",
                AZURE: self.headers["Metadata"] == "true" and "api-version=" in self.path,
                AZURE_NAME: self.headers["Metadata"] == "true" and "format=text" in self.path,
            }
            self.answer(answers.get(path) if is_allowed[path] else None)

        def answer(self, text: str | None) -> None:
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "<html>404</html>").encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def azure(*events: tuple[str, str]) -> dict[str, str]:
    found = [
        {"EventId": "1", "EventType": kind, "Resources": [name], "EventStatus": "Scheduled"}
        for kind, name in events
    ]
    return {AZURE: json.dumps({"DocumentIncarnation": 1, "Events": found}), AZURE_NAME: "me"}


@pytest.mark.parametrize(
    ("script", "answers", "is_notice"),
    [
        ("aws_notice.sh", {}, False),
        ("aws_notice.sh", {AWS: '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'}, True),
        ("gcp_notice.sh", {}, False),
        ("gcp_notice.sh", {GCP: "FALSE"}, False),
        ("gcp_notice.sh", {GCP: "TRUE"}, True),
        ("azure_notice.py", {}, False),
        ("azure_notice.py", azure(), False),
        ("azure_notice.py", azure(("Preempt", "another")), False),
        ("azure_notice.py", azure(("Freeze", "me")), False),
        ("azure_notice.py", azure(("Freeze", "me"), ("Preempt", "me")), True),
    ],
)
def test_a_script_of_the_page_knows_a_notice(
    tmp_path: Path, script: str, answers: dict[str, str], is_notice: bool
) -> None:
    (tmp_path / script).write_text(scripts()[script])
    with metadata_service(answers) as address:
        variables = {**environment(tmp_path), "METADATA_SERVER": address}
        done = subprocess.run(
            [*COMMANDS[script], script],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert (done.returncode == 0) is is_notice, done.stderr
    assert not is_notice or not done.stderr


@pytest.mark.parametrize("script", COMMANDS)
def test_a_script_of_the_page_takes_no_answer_for_no(tmp_path: Path, script: str) -> None:
    (tmp_path / script).write_text(scripts()[script])
    variables = {**environment(tmp_path), "METADATA_SERVER": "http://127.0.0.1:9"}
    argv = [*COMMANDS[script], script]
    assert subprocess.run(
        argv, cwd=tmp_path, env=variables, capture_output=True, timeout=DEADLINE_S
    ).returncode
