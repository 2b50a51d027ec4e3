"""A training step of D-FINE, RT-DETRv2 and RF-DETR beside Hugging Face's transformers: the same networks, images and labels.

    python benchmarks/detr.py [--models dfine-n rtdetrv2-r18] [--img 320] [--images 2] [--rounds 5]
    python benchmarks/detr.py --models rfdetr-n --img 384     # beside the authors' package too, where rfdetr is installed
    python benchmarks/detr.py --device cuda --precision fp32 bf16 fp16 --models dfine-n dfine-s --img 640 --images 16

A step is the forward pass with denoising queries, the matching, the loss and the backward pass, without an optimizer: on
one core in fp32, or on a GPU under autocast. Both programs take turns; the figure is the ratio of the medians of their CPU
times, on a GPU of their wall times. Both have random weights, so the numbers of operations are those of a training, and the
values of the losses are not compared here (tests/parity does that).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch

from yolofleet.config.recipe import load_recipe, recipe_of
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.build import build_model, family_loss, family_of
from yolofleet.families.networks.description import describe

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "parity")]
CLASSES, LABELS = 80, 7  # of an image; COCO has 7.3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def labels_of(images: int) -> list[Shapes]:
    """Return the labels of each image."""
    rng = np.random.default_rng(0)
    low, high = [0.3, 0.3, 0.05, 0.05], [0.7, 0.7, 0.4, 0.4]
    return [
        Shapes.of_image(rng.integers(0, CLASSES, LABELS), rng.uniform(low, high, (LABELS, 4)))
        for _ in range(images)
    ]


def our_step(
    name: str, images: torch.Tensor, labels: Sequence[Shapes], precision: torch.dtype
) -> Callable[[], None]:
    device = images.device
    model = build_model(describe(name), CLASSES).train().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    family, described = family_of(model.description), model.description
    recipe = recipe_of(load_recipe(), family, described).value
    loss = family_loss(model, recipe, images.shape[3])
    loss.gains = loss.gains.to(device)
    images = images.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        targets = loss.match(labels[0].of_images(labels), len(images), (images.shape[2], images.shape[3]))
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            raws = model(images, targets) if model.reads_targets else model(images)
        counts = torch.from_numpy(targets.counts).to(device).clamp(min=1)
        (loss.sums(raws, targets) * loss.gains / counts).sum().backward()
        model.zero_grad()

    return step


def their_step(
    name: str, images: torch.Tensor, labels: list[Shapes], precision: torch.dtype
) -> Callable[[], None]:
    device = images.device
    if describe(name).family == "rfdetr":
        from test_rfdetr_parity import with_weights_of

        model = with_weights_of(build_model(describe(name), CLASSES).train()).to(device)
    else:
        from test_detr_parity import theirs

        model = theirs(describe(name), CLASSES).train().to(device)
    wanted = targets_of(labels, device, "class_labels")

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = model(pixel_values=images, labels=wanted).loss
        loss.backward()
        model.zero_grad()

    return step


def authors_step(
    name: str, images: torch.Tensor, labels: list[Shapes], precision: torch.dtype
) -> Callable[[], None]:
    """Return a step of the package rfdetr 1.11.2."""
    from rfdetr import config
    from rfdetr.models.lwdetr import build_criterion_from_config, build_model_from_config

    device, size = images.device, {"n": "Nano", "s": "Small", "m": "Medium", "l": "Large"}[name[7]]
    # a name of weights keeps the package from a download of DINOv2's; nothing loads them here
    network = getattr(config, f"RFDETR{size}Config")(
        num_classes=CLASSES, pretrain_weights="none.pth", device=device.type
    )
    training = config.TrainConfig(dataset_dir=".", output_dir=".")
    model = build_model_from_config(network, training).train().to(device)
    criterion, _ = build_criterion_from_config(network, training)
    wanted = targets_of(labels, device, "labels")

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            losses = criterion(model(list(images), wanted), wanted)
        sum(losses[term] * gain for term, gain in criterion.weight_dict.items() if term in losses).backward()
        model.zero_grad()

    return step


def targets_of(labels: Sequence[Shapes], device: torch.device, classes: str) -> list[dict[str, torch.Tensor]]:
    """Return the labels of each image as the other programs read them; ``classes``: their key of the classes."""
    return [
        {classes: torch.from_numpy(mine.classes).to(device), "boxes": torch.from_numpy(mine.boxes).to(device)}
        for mine in labels
    ]


def seconds_of(step: Callable[[], None], on_gpu: bool) -> float:
    """Return the CPU time of a step, or the wall time of one of five steps on a GPU."""
    if not on_gpu:
        began = time.process_time()
        step()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["dfine-n", "rtdetrv2-r18"])
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=DTYPES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.rand(args.images, 3, args.img, args.img, generator=torch.Generator().manual_seed(0)).to(
        args.device
    )
    labels, on_gpu = labels_of(args.images), images.is_cuda
    for name, precision in product(args.models, args.precision):
        steps = {
            "yolofleet": our_step(name, images, labels, DTYPES[precision]),
            "transformers": their_step(name, images, labels, DTYPES[precision]),
        }
        if describe(name).family == "rfdetr" and find_spec("rfdetr"):
            steps["rfdetr"] = authors_step(name, images, labels, DTYPES[precision])
        seconds: dict[str, list[float]] = {program: [] for program in steps}
        for _ in range(1 + args.rounds):
            for program, step in steps.items():
                seconds[program].append(seconds_of(step, on_gpu))
        taken = {program: median(each[1:]) for program, each in seconds.items()}
        ours = taken.pop("yolofleet")
        for program, other in taken.items():
            rates = f"{args.images / ours:.2f} / {args.images / other:.2f} images/s"
            print(
                f"{name} {precision}, {args.images} images of {args.img} px: {rates}, {other / ours:.2f} times {program}",
                flush=True,
            )


if __name__ == "__main__":
    main()
