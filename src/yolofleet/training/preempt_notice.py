"""Ask a user's command every few seconds whether this machine will be taken away (``--preempt-notice``).

A process of its own runs the command: ``python -m yolofleet.training.preempt_notice COMMAND WORDS``. Starting a command from
a worker would copy the page tables of a large process each time, and a killed worker could not end the command. The
process watches its standard input, a pipe from the worker. At its end the worker is gone, so the process kills the command
and ends. It tells the worker what happened in lines of JSON: ``[event, text]``.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from yolofleet.support.system.children import die_with_parent, module_argv, with_this_package
from yolofleet.support.text import screen_line

PERIOD_S = 5.0  # between two runs of the command; AWS advises this for its notices, which come 120 s ahead
TIMEOUT_S = 10.0  # of one run of the command
POLL_S = 0.1
END_S = 5.0  # for the process to end when the worker closes the pipe
MOST_OUTPUT_BYTES = 4096


@contextmanager
def preempt_notices(
    command: str, *, notice: Callable[[], None], log: Callable[[str], None], warn: Callable[[str], None]
) -> Iterator[None]:
    """Run ``command`` every ``PERIOD_S`` inside the block, until it ends with exit code 0.

    Args:
        command: words as a shell would split them; no shell runs them. "": do nothing.
        notice: called once, from another thread, when the exit code is 0.
        log: called with new output of the command, as one line without control characters.
        warn: called with a problem, once for each kind.
    """
    if not command:
        yield
        return
    watcher = subprocess.Popen(
        module_argv("yolofleet.training.preempt_notice", *shlex.split(command)),
        env=with_this_package(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert watcher.stdin is not None and watcher.stdout is not None
    lines, closing = watcher.stdout, threading.Event()

    def listen() -> None:
        event = ""
        for line in lines:
            event, text = json.loads(line)
            if text:
                (warn if event == "problem" else log)(f"--preempt-notice: {screen_line(text)}")
            if event == "notice":
                notice()
        if event != "notice" and not closing.is_set():
            warn("--preempt-notice: its process was killed, so there will be no notice")

    listener = threading.Thread(target=listen, name="preempt-notice", daemon=True)
    listener.start()
    try:
        yield
    finally:
        closing.set()
        watcher.stdin.close()
        try:
            watcher.wait(END_S)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()
        listener.join(END_S)
        lines.close()


def main(argv: list[str]) -> int:
    """Run ``argv`` every ``PERIOD_S`` until its exit code is 0, or until standard input is closed."""
    for name in ("SIGINT", "SIGHUP"):  # Ctrl-C, or a closed terminal: the worker decides when this ends
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    said: set[tuple[str, str]] = set()
    output = ""
    while True:
        began_s = time.monotonic()
        event, text = _asked(argv)
        if event != "no":
            if (event, text) not in said:
                _say(event, text)
            said.add((event, text))
        elif text != output:
            _say(event, text)
            output = text
        if event == "notice" or _is_parent_gone(began_s + PERIOD_S - time.monotonic()):
            return 0


def _say(event: str, text: str) -> None:
    with suppress(OSError):  # the worker is gone
        print(json.dumps([event, text]), flush=True)


def _is_parent_gone(wait_s: float) -> bool:
    """Wait at most ``wait_s``; return whether standard input has ended.

    No process writes to this pipe, so readable means end of file.
    """
    return bool(select.select([0], [], [], max(wait_s, 0.0))[0])


def _asked(argv: list[str]) -> tuple[str, str]:
    """Run the command once; return ``notice``, ``no`` or ``problem``, and its output or the problem in one line."""
    try:
        command = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all its processes can be killed together
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
    except (OSError, ValueError) as problem:
        return "problem", f"{argv[0]} cannot be started: {getattr(problem, 'strerror', None) or problem}"
    assert command.stdout is not None
    pipe, output = command.stdout.fileno(), b""
    os.set_blocking(pipe, False)
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while command.poll() is None:
            if time.monotonic() > deadline_s:
                return "problem", f"{shlex.join(argv)} did not end within {TIMEOUT_S:.0f} s, and was killed"
            if _is_parent_gone(POLL_S):
                return "no", ""
            output += _read(pipe)[: MOST_OUTPUT_BYTES - len(output)]
        output += _read(pipe)[: MOST_OUTPUT_BYTES - len(output)]
    finally:
        with suppress(OSError):
            os.killpg(command.pid, signal.SIGKILL)  # also what the command has left in the background
        command.wait()
        command.stdout.close()
    text = output.decode("utf-8", "replace").strip()
    return ("notice", text) if command.returncode == 0 else ("no", text)


def _read(pipe: int) -> bytes:
    """Return what is in the pipe now."""
    with suppress(OSError):  # BlockingIOError: nothing
        return os.read(pipe, 1 << 16)
    return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
