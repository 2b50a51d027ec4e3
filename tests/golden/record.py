"""The record of what users and their programs rely on, and of which a change must be on purpose.

    python tests/golden/record.py             # show how this version differs from the record; exit code 1 if it does
    python tests/golden/record.py --write     # accept the differences; commit them with the change that causes them
    python tests/golden/record.py --write errors.json figures.txt   # only these
    python tests/golden/record.py --slow      # the selftest's figures, too: four minutes on two cores

An edit of messages changes nothing but lines ``"first_line"`` of errors.json. The stored run (``run``) stays as an
older version wrote it, so that ``--write`` never touches it; ``--new-run`` replaces it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # pytest has it from tests/conftest.py

import golden_errors
import golden_files
import golden_options
import golden_run

HERE = Path(__file__).resolve().parent
# file -> makes its text, in an empty folder that is its argument
PARTS: dict[str, Callable[[Path], str]] = {
    "options.txt": golden_options.options_text,
    "spellings.txt": golden_options.spellings_text,
    "names.txt": golden_options.names_text,
    "errors.json": golden_errors.errors_text,
    "networks.txt": golden_files.networks_text,
    "folders.txt": golden_files.folders_text,
    "figures.txt": golden_files.figures_text,
    "export_torchscript.txt": golden_files.torchscript_text,
    "export_onnx.txt": golden_files.onnx_text,
    "resumed.json": golden_run.resumed_text,
    "selftest.txt": golden_files.selftest_text,
}
SLOW = ("selftest.txt",)
NEEDS = {"export_onnx.txt": ("onnx", "onnxruntime")}  # packages that yolofleet itself does not need


def stored(name: str) -> str:
    path = HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def made(name: str) -> str:
    """Return the text that this version gives."""
    with TemporaryDirectory() as folder:
        return PARTS[name](Path(folder).resolve())


def difference(name: str, now: str) -> str:
    """Return the difference from the record as ``diff -u`` shows it, '' for none."""
    lines = [text.splitlines(keepends=True) for text in (stored(name), now)]
    return "".join(difflib.unified_diff(*lines, f"recorded {name}", f"now {name}"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="FILE", help=", ".join(PARTS))
    parser.add_argument("--write", action="store_true", help="accept the differences")
    parser.add_argument("--slow", action="store_true", help=f"also {', '.join(SLOW)}")
    parser.add_argument("--new-run", action="store_true", help="first train the stored run anew")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"not in the record: {' '.join(unknown)}")
    if options.new_run:
        with TemporaryDirectory() as folder:
            golden_run.write_run(Path(folder).resolve())
    differs = False
    for name in options.parts or [name for name in PARTS if options.slow or name not in SLOW]:
        if missing := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
            print(f"{name} is left out: {' and '.join(missing)} are not installed")
            continue
        now = made(name)
        changes = difference(name, now)
        differs |= bool(changes)
        sys.stdout.write(changes)
        if options.write and changes:
            (HERE / name).write_text(now, encoding="utf-8", newline="\n")
    return int(differs and not options.write)


if __name__ == "__main__":
    sys.exit(main())
