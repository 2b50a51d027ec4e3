"""Load a class that the user names on the command line: ``FILE.py:CLASS``, or ``MODULE:CLASS`` of an installed module.

No other module of this package loads code. Only the command line and the caller of the Python interface can name a class;
configuration files, data sets, weights and checkpoints cannot, and nothing is pickled. Each process of a run loads the file
itself, so the file must exist on every host under the same path.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from modulefinder import ModuleFinder
from os.path import relpath
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import nearest, shown

T = TypeVar("T")
MAX_SOURCE_BYTES = 16 << 20


def split_name(name: str, flag: str) -> tuple[str, str]:
    """Return the file or module, and the class, of ``name``; loads nothing.

    Raises:
        ConfigError: the form is wrong, or the file does not exist.
    """
    place, colon, class_name = name.rpartition(":")
    if not colon or not place or not class_name.isidentifier():
        raise ConfigError(
            f"{flag} {shown(name)} does not name a class",
            hint=f"{flag} FILE.py:CLASS, or {flag} MODULE:CLASS for an installed module",
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(
            f"{flag} {shown(name)}: the file {shown(place)} does not exist",
            hint="check the path; with several hosts the file must be on each of them",
        )
    return place, class_name


def load_class(name: str, base: type[T], flag: str) -> type[T]:
    """Load the class that ``name`` names.

    Raises:
        ConfigError: the code cannot be loaded, or has no such class.
    """
    place, class_name = split_name(name, flag)
    try:
        module = _module_of(Path(place)) if place.endswith(".py") else import_module(place)
    except ConfigError:
        raise
    except Exception as problem:
        raise failure_of_code(f"{flag} {name} cannot be loaded", problem) from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)
        ]
        near = nearest(class_name, classes)
        package = "torch.optim" if base.__module__.startswith("torch.") else "yolofleet"
        raise ConfigError(
            f"{flag} {name}: {place} has no subclass {class_name} of {package}.{base.__name__}",
            hint=f"did you mean {near}?" if near else f"class {class_name}({package}.{base.__name__}): ...",
        )
    return found


def identity_of(name: str, flag: str) -> str:
    """Return the class of ``name`` and the SHA-256 of its source file, which identify the code in a checkpoint."""
    place, class_name = split_name(name, flag)
    spec = None if place.endswith(".py") else find_spec(place)
    file = Path(place) if spec is None or spec.origin is None else Path(spec.origin)
    sha256 = hashlib.sha256(read_foreign(file, limit_bytes=MAX_SOURCE_BYTES)).hexdigest()
    return f"{class_name} with SHA-256 {sha256}"


def source_files(file: str) -> list[str]:
    """Return a file of the user's code and the files of its folder that it imports. Read them, and execute nothing."""
    folder = Path(file).parent
    finder = _Neighbours(path=[str(folder)])
    with suppress(OSError, SyntaxError, ValueError):  # the processes of the run report the problem
        finder.run_script(file)
    found = [getattr(module, "__file__", None) for module in finder.modules.values()]
    return [file, *sorted({str(folder / relpath(name, folder)) for name in found if name} - {file})]


class _Neighbours(ModuleFinder):
    """Passes over folders without ``__init__.py``, for which Python's class fails with an exception of its own."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        try:
            return super().find_module(name, path, parent)
        except (AttributeError, TypeError):
            raise ImportError(name) from None


def failure_of_code(what: str, problem: BaseException) -> ConfigError:
    """Return the error for an exception in the user's code; its source is the innermost line outside of Python's
    own folders."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(problem.__traceback__)]
    if isinstance(problem, SyntaxError):
        lines.append((problem.filename or "", problem.lineno))
    lines = [(file, line) for file, line in lines if file.endswith(".py")]
    own = [(file, line) for file, line in lines if not file.startswith((sys.base_prefix, sys.prefix))]
    files = [f"{file}:{line}" for file, line in own or lines]
    return ConfigError(
        f"{what}: {type(problem).__name__}: {problem}",
        source=files[-1] if files else None,
        hint="correct the code; a run that has saved a checkpoint can be resumed",
    )


def _module_of(file: Path) -> ModuleType:
    """Load a file under its own name, as ``python FILE`` would find its neighbours.

    Its folder is appended to the import path, so its modules hide no installed one. Processes that are not forked
    (loader processes on macOS and Windows) find the module there by its name.

    Raises:
        ConfigError: another module has that name.
    """
    path, name = file.resolve(), file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    found = find_spec(name) if known is None else known.__spec__
    if known is not None or (found is not None and found.origin != str(path)):
        raise ConfigError(
            f"{file} has the name of another module, {name}",
            hint="rename the file, for example my_" + file.name,
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
