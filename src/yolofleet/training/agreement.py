"""Check that all ranks have equal settings at the start, and equal state every few steps (by exchanging digests).

On equal machines a difference is a fault (memory, a kernel that is not deterministic, a rank that skipped a step) and
ends the run. On mixed hardware the last bits may differ. As long as the difference is rounding, all ranks then take
rank 0's state, with a note.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from yolofleet import __version__
from yolofleet.config.schema import Recipe, TrainConfig, flag_of
from yolofleet.support import devices
from yolofleet.support.errors import ClusterError
from yolofleet.support.text import shown
from yolofleet.training.parallel.world import World
from yolofleet.training.state import TrainState

PER_MACHINE = {  # settings that may differ between machines: paths, devices, memory and disk
    *("data", "cfg", "weights", "recipe", "set", "resume", "project", "name", "exist_ok"),
    *("device", "threads", "workers", "cache", "stage", "timeout_s", "recipe_class", "callbacks"),
    *("preempt_notice", "plots", "quiet", "keep_last", "log", "checkpoint_to"),
}
CHECK_STEPS = 50  # between two checks of a run
ROUNDING = 1e-4  # largest relative difference of the weights' norm that counts as rounding


def kernels(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, besides the shape of a micro-batch."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if devices.is_host(device):
        found["device"] = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        return found
    return found | devices.kernel_versions(device)


def have_equal_kernels(world: World) -> bool:
    """Return whether all ranks compute with equal kernels. Collective: every rank."""
    every = world.gather(kernels(world.device))
    return all(theirs == every[0] for theirs in every)


def check_settings(config: TrainConfig, recipe: Recipe, world: World) -> None:
    """Raise if ranks were started with different settings. Collective: every rank.

    Raises:
        ClusterError: names the first rank that differs from rank 0, and in what.
    """
    mine = {
        flag_of(name, field): getattr(config, name)
        for name, field in TrainConfig.model_fields.items()
        if name not in PER_MACHINE
    }
    mine |= {"--cache jpeg": config.cache == "jpeg", "--stage": config.stage is not None}
    mine |= {f"--set {name}": value for name, value in recipe.model_dump().items()}
    mine |= {"yolofleet": __version__, "host": world.host}
    every = world.gather(mine)
    for rank, theirs in enumerate(every):
        for name in mine:
            if name != "host" and theirs.get(name) != every[0].get(name):
                raise ClusterError(
                    f"rank {rank} ({theirs['host']}) was started with {name} {shown(theirs.get(name))}, "
                    f"rank 0 ({every[0]['host']}) with {shown(every[0].get(name))}",
                    hint="give the same command on every machine; --device, --data and other paths may differ",
                )


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of the bits of float32 tensors of one device; costs one pass over them there."""
    sums, longest = [], max(t.numel() for t in tensors.values())
    device = next(iter(tensors.values())).device
    weights = torch.arange(1, longest + 1, device=device, dtype=torch.int32)
    for t in tensors.values():
        bits = t.detach().contiguous().view(torch.int32).flatten()
        # integers wrap around alike on all devices
        sums.append((bits * weights[: len(bits)]).sum(dtype=torch.int64))
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()[:16]


def check_agreement(state: TrainState, world: World, *, equal_kernels: bool) -> None:
    """Compare the weights and batch-norm statistics of all ranks. Collective: every rank, at the same step.

    Raises:
        ClusterError: names the ranks whose state differs from the most frequent one.
    """
    tensors = {name: t.detach() for name, t in state.live.items()}
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors.values())))))
    mine = {"digest": digest(tensors), "norm": norm, "host": world.host}
    every = world.gather(mine)
    usual, _ = Counter(one["digest"] for one in every).most_common(1)[0]
    odd = [rank for rank, one in enumerate(every) if one["digest"] != usual]
    if not odd:
        return
    names = ", ".join(f"{rank} ({every[rank]['host']})" for rank in odd)
    spread = max(abs(one["norm"] / every[0]["norm"] - 1) for one in every)
    if equal_kernels or not spread <= ROUNDING:
        raise ClusterError(
            f"after step {state.step} the weights of rank {names} differ from those of the other ranks "
            f"(norms differ by {spread:.1e})",
            hint="run yolofleet selftest; --resume continues from the last checkpoint",
        )
    world.console.note(
        f"after step {state.step} ranks differ in the last bits (mixed hardware): all take rank 0's state"
    )
    for t in state.all_tensors():
        world.broadcast_(t)
    state.replicas.copy_to_devices()
