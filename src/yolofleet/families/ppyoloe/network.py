"""PP-YOLOE networks (arXiv:2203.16250): CSPRepResNet, CSP-PAN neck, ET-head with distributions over distances.

N images, C classes (in blocks: channels), R = 17 bins of a distance, levels of stride s = 32, 16, 8 (coarse first, as in
published files), K = sum over levels of (H/s) (W/s) cells.
Published checkpoints fix the names of attributes (``conv2.conv1.bn.weight``). tests/parity/test_ppyoloe_model.py compares
outputs, parameter counts and names with PaddleDetection.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.data.geometry.boxes import Decoded
from yolofleet.families.networks import blocks
from yolofleet.families.networks.blocks import Upsample, results
from yolofleet.families.networks.detector import Detector
from yolofleet.families.ppyoloe.description import PpyoloeDescription

REG_BINS = 17  # a distance is 0..16 cells (arXiv:2006.04388)
STRIDES = (32, 16, 8)
BACKBONE_CHANNELS, BACKBONE_REPEATS = (64, 128, 256, 512, 1024), (3, 6, 6, 3)  # of the l model; stem first
NECK_CHANNELS, NECK_REPEATS = (768, 384, 192), 3
CLASS_PRIOR = 0.01  # initial probability of every class in every cell (arXiv:1708.02002)
BN_EPS = 1e-5
BN_MOMENTUM = 0.1  # share of the new value; Paddle's 0.9 is the share of the old one


class PpyoloeNetwork(Detector):
    """A PP-YOLOE network. Its raw predictions are six maps, two for each level 32, 16, 8:

        [N, H/s, W/s, C]  class logits
        [N, H/s, W/s, 4 R]  logits of the distances to the left, top, right and bottom, R bins each

    Both are permuted views of a convolution's output; in channels-last memory ``flatten(1, 2)`` copies nothing. Cells of
    a level are in the order y, x; their centres are ``cell + 0.5``, see :func:`centres_cells`.
    """

    description: PpyoloeDescription

    def __init__(self, description: PpyoloeDescription, nc: int) -> None:
        super().__init__(description, nc)
        self.strides = STRIDES
        self.backbone = Backbone(description)
        self.neck = Neck(self.backbone.out_channels, description)
        self.yolo_head = Head(self.neck.out_channels, nc)
        self.backbone_groups = 1 + len(self.backbone.stages)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the six maps described at the class.

        Args:
            images: [N, 3, H, W] RGB in 0..1, H and W multiples of 32.
        """
        normalise = self.description.normalise
        if normalise is not None:
            # made on the device, because a copy from the host would wait for the device
            mean, std = (
                torch.stack([images.new_full((1, 1), v) for v in values])
                for values in (normalise.mean, normalise.std)
            )
            images = (images - mean) / std
        raws: list[Tensor] = self.yolo_head(self.neck(self.backbone(images)))
        return raws

    def decode(self, raws: Sequence[Tensor]) -> Decoded:
        """Convert raw predictions to boxes and probabilities, in float32; rows by level, y, x.

        A distance is the mean of its distribution.
        """
        decoded = []
        for logits, bins, stride in zip(raws[::2], raws[1::2], self.strides, strict=True):
            n, h, w, nc = logits.shape
            left_top, right_bottom = distances_cells(bins.reshape(n, h * w, -1)).split(2, 2)  # [N, HW, 2]
            centres = (centres_cells(h, w, bins.device) + (right_bottom - left_top) / 2) * stride
            sizes = (left_top + right_bottom) * stride
            scores = logits.reshape(n, h * w, nc).float().sigmoid()
            decoded.append(Decoded.of(torch.cat([centres, sizes], 2), scores).rows)
        return Decoded(torch.cat(decoded, 1))

    def freeze_groups(self) -> list[str]:
        stages = [f"backbone.stages.{i}." for i in range(len(self.backbone.stages))]
        return ["backbone.stem.", *stages, "neck.", "yolo_head."]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all parameters.

        Convolutions are normal with variance 2 / fan-in (arXiv:1502.01852), biases 0. The gates of the head start near
        0.5. Initial predictions do not depend on the image: each class has probability 0.01, each distance the middle of
        its range.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.normal_(0, math.sqrt(2 / module.weight[0].numel()), generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for name, parameter in self.named_parameters():
            if name.endswith(".alpha"):
                parameter.fill_(1)
        self.yolo_head.initialise(generator)


def distances_cells(bins: Tensor) -> Tensor:
    """Return the means of the distributions, float32.

    Args:
        bins: [..., 4 R] logits of any R: left, top, right, bottom.
    Returns:
        [..., 4] in 0..R - 1.
    """
    count = bins.shape[-1] // 4
    probabilities: Tensor = bins.unflatten(-1, (4, count)).float().softmax(-1)
    # not a matrix product, which autocast would compute in 16 bits
    return (probabilities * torch.arange(count, device=bins.device, dtype=torch.float32)).sum(-1)


def centres_cells(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return [H W, 2] x, y of each cell's centre in cells, float32, in the order y, x."""
    xs = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    ys = torch.arange(height, device=device, dtype=torch.float32) + 0.5
    return torch.stack([xs.repeat(height), ys.repeat_interleave(width)], 1)


class Backbone(nn.Module):
    """CSPRepResNet: a stem of three convolutions and four stages; maps of strides 8, 16, 32."""

    def __init__(self, description: PpyoloeDescription) -> None:
        super().__init__()
        first, *rest = (max(round(c * description.width_multiple), 1) for c in BACKBONE_CHANNELS)
        repeats = [max(round(n * description.depth_multiple), 1) for n in BACKBONE_REPEATS]
        self.stem = nn.Sequential()
        self.stem.add_module("conv1", ConvNorm(3, first // 2, 3, 2))
        self.stem.add_module("conv2", ConvNorm(first // 2, first // 2, 3))
        self.stem.add_module("conv3", ConvNorm(first // 2, first, 3))
        self.stages = nn.ModuleList(
            BackboneStage(before, out, n, plus=description.plus)
            for before, out, n in zip([first, *rest], rest, repeats, strict=False)
        )
        self.out_channels = rest[1:]

    def forward(self, x: Tensor) -> list[Tensor]:
        return results(self.stages, self.stem(x))[1:]


class ConvNorm(blocks.Conv):
    """Convolution, batch normalisation; SiLU unless ``activate`` is False."""

    def __init__(
        self, in_channels: int, out: int, kernel: int = 1, stride: int = 1, *, activate: bool = True
    ) -> None:
        super().__init__(in_channels, out, kernel, stride)
        self.bn = nn.BatchNorm2d(out, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.activate else self.bn(self.conv(x))


class Residual(nn.Module):
    """3x3 convolution and RepVgg, added to the input if ``shortcut``.

    Args:
        plus: RepVgg's 1x1 branch has a learned factor ``alpha``, 1 at the start.
    """

    def __init__(self, channels: int, *, shortcut: bool, plus: bool) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3)
        self.conv2 = blocks.RepVgg(
            ConvNorm(channels, channels, 3, activate=False),
            ConvNorm(channels, channels, 1, activate=False),
            nn.Parameter(torch.ones(1)) if plus else None,
        )
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(self.conv1(x))
        return x + y if self.shortcut else y


class EffectiveSE(nn.Module):
    """Effective squeeze and excitation (arXiv:1911.06667): one layer computes channel weights from channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class BackboneStage(nn.Module):
    """Stride 2, then a cross-stage partial block with attention (CSPRepResStage)."""

    def __init__(self, in_channels: int, out: int, repeats: int, *, plus: bool) -> None:
        super().__init__()
        middle = (in_channels + out) // 2
        half = middle // 2
        self.conv_down = ConvNorm(in_channels, middle, 3, 2)
        self.conv1 = ConvNorm(middle, half, 1)
        self.conv2 = ConvNorm(middle, half, 1)
        self.blocks = nn.Sequential(*(Residual(half, shortcut=True, plus=plus) for _ in range(repeats)))
        self.attn = EffectiveSE(2 * half)
        self.conv3 = ConvNorm(2 * half, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_down(x)
        y: Tensor = self.conv3(self.attn(torch.cat([self.conv1(x), self.blocks(self.conv2(x))], 1)))
        return y


class SPP(nn.Module):
    """Concatenates the input and its max pools of 5, 9 and 13 pixels; a chain of 5-pools gives the same values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = ConvNorm(4 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [x]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        y: Tensor = self.conv(torch.cat(pooled, 1))
        return y


class NeckStage(nn.Module):
    """Cross-stage partial block without shortcuts; ``spp`` adds pooling after its middle block."""

    def __init__(self, in_channels: int, out: int, repeats: int, *, spp: bool = False) -> None:
        super().__init__()
        half = out // 2
        self.conv1 = ConvNorm(in_channels, half, 1)
        self.conv2 = ConvNorm(in_channels, half, 1)
        chain: OrderedDict[str, nn.Module] = OrderedDict()
        for i in range(repeats):
            chain[str(i)] = Residual(half, shortcut=False, plus=False)
            if spp and i == (repeats - 1) // 2:
                chain["spp"] = SPP(half)
        self.convs = nn.Sequential(chain)
        self.conv3 = ConvNorm(2 * half, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv3(torch.cat([self.conv1(x), self.convs(self.conv2(x))], 1))
        return y


class GatedConv(nn.Module):
    """The head's attention: channels weighted by the map's means, then a 1x1 convolution (ESE of the ET-head)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)
        self.conv = ConvNorm(channels, channels, 1)

    def forward(self, x: Tensor, means: Tensor) -> Tensor:
        """Return the weighted map; ``means``: [N, C, 1, 1] of ``x``."""
        y: Tensor = self.conv(x * self.fc(means).sigmoid())
        return y


class Neck(nn.Module):
    """Path from coarse to fine maps and back (CSP-PAN); maps of strides 32, 16, 8.

    Args:
        in_channels: of the maps of strides 8, 16, 32.
    """

    def __init__(self, in_channels: Sequence[int], description: PpyoloeDescription) -> None:
        super().__init__()
        out = [max(round(c * description.width_multiple), 1) for c in NECK_CHANNELS]
        repeats = max(round(NECK_REPEATS * description.depth_multiple), 1)
        coarse, middle, fine = out
        inputs = [in_channels[2], in_channels[1] + coarse // 2, in_channels[0] + middle // 2]
        # In published files a stage is a list of one block, so it is an nn.Sequential here.
        self.fpn_stages = nn.ModuleList(
            nn.Sequential(NeckStage(before, after, repeats, spp=i == 0))
            for i, (before, after) in enumerate(zip(inputs, out, strict=True))
        )
        self.fpn_routes = nn.ModuleList(ConvNorm(c, c // 2, 1) for c in (coarse, middle))
        self.pan_stages = nn.ModuleList(
            nn.Sequential(NeckStage(after + finer, after, repeats))
            for after, finer in ((coarse, middle), (middle, fine))
        )
        self.pan_routes = nn.ModuleList(ConvNorm(c, c, 3, 2) for c in (middle, fine))
        self.upsample = Upsample()
        self.out_channels = out

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        down = [self.fpn_stages[0](maps[2])]
        for route, stage, x in zip(self.fpn_routes, self.fpn_stages[1:], (maps[1], maps[0]), strict=True):
            down.append(stage(torch.cat([self.upsample(route(down[-1])), x], 1)))
        coarse, middle, fine = down
        middle = self.pan_stages[1](torch.cat([self.pan_routes[1](fine), middle], 1))
        coarse = self.pan_stages[0](torch.cat([self.pan_routes[0](middle), coarse], 1))
        return [coarse, middle, fine]


class Head(nn.Module):
    """Efficient task-aligned head: for each level attention and a 3x3 convolution, for classes and for distances."""

    def __init__(self, in_channels: Sequence[int], nc: int) -> None:
        super().__init__()
        self.stem_cls = nn.ModuleList(GatedConv(c) for c in in_channels)
        self.stem_reg = nn.ModuleList(GatedConv(c) for c in in_channels)
        self.pred_cls = nn.ModuleList(nn.Conv2d(c, nc, 3, padding=1) for c in in_channels)
        self.pred_reg = nn.ModuleList(nn.Conv2d(c, 4 * REG_BINS, 3, padding=1) for c in in_channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return class logits and distance logits of each level, channels last."""
        raws = []
        for i, x in enumerate(maps):
            means = x.mean((2, 3), keepdim=True)
            raws.append(self.pred_cls[i](self.stem_cls[i](x, means) + x).permute(0, 2, 3, 1))
            raws.append(self.pred_reg[i](self.stem_reg[i](x, means)).permute(0, 2, 3, 1))
        return raws

    def initialise(self, generator: torch.Generator) -> None:
        for gate in (*self.stem_cls, *self.stem_reg):
            assert isinstance(gate, GatedConv)
            gate.fc.weight.normal_(0, 0.001, generator=generator)
        for convs, bias in ((self.pred_cls, math.log(CLASS_PRIOR / (1 - CLASS_PRIOR))), (self.pred_reg, 1.0)):
            for conv in convs:
                assert isinstance(conv, nn.Conv2d) and conv.bias is not None
                conv.weight.zero_()
                conv.bias.fill_(bias)
