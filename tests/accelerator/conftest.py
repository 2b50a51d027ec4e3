"""Every test here has the accelerator, which a process keeps: ``tests/multiprocess/test_miniature_accelerator.py`` runs them in
a process of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import miniature
import pytest
import torch
import torch._dynamo  # optimizers do; what is imported before the tests is exempt from garbage collection

installed = miniature.install()  # before a test module names a device


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[miniature.Accelerator]:
    torch.set_num_threads(1)
    installed.reset()
    # hooks of buckets keep the networks of earlier tests, which each allocation would visit
    for device in installed.devices:
        device.blocks.clear()
        device.pools.clear()
        device.held_bytes = device.swept_bytes = 0
    gc.collect()
    gc.freeze()  # the collections of a trial need not visit those networks either
    yield installed
    installed.reset()
