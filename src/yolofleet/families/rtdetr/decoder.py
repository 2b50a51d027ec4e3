"""The decoder of RT-DETRv2 (arXiv:2407.17140): select queries among the cells of all maps, and refine their boxes.

N images, L decoder layers, S cells of all maps, Q queries, D denoising queries, T = D + Q, C classes, W channels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rtdetr.attention import DeformableAttention
from yolofleet.families.rtdetr.blocks import ConvNorm, Mlp, SelfAttention, inverse_sigmoid, tokens_of, xavier
from yolofleet.families.rtdetr.description import DetrDescription
from yolofleet.families.rtdetr.raws import DetrRaws, RtdetrTrainingRaws, TrainingRaws
from yolofleet.support.devices import to_device

CLASS_PRIOR = 0.01  # initial probability of every class in every prediction (arXiv:1708.02002)
ANCHOR_SIDE = 0.05  # of the finest level, of the image's side; each coarser level has the double
BORDER = 0.01  # cells whose centre is nearer to the image's edge than this are no candidates
FAR = 1e4  # a logit whose sigmoid is 1, within the range of 16-bit numbers
LARGEST = 65504.0  # of 16-bit numbers
TIE = 0.01  # difference of scores (logits) that rounding may reverse
TIED = 3  # most cells of such scores on each side of the last query


class Context(NamedTuple):
    """What queries attend to."""

    memory: Tensor  # [N, S, W] cells of the levels, one after the other
    sizes_hw: list[tuple[int, int]]  # of each level
    # float32 [N, 1, T, T], 0 where a query sees another one, else -inf; None: all see all
    mask: Tensor | None


class DecoderLayer(nn.Module):
    """Self-attention of queries, deformable attention to the maps, feed-forward network.

    Args:
        gateway: joins a query [N, T, W] and what it has seen of the maps, without linear layers before and after the
            sampling; None: the sum is normalised.
    """

    def __init__(self, description: DetrDescription, gateway: nn.Module | None = None) -> None:
        super().__init__()
        width, feedforward = description.decoder_width, description.decoder_feedforward
        self.self_attn = SelfAttention(width)
        self.norm1 = nn.LayerNorm(width)
        self.cross_attn = DeformableAttention(width, description.points, projects=gateway is None)
        self.gateway = gateway
        if gateway is None:
            self.norm2 = nn.LayerNorm(width)
        self.activation = getattr(F, description.activation)
        self.linear1 = nn.Linear(width, feedforward)
        self.linear2 = nn.Linear(feedforward, width)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: Tensor, position: Tensor, boxes: Tensor, context: Context) -> Tensor:
        x = self.norm1(x + self.self_attn(x, position, context.mask))
        seen = self.cross_attn(x + position, boxes, context.memory, context.sizes_hw)
        x = self.norm2(x + seen) if self.gateway is None else self.gateway(x, seen)
        return self.fed(x)

    def fed(self, x: Tensor) -> Tensor:
        """Return the result of the feed-forward network."""
        x = x + self.linear2(self.activation(self.linear1(x)))
        y: Tensor = self.norm3(F.hardtanh(x, -LARGEST, LARGEST))  # in fp16 the sum may be infinite
        return y

    def initialise(self, generator: torch.Generator) -> None:
        self.cross_attn.initialise(generator)
        xavier([self.linear1.weight, self.linear2.weight], generator)


class QueryDecoder(nn.Module):
    """What the decoders of both families share. A subclass has ``refined``, which runs the layers.

    Attributes:
        box_values: outputs of each layer's box head.
        training_raws: the class of its results in training.
    """

    box_values = 4
    training_raws: Any = RtdetrTrainingRaws

    def __init__(self, description: DetrDescription, nc: int) -> None:
        super().__init__()
        width, every = description.decoder_width, range(description.layers)
        mlp = partial(Mlp, activation=description.activation)
        self.queries, self.used_layers = description.queries, description.used_layers
        self.is_folded = False
        self.input_proj = nn.ModuleList(self.project(description.width, width) for _ in description.points)
        self.decoder: Any = nn.Module()  # as in published files, the layers belong to a module of their own
        self.decoder.layers = nn.ModuleList(self.layer(description) for _ in every)
        self.denoising_class_embed = nn.Embedding(nc + 1, width, padding_idx=nc)
        self.query_pos_head = mlp(4, 2 * width, width)
        project, norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.enc_output: Any = nn.Sequential(OrderedDict(proj=project, norm=norm))
        self.enc_score_head = nn.Linear(width, nc)
        self.enc_bbox_head = mlp(width, width, width, 4)
        self.dec_score_head = nn.ModuleList(nn.Linear(width, nc) for _ in every)
        self.dec_bbox_head = nn.ModuleList(mlp(width, width, width, self.box_values) for _ in every)

    def layer(self, description: DetrDescription) -> DecoderLayer:
        return DecoderLayer(description)

    def project(self, in_channels: int, out: int) -> nn.Module:
        return ConvNorm(in_channels, out)

    def forward(
        self, maps: Sequence[Tensor], size_hw: Sequence[int], targets: Any, cells: Tensor | None = None
    ) -> tuple[DetrRaws | TrainingRaws, list[Tensor]]:
        """Return the raw predictions, and the queries [N, T, W] after each layer whose results they have.

        Args:
            maps: of the encoder, the finest first; maps before them are ignored.
            size_hw: of the images, pixels.
            targets: as of :class:`DetrNetwork`.
            cells: int64 [N, Q] that become queries; None: those with the highest scores.
        """
        memory, sizes_hw = self.memory_of(maps)
        content, places, logits = self.selected(*self.candidates(memory, sizes_hw), cells)
        boxes = places.sigmoid()
        x, start, mask = content.detach(), boxes.detach(), None
        if targets is not None and targets.noisy_boxes.shape[1]:
            noisy, noisy_boxes, mask = self.denoising(targets, x.shape[1], memory.device)
            x, start = torch.cat([noisy.to(x.dtype), x], 1), torch.cat([noisy_boxes, start], 1)
        is_full = not self.is_folded and (self.training or targets is not None)
        *results, states = self.refined(x, start, Context(memory, sizes_hw, mask), is_full=is_full)
        # [N, 1]; on the device, so that the host does not wait
        ones = torch.ones_like(results[0][-1][:, :1, 0])
        sides = torch.cat([ones * size_hw[1], ones * size_hw[0]] * 2, 1)
        if not is_full:
            return DetrRaws(results[0][-1], results[1][-1], sides), states
        raws = [torch.stack(of_layers, 1) for of_layers in results]
        split = [x.shape[1] - content.shape[1], content.shape[1]]
        noise, normal = zip(*(raw.split(split, 2) for raw in raws), strict=True)  # [N, L, D, .], [N, L, Q, .]
        last = DetrRaws(normal[0][:, -1], normal[1][:, -1], sides)
        layers = (*normal[:2], boxes, logits, *noise[:2], *normal[2:], *noise[2:])
        found: TrainingRaws = self.training_raws(*last, *layers)
        return found, states

    def memory_of(self, maps: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the cells [N, S, W] of all maps of the encoder, and the sizes of the maps."""
        levels = maps[-len(self.input_proj) :]
        maps = [project(x) for project, x in zip(self.input_proj, levels, strict=True)]
        return torch.cat([tokens_of(x) for x in maps], 1), [(x.shape[2], x.shape[3]) for x in maps]

    def candidates(
        self, memory: Tensor, sizes_hw: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the content [N, S, W], first box logits [1, S, 4] and class logits [N, S, C] of all cells."""
        anchors, valid = anchors_of(sizes_hw, memory.device)
        content = self.enc_output(memory * valid)
        return content, anchors, self.enc_score_head(content)

    def selected(
        self, content: Tensor, anchors: Tensor, logits: Tensor, cells: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the content [N, Q, W], box logits [N, Q, 4] and class logits [N, Q, C] of ``cells``, or of the best ones.

        An image with fewer than Q cells gives that many queries.
        """
        best = (self.best(logits) if cells is None else cells)[..., None]
        chosen = anchors.expand(content.shape[0], -1, -1)
        content, logits = (t.gather(1, best.expand(-1, -1, t.shape[2])) for t in (content, logits))
        return content, self.enc_bbox_head(content).float() + chosen.gather(1, best.expand(-1, -1, 4)), logits

    def best(self, logits: Tensor) -> Tensor:
        """Return the cells with the highest scores, int64 [..., Q], for class logits [..., S, C]."""
        scores = logits.detach().amax(-1)
        count: Any = min(self.queries, int(scores.shape[-1]))
        if torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export():  # a trace is for other sizes, too
            count = torch.minimum(torch.tensor(self.queries), torch.as_tensor(scores.shape[-1]))
        return scores.topk(count, -1).indices

    def tied(self, maps: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the choices of queries, int64 [1, Q], that rounding may cause for one image, beginning with the highest scores."""
        scores, order = (
            self.candidates(*self.memory_of(maps))[2].amax(2)[0].sort(descending=True, stable=True)
        )
        q = self.queries
        if len(order) > q:
            near = [
                i
                for i in range(max(q - TIED, 0), min(q + TIED, len(order)))
                if abs(scores[i] - scores[q - 1]) < TIE
            ]
            for chosen in combinations(near, sum(i < q for i in near)):
                yield torch.cat([order[: near[0]], order[list(chosen)]])[None]

    def denoising(self, targets: Any, queries: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the content [N, D, W] and boxes [N, D, 4] of labels with noise, and the mask of ``Context``.

        A denoising query sees its group and the normal queries, which see only each other. Nobody sees padding.
        """
        boxes, classes, groups = (
            to_device(torch.from_numpy(values), device)
            for values in (targets.noisy_boxes, targets.noisy_classes, targets.noise_group)
        )
        same = (groups[:, :, None] == groups[:, None]) & (groups >= 0)[:, None]  # [N, D, D]
        mask = F.pad(F.pad(same, (0, 0, 0, queries), value=False), (0, queries), value=True)
        content: Tensor = self.denoising_class_embed(classes)
        # each layer would make numbers of a mask of bools
        return content, inverse_sigmoid(boxes).sigmoid(), torch.where(mask[:, None], 0.0, -math.inf)

    def refined(self, x: Tensor, boxes: Tensor, context: Context, *, is_full: bool) -> list[list[Tensor]]:
        """Run the layers. Return boxes, class logits, other results of the family, and the queries; each a list of [N, T, .].

        Args:
            x, boxes: of the queries, [N, T, W] and float32 [N, T, 4]; no gradient reaches the encoder through them.
            is_full: the lists have the results of all layers. Else their last entry is that of the last layer that a
                prediction needs.
        """
        raise NotImplementedError

    def fold(self) -> None:
        """Drop what only the training needs."""
        if self.is_folded:
            return
        self.decoder.layers = self.decoder.layers[: self.used_layers]
        self.dec_bbox_head = self.dec_bbox_head[: self.used_layers]
        self.dec_score_head = last_of(self.dec_score_head, self.used_layers)
        del self.denoising_class_embed
        self.is_folded = True  # torch's ONNX exporter leaves networks in training mode

    def initialise(self, generator: torch.Generator) -> None:
        """Set the values that are not torch's default ones. At the start all boxes are the anchors' own."""
        for layer in self.decoder.layers:
            layer.initialise(generator)
        self.denoising_class_embed.weight.normal_(generator=generator)
        self.denoising_class_embed.weight[-1] = 0
        xavier((p for p in self.query_pos_head.parameters() if p.dim() == 2), generator)
        xavier([self.enc_output.get_parameter("proj.weight")], generator)
        for head in (self.enc_score_head, *self.dec_score_head):
            head.bias.fill_(math.log(CLASS_PRIOR / (1 - CLASS_PRIOR)))
        for head in (self.enc_bbox_head, *self.dec_bbox_head):
            head.start_at_zero()


class RtdetrDecoder(QueryDecoder):
    """Each layer corrects the boxes of the one before it."""

    def refined(self, x: Tensor, boxes: Tensor, context: Context, *, is_full: bool) -> list[list[Tensor]]:
        """See the base class. In training, the box of a layer also has a gradient through that of the layer before."""
        count = len(self.decoder.layers) if is_full else self.used_layers
        all_boxes, all_logits, states, before = [], [], [], boxes
        for i, layer in enumerate(self.decoder.layers[:count]):
            x = layer(x, self.query_pos_head(boxes.to(x.dtype)), boxes, context)
            change = self.dec_bbox_head[i](x).float()  # logits of boxes stay in float32
            after = (change + inverse_sigmoid(boxes)).sigmoid()
            if is_full or i == count - 1:
                all_boxes.append((change + inverse_sigmoid(before)).sigmoid() if is_full else after)
                all_logits.append(self.dec_score_head[i](x))
                states.append(x)
            before, boxes = after, after.detach()
        return [all_boxes, all_logits, states]

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        xavier([project.get_parameter("conv.weight") for project in self.input_proj], generator)


def last_of(heads: nn.ModuleList, count: int) -> nn.ModuleList:
    """Return the first ``count`` heads, all but the last one replaced by modules without parameters."""
    return nn.ModuleList([*(nn.Identity() for _ in range(count - 1)), heads[count - 1]])


def anchors_of(sizes_hw: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a first box of every cell and whether it is far enough from the image's edge.

    They follow the sizes of the maps, so any size will do.

    Returns:
        float32 [1, S, 4] logits of cx, cy, w, h, and bool [1, S, 1].
    """
    levels = [first_boxes(*size_hw, ANCHOR_SIDE * 2**i, device) for i, size_hw in enumerate(sizes_hw)]
    boxes, valid = (torch.cat(parts)[None] for parts in zip(*levels, strict=True))
    return (boxes / (1 - boxes)).log().where(valid, torch.full_like(boxes, FAR)), valid


def first_boxes(height: int, width: int, side: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a first box of every cell, float32 [H W, 4], and whether it is far enough from the image's edge, bool [H W, 1]."""
    y, x = ((torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n for n in (height, width))
    centres = torch.stack([x.expand(height, width), y[:, None].expand(height, width)], 2).flatten(0, 1)
    boxes = torch.cat([centres, torch.full_like(centres, side)], 1)
    return boxes, ((boxes > BORDER) & (boxes < 1 - BORDER)).all(1, keepdim=True)
