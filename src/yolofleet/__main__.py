"""Run ``yolofleet`` as ``python -m yolofleet``."""

import sys

from yolofleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
