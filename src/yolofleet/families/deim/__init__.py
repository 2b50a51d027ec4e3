"""D-FINE as DEIM trains it."""

from dataclasses import replace

from yolofleet.families import dfine

FAMILY = replace(
    dfine.FAMILY,
    name="deim",
    from_dict="deim.description:DeimDescription.from_dict",
    recipe="deim",
    preset_names="deim.description:PRESETS.keys",
    preset="deim.description:PRESETS.__getitem__",
    canonical="deim.description:canonical",
    published=dict,
)
