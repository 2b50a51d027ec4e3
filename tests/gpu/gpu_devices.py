"""The devices that the tests of this folder use.

``YOLOFLEET_TEST_GPUS`` chooses them: unset, the GPUs of this machine; ``cpu``: processes on the CPU; ``mini``: the
simulated accelerator of ``tests/accelerator``, in this process only. So a machine without a GPU can run the same bodies,
which shows faults of the tests. Tests marked ``only_gpus`` skip there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from yolofleet.support.devices import accelerator, device_count

ON = os.environ.get("YOLOFLEET_TEST_GPUS", "")
ON_CPUS = ON == "cpu"
if ON == "mini":
    sys.path.append(str(Path(__file__).parents[1] / "accelerator"))
    import miniature

    miniature.install()
COUNT = 2 if ON_CPUS else device_count()
KIND = "cpu" if ON_CPUS else accelerator()
IS_GPU = KIND not in ("cpu", "mini")


def places(*ids: int) -> str:
    """Return the value of ``--device`` for a process on each of these devices."""
    if ON_CPUS:
        return f"cpu:{len(ids)}" if len(ids) > 1 else "cpu"
    return ",".join(map(str, ids))


def shared_by(processes: int) -> str:
    """Return the value of ``--device`` for so many processes on the first device."""
    return f"cpu:{processes}" if ON_CPUS else f"0:{processes}"


# with one GPU, two processes share it
ONE, SECOND, TWO, SWAPPED = places(0), places(1), shared_by(2) if COUNT == 1 else places(0, 1), places(1, 0)
ALL = shared_by(2) if COUNT == 1 else places(*range(COUNT))
DEVICE = torch.device("cpu") if ON_CPUS else torch.device(KIND or "cuda", 0)
PRECISIONS = ("fp32", "bf16") if ON_CPUS else ("fp16", "fp32")  # the CPU has no fp16

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not COUNT, reason="needs an accelerator")]
two_gpus = pytest.mark.skipif(COUNT < 2, reason="needs two accelerator devices")
only_gpus = pytest.mark.skipif(not IS_GPU, reason="means nothing without a GPU")
only_cuda = pytest.mark.skipif(KIND != "cuda", reason="needs a function of CUDA")


def are_equal_devices() -> bool:
    """Return whether the devices of ``TWO`` are of one product; others give other bits."""
    return ON_CPUS or COUNT == 1 or torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
