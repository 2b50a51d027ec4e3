"""`python train_multi_GPU.py ...`, as guides of YOLOv3-SPP have it, is `train.py` with that network."""

import sys

from train import main

NETWORKS = ("--cfg", "--model", "--weights", "--resume")

if __name__ == "__main__":
    chosen = any(word.startswith(NETWORKS) for word in sys.argv[1:])
    sys.exit(main(["train", *([] if chosen else ["--model=yolov3-spp"]), *sys.argv[1:]]))
