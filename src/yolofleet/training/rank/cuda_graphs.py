"""Decide whether the passes of a run become CUDA graphs (``--passes``), and make them before its first step."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch

from yolofleet.config.schema import TrainConfig
from yolofleet.families.build import family_of
from yolofleet.families.networks.detector import Detector
from yolofleet.families.networks.precision import autocast
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.cuda_graph import LAUNCH_BOUND, ROOM, GraphedPass, TrainingPass
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.memory_probe import LargestPass, reserved_by


def capture(
    config: TrainConfig, sizes: tuple[float, float], largest: LargestPass, images: int, world: World
) -> None:
    """Make CUDA graphs for passes of ``images`` images (``--passes``). No collective.

    Args:
        sizes: smallest and largest training size, as fractions of ``--img``.

    Raises:
        ConfigError: ``--passes graphs`` where they are not possible.
    """
    model, is_asked = cast(Detector, largest.state.model), config.passes == "graphs"
    # nobody has run those of several processes and of parts of a network on GPUs
    is_unproven = world.size > 1 or model.reads_targets
    if config.passes in ("plain", "compiled") or (is_unproven and not is_asked):
        return
    replicas, device = largest.state.replicas, largest.state.replicas.lead.device
    part = replicas.lead.image_part
    reasons = {
        f"devices of type {device.type} have none": not devices.has_graphs(device),
        "the size of the images varies": config.rect or sizes != (1, 1),
        "--checkpoint-activations computes blocks again": config.checkpoint_activations,
        "--sync-bn sums over the ranks during a pass": config.sync_bn,
        "DataParallel uses several threads": len(replicas.all) > 1,
        "all of the network reads the targets of a pass": model.reads_targets and part is replicas.lead.model,
        "your own network may compute something else in each pass": family_of(model.description).user_code,
    }
    reason = next((text for text, holds in reasons.items() if holds), "")
    if not reason:
        needed = reserved_by(partial(largest.run, images), device)
        if (info := devices.memory_info(device)) is None or info[0] <= ROOM * needed:
            reason = f"{device} has too little memory for a second copy of a pass"
    if not reason:
        casts = partial(autocast, largest.precision, device)
        training_pass = TrainingPass(part, casts)
        pixels = torch.zeros((images, largest.side, largest.side, 3), device=device).permute(0, 3, 1, 2)
        try:
            if is_asked or training_pass.launch_share(pixels) > LAUNCH_BOUND:
                replicas.lead.replace_usual(GraphedPass(training_pass, pixels), images)
        except RuntimeError as problem:
            devices.release_memory(device)
            reason = f"torch cannot capture the network: {' '.join(str(problem).split())[:200]}"
    if reason and is_asked:
        raise ConfigError(f"--passes graphs: {reason}", hint="--passes auto")
