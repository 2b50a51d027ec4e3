"""`python export.py ...` is `yolofleet export ...`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if (
    find_spec("yolofleet") is None
):  # a checkout that is not installed; processes started from here need it too
    SOURCE = str(Path(__file__).resolve().parent / "src")
    sys.path.insert(0, SOURCE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

from yolofleet.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
