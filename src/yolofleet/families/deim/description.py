"""DEIM's networks of D-FINE as data. No torch here.

Their files have the names and shapes of D-FINE's, so the description says which activation the decoder has.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from yolofleet.families.dfine import description as dfine


@dataclass(frozen=True)
class DeimDescription(dfine.DfineDescription):
    """D-FINE with SiLU in the decoder's linear layers. No norm and no stem of the backbone is constant."""

    family = "deim"
    activation = "silu"
    rates = {name.replace("dfine", "deim"): values for name, values in dfine.DfineDescription.rates.items()}


PRESETS = {
    name: DeimDescription(**asdict(preset) | {"name": name, "is_frozen": False})
    for preset in dfine.PRESETS.values()
    if not preset.mask_width
    for name in [preset.name.replace("dfine", "deim")]
}


def canonical(name: str) -> str | None:
    """Return the built-in network that the authors call ``name``, such as ``deim_dfine_hgnetv2_n_coco_160e``; None if unknown."""
    pattern = r"deim-(d-?fine-)?(hgnetv2-)?([nsmlx])(-coco)?(-\d{1,3}e)?"
    match = re.fullmatch(pattern, name.lower().replace("_", "-"))
    return match and f"deim-{match[3]}"
