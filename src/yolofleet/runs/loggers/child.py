"""The process of one logger: ``python -m yolofleet.runs.loggers.child NAME``. ``running.py`` starts it.

Standard input has lines of JSON: a :class:`LoggedRun`, then rows and pictures, then true or false for the end of the run. The child
answers each of them and the end with a line: "" or the text of the failure. The packages of loggers patch modules, start threads
and processes, print, and install handlers of signals and exits; in a separate process this cannot affect the training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from yolofleet.runs.loggers import loggers
from yolofleet.runs.loggers.loggers import LoggedRun, Logger
from yolofleet.support.redaction import Redaction
from yolofleet.support.system.children import name_process

MOST_TEXT = 300  # longest text of a failure, characters
NICE = 10  # the training has priority on a busy host
PARENT_S = 1.0  # between looks at the parent
MOST_MEMORY_BYTES = 2 << 30  # clients read the answer of a server to its end, also if it has none


def main(name: str) -> None:
    _end_only_with(os.getppid())
    name_process(f"yolofleet-{name}")
    if hasattr(os, "nice"):
        os.nice(NICE)
    _limit_memory()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)  # the output of the packages would disturb the screen of the run
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.argv = ["yolofleet"]  # some packages store the command line

    without_secrets = Redaction.of_this_account()
    values = json.loads(sys.stdin.readline())
    run = LoggedRun(**{**values, "folder": Path(values["folder"])})
    if not run.resumed:
        run.forget_id()
    logger: Logger | None = None
    for line in sys.stdin:
        message, problem = json.loads(line), ""
        try:
            if isinstance(message, bool):
                if logger is not None:
                    logger.close(message)
            else:
                if logger is None:
                    logger = getattr(loggers, f"{name.title()}Logger")(run)
                if path := message.get("picture"):
                    logger.picture(Path(path), message["epoch"])
                else:
                    logger.row(message)
        except (Exception, SystemExit) as failure:
            # the next attempt continues what this one has begun in the store
            run = replace(run, resumed=True)
            text = " ".join(str(getattr(failure, "what", failure)).split())
            problem = without_secrets(f"{type(failure).__name__}: {text}".strip(": "))[:MOST_TEXT]
        answers.write(json.dumps(problem) + "\n")
        answers.flush()
        if isinstance(message, bool):
            break
    os._exit(0)  # at exit, packages wait for their servers


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # other systems
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = MOST_MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MOST_MEMORY_BYTES, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _end_only_with(parent: int) -> None:
    """Ignore the signals that stop a run, because the run still sends its last rows, but end with the parent."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            # a function, because programs of the packages would inherit SIG_IGN
            signal.signal(getattr(signal, name), lambda *_: None)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    # not a signal of the kernel: packages replace the handlers, and may hang in theirs
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
