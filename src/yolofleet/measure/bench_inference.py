"""``yolofleet bench``: measure the speed of weights or an exported file on this machine, by stage."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from yolofleet.config.schema.verbs import BenchConfig, PredictConfig
from yolofleet.families.recipe_class import load_recipe_class
from yolofleet.inference.export.runtime import ImageSize, Runtime, open_weights
from yolofleet.inference.export.verify import generated_images
from yolofleet.inference.predict.predictor import Predictor, one_device
from yolofleet.inference.predict.run import place_text
from yolofleet.runs.report.console import Console
from yolofleet.storage.atomic import emit_json
from yolofleet.support import devices

STAGES = ("letterbox", "forward", "nms")
WARM_UP = 3  # passes


def bench_command(config: BenchConfig) -> int:
    """Run the command; return the exit code. Raises YolofleetError."""
    figures, names, size = bench(config)
    with Console(stream=sys.stderr if config.json_out == "-" else None) as console:
        console.header(
            "yolofleet bench",
            {
                "weights": f"{config.weights}, {len(names)} classes",
                "where": f"{figures['where']}, {figures['threads']} threads",
                "image size": size.text,
                "images": f"{config.batch} of {figures['height_px']} x {figures['width_px']} px a pass, "
                f"{config.passes} passes",
            },
        )
        if size.note:
            console.note(size.note)
        cells = [
            (stage, f"{ms:.2f}", f"{ms / config.batch:.2f}") for stage, ms in figures["median_ms"].items()
        ]
        console.table("medians", ("stage", "ms a pass", "ms an image"), cells)
        console.summary(f"{figures['images_per_s']:.4g} images/s", {})
    emit_json(figures, config.json_out)
    return 0


@devices.torch_defaults()
def bench(config: BenchConfig) -> tuple[dict[str, Any], Sequence[str], ImageSize]:
    """Return the median milliseconds of a pass by stage, and what was measured, as values for JSON.

    Also return the class names, and the image size with its source.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    load_recipe_class(config.recipe_class)
    device = one_device(config.device)
    wanted = None if config.device == "auto" else device
    model = open_weights(config.weights, config.cfg, device=wanted, trust=config.trust)
    shared = {name: getattr(config, name) for name in ("device", "img", "precision", "batch")}
    predictor = Predictor(model, PredictConfig(**shared))
    pictures = list(islice(generated_images(), config.batch))
    ms: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "all")}
    images: list[np.ndarray] = []
    for number in range(WARM_UP + config.passes):
        began_s = time.perf_counter()
        images = [predictor.letterboxed(picture)[0] for picture in pictures]
        ready_s = time.perf_counter()
        decoded = predictor.forward(images)
        decoded_s = time.perf_counter()
        predictor.suppress(decoded)
        done_s = time.perf_counter()
        if number >= WARM_UP:
            moments = (began_s, ready_s, decoded_s, done_s)
            spans = [later - earlier for earlier, later in pairwise(moments)]
            for stage, span in zip(ms, [*spans, done_s - began_s], strict=True):
                ms[stage].append(1000 * span)
    medians = {stage: statistics.median(values) for stage, values in ms.items()}
    figures = {
        "weights": config.weights,
        "where": place_text(predictor),
        "exported": isinstance(model, Runtime),
        "threads": torch.get_num_threads(),
        "height_px": images[0].shape[0],
        "width_px": images[0].shape[1],
        "batch": config.batch,
        "passes": config.passes,
        "median_ms": medians,
        "images_per_s": 1000 * config.batch / medians["all"],
    }
    return figures, predictor.names, predictor.size
