"""`python detect.py ...` is `yolofleet predict ...`, with results in runs/detect."""

import sys

from train import main

if __name__ == "__main__":
    sys.exit(main(["predict", "--project", "runs/detect", *sys.argv[1:]]))
