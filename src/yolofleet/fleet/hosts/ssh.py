"""How yolofleet calls the system's OpenSSH, and errors of hosts that cannot be reached: why, and what to do."""

from __future__ import annotations

import errno
import subprocess
import sys

from yolofleet.fleet.hosts.fleet import HERE, Host
from yolofleet.support.errors import ClusterError

SSH_FAILED = 255  # exit code of ssh's own; others are the command's
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


class Unreachable(ClusterError):
    """A host is unreachable, or no host agent answers there.

    Args:
        kind: no-ssh, unknown-host, key-refused, host-key, port-refused, no-route, time-out, closed, no-python,
            no-package, other-version, not-linux, or other.
    """

    def __init__(self, host: str, kind: str, what: str, *, source: str = "", hint: str = "") -> None:
        super().__init__(f"{host}: {what}", source=source or None, hint=hint or None)
        self.host, self.kind = host, kind


def not_started(host: Host, problem: OSError) -> Unreachable:
    """Return the error for ssh, or a host agent on this machine, that cannot be started."""
    words = problem.strerror or str(problem)
    if problem.filename is None:  # the program exists, but this machine cannot start another one
        what = f"cannot start a connection to it: {words}"
        many = problem.errno in (errno.EMFILE, errno.ENFILE)
        return Unreachable(
            host.name, "other", what, hint="allow more open files: ulimit -n 4096" if many else ""
        )
    what = f"cannot start {problem.filename}: {words}"
    if host.name == HERE:
        return Unreachable(host.name, "no-python", what, hint="set python: (fleet.yaml)")
    return Unreachable(host.name, "no-ssh", what, hint="install OpenSSH's client here")


SAME_VERSION = (
    "install the same version of yolofleet on every host, whose shell must print nothing after the login"
)
REASONS = (  # words of ssh or the shell -> kind, what, hint; the first match counts
    ("could not resolve hostname", "unknown-host", "there is no host of that name",
     "check its spelling, /etc/hosts and ~/.ssh/config"),
    ("host identification has changed", "host-key", "its key is not the one that ssh knows",
     "if it was installed again: ssh-keygen -R {host}, and log in once with: ssh {host}"),
    ("host key verification failed", "host-key", "ssh does not know its key yet",
     "log in once, and confirm the key: ssh {host}"),
    ("permission denied", "key-refused", "it refuses the key (passwords are not asked for)",
     "ssh-copy-id {host}, or IdentityFile in ~/.ssh/config; this must work: ssh -oBatchMode=yes {host} true"),
    ("too many authentication failures", "key-refused", "it refuses the keys",
     "IdentityFile and IdentitiesOnly in ~/.ssh/config; this must work: ssh -oBatchMode=yes {host} true"),
    ("connection refused", "port-refused", "no process listens on its ssh port",
     "check that sshd runs there, and Port in ~/.ssh/config"),
    ("no route to host", "no-route", "there is no route to it",
     "check that it is switched on, in this network, and not behind a firewall that rejects"),
    ("network is unreachable", "no-route", "there is no route to its network", "check this machine's network (ip route)"),
    ("timed out", "time-out", "it does not answer",
     "check that it is switched on; a firewall may drop port 22: ssh {host}"),
    ("no module named", "no-package", "{python} there has no yolofleet that can be started ({words})",
     "install yolofleet there, or set python: of an environment that has it (fleet.yaml)"),
    ("not found", "no-python", "there is no {python}", "set python: for this host (fleet.yaml)"),
    ("no such file", "no-python", "there is no {python}", "set python: for this host (fleet.yaml)"),
    ("connection reset", "closed", "it closed the connection", "its sshd log says why; check with: ssh {host}"),
    ("connection closed", "closed", "it closed the connection", "its sshd log says why; check with: ssh {host}"),
)  # fmt: skip


def unreachable(host: Host, code: int, words: str) -> Unreachable:
    """Return the error for ssh, or the command behind it, that ended with ``code`` before the first message."""
    said = words.lower()
    names = {
        "host": host.name,
        "python": host.python or sys.executable,
        "words": (words.splitlines() or [""])[-1],
    }
    for words_of_it, kind, what, hint in REASONS:
        if words_of_it in said:
            return Unreachable(
                host.name,
                kind,
                what.format(**names),
                source=f"ssh: {words}"[:2000],
                hint=hint.format(**names),
            )
    if code == SSH_FAILED and not said:
        return Unreachable(
            host.name,
            "closed",
            "the connection to it was lost before the first message",
            hint=f"check that it is on, and the network to it: ssh {host.name}",
        )
    return Unreachable(
        host.name,
        "other",
        f"cannot start a host agent there (exit code {code})",
        source=words[-2000:],
        hint=f"this must work: ssh -oBatchMode=yes {host.name} {names['python']} -c 'import yolofleet'",
    )
