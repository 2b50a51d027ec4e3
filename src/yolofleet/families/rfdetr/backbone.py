"""DINOv2 with windows (arXiv:2304.07193, arXiv:2511.09554), and the block that joins its maps (arXiv:2406.03459).

N images, k windows along a side, h x w cells (patches) of the map, T tokens: one for the window or image, and one for each of
its cells, W channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.rfdetr.description import RfdetrDescription

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of colours, for which the weights were made
EPS = 1e-6  # of the norms
SPREAD = 0.02  # of initial tokens and positions


class Embeddings(nn.Module):
    """From images to tokens with positions.

    The file of DINOv2 has a token for masked patches, which is kept and not trained: nothing here uses it.
    """

    def __init__(self, description: RfdetrDescription) -> None:
        super().__init__()
        width, self.side = description.backbone_width, description.positions
        self.patch, self.windows = description.patch, description.windows
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.mask_token = nn.Parameter(torch.empty(1, width), requires_grad=False)
        self.position_embeddings = nn.Parameter(torch.empty(1, 1 + self.side**2, width))
        self.projection = nn.Conv2d(3, width, self.patch, self.patch)

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens of each window, [N k k, T, W]."""
        n, k = images.shape[0], self.windows
        # the constants of colours go into the weights, which saves two passes over the images
        scaled = [
            part / scale for part, scale in zip(self.projection.weight.unbind(1), DEVIATION, strict=True)
        ]
        shift: Any = sum(part.sum((1, 2)) * mean for part, mean in zip(scaled, MEAN, strict=True))
        x = F.conv2d(images, torch.stack(scaled, 1), self.projection.bias - shift, self.patch)
        height, width = x.shape[2:]
        x = x.permute(0, 2, 3, 1) + self.positions(height, width)  # [N, h, w, W]
        x = x.reshape(n, k, height // k, k, width // k, x.shape[3]).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(n * k * k, (height // k) * (width // k), x.shape[5])
        first = self.cls_token + self.position_embeddings[:, :1]
        return torch.cat([first.expand(x.shape[0], -1, -1).to(x.dtype), x], 1)

    def positions(self, height: int, width: int) -> Tensor:
        """Return the learned positions of a map's cells, [h, w, W], in the number format of the parameters."""
        grid: Tensor = self.position_embeddings[:, 1:].unflatten(1, (self.side, self.side))
        if torch.jit.is_tracing() or not height == width == self.side:  # a trace is for other sizes, too
            grid = resized(grid, height, width, cubic).to(grid.dtype)
        return grid[0]

    def draw_initial(self, generator: torch.Generator) -> None:
        self.mask_token.zero_()
        for tokens in (self.cls_token, self.position_embeddings):
            tokens.normal_(0, SPREAD, generator=generator)


class Attention(nn.Module):
    """Attention of tokens to each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, T, W] for x [N, T, W]."""
        n, tokens, width = x.shape
        joined = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        # [N, T, 3 W] -> three of [N, heads, T, W / heads]
        query, key, value = joined.reshape(n, tokens, 3, self.heads, width // self.heads).permute(
            2, 0, 3, 1, 4
        )
        seen = F.scaled_dot_product_attention(query, key, value)
        y: Tensor = self.out_proj(seen.permute(0, 2, 1, 3).reshape(n, tokens, width))
        return y

    def draw_initial(self, generator: torch.Generator) -> None:
        self.in_proj_weight.normal_(0, SPREAD, generator=generator)
        self.in_proj_bias.zero_()


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised before and scaled after.

    Args:
        joined: number of windows that attend to each other, those of one image; 1: each window by itself.
    """

    def __init__(self, description: RfdetrDescription, joined: int) -> None:
        super().__init__()
        width, self.joined = description.backbone_width, joined
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attention = Attention(width, description.backbone_heads)
        self.scale1, self.scale2 = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N k k, T, W] for x [N k k, T, W]."""
        windows, tokens, width = x.shape
        y = self.norm1(x).reshape(windows // self.joined, self.joined * tokens, width)
        x = x + self.attention(y).reshape(windows, tokens, width) * self.scale1
        y = self.linear2(F.gelu(self.linear1(self.norm2(x))))
        z: Tensor = x + y * self.scale2
        return z

    def draw_initial(self, generator: torch.Generator) -> None:
        self.scale1.fill_(1)
        self.scale2.fill_(1)


class Dinov2(nn.Module):
    """The backbone: the normalised results of some blocks, joined to one map."""

    def __init__(self, description: RfdetrDescription) -> None:
        super().__init__()
        self.windows, self.taps = description.windows, description.taps
        self.out_channels = len(self.taps) * description.backbone_width
        self.embeddings = Embeddings(description)
        # the authors count taps from 1 and blocks from 0, so the block after a tap attends to the whole image
        self.layers = nn.ModuleList(
            Block(description, self.windows**2 if i in self.taps else 1) for i in range(description.blocks)
        )
        self.norm = nn.LayerNorm(description.backbone_width, EPS)

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, taps W, h, w] in channels-last memory."""
        x = self.embeddings(images)
        found = []
        for number, layer in enumerate(self.layers[: self.taps[-1]], 1):
            x = layer(x)
            if number in self.taps:
                found.append(self.norm(x)[:, 1:])
        k, patch = self.windows, self.embeddings.patch
        n, rows, columns = images.shape[0], images.shape[2] // patch // k, images.shape[3] // patch // k
        y = torch.cat(found, 2)
        y = y.reshape(n, k, k, rows, columns, y.shape[2]).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(n, k * rows, k * columns, y.shape[5]).permute(0, 3, 1, 2)


class ConvNorm(nn.Module):
    """Convolution, normalisation over channels, SiLU."""

    def __init__(self, in_channels: int, out: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.LayerNorm(out, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(over_channels(self.norm, self.conv(x)))


class Bottleneck(nn.Module):
    """Two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = ConvNorm(width, width, 3), ConvNorm(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv2(self.cv1(x))
        return y


class Projector(nn.Module):
    """The encoder: a cross-stage partial block from the backbone's map to that of the decoder."""

    def __init__(self, in_channels: int, description: RfdetrDescription) -> None:
        super().__init__()
        width, half = description.decoder_width, description.decoder_width // 2
        self.cv1 = ConvNorm(in_channels, 2 * half, 1)
        self.m = nn.ModuleList(Bottleneck(half) for _ in range(3))
        self.cv2 = ConvNorm((2 + len(self.m)) * half, width, 1)
        self.norm = nn.LayerNorm(width, EPS)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the one map [N, W, h, w]."""
        parts = list(self.cv1(x).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return [over_channels(self.norm, self.cv2(torch.cat(parts, 1)))]


def over_channels(norm: nn.Module, x: Tensor) -> Tensor:
    """Return a map [N, C, H, W] normalised over its channels."""
    y: Tensor = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return y


def cubic(distance: Tensor) -> Tensor:
    """Return the weights of cells at a distance, for bicubic resampling of Keys (1981) with a = -0.5."""
    d = distance.clamp(max=2)
    near, far = (1.5 * d - 2.5) * d * d + 1, ((-0.5 * d + 2.5) * d - 4) * d + 2
    return torch.where(d < 1, near, far)


def linear(distance: Tensor) -> Tensor:
    """Return the weights of cells at a distance, for bilinear resampling."""
    return (1 - distance).clamp(min=0)


def resized(x: Tensor, height: Any, width: Any, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Return maps [N, H, W, C] in another size, [N, ``height``, ``width``, C].

    The same as ``F.interpolate`` with ``antialias`` and centres of pixels at halves. As products of matrices its backward
    pass adds in a fixed order on GPUs, and every runtime has it.
    """
    n, rows, columns, channels = x.shape
    x = torch.matmul(shares(rows, height, kernel, x), x.reshape(n, rows, columns * channels))
    return torch.matmul(shares(columns, width, kernel, x), x.reshape(n, height, columns, channels))


def shares(before: Any, after: Any, kernel: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return the shares of ``before`` cells in ``after`` ones, [after, before]."""
    step = torch.ones(1, device=like.device) * before / after  # a trace keeps both sizes
    centres = (torch.arange(after, device=like.device, dtype=torch.float32) + 0.5) * step
    places = torch.arange(before, device=like.device, dtype=torch.float32) + 0.5
    weights = kernel((places - centres[:, None]).abs() / step.clamp(min=1))
    return (weights / weights.sum(1, keepdim=True)).to(like.dtype)
