"""Your own model: yolofleet train ... --recipe-class examples/my_model.py:TinyModel"""

import torch
from torch import nn

from yolofleet import TrainingRecipe
from yolofleet.data.geometry.boxes import SquaredSigmoid
from yolofleet.families.custom import CustomDescription
from yolofleet.families.networks.blocks import Conv
from yolofleet.families.networks.detector import AnchorDetector


class TinyNetwork(AnchorDetector):
    strides, codings, backbone_groups = (8, 16), (SquaredSigmoid(),) * 2, 2
    anchors_px = torch.tensor([[[10.0, 13.0], [30.0, 30.0]], [[40.0, 60.0], [90.0, 90.0]]])  # [L, A, 2]

    def __init__(self, nc):
        super().__init__(CustomDescription("TinyModel"), nc)
        self.fine = nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 32, 3, 2), Conv(32, 64, 3, 2))
        self.coarse = Conv(64, 128, 3, 2)
        self.heads = nn.ModuleList(nn.Conv2d(width, 2 * (5 + nc), 1) for width in (64, 128))

    def forward(self, images):
        fine = self.fine(images)
        raws = [head(x) for head, x in zip(self.heads, (fine, self.coarse(fine)), strict=True)]
        return [raw.unflatten(1, (2, -1)).permute(0, 1, 3, 4, 2) for raw in raws]  # [N, A, H, W, 5 + C]

    @torch.no_grad()
    def initialise(self, generator):
        self.draw_weights(generator)
        self.set_priors(self.heads)

    def freeze_groups(self):
        return ["fine.", "coarse.", "heads."]


class TinyModel(TrainingRecipe):
    def network(self, nc):
        return TinyNetwork(nc)
