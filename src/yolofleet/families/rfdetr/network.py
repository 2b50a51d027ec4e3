"""RF-DETR networks (arXiv:2511.09554): DINOv2 with windows, one map, and a decoder whose queries have groups in training.

No norm uses statistics of several images, so the gradient of a step does not depend on the micro-batch except by rounding.
tests/parity/test_rfdetr_parity.py compares outputs, parameter counts and names with transformers.
"""

from __future__ import annotations

from typing import Any

import torch

from yolofleet.families.networks.detector import Detector
from yolofleet.families.rfdetr.backbone import Dinov2, Projector
from yolofleet.families.rfdetr.decoder import RfdetrDecoder, RfdetrMaskHead
from yolofleet.families.rfdetr.description import RfdetrDescription
from yolofleet.families.rtdetr.blocks import SelfAttention
from yolofleet.families.rtdetr.network import DetrNetwork


class RfdetrNetwork(DetrNetwork):
    """RF-DETR."""

    description: Any
    classes_first = ()

    def __init__(self, description: RfdetrDescription, nc: int) -> None:
        Detector.__init__(self, description, nc)
        self.strides, self.queries, self.trained_px = (
            (description.stride,),
            description.queries,
            description.px,
        )
        self.backbone_groups = 2 + description.blocks
        self.backbone = Dinov2(description)
        self.encoder = Projector(self.backbone.out_channels, description)
        self.decoder = RfdetrDecoder(description, nc)
        self.masks = None
        if description.mask_width:
            self.task = "masks"
            self.masks = RfdetrMaskHead(description)

    def freeze_groups(self) -> list[str]:
        layers = [f"backbone.layers.{i}." for i in range(len(self.backbone.layers))]
        parts = ["encoder.", "decoder.", *([] if self.masks is None else ["masks."])]
        return ["backbone.embeddings.", *layers, "backbone.norm.", *parts]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all parameters. Each class has probability 0.01 in every prediction."""
        self.draw_weights(generator)
        for module in self.modules():
            if isinstance(module, SelfAttention):  # after the loop above, which draws the bias too
                module.out_proj.bias.zero_()
        self.decoder.initialise(generator)
