"""`python val.py ...` is `yolofleet val ...`; also under torchrun: every process validates its share."""

import sys

from train import main

if __name__ == "__main__":
    sys.exit(main(["val", *sys.argv[1:]]))
