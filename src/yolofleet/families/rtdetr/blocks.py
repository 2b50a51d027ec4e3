"""Building blocks of both families. N images, C channels, H x W map, T tokens of an image, W channels of a token.

Published checkpoints fix the attribute names (``conv.weight``, ``norm.weight``, ``self_attn.in_proj_weight``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet.families.networks.blocks import Foldable, RepVgg
from yolofleet.families.rtdetr.description import HEADS


class FrozenNorm(nn.Module):
    """Batch normalisation by constants, which are buffers. Backbones from weights keep their statistics this way."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels))

    def draw_initial(self, generator: torch.Generator) -> None:
        """Set the constants that change nothing."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name in ("weight", "running_var") else 0)


class Conv(nn.Conv2d):
    """Convolution with optional constants of a frozen norm after it."""

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        if scale is None:
            return super().forward(x)
        weight = self.weight * scale.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, shift, self.stride, self.padding, self.dilation, self.groups)


class ConvNorm(Foldable):
    """Convolution, batch normalisation, and an activation such as ``F.relu`` or ``F.silu``."""

    norm_name = "norm"

    def __init__(
        self,
        in_channels: int,
        out: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        *,
        activation: Callable[..., Tensor] | None = None,
        is_frozen: bool = False,
    ) -> None:
        super().__init__()
        padding = (kernel - 1) // 2
        self.conv = Conv(in_channels, out, kernel, stride, padding, groups=groups, bias=False)
        self.add_module(self.norm_name, FrozenNorm(out) if is_frozen else nn.BatchNorm2d(out))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        norm = getattr(self, self.norm_name)
        if isinstance(norm, FrozenNorm):
            # its constants go into the weight, which saves two passes over the map
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            y = self.conv(x, scale, norm.bias - norm.running_mean * scale)
        else:
            y = norm(self.conv(x))
        # in place only without gradients, because autograd would copy the input
        return self.activation(y, inplace=not torch.is_grad_enabled()) if self.activation else y


class CspRep(nn.Module):
    """Cross-stage partial block of RepVgg blocks, whose two branches are added."""

    def __init__(self, in_channels: int, out: int, repeats: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, hidden, activation=F.silu)
        self.conv2 = ConvNorm(in_channels, hidden, activation=F.silu)
        self.bottlenecks = nn.Sequential(
            *(RepVgg(ConvNorm(hidden, hidden, 3), ConvNorm(hidden, hidden)) for _ in range(repeats))
        )
        self.conv3 = ConvNorm(hidden, out, activation=F.silu) if hidden != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv3(self.bottlenecks(self.conv1(x)) + self.conv2(x))
        return y


class Mlp(nn.Module):
    """Linear layers with an activation of torch between them, such as ``relu``."""

    def __init__(self, *widths: int, activation: str) -> None:
        super().__init__()
        self.activation = getattr(F, activation)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        y: Tensor = self.layers[-1](x)
        return y

    def start_at_zero(self) -> None:
        """Let the outputs be 0 whatever the inputs are."""
        for parameter in self.layers[-1].parameters():
            parameter.zero_()


class SelfAttention(nn.Module):
    """Attention of tokens to each other; positions are part of queries and keys (arXiv:2005.12872).

    Its parameters have the names of ``nn.MultiheadAttention``.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [N, T, W].

        Args:
            x: [N, T, W].
            position: [N or 1, T, W].
            mask: [N, 1, T, T], added to the logits; None: all see all.
        """
        n, tokens, width = x.shape
        weight, value_weight = self.in_proj_weight.split([2 * width, width])
        bias, value_bias = self.in_proj_bias.split([2 * width, width])
        query, key = F.linear(x + position, weight, bias).chunk(2, 2)
        value = F.linear(x, value_weight, value_bias)
        # [N, T, W] -> [N, heads, T, W / heads]; ONNX exports with variable sizes need all sizes and axes here
        query, key, value = (
            part.reshape(n, tokens, HEADS, width // HEADS).permute(0, 2, 1, 3) for part in (query, key, value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        y: Tensor = self.out_proj(seen.permute(0, 2, 1, 3).reshape(n, tokens, width))
        return y

    def draw_initial(self, generator: torch.Generator) -> None:
        xavier([self.in_proj_weight], generator)
        self.in_proj_bias.zero_()


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the logit of ``x`` in 0..1, at most log(1 / eps) from 0."""
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


def tokens_of(x: Tensor) -> Tensor:
    """Return the cells of a map, [N, C, H, W] -> [N, H W, C], without a copy in channels-last memory.

    Channels become the last axis before H and W are joined. The other way round, the gradient of a single image would have
    the strides (C, 1, W C, C), for which torch's batch normalisation on CPUs returns wrong gradients (torch 2.13).
    """
    n, channels, height, width = x.shape
    return x.permute(0, 2, 3, 1).reshape(n, height * width, channels)


def map_of(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return the map [N, C, H, W] whose cells :func:`tokens_of` returned."""
    return tokens.reshape(tokens.shape[0], height, width, tokens.shape[2]).permute(0, 3, 1, 2)


def sine_position(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Return a code of the places of a map's cells, float32 [1, H W, C]: sines and cosines of y, then of x.

    Source: arXiv:2005.12872, with the order of channels of RT-DETR. It follows the size of the map, so any size will do.
    """
    count = channels // 4
    rates = 10000.0 ** (torch.arange(count, device=device, dtype=torch.float32) / -count)
    rows, columns = (
        torch.arange(n, device=device, dtype=torch.float32)[:, None] * rates for n in (height, width)
    )
    y = torch.cat([rows.sin(), rows.cos()], 1)[:, None].expand(-1, width, -1)  # [H, W, C / 2]
    x = torch.cat([columns.sin(), columns.cos()], 1)[None].expand(height, -1, -1)
    return torch.cat([y, x], 2).reshape(1, height * width, 4 * count)


def xavier(weights: Iterable[Tensor], generator: torch.Generator) -> None:
    """Draw weights of equal variance forwards and backwards (Glorot and Bengio 2010)."""
    for weight in weights:
        bound = math.sqrt(6 / (weight[0].numel() + weight[:, 0].numel()))
        weight.uniform_(-bound, bound, generator=generator)
