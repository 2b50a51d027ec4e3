"""Call functions in copies of this process, which has torch loaded.

A copy saves the seconds that torch takes to load. This process must not ask for devices, because a process that has used
CUDA cannot be forked.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from yolofleet.measure.selftest.checks import fleet_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.system.children import die_with_parent


def copy_of_this_process(target: Callable[..., int], *args: Any) -> BaseProcess:
    """Start ``target`` in a copy of this process, which has torch loaded; its result is the exit code.

    Systems other than Linux start a new Python instead, which loads torch again.
    """
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process: BaseProcess = context.Process(target=_exit_with, args=(target, *args))
    process.start()
    return process


def _exit_with(target: Callable[..., int], *args: Any) -> None:
    """End this process with the result of ``target``. Exit handlers of ``atexit`` do not run in a copy."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.exit(target(*args))


def resolved_fleet(device: str) -> str:
    """Return :func:`checks.fleet_of` of ``--device``. A copy of this process asks for the devices.

    Raises:
        ConfigError: this machine does not have a device.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = copy_of_this_process(_send_fleet, device, sender)
    sender.close()
    try:
        fleet, problem = receiver.recv()
    except EOFError:
        fleet, problem = (
            "",
            {
                "what": f"--device {device}: the process that asks for its devices crashed",
                "hint": "yolofleet doctor",
            },
        )
    process.join()
    if problem:
        raise ConfigError(**problem)
    return str(fleet)


def _send_fleet(device: str, sender: Connection) -> int:
    try:
        sender.send((fleet_of(device), None))
    except ConfigError as problem:
        sender.send(("", {name: getattr(problem, name) for name in ("what", "source", "hint")}))
    return 0


def checked_devices(devices: Sequence[str], model: str) -> Iterator[dict[str, Any]]:
    """Run the checks of each device in a process of its own, so that a device that crashes does not end this process.

    Yields:
        One dictionary a check, when the check has ended: device, name, passed, detail.
    """
    from yolofleet.measure.selftest.device_checks import send_checks

    for device in devices:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = copy_of_this_process(send_checks, device, model, sender)
        sender.close()
        with receiver, suppress(EOFError):
            while True:
                yield {"device": device, **receiver.recv()}
        process.join()
        if process.exitcode:
            detail = f"ended with exit code {process.exitcode}"
            yield {"device": device, "name": "all checks", "passed": False, "detail": detail}
