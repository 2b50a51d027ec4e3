"""D-FINE's decoder (arXiv:2410.13842): each layer refines distributions over the distances to a box's edges.

N images, L decoder layers, T queries with those of the denoising, C classes, W channels, R + 1 = 33 bins of a distance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.dfine.description import DfineDescription
from yolofleet.families.rtdetr.blocks import ConvNorm, Mlp, inverse_sigmoid
from yolofleet.families.rtdetr.decoder import Context, DecoderLayer, QueryDecoder, last_of
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.raws import DfineTrainingRaws

BINS = 33
UP = 0.5  # an edge moves by at most this part of the box's side, except by the outermost bins
TOP_BINS, QUALITY_WIDTH = 4, 64  # of the estimate of a box's quality
LARGEST_POSITION = 10.0  # of a query's position code


class Gateway(nn.Module):
    """The sum of two vectors, each multiplied by its gates: they choose between a query and what it has seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * width, 2 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        first, second = self.gate(torch.cat([x, seen], 2)).sigmoid().chunk(2, 2)
        y: Tensor = self.norm(first * x + second * seen)
        return y


class Quality(nn.Module):
    """Adds to class logits an estimate of the box's quality from the peaks of its distributions (LQE)."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.reg_conf = Mlp(4 * (TOP_BINS + 1), QUALITY_WIDTH, 1, activation=activation)

    def forward(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Return [N, T, C]; ``probabilities``: float32 [N, T, 4, R + 1]."""
        top = probabilities.topk(TOP_BINS, 3).values
        peaks = torch.cat([top, top.mean(3, keepdim=True)], 3)
        n, queries, edges, count = peaks.shape
        quality: Tensor = self.reg_conf(peaks.reshape(n, queries, edges * count).to(logits.dtype))
        return logits + quality


class DfineDecoder(QueryDecoder):
    """The first layer's own box head places a box; all layers then add to the distributions of its edges' distances."""

    box_values = 4 * BINS
    training_raws = DfineTrainingRaws

    def __init__(self, description: DfineDescription, nc: int) -> None:
        super().__init__(description, nc)
        width, activation = description.decoder_width, description.activation
        self.decoder.lqe_layers = nn.ModuleList(Quality(activation) for _ in self.decoder.layers)
        self.pre_bbox_head = Mlp(width, width, width, 4, activation=activation)
        # numbers that published files hold as parameters; they are not trained
        self.up = nn.Parameter(torch.empty(1), requires_grad=False)
        self.reg_scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.initial_scale = description.reg_scale

    def layer(self, description: DetrDescription) -> DecoderLayer:
        return DecoderLayer(description, Gateway(description.decoder_width))

    def project(self, in_channels: int, out: int) -> nn.Module:
        return nn.Identity() if in_channels == out else ConvNorm(in_channels, out)

    def refined(self, x: Tensor, boxes: Tensor, context: Context, *, is_full: bool) -> list[list[Tensor]]:
        """See the base class. Boxes and class logits begin with those of ``pre_bbox_head``, so they are L + 1.

        The family's own are the distributions' logits [N, T, 4 (R + 1)] and the boxes that distances start from [N, T, 4].
        """
        count = len(self.decoder.layers) if is_full else self.used_layers
        scale = self.reg_scale.float().abs()
        bins = bin_values(self.up.float().abs(), scale)
        all_boxes, all_logits, all_corners, states = [], [], [], []
        before, corners, start = x.new_zeros(()), bins.new_zeros(()), boxes
        for i, layer in enumerate(self.decoder.layers[:count]):
            position = F.hardtanh(self.query_pos_head(boxes.to(x.dtype)), -LARGEST_POSITION, LARGEST_POSITION)
            x = layer(x, position, boxes, context)
            if i == 0:
                first = (self.pre_bbox_head(x).float() + inverse_sigmoid(boxes)).sigmoid()
                start = first.detach()
                if is_full:
                    all_boxes.append(first)
                    all_logits.append(self.dec_score_head[0](x))
            # float32 from here on: sums over bins and layers
            corners = self.dec_bbox_head[i](x + before).float() + corners
            probabilities = corners.reshape(*corners.shape[:2], 4, BINS).softmax(3)
            refined = moved(start, (probabilities * bins).sum(3), scale)
            if is_full or i == count - 1:
                all_boxes.append(refined)
                all_logits.append(self.decoder.lqe_layers[i](self.dec_score_head[i](x), probabilities))
                all_corners.append(corners)
                states.append(x)
            boxes, before = refined.detach(), x.detach()
        return [all_boxes, all_logits, all_corners, [start] * count, states]

    def fold(self) -> None:
        super().fold()
        self.decoder.lqe_layers = last_of(self.decoder.lqe_layers, self.used_layers)

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        self.pre_bbox_head.start_at_zero()
        for layer, quality in zip(self.decoder.layers, self.decoder.lqe_layers, strict=True):
            layer.gateway.gate.weight.zero_()
            layer.gateway.gate.bias.zero_()
            quality.reg_conf.start_at_zero()
        self.up.fill_(UP)
        self.reg_scale.fill_(self.initial_scale)


def bin_values(up: Tensor, scale: Tensor) -> Tensor:
    """Return the distances that the bins stand for, W(n) of the paper, float32 [R + 1].

    They grow exponentially from the middle bin, which is 0, to ``up scale`` on both sides; the outermost ones are twice that.

    Args:
        up, scale: float32 [1], positive.
    """
    most = up * scale
    exponents = torch.arange(1, BINS // 2, device=up.device, dtype=torch.float32)
    positive = (most + 1) ** (exponents * (2 / (BINS - 3))) - 1
    return torch.cat([-2 * most, -positive.flip(0), torch.zeros_like(most), positive, 2 * most])


def moved(boxes: Tensor, distances: Tensor, scale: Tensor) -> Tensor:
    """Return boxes whose edges are moved, cx, cy, w, h.

    Args:
        boxes: [..., 4] cx, cy, w, h.
        distances: [..., 4] left, top, right, bottom, outwards, in units of the box's side / ``scale``.
    """
    centres, sides = boxes.split(2, -1)
    left_top, right_bottom = ((distances / scale + 0.5) * torch.cat([sides, sides], -1)).split(2, -1)
    return torch.cat([centres + (right_bottom - left_top) / 2, left_top + right_bottom], -1)
