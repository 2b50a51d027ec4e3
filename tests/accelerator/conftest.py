"""Every test here has the accelerator, which a process keeps: ``tests/multiprocess/test_miniature_accelerator.py`` runs them in
a process of their own."""

from __future__ import annotations

from collections.abc import Iterator

import miniature
import pytest
import torch._dynamo  # noqa: F401  (optimizers do; what is imported before the tests is exempt from garbage collection)

installed = miniature.install()  # before a test module names a device


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[miniature.Accelerator]:
    installed.begin()
    yield installed
    installed.reset()
