"""`yolofleet serve`: its start, its end, and what it refuses."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, ran
from exported import network
from pages import BLOCKS
from small_data import encoded, picture
from small_weights import saved

from yolofleet.cli import main
from yolofleet.support.errors import install_hint
from yolofleet.support.listener import open_listener

pytest.importorskip("uvicorn", reason="the extra yolofleet[serve] is not installed")

START_S = 900


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return saved(network(), tmp_path / "small.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_answers_and_ends_at_a_signal(weights: Path, exported: bool) -> None:
    if exported:
        pytest.importorskip("onnxruntime", reason="the extra yolofleet[onnx] is not installed")
        assert main(["export", "--weights", str(weights), "--dynamic", "batch"]) == 0
        weights = weights.with_suffix(".onnx")
    argv = [
        sys.executable,
        *("-m", "yolofleet", "serve"),
        "--weights",
        weights.name,
        *("--port", "0", "--device", "cpu"),
    ]
    server = subprocess.Popen(
        argv, cwd=weights.parent, env=environment(weights.parent), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        found = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/predict\n", server.stdout.readline())
        assert found
        connection = http.client.HTTPConnection(found[1], timeout=START_S)
        versions = set()
        for path, body in (("/predict?conf=0.01", encoded(picture(90, 60))), ("/setup", b"{}")):
            connection.request("POST", path, body)
            answer = json.loads(connection.getresponse().read())
            versions.add(answer["model_version"])
        (weights.parent / "street.jpg").write_bytes(encoded(picture(90, 60)))
        (program,) = (
            block.text for block in BLOCKS if block.name == "docs/serve.md" and block.language == "python"
        )
        program = program.replace("127.0.0.1:8643", found[1]).replace("conf=0.3", "conf=0.01")
        printed = ran(weights.parent, sys.executable, "-c", program).out
        assert re.match(r"(person|dog|traffic light) 0\.\d+ \[", printed)
        assert len(versions) == 1 and re.fullmatch(r"small-[0-9a-f]{12}", versions.pop())
    finally:
        server.send_signal(signal.SIGTERM)  # with an open connection
        out, err = server.communicate(timeout=START_S)
    connection.close()
    assert server.returncode == 0 and out == ""
    assert (
        f"{weights.name}, 3 classes, 64" in err and "the server has ended" in err and "Traceback" not in err
    )


def test_what_cannot_be_served_is_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = ["serve", "--weights", str(weights)]
    with open_listener("127.0.0.1") as taken:
        port = str(taken.getsockname()[1])
        refused = [
            ([*serve, "--port", port], "the server cannot listen on 127.0.0.1:"),
            (["serve"], "--weights is missing"),
            ([*serve, "--host", "example.org"], "--host example.org is not an IPv4 address"),
            ([*serve, "--label-studio-url", "file:///etc"], "--label-studio-url"),
            ([*serve, "--label-studio-url", "http://key@studio"], "--label-studio-url"),
            ([*serve, "--queue", "0"], "--queue"),
            (["serve", "--weights", "nowhere.safetensors", "--port", "0"], "nowhere.safetensors"),
        ]
        for words, says in refused:
            assert main(words) in (2, 3), words
            assert says in capsys.readouterr().err, words
    config = weights.with_name("serve.yaml")
    config.write_text("host: 0.0.0.0\n")
    assert main([*serve, "--config", str(config)]) == 2
    assert "host: cannot be set in a file" in capsys.readouterr().err
    monkeypatch.setattr("yolofleet.cli.board.find_spec", lambda name: None)
    assert main(serve) == 2
    assert install_hint("serve") in capsys.readouterr().err
