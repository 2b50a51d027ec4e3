"""RF-DETR's decoder (arXiv:2511.09554, arXiv:2406.03459): queries in groups (arXiv:2207.13085), boxes relative to first ones.

N images, S cells of the map, G groups (1 in a prediction), Q queries of a group, L layers, C classes, W channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rfdetr.backbone import linear, resized
from yolofleet.families.rfdetr.description import MASK_STRIDE, SAMPLING_HEADS, RfdetrDescription
from yolofleet.families.rtdetr.attention import DeformableAttention
from yolofleet.families.rtdetr.blocks import Mlp, tokens_of
from yolofleet.families.rtdetr.decoder import (
    ANCHOR_SIDE,
    CLASS_PRIOR,
    DecoderLayer,
    QueryDecoder,
    first_boxes,
)
from yolofleet.families.rtdetr.masks import MaskHead
from yolofleet.families.rtdetr.raws import (
    DetrRaws,
    MaskRaws,
    MaskTrainingRaws,
    RtdetrTrainingRaws,
    TrainingRaws,
)

ROUNDING = 1e-4  # difference of scores (logits) that other runtimes may reverse
SWAPS = 6  # most neighbours that a verification lets change places


class GroupLayer(DecoderLayer):
    """A decoder layer whose queries see those of their own group."""

    def __init__(self, description: Any) -> None:
        super().__init__(description)
        width, points = description.decoder_width, description.points
        self.cross_attn = DeformableAttention(width, points, projects=True, heads=SAMPLING_HEADS)

    def forward(self, x: Tensor, position: Tensor, boxes: Tensor, context: Any) -> Tensor:
        """Return [N, G, Q, W].

        Args:
            x, position: [N, G, Q, W].
            boxes: [N, G, Q, 4].
            context: memory [N, S, W], and the size of the map.
        """
        memory, size_hw = context
        seen = self.self_attn(x.flatten(0, 1), position.flatten(0, 1)).view_as(x)
        x = self.norm1(x + seen)
        seen = self.cross_attn((x + position).flatten(1, 2), boxes.flatten(1, 2), memory, [size_hw]).view_as(
            x
        )
        return self.fed(self.norm2(x + seen))


class RfdetrDecoder(QueryDecoder):
    """Select the best cells for each group, and refine their boxes. All layers start from the same boxes and share the heads."""

    def __init__(self, description: RfdetrDescription, nc: int) -> None:
        nn.Module.__init__(self)
        d, width = description, description.decoder_width
        self.queries, self.groups, self.used_layers, self.is_folded = d.queries, d.groups, d.layers, False
        every = range(d.groups)
        self.refpoint_embed = nn.Embedding(d.groups * d.queries, 4)
        self.query_feat = nn.Embedding(d.groups * d.queries, width)
        self.layers: Any = nn.ModuleList(GroupLayer(d) for _ in range(d.layers))
        self.norm = nn.LayerNorm(width)
        self.ref_point_head = Mlp(2 * width, width, width, activation="relu")
        self.enc_output = nn.ModuleList(nn.Linear(width, width) for _ in every)
        self.enc_output_norm = nn.ModuleList(nn.LayerNorm(width) for _ in every)
        self.enc_out_class_embed: Any = nn.ModuleList(nn.Linear(width, nc) for _ in every)
        self.enc_out_bbox_embed: Any = nn.ModuleList(
            Mlp(width, width, width, 4, activation="relu") for _ in every
        )
        self.class_embed = nn.Linear(width, nc)
        self.bbox_embed = Mlp(width, width, width, 4, activation="relu")

    def forward(
        self, maps: Sequence[Tensor], size_hw: Sequence[int], targets: Any, cells: Tensor | None = None
    ) -> tuple[DetrRaws | TrainingRaws, list[Tensor]]:
        """Return the raw predictions, and the queries [N, G Q, W] of the encoder and after each layer; see ``QueryDecoder``.

        Args:
            targets: whether there are any decides what is returned; nothing here reads them.
        """
        memory, sizes_hw = self.memory_of(maps)
        is_full = not self.is_folded and (self.training or targets is not None)
        groups = self.groups if self.training and is_full else 1
        content, first, logits = self.chosen(memory, sizes_hw[0], groups, cells)
        n, _, count, width = content.shape
        learned = [
            table.weight.view(-1, self.queries, table.weight.shape[1])[:groups, :count]
            for table in (self.refpoint_embed, self.query_feat)
        ]
        boxes = refined(first.detach(), learned[0].float())  # [N, G, Q, 4]
        position = self.ref_point_head(sine_of(boxes, width // 2).to(content.dtype))
        x = learned[1].expand(n, -1, -1, -1).to(content.dtype)
        states = []
        for layer in self.layers:
            x = layer(x, position, boxes, (memory, sizes_hw[0]))
            states.append(self.norm(x).flatten(1, 2))
        ones = torch.ones_like(boxes[:, 0, :1, 0])  # [N, 1]; on the device, so that the host does not wait
        sides = torch.cat([ones * size_hw[1], ones * size_hw[0]] * 2, 1)
        kept = torch.stack(states if is_full else states[-1:], 1)  # [N, L, G Q, W]
        all_logits = self.class_embed(kept)
        all_boxes = refined(boxes.flatten(1, 2)[:, None], self.bbox_embed(kept).float())
        last = DetrRaws(all_boxes[:, -1, :count], all_logits[:, -1, :count], sides)
        if not is_full:
            return last, states
        noise = all_boxes[:, :, :0], all_logits[:, :, :0]
        layers = all_boxes, all_logits, first.flatten(1, 2), logits.flatten(1, 2), *noise
        return RtdetrTrainingRaws(*last, *layers), [content.flatten(1, 2), *states]

    def memory_of(self, maps: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        return tokens_of(maps[0]), [(maps[0].shape[2], maps[0].shape[3])]

    def candidates(
        self, memory: Tensor, sizes_hw: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the content [N, S, W], first boxes [S, 4] and class logits [N, S, C] of all cells, for the first group."""
        content, boxes, logits = self._of_groups(memory, sizes_hw[0], 1)
        return content[0], boxes, logits[0]

    def _of_groups(
        self, memory: Tensor, size_hw: tuple[int, int], groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return content [G, N, S, W], first boxes [S, 4] and class logits [G, N, S, C]; cells at the edge have the lowest."""
        boxes, valid = first_boxes(*size_hw, ANCHOR_SIDE, memory.device)
        n, cells, width = (
            memory.shape[0],
            memory.shape[1],
            self.query_feat.embedding_dim,
        )  # in a trace a constant
        x = (memory * valid).reshape(1, n * cells, width).expand(groups, -1, -1)
        x = F.layer_norm(grouped(x, self.enc_output), (width,))
        norms: Any = self.enc_output_norm[:groups]
        x = x * torch.stack([norm.weight for norm in norms])[:, None]
        x = x + torch.stack([norm.bias for norm in norms])[:, None]
        logits = grouped(x, self.enc_out_class_embed).view(groups, n, cells, -1)
        return (
            x.view(groups, n, cells, width),
            boxes,
            logits.masked_fill(~valid, torch.finfo(logits.dtype).min),
        )

    def chosen(
        self, memory: Tensor, size_hw: tuple[int, int], groups: int, cells: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the content [N, G, Q, W], boxes [N, G, Q, 4] and class logits [N, G, Q, C] of ``cells``, or of the best ones.

        An image with fewer than Q cells gives that many queries.
        """
        content, boxes, logits = self._of_groups(memory, size_hw, groups)
        best = self.best(logits) if cells is None else cells[None]  # [G, N, Q]
        content = content.gather(2, best[..., None].expand(-1, -1, -1, content.shape[3]))
        change = x = content.flatten(1, 2)
        for i in range(3):
            x = grouped(change, [head.layers[i] for head in self.enc_out_bbox_embed])
            change = F.relu(x)
        change = x.view(*best.shape, 4).float()
        logits = grouped(content.flatten(1, 2), self.enc_out_class_embed).view(*best.shape, -1)
        of_group = content, refined(boxes[best], change), logits
        content, boxes, logits = (part.transpose(0, 1).contiguous() for part in of_group)
        return content, boxes, logits

    def tied(self, maps: Sequence[Tensor]) -> Iterator[Tensor]:
        """See :meth:`QueryDecoder.tied`. A cell's place decides its learned query, so cells may also change places."""
        memory, (size_hw,) = self.memory_of(maps)
        scores, order = self.candidates(memory, [size_hw])[2].amax(2)[0].sort(descending=True, stable=True)
        gaps = (scores[:-1] - scores[1:])[: self.queries]
        near = [i for i in gaps.argsort()[:SWAPS].tolist() if gaps[i] < ROUNDING]
        for count in range(1, len(near) + 1):
            for swapped in combinations(near, count):
                cells = order.tolist()
                for i in sorted(swapped):
                    cells[i], cells[i + 1] = cells[i + 1], cells[i]
                yield torch.tensor(cells[: self.queries], device=order.device)[None]

    def fold(self) -> None:
        """Drop the groups that only the training needs."""
        if self.is_folded:
            return
        for name in ("enc_output", "enc_output_norm", "enc_out_class_embed", "enc_out_bbox_embed"):
            setattr(self, name, getattr(self, name)[:1])
        for table in (self.refpoint_embed, self.query_feat):
            table.weight = nn.Parameter(table.weight[: self.queries].clone())
        self.is_folded = True  # torch's ONNX exporter leaves networks in training mode

    def initialise(self, generator: torch.Generator) -> None:
        """Set the values that are not torch's default ones. At the start all boxes are those of the chosen cells."""
        for layer in self.layers:
            layer.initialise(generator)
        self.refpoint_embed.weight.zero_()
        self.query_feat.weight.normal_(generator=generator)
        for head in (self.class_embed, *self.enc_out_class_embed):
            head.bias.fill_(math.log(CLASS_PRIOR / (1 - CLASS_PRIOR)))
        for head in (self.bbox_embed, *self.enc_out_bbox_embed):
            head.start_at_zero()


class RfdetrMaskHead(MaskHead):
    """The head of masks on the decoder's own map: that map, and the result of a block for each layer of the decoder."""

    def __init__(self, description: Any) -> None:
        super().__init__(description.decoder_width, description)
        del self.project, self.enlarge  # the map has the right channels, and other sides
        self.times = description.patch // MASK_STRIDE

    def forward(
        self, x: Tensor, states: Sequence[Tensor], raws: DetrRaws | TrainingRaws
    ) -> MaskRaws | MaskTrainingRaws:
        """Return the raw predictions with masks.

        Args:
            x: map [N, W, h, w].
            states: queries [N, G Q, W] of the encoder and after each layer; in a prediction only those of layers.
            raws: of the boxes.
        """
        height, width = x.shape[2] * self.times, x.shape[3] * self.times
        maps = [resized(x.permute(0, 2, 3, 1), height, width, linear).permute(0, 3, 1, 2)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        if isinstance(raws, DetrRaws):
            return MaskRaws(*raws, self.coefficients(states[-1]), maps[-1])
        found = torch.stack([self.coefficients(state) for state in states], 1)
        return MaskTrainingRaws(raws, found, tuple(maps))


def grouped(x: Tensor, heads: Any) -> Tensor:
    """Return the results [G, T, O] of linear layers for x [G, T, W], each for the tokens of its group, in one product."""
    heads = list(heads)[: x.shape[0]]
    bias = torch.stack([head.bias for head in heads])[:, None]
    # a stack's gradient would be copied for each layer, because the product has it transposed
    weight = torch.cat([head.weight for head in heads]).view(len(heads), -1, heads[0].in_features)
    return torch.baddbmm(bias, x, weight.transpose(1, 2))


def refined(boxes: Tensor, change: Tensor) -> Tensor:
    """Return boxes whose centres are moved by shares of their sides, and whose sides grow exponentially; [..., 4] cx, cy, w, h."""
    centres, sides = boxes.split(2, -1)
    return torch.cat([centres + change[..., :2] * sides, change[..., 2:].exp() * sides], -1)


def sine_of(boxes: Tensor, channels: int) -> Tensor:
    """Return sines and cosines of cy, cx, w and h, float32 [..., 4 ``channels``]; those of one frequency are neighbours."""
    steps = torch.arange(channels // 2, device=boxes.device, dtype=torch.float32) * (2 / channels)
    cx, cy, w, h = (boxes * (2 * math.pi)).unsqueeze(-1).unbind(-2)
    angles = torch.stack([cy, cx, w, h], -2) / 10000.0**steps
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-3)
