"""The published weights of PP-YOLOE. Only files with a publicly known digest are downloaded. No torch here."""

from __future__ import annotations

from yolofleet.storage.fetch import Item

LICENCE = "Apache-2.0"
ORIGIN = "https://github.com/PaddlePaddle/PaddleDetection/tree/release/2.8/configs/ppyoloe"


def items() -> dict[str, Item]:
    """Return the files by the names of their built-in models."""
    names = {f"ppyoloe-{size}": f"ppyoloe_crn_{size}_300e_coco.pdparams" for size in "smlx"}
    names |= {f"ppyoloe-plus-{size}": f"ppyoloe_plus_crn_{size}_80e_coco.pdparams" for size in "smlx"}
    return {
        name: Item(file, (f"https://paddledet.bj.bcebos.com/models/{file}",), None, None, LICENCE, ORIGIN)
        for name, file in names.items()
    }
