"""Weights and images that are functions of names, shapes and seeds, so that tests of full networks store neither."""

import zlib

import numpy as np
import torch


@torch.no_grad()
def fill_by_formula(model, gain):
    """Each tensor from its official name, shape and role; anchors and counters stay."""
    for name, tensor in model.state_dict().items():
        shape, r = tuple(tensor.shape), np.random.RandomState(zlib.crc32(name.encode()))
        if name.endswith(("num_batches_tracked", ".anchors")):
            continue
        if tensor.dim() == 4:
            values = r.standard_normal(shape) * np.sqrt(gain / np.prod(shape[1:]))
        elif name.endswith((".bn.weight", ".running_var")):
            values = 0.5 + r.random_sample(shape)
        elif name.endswith((".bn.bias", ".running_mean")):
            values = 0.2 * r.standard_normal(shape)
        else:
            values = 0.5 * r.standard_normal(shape)
        tensor.copy_(torch.from_numpy(values.astype(np.float32)))


def formula_image(height, width, seed):
    """[1, 3, H, W] in 0..1: flat 8 x 8 cells plus noise."""
    r = np.random.RandomState(seed)
    cells = r.randint(0, 200, (1, 3, height // 8, width // 8)).repeat(8, 2).repeat(8, 3)
    return torch.from_numpy((cells + r.randint(0, 56, (1, 3, height, width))).astype(np.float32)) / 255
