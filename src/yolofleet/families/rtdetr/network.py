"""RT-DETRv2 networks (arXiv:2304.08069, arXiv:2407.17140): ResNet-vd, hybrid encoder, decoder with denoising queries.

N images, Q queries, C classes.
tests/parity/test_detr_parity.py compares outputs, parameter counts and names with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.data.geometry.boxes import Decoded, DecodedMasks
from yolofleet.families.networks.detector import Detector
from yolofleet.families.rtdetr.backbone import ResNet
from yolofleet.families.rtdetr.blocks import SelfAttention
from yolofleet.families.rtdetr.decoder import RtdetrDecoder
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.encoder import HybridEncoder
from yolofleet.families.rtdetr.masks import MaskHead, decoded
from yolofleet.families.rtdetr.raws import DetrRaws, MaskRaws, MaskTrainingRaws, TrainingRaws


class DetrNetwork(Detector):
    """Backbone, encoder, decoder, and the head of masks if there is one."""

    description: DetrDescription
    pads_to_square, needs_nms, reads_targets, trained_px = True, False, True, 640
    classes_first: tuple[str, ...] = ("decoder.denoising_class_embed.weight",)
    parts: tuple[Any, Any, Any]  # classes of backbone, encoder and decoder
    backbone_groups = 5  # the stem and four stages

    def __init__(self, description: DetrDescription, nc: int) -> None:
        super().__init__(description, nc)
        backbone, encoder, decoder = self.parts
        self.strides, self.queries = (8, 16, 32)[-len(description.points) :], description.queries
        self.backbone = backbone(description)
        self.encoder = encoder(self.backbone.out_channels, description)
        self.decoder = decoder(description, nc)
        self.masks: MaskHead | None = None
        if description.mask_width:
            self.task = "masks"
            self.masks = MaskHead(self._finest_channels(), description)

    def _finest_channels(self) -> int:
        """Return the channels of the map of stride 8: the encoder's, or the backbone's if the encoder has none."""
        d: Any = self.description
        return int(d.width if len(self.strides) == 3 else d.outer_widths[1])

    @property
    def image_part(self) -> nn.Module:  # type: ignore[override]
        """The module from images to the encoder's maps [N, C, H / s, W / s] of all strides s.

        For masks, a map of the backbone of stride 8 precedes them if the encoder has none.
        """
        return nn.Sequential(self.backbone, self.encoder)

    def forward(  # type: ignore[override]  # it returns a named tuple
        self,
        images: Tensor,
        targets: Any = None,
        features: Sequence[Tensor] | None = None,
        cells: Tensor | None = None,
    ) -> DetrRaws | TrainingRaws | MaskRaws | MaskTrainingRaws:
        """Return the predictions of the last layer; in training, or with targets, those that the loss reads.

        Args:
            images: [N, 3, H, W] RGB in 0..1, H and W multiples of 32.
            targets: what the loss's ``match`` returned, with the denoising queries; None outside of a training step.
            features: what ``image_part`` returned; None: backbone and encoder run here.
            cells: int64 [N, Q] that become queries; None: those with the highest scores.
        """
        maps = self.encoder(self.backbone(images)) if features is None else features
        raws: DetrRaws | TrainingRaws
        raws, states = self.decoder(maps, images.shape[2:], targets, cells)
        return raws if self.masks is None else self.masks(maps[0], states, raws)

    def decode(self, raws: DetrRaws | TrainingRaws | MaskRaws) -> Decoded | DecodedMasks:  # type: ignore[override]
        """Return the predictions of the queries, float32."""
        boxes, scores = raws.boxes.float() * raws.sides[:, None], raws.logits.float().sigmoid()
        found = Decoded.of(boxes, scores)
        return DecodedMasks(found.rows, *decoded(raws)) if isinstance(raws, MaskRaws) else found

    def choices(self, image: Tensor) -> Iterator[Decoded | DecodedMasks]:
        maps = self.image_part(image)
        return (self.decode(self(image, None, maps, cells)) for cells in self.decoder.tied(maps))

    def freeze_groups(self) -> list[str]:
        (stem, _), (stages, blocks) = self.backbone.named_children()
        groups = (stem, *(f"{stages}.{name}" for name, _ in blocks.named_children()))
        masks = [] if self.masks is None else ["masks."]
        return [*(f"backbone.{group}." for group in groups), "encoder.", "decoder.", *masks]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all parameters and buffers.

        Convolutions of the backbone are normal with variance 2 / fan-in (arXiv:1502.01852), because a frozen norm corrects
        nothing. Each class has probability 0.01 in every prediction, and boxes are those of the anchors.
        """
        self.draw_weights(generator)
        for module in self.modules():
            if isinstance(module, SelfAttention):  # after the loop above, which draws the bias too
                module.out_proj.bias.zero_()
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.normal_(0, math.sqrt(2 / module.weight[0].numel()), generator=generator)
        self.decoder.initialise(generator)


class RtdetrNetwork(DetrNetwork):
    """RT-DETRv2."""

    parts = ResNet, HybridEncoder, RtdetrDecoder
