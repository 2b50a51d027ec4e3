"""Operations of a training step, counted on the CPU: on a GPU each is a kernel that the host must launch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from small_training import SmallRun, small_run
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from yolofleet.training.parallel.grouped_norm import PYTORCH, GroupedBatchNorm2d, Kernels

ROOM = 1.1  # other versions of torch split some operations
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts the operations inside its block that would be kernels, by name: neither views nor bare allocations.

    An operation over a list of tensors counts as one, because a few kernels do it. Views, ``FREE`` and what Python does
    launch nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.kinds.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and (name := func.overloadpacket.__name__) not in FREE:
            self.kinds[name] += 1
        return func(*args, **(kwargs or {}))

    def as_triton(self, run: SmallRun) -> None:
        """Count batch norm of several micro-batches as Triton's kernels, which test_grouped_norm.py counts."""
        for layer in run.state.model.modules():
            if isinstance(layer, GroupedBatchNorm2d):
                layer.kernels = Kernels(
                    self._kernels(PYTORCH.normalise), self._kernels(PYTORCH.differentiate)
                )

    def _kernels(self, compute: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.kinds["Triton's batch norm"] += 2
            with _disable_current_modes():
                return compute(*args)

        return counted


BUDGETS = {  # in float32: forward, loss, backward, and the rest of a step of one micro-batch
    ("yolov5-narrow", 0.0): (201, 72, 318, 63),
    ("yolov3-narrow", 0.0): (45, 68, 156, 55),
    ("ppyoloe-narrow", 0.0): (317, 262, 437, 65),
    ("ppyoloe-narrow", 0.9): (317, 360, 437, 65),
    ("dfine-toy", 0.0): (491, 199, 710, 54),
    ("rfdetr-toy", 0.0): (315, 138, 510, 50),
}
PASSES = {  # in bfloat16: a step in one pass of eight micro-batches, by the kernels of PyTorch and of Triton
    ("yolov5-narrow", 0.0): (1770, 915),
    ("ppyoloe-narrow", 0.0): (2649, 1479),
}


@pytest.mark.parametrize(("model", "progress"), BUDGETS)
def test_a_step_launches_no_more_operations_than_its_budget(model: str, progress: float) -> None:
    run = small_run(model, images=2, micro_batch=2)
    run.progress = progress
    run.do(2)
    shares = run.micro_batches(run.step)
    replica, loss, (batch,) = run.state.replicas.all[0], run.loss.at(progress), shares[0]
    run.state.replicas.begin(1)
    images = batch.images_on(replica.device).float().div_(255)
    with Launches() as forward:
        raws = replica.forward(images, batch.targets)
    with Launches() as of_loss:
        sums = loss.sums(raws, batch.targets)
    total_loss = sums.sum()
    with Launches() as backward:
        total_loss.backward()
    with Launches() as step:
        run.do(1, shares=shares)
    parts = [forward.count, of_loss.count, backward.count]
    parts.append(step.count - sum(parts))
    budget = BUDGETS[model, progress]
    assert all(count <= ROOM * most for count, most in zip(parts, budget, strict=True)), (parts, budget)


@pytest.mark.parametrize(("model", "progress"), PASSES)
def test_a_pass_of_eight_micro_batches_launches_no_more_operations_than_its_budget(
    model: str, progress: float
) -> None:
    run = small_run(model, images=16, micro_batch=2, per_pass=8, precision="bf16")
    run.progress = progress
    run.do(1)
    pytorch, triton = Launches(), Launches()
    with pytorch:
        run.do(1, shares=run.micro_batches(1))
    triton.as_triton(run)
    with triton:
        run.do(1, shares=run.micro_batches(1))
    budget = PASSES[model, progress]
    assert all(
        counted.count <= ROOM * most for counted, most in zip((pytorch, triton), budget, strict=True)
    ), (pytorch.count, triton.count, budget)
