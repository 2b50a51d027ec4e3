"""How yolofleet calls the system's OpenSSH. Standard library alone."""

from __future__ import annotations

import subprocess

CONNECT_S = 10
LOGIN_S = 20.0
SSH_OPTIONS = (
    *("-T", "-a", "-x"),  # no terminal, no agent, no X11
    "-oBatchMode=yes",
    f"-oConnectTimeout={CONNECT_S}",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
    "-oClearAllForwardings=yes",
    "-oControlMaster=no",
    "-oControlPath=none",  # its own connection, of which nothing stays
    "-oRemoteCommand=none",
    "-oLogLevel=ERROR",
)


def refused_login(name: str) -> str:
    """Return why this machine cannot log in to a host; "" if it can."""
    if name.startswith("-"):
        return "not the name of a host"
    try:
        command = ["ssh", *SSH_OPTIONS, name, "true"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOGIN_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    words = done.stderr.decode("utf-8", "replace").strip()
    return "" if done.returncode == 0 else words or f"ssh ended with exit code {done.returncode}"
