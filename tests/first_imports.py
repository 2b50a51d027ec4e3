"""Import each module of the package as the first one, in a fork of a process that has loaded only other packages.

``python tests/first_imports.py`` writes a line of JSON for each module: its name, the error or "", the modules of ours that
it loaded.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[1] / "src"


def in_a_fork(work: Callable[[], object]) -> object:
    """Return what ``work`` returns in a process of its own."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.wait()
    return json.loads(answer)


def imported(name: str) -> tuple[str, list[str]]:
    """Import a module; return the error or "", and the modules of ours that are loaded then, without extensions."""
    problem = ""
    try:
        importlib.import_module(name)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "yolofleet"}
    return problem, [name for name, module in ours.items() if str(module.__file__).endswith(".py")]


def names() -> list[str]:
    files = sorted(path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("yolofleet/**/*.py"))
    found = [".".join(file.parts).removesuffix(".__init__") for file in files]
    return [name for name in found if not name.endswith("__main__")]


def of_others() -> list[str]:
    """Import all; return the modules of other packages that are loaded then."""
    for name in names():
        imported(name)
    known: dict[str, ModuleType] = dict(sys.modules)
    return [name for name in known if name.split(".")[0] not in ("yolofleet", "__main__")]


if __name__ == "__main__":
    for other in in_a_fork(of_others):  # type: ignore[attr-defined]
        with suppress(Exception):
            importlib.import_module(other)
    gc.disable()
    for name in names():
        print(json.dumps([name, *in_a_fork(lambda name=name: imported(name))]), flush=True)  # type: ignore[misc]
