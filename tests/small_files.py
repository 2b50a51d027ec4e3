"""Small good files that tests of several folders read, as text."""

from __future__ import annotations

from pathlib import Path

# a network of 0.1 million parameters, which trains in a fifth of the time of yolov5n
TINY = Path(__file__).with_name("tiny.yaml")
TINY_YAML = TINY.read_text(encoding="utf-8")
TWO_LEVELS_CFG = """\
# a network of two levels
[network]
batch=64
width = 64
height=32
channels=3
learning_rate=0.001 ; of Darknet's training
[convolutional]
batch_normalize=1
filters=8
size=3
stride=2
pad=1
activation=leaky
[conv]
batch_normalize=1
filters=8
size=3
stride=1
padding=1
groups=2
activation=mish
[shortcut]
from=-2
activation=relu
[max]
size=2
stride=2
[route]
layers=-1,
groups=2
group_id=1
[convolutional]
filters=16
size=1
stride=1
activation=linear
[yolo]
mask = 1, 2
anchors = 4,5,  8.5,9,  20,10
classes=3
num=3
jitter=.3
scale_x_y=1.1
[route]
layers=-4
[upsample]
stride=2
[dropout]
probability=.5
[route]
layers=-1, 2
[convolutional]
filters=16
size=1
stride=1
pad=1
activation=linear
[yolo]
mask=0,1
anchors=4,5,8.5,9,20,10
classes=3
num=3
ignore_thresh=.7
"""
FLEET_FILE = """\
port: 29600
silence_s: 30
defaults:
  python: /opt/yf/bin/python
  env: {NCCL_DEBUG: WARN, A: 1}
  gpus: 2
hosts:
  - node-a
  - b:0+2
  - host: c
    device: cpu:4
    interface: ib0
    folder: ~/work
    data: /fast/coco.yaml
    env: {A: off}
"""
