"""`python segment/val.py ...` is `yolofleet val ...`, with results in runs/val-seg."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, which has a train.py, too

from train import main

if __name__ == "__main__":
    sys.exit(main(["val", "--project", "runs/val-seg", *sys.argv[1:]]))
