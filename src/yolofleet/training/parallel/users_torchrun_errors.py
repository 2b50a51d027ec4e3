"""Errors of processes that a torchrun of the user started: one message for each machine, also in torchrun's own report."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from yolofleet.storage.atomic import write_text
from yolofleet.support.errors import ClusterError, StorageError, YolofleetError

# of this process: attempt_0/LOCAL_RANK/error.json in a folder of torchrun
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# A rank that lost another one ends so much later, also under our own launcher. On an H200 the end of a killed process was noticed within a second.
AFTER_CAUSE_S = 2.0


def is_told(problem: YolofleetError, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether another process of this machine has printed this error, or the one that caused it.

    The first process that calls this for an error of one text prints it. A process that lost another one
    (``ClusterError``) waits, and prints its error only if no process has printed one. torchrun copies the text from its
    error file to the end of its report.
    """
    if not environment.get(ERROR_FILE):  # empty: torchrun keeps no logs
        return False
    file, text = Path(environment[ERROR_FILE]), problem.render()
    is_consequence = isinstance(problem, ClusterError)
    if is_consequence:
        time.sleep(AFTER_CAUSE_S)
    name = "cluster" if is_consequence else hashlib.sha256(text.encode()).hexdigest()
    folder, told = file.parent.parent, False
    try:
        told = is_consequence and any(folder.glob("told-*"))
        (folder / f"told-{name}").touch(exist_ok=False)
    except FileExistsError:
        told = True
    except OSError:
        return False
    # torchrun names the process with the earliest time as the cause
    entry = {
        "message": text.partition("\n")[0],
        "extraInfo": {
            "py_callstack": "another process of this machine has reported the error" if told else text,
            "timestamp": str(int(time.time()) + told),
        },
    }
    with suppress(StorageError):
        write_text(file, json.dumps({"message": entry}))
    if told:
        time.sleep(AFTER_CAUSE_S)  # when this process ends, torchrun ends the one that prints
    return told
