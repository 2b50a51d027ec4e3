"""Check that tensors of a file fit the network that it describes, and have possible values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from yolofleet.families.build import outline
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.weights.format import non_finite
from yolofleet.families.weights.value import UNCOUNTED
from yolofleet.support.errors import CheckpointError, ConfigError, NonFiniteError
from yolofleet.support.text import screen_line

if TYPE_CHECKING:
    from yolofleet.families.weights.pickles import StoredTensor


def misfits(given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int) -> list[str]:
    """Return texts about missing, extra and differently shaped tensors, compared with the description's network."""
    expected = {name: tuple(t.shape) for name, t in outline(description, nc).state_dict().items()}
    found = {name: tuple(t.shape) for name, t in given.items()}
    missing = [f"{n} is missing" for n in expected if n not in found and not n.endswith(UNCOUNTED)]
    surplus = [f"{n} is unknown" for n in found if n not in expected]
    wrong = [
        f"{n} is {found[n]} instead of {shape}"
        for n, shape in expected.items()
        if n in found and found[n] != shape
    ]
    return missing + surplus + wrong


def check_fit(
    given: Mapping[str, Tensor | StoredTensor], description: ModelDescription, nc: int, source: str
) -> None:
    """Raise CheckpointError if names or shapes differ from the description's network."""
    try:
        problems = misfits(given, description, nc)
    except ConfigError as problem:
        raise CheckpointError(f"{source}: {problem.what}") from None
    if not problems:
        return
    folded = "model.0.conv.bias" in given and "model.0.bn.weight" not in given
    raise CheckpointError(
        f"{source}: {len(problems)} tensors do not fit the model {description.name}: {'; '.join(problems[:3])}",
        hint="its batch normalisation is folded; use the file that training wrote"
        if folded
        else "the file belongs to another model",
    )


def check_values(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise on values that no training gives, because they would make every prediction wrong without an error.

    Raises:
        NonFiniteError: a tensor has NaN or infinity.
        CheckpointError: a tensor has values that are not real numbers, or is a negative variance.
    """
    for name, t in tensors.items():
        if name.endswith(UNCOUNTED):
            continue
        if not t.is_floating_point():
            raise CheckpointError(f"{source}: {screen_line(name)} has {t.dtype}, expected real numbers")
        if non_finite({name: t}):
            raise NonFiniteError(f"{source}: {screen_line(name)} is not finite")
        if name.endswith("running_var") and t.numel() and t.min() < 0:
            raise CheckpointError(
                f"{source}: the variance {screen_line(name)} has negative values",
                hint="the file is damaged, or belongs to another model; use another copy",
            )
