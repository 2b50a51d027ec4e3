"""Lost hosts that come back, or that are on and cannot be used; ssh is a script."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from queue import Queue

import pytest

from yolofleet.fleet.hosts.fleet import Host
from yolofleet.fleet.launch import returns
from yolofleet.fleet.launch.returns import Returns

CHANGED = "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! / Host key verification failed."


@pytest.mark.skipif(sys.platform != "linux", reason="fleets are started on Linux here")
@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            (CHANGED,),
            ["warning: m2 does not take part: m2: its key is not the one that ssh knows; if it was installed again:"],
        ),
        (("Permission denied (publickey).",), ["warning: m2 does not take part: m2: it refuses the key"]),
        (("connect to host m2 port 22: Connection timed out", "No route to host", "Connection refused"), []),
        (("Connection timed out", CHANGED, "Connection timed out"), ["warning: m2 does not take part: m2: its key"]),
    ],
)  # fmt: skip
def test_a_host_that_is_on_and_cannot_be_used_is_named_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    says: tuple[str, ...],
    told: list[str],
) -> None:
    monkeypatch.setattr(returns, "LOGIN_EVERY_S", 0.01)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    texts = "\n".join(f"{number}) echo '{text}' >&2;;" for number, text in enumerate(says))
    ssh = f"""#!/bin/sh
n=$(cat {tmp_path}/n 2>/dev/null || echo 0)
echo $((n + 1)) > {tmp_path}/n
case $((n % {len(says)})) in
{texts}
esac
exit 255
"""
    (tmp_path / "ssh").write_text(ssh)
    (tmp_path / "ssh").chmod(0o755)
    waiting = Returns(Queue(), lambda *_: None, lambda _: 0, list)
    waiting.wait_for(Host("m2", "cpu:1"), 1)
    waiting.start()
    gives_up_at_s = time.monotonic() + 600
    while not (tmp_path / "n").exists() or int((tmp_path / "n").read_text() or 0) < 2 * len(says) + 1:
        assert time.monotonic() < gives_up_at_s
        time.sleep(0.01)
    waiting.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "does not take part" in line]
    assert len(lines) == len(told), lines
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True)), lines
