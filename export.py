"""`python export.py ...` is `yolofleet export ...`."""

import sys

from train import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
