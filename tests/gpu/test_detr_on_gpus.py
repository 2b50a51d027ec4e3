"""The networks of RT-DETRv2 and D-FINE on one GPU: equal bits of every pass, and the values of the CPU."""

from __future__ import annotations

import copy
import csv
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import results, yolofleet
from gpu_devices import DEVICE, ONE, needs_gpu, only_gpus
from torch import Tensor

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import preset
from yolofleet.families.networks.detector import Detector
from yolofleet.support.devices import float32_products

pytestmark = needs_gpu
MODELS = ("rtdetrv2-r18", "dfine-n")
GROUPS = 10  # of denoising queries


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Make torch raise for an operation whose bits may differ from pass to pass."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def passed(model: Detector, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return raw predictions and gradients of a pass in training."""
    rng, n = np.random.default_rng(0), len(images)
    centres, sides = rng.uniform(0.2, 0.8, (n, 40, 2)), rng.uniform(0.05, 0.3, (n, 40, 2))
    targets = SimpleNamespace(
        noisy_boxes=np.concatenate([centres, sides], 2).astype(np.float32),
        noisy_classes=rng.integers(0, model.nc, (n, 40)),
        noise_group=np.tile(np.arange(40) % GROUPS, (n, 1)),
    )
    raws = model(images, targets)
    model.zero_grad()
    sum(((raw.float() - 0.3) ** 2).sum() for raw in raws[3:]).backward()
    return raws, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def start(name: str) -> tuple[Detector, Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = build_model(preset(name), 8).train()
    with torch.no_grad():
        for parameter in model.decoder.parameters():  # type: ignore[union-attr]  # boxes must depend on the images
            if parameter.requires_grad and not parameter.any():
                parameter.uniform_(-0.02, 0.02, generator=generator)
    return model, torch.rand(4, 3, 320, 320, generator=generator)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_pass_has_the_same_bits(name: str, precision: torch.dtype, deterministic: None) -> None:
    model, images = start(name)
    model, images = model.to(DEVICE), images.to(DEVICE)
    with torch.autocast(DEVICE.type, precision, enabled=precision != torch.float32):
        first, *others = (passed(copy.deepcopy(model), images) for _ in range(3))
    assert all(gradient.isfinite().all() for gradient in first[1])
    for other in others:
        for here, there in zip((*first[0], *first[1]), (*other[0], *other[1]), strict=True):
            assert torch.equal(here, there)


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_those_of_the_cpu(name: str) -> None:
    model, images = start(name)
    model.eval()
    with torch.no_grad(), float32_products(DEVICE, tf32=False):
        here, there = model(images), copy.deepcopy(model).to(DEVICE)(images.to(DEVICE))
    # near scores may change places
    best = [raws.logits.cpu().amax(2).sort(1).values for raws in (here, there)]
    torch.testing.assert_close(*best, rtol=0, atol=1e-3)


@only_gpus
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_two_hundred_steps_in_mixed_precision_are_finite(tmp_path: Path, name: str, precision: str) -> None:
    argv = [
        *("train", "--data", "shapes:64"),
        "--model",
        name,
        *("--img", "320", "--batch", "8", "--nominal-batch", "8"),
    ]
    argv += ["--epochs", "25", "--val-period", "25", "--no-plots", "--device", ONE, "--precision", precision]
    out = yolofleet(tmp_path, *argv, "--name", "run").out
    run = tmp_path / "runs/train/run"
    with (run / "results.csv").open() as file:
        losses = [
            float(value) for row in csv.DictReader(file) for key, value in row.items() if "train/" in key
        ]
    assert results(run)["steps"] == 200 and np.isfinite(losses).all()
    # a search for the loss scale begins at 65,536 and halves it
    assert sum(map(int, re.findall(r"fp16: (\d+) steps were left out", out))) <= 16
    print(f"\n{name} {precision}: first loss {sum(losses[:4]):.3g}, last {sum(losses[-4:]):.3g}")
