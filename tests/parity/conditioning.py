"""Comparisons with other implementations, and the check that they are well conditioned.

A comparison is well conditioned if its values hardly move when rounding does: then no processor and no version of torch
can make the test fail. Each test of this folder has a slow twin, which runs the test as it stands and then 20 times
with inputs and weights multiplied by 1 + 1e-6 u, u uniform in -1..1. Compared values must stay within a third of their
tolerance of the first run; values that are compared without a tolerance (labels assigned, boxes kept) must stay equal.

A test calls :func:`perturbed` for what it computes from and :func:`compare` for what it computes.
``YOLOFLEET_PARITY_SEEDS=3`` in the environment runs fewer perturbations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

SEEDS = int(os.environ.get("YOLOFLEET_PARITY_SEEDS", "20"))
SIZE = 1e-6
SHARE = 1 / 3  # a perturbation may use up to this share of the tolerance
ROUNDED = 1e-6  # a relative tolerance up to this allows for the rounding of one number to float32


class Run:
    """One run of a test: ``seed`` is None for the run that the others are compared with."""

    def __init__(self, seed: int | None, first: list[np.ndarray]) -> None:
        self.seed, self.first = seed, first
        self.random = np.random.default_rng(seed)
        self.compared = self.perturbed = 0
        self.exact = True
        self.worst = (0.0, 0, "")  # share of the tolerance, number and name of the comparison
        self.faults: list[str] = []

    def compare(self, actual: np.ndarray, tolerance: np.ndarray, name: str) -> None:
        if self.seed is None:
            self.first.append(actual.copy())
        else:
            first = self.first[self.compared]
            assert actual.shape == first.shape, (
                f"seed {self.seed}: {actual.shape} values, {first.shape} before"
            )
            moved = np.abs(np.subtract(actual, first, dtype=np.float64))
            share = np.divide(moved, tolerance, out=np.where(moved > 0, np.inf, 0.0), where=tolerance > 0)
            self.worst = max(self.worst, (float(share.max(initial=0.0)), self.compared, name))
            if (share > SHARE).any():
                self.faults.append(
                    f"seed {self.seed} moves {(share > SHARE).sum()} of {share.size} values of comparison "
                    f"{self.compared} {name} by up to {share.max():.3g} of the tolerance"
                )
        self.compared += 1


_run: Run | None = None


def perturbed(values: Any) -> Any:
    """Return ``values``: a number, an array, a tensor, or a network (changed in place, its statistics included)."""
    if _run is None:
        return values
    _run.perturbed += 1
    if _run.seed is None:
        return values
    if isinstance(values, nn.Module):
        with torch.no_grad():
            for tensor in values.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(torch.from_numpy(_factors(tensor.shape)))
        return values
    if isinstance(values, torch.Tensor):
        return values * torch.from_numpy(_factors(values.shape)).to(values.dtype)
    return (values * _factors(np.shape(values))).astype(np.asarray(values).dtype)


def _factors(shape: tuple[int, ...]) -> np.ndarray:
    assert _run is not None
    return 1 + SIZE * _run.random.uniform(-1, 1, shape)


def seed() -> int | None:
    """Return what tells runs apart, for the key of a cache."""
    return None if _run is None else _run.seed


def compare(
    actual: Any,
    expected: Any,
    *,
    rtol: float = 0.0,
    atol: Any = 0.0,
    rms: float | None = None,
    ignore: Any = False,
    name: str = "",
) -> None:
    """Raise unless ``|actual - expected| <= atol + rtol |expected|``; without tolerances, unless they are equal.

    Args:
        atol: a number, or an array for the shape of ``expected``.
        rms: a bound for the root mean square of all differences. Where a network amplifies rounding in a few values,
            this bound can be much lower than ``atol``, which one value decides.
        ignore: a mask of values that this comparison leaves out.
    """
    actual, expected = (
        np.asarray(v.detach() if isinstance(v, torch.Tensor) else v) for v in (actual, expected)
    )
    assert actual.shape == expected.shape, name
    if _run is None or _run.seed is None:
        tolerance = atol + rtol * np.abs(expected)
        if np.max(tolerance, initial=0) == 0:
            np.testing.assert_array_equal(actual, expected, name)
        else:
            wrong = ~(np.abs(actual - expected) <= tolerance) & ~np.asarray(ignore)
            if wrong.any():
                np.testing.assert_allclose(actual, expected, rtol, atol, err_msg=name)  # says how far
    if _run is not None:
        _run.exact = _run.exact and rtol <= ROUNDED and np.max(atol) <= 1e-9
        kept = np.where(ignore, expected, actual) if np.any(ignore) else actual
        _run.compare(kept, np.broadcast_to(atol + rtol * np.abs(expected), expected.shape), name)
    if rms is not None:
        differences = np.where(ignore, 0, np.subtract(actual, expected, dtype=np.float64))
        compare(np.sqrt(np.mean(differences**2)), 0, atol=rms, name=f"{name} (root mean square)")


def paired(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return rows in the order of their nearest partners in ``expected``: nearly equal scores may change places."""
    assert actual.shape == expected.shape
    if not len(actual):
        return actual
    partners = np.abs(actual[:, None] - expected).max(2).argmin(0)
    assert len(set(partners.tolist())) == len(actual), "two rows have the same nearest partner"
    return actual[partners]


def worst(actual: Any, expected: Any, *, rtol: float = 0.0, atol: Any = 0.0) -> float:
    """Return the greatest difference, in tolerances."""
    return float((np.abs(np.subtract(actual, expected)) / (atol + rtol * np.abs(expected))).max())


def check(test: Callable[[], None]) -> None:
    """Run ``test`` as it stands and under each perturbation; skip one that measures nothing."""
    global _run
    first: list[np.ndarray] = []
    worst_of_all, faults = (0.0, 0, ""), list[str]()
    for number in (None, *range(SEEDS)):
        run = Run(number, first)
        outer, _run = _run, run
        try:
            test()
        finally:
            _run = outer
        worst_of_all = max(worst_of_all, run.worst)
        faults += run.faults
        if number is None and (not run.compared or (run.exact and not run.perturbed)):
            pytest.skip("compares exact values only")
        assert run.perturbed, "this test compares within a tolerance, but perturbs nothing"
    share, place, name = worst_of_all
    print(f"largest move of {SEEDS} seeds: {share:.3f} of the tolerance, in comparison {place} {name}")
    assert not faults, "\n".join(["not well conditioned:", *faults])
