"""Small good files that tests of several folders read, as text."""

TINY_YAML = """\
nc: 4
depth_multiple: 0.33
width_multiple: 0.125
anchors:
  - [10,13, 16,30, 33,23]
  - [30,61, 62,45, 59,119]
backbone:
  - [-1, 1, Conv, [64, 6, 2, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, C3, [128]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, C3, [256]]
  - [-1, 1, Conv, [512, 3, 2]]
  - [-1, 1, SPPF, [512, 5]]
head:
  - [[4, 6], 1, Detect, [nc, anchors]]
"""
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
