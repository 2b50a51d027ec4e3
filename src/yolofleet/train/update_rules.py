"""Optimizers that torch does not have: Lion, LARS, LAMB and schedule-free SGD and AdamW.

Each keeps its slots from the start, so a first step that is left out finds nothing to undo but their values. All ranks
compute the same update from the same gradient, norms of whole parameters included, so no rule has a collective.
In the formulas x is a parameter, g its gradient, lr its rate and wd its weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Group = dict[str, Any]
Tensors = list[Tensor]  # one for each parameter of a group
TRUSTED = "weight"  # role of the parameters that LARS and LAMB scale; both papers leave out biases and norms


class Part(NamedTuple):
    """What an update reads and changes of one group of P parameters.

    Attributes:
        group: its settings, with this step's rates.
        params, gradients: P tensors.
        slots: P tensors for each of the rule's ``slots``, of the shapes of the parameters.
        counts: the rule's ``counters`` by name.
    """

    group: Group
    params: Tensors
    gradients: Tensors
    slots: list[Tensors]
    counts: dict[str, float]


class UpdateRule(torch.optim.Optimizer):
    """An optimizer over lists of tensors, so that a group costs a few calls.

    ``slots`` start at zero and have the shape of their parameter. ``counters`` are numbers on the CPU, one for each
    parameter because a checkpoint stores slots by parameter; they are equal within a group.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    counters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, groups: Iterable[Any], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {slot: torch.zeros_like(p) for slot in self.slots}
            self.state[p] |= {name: torch.zeros((), dtype=torch.float64) for name in self.counters}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p.detach() for p in group["params"]]
            gradients = [p.grad for p in group["params"]]
            states = [self.state[p] for p in group["params"]]
            slots = [[state[slot] for state in states] for slot in self.slots]
            counts = {name: float(states[0][name]) for name in self.counters}
            self.update(Part(group, params, gradients, slots, counts))
            for state in states:
                for name, count in counts.items():
                    state[name].fill_(count)

    def update(self, part: Part) -> None:
        """Change the parameters, slots and counters of a group in place; leave the gradients as they are."""
        raise NotImplementedError


class Lion(UpdateRule):
    """x -= lr (sign(beta1 m + (1 - beta1) g) + wd x), then m = beta2 m + (1 - beta2) g (arXiv:2302.06675)."""

    slots = ("exp_avg",)

    def __init__(self, groups: Iterable[Any], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=lr, betas=betas)

    def update(self, part: Part) -> None:
        group, params, gradients, slots, _counts = part
        (averages,), (beta1, beta2) = slots, group["betas"]
        direction = torch._foreach_mul(averages, beta1)
        torch._foreach_add_(direction, gradients, alpha=1 - beta1)
        torch._foreach_sign_(direction)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, direction, alpha=-group["lr"])
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, gradients, alpha=1 - beta2)


class LARS(UpdateRule):
    """v = momentum v + lr r (g + wd x), then x -= v (arXiv:1708.03888).

    The trust ratio r is ``trust`` |x| / (|g| + wd |x|), and 1 for biases and norms.
    """

    slots = ("momentum_buffer",)

    def __init__(self, groups: Iterable[Any], lr: float, momentum: float, trust: float = 0.001) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, trust=trust)

    def update(self, part: Part) -> None:
        group, params, gradients, slots, _counts = part
        (velocities,), decay = slots, group["weight_decay"]
        direction = torch._foreach_add(gradients, params, alpha=decay)
        if group["role"] == TRUSTED:
            sizes, slopes = norms(params), norms(gradients)
            torch._foreach_mul_(direction, trust_ratios(group["trust"] * sizes, slopes + decay * sizes))
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, direction, alpha=group["lr"])
        torch._foreach_sub_(params, velocities)


class LAMB(UpdateRule):
    """u = m' / (sqrt(v') + eps) + wd x with Adam's m' and v', then x -= lr r u (arXiv:1904.00962, algorithm 2).

    The trust ratio r is |x| / |u|, and 1 for biases and norms.
    """

    slots = ("exp_avg", "exp_avg_sq")
    counters = ("step",)

    def __init__(
        self, groups: Iterable[Any], lr: float, betas: tuple[float, float], eps: float = 1e-6
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)

    def update(self, part: Part) -> None:
        group, params, gradients, slots, counts = part
        means, squares = slots
        beta1, beta2 = group["betas"]
        counts["step"] += 1
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        direction = over_root_mean_square(means, gradients, squares, counts["step"], beta2, group["eps"])
        torch._foreach_div_(direction, 1 - beta1 ** counts["step"])
        torch._foreach_add_(direction, params, alpha=group["weight_decay"])
        if group["role"] == TRUSTED:
            torch._foreach_mul_(direction, trust_ratios(norms(params), norms(direction)))
        torch._foreach_add_(params, direction, alpha=-group["lr"])


class ScheduleFreeSGD(UpdateRule):
    """Schedule-free SGD (arXiv:2405.15682): its average replaces both the decay of the rate and a moving average.

    The parameter is y, where the gradient is taken. With u = g + wd y:
    z -= lr u; x = (1 - c) x + c z; y = (1 - momentum) z + momentum x. The network to validate is x, the average of all z
    with weights lr^2, for which lr is the largest rate so far: c = lr^2 / (sum of lr^2).
    """

    slots: ClassVar[tuple[str, ...]] = ("z", "x")
    counters: ClassVar[tuple[str, ...]] = ("largest_lr", "weight_sum")

    def __init__(self, groups: Iterable[Any], lr: float, momentum: float) -> None:
        self._begin(groups, lr=lr, momentum=momentum)

    def _begin(self, groups: Iterable[Any], **defaults: Any) -> None:
        UpdateRule.__init__(self, groups, **defaults)
        for p, state in self.state.items():
            state["z"].copy_(p.detach())
            state["x"].copy_(p.detach())

    def direction(
        self, group: Group, gradients: Tensors, moments: list[Tensors], counts: dict[str, float]
    ) -> Tensors:
        """Return u without weight decay, in new tensors."""
        return [g.clone() for g in gradients]

    def update(self, part: Part) -> None:
        group, params, gradients, slots, counts = part
        z, x, *moments = slots
        momentum = group["betas"][0] if "betas" in group else group["momentum"]
        direction = self.direction(group, gradients, moments, counts)
        torch._foreach_add_(direction, params, alpha=group["weight_decay"])
        counts["largest_lr"] = max(counts["largest_lr"], group["lr"])
        counts["weight_sum"] += counts["largest_lr"] ** 2
        c = counts["largest_lr"] ** 2 / counts["weight_sum"] if counts["weight_sum"] else 0.0
        torch._foreach_add_(z, direction, alpha=-group["lr"])
        torch._foreach_lerp_(x, z, c)
        torch._foreach_copy_(params, z)
        torch._foreach_lerp_(params, x, momentum)


class ScheduleFreeAdamW(ScheduleFreeSGD):
    """As :class:`ScheduleFreeSGD`, with u = g / (sqrt(v') + eps) + wd y and Adam's v'."""

    slots = ("z", "x", "exp_avg_sq")
    counters = ("largest_lr", "weight_sum", "step")

    def __init__(
        self, groups: Iterable[Any], lr: float, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        self._begin(groups, lr=lr, betas=betas, eps=eps)

    def direction(
        self, group: Group, gradients: Tensors, moments: list[Tensors], counts: dict[str, float]
    ) -> Tensors:
        (squares,), beta2 = moments, group["betas"][1]
        counts["step"] += 1
        return over_root_mean_square(gradients, gradients, squares, counts["step"], beta2, group["eps"])


def averaged_parameter(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return the tensor to validate in place of ``parameter``: itself, or the average of a schedule-free optimizer."""
    found: Tensor = optimizer.state[parameter].get("x", parameter)
    return found


def over_root_mean_square(
    numerators: Tensors, gradients: Tensors, squares: Tensors, step: float, beta2: float, eps: float
) -> Tensors:
    """Update the mean squares v of the gradients; return numerators / (sqrt(v / (1 - beta2^step)) + eps)."""
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(roots, eps)
    return list(torch._foreach_div(numerators, roots))


def norms(tensors: Tensors) -> Tensor:
    """Return [P] the 2-norm of each tensor."""
    return torch.stack(torch._foreach_norm(tensors))


def trust_ratios(sizes: Tensor, slopes: Tensor) -> Tensors:
    """Return sizes / slopes for each parameter, and 1 where either is 0: a parameter at 0 must be able to leave it."""
    usable = (sizes > 0) & (slopes > 0)
    return list(torch.where(usable, sizes / slopes, torch.ones_like(sizes)).unbind())
