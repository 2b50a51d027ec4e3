"""The stage of an overflow in one layer of the network."""

from __future__ import annotations

import torch
from torch import Tensor

from yolofleet.families.weights.format import non_finite
from yolofleet.measure.selftest.device_checks import Training


def forgets_an_overflow_in_a_layer(device: torch.device, precision: str, per_pass: int, model: str) -> str:
    """Check that a step whose activations overflow in one layer leaves no trace: all is finite after the next good step.

    Args:
        per_pass: micro-batches that pass the network together.
    """
    training, overflows = Training(device, model=model, precision=precision, per_pass=per_pass), False

    def overflow(_module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        return output * float("inf") if overflows else None

    layer = next(m for m in training.state.model.modules() if isinstance(m, torch.nn.Conv2d))
    hook = layer.register_forward_hook(overflow)
    training.state.scaler.load_state_dict({"scale": 256.0, "_growth_tracker": 0})
    training.steps(1)
    before = training.tensors()
    overflows = True
    training.steps(1)
    overflows = False
    after = training.tensors()
    changed = [name for name, t in before.items() if not torch.equal(t, after[name])]
    assert not changed, f"the step that overflowed changed {len(changed)} tensors, first {changed[0]}"
    loss = training.steps(2)
    hook.remove()
    tensors = training.tensors()
    broken = non_finite(tensors)
    assert not broken, (
        f"{len(broken)} of {len(tensors)} tensors are not finite after the next good step with {per_pass} micro-batches in a "
        f"pass, first {broken[0]}"
    )
    return f"{len(tensors)} tensors are finite, loss {loss:.4g}"
