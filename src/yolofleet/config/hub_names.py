"""Names of weights on the Hugging Face hub: ``hf:USER/NAME`` or ``hf:USER/NAME@REVISION``."""

from __future__ import annotations

import re

HUB = "hf:"
_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
HUB_NAME = re.compile(rf"{HUB}({_PART}/{_PART})(?:@(\w[\w.-]{{0,99}}))?", re.ASCII)


def is_hub_name(name: object) -> bool:
    """Return whether a value of ``--weights`` is meant for the hub, also if no repository can have that name."""
    return isinstance(name, str) and name.startswith(HUB)
