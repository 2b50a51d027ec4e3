"""`python segment/train.py ...` is `yolofleet train ...`, with results in runs/train-seg."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, which has a train.py, too

from train import main

if __name__ == "__main__":
    sys.exit(main(["train", "--project", "runs/train-seg", *sys.argv[1:]]))
