"""The lines of the header that a training prints."""

from __future__ import annotations

from yolofleet.config.load import Resolved
from yolofleet.config.schema import TrainConfig
from yolofleet.input.pixels import COMPILED
from yolofleet.parallel.process import loader_processes, place_text, replica_devices
from yolofleet.parallel.world import World
from yolofleet.rank.network import Network, Prepared


def header_lines(
    network: Network, prepared: Prepared, precision: str, cached: str, world: World
) -> dict[str, str]:
    """Return the lines of the header, by name; ``cached`` says where decoded images are kept."""
    config, schedule, splitter = prepared.config, prepared.schedule, prepared.splitter
    workers = loader_processes(config.workers, world)
    model, recipe = network.model, network.recipe.value
    frozen = f", {len(prepared.frozen)} tensors frozen" if prepared.frozen else ""
    steps = min(schedule.steps_of_run, config.max_steps or schedule.steps_of_run)
    rounded = (
        f" (--img {config.img} rounded up to stride {network.stride})" if network.img != config.img else ""
    )
    lines = {
        "where": place_text(world, len(replica_devices(config, world))),
        "model": f"{model.description.name}, {sum(p.numel() for p in model.parameters()):,} parameters{frozen}",
        "step": ("" if config.minutes else f"{steps} step{'s' if steps != 1 else ''} of ")
        + f"{schedule.step_images} images (after warm-up) as micro-batches of {splitter.micro_batch}, "
        + (f"up to {splitter.per_pass} in a pass, " if splitter.per_pass > 1 else "")
        + f"{precision}, {config.reduce} sums",
        "rate": f"lr0 {recipe.lr0:g} x {schedule.lr_factor:.4g} (--lr-scale {config.lr_scale}: recipe made for "
        f"{recipe.reference_batch} images a step), {schedule.decay}, {config.optimizer_class or config.optimizer}",
        "image": f"{network.img} px{rounded}" + (", rectangles without mosaics" if config.rect else ""),
        "loader": (f"{workers} processes" if workers else "in this process")
        + f"; {cached}"
        + ("; images are augmented on the device" if config.augment_on == "device" else "")
        + ("" if COMPILED else "; augmentation is slow: yolofleet was installed without a C compiler"),
    }
    return {**lines, "anchors": network.anchors} if network.anchors else lines


def chosen_settings(resolved: Resolved[TrainConfig]) -> list[tuple[str, str, str]]:
    """Return name, value and source of each setting that is not a default."""
    rows = []
    for name, source in resolved.sources.items():
        if resolved.is_given(name):
            value = getattr(resolved.value, name)
            rows.append((name, " ".join(value) if isinstance(value, tuple) else str(value), source))
    return rows
