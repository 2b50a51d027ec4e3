"""D-FINE networks (arXiv:2410.13842): HGNetV2, hybrid encoder, decoder that refines distributions.

tests/parity/test_detr_parity.py compares outputs, parameter counts and names with transformers.
"""

from __future__ import annotations

from yolofleet.families.dfine.backbone import HgNet
from yolofleet.families.dfine.decoder import DfineDecoder
from yolofleet.families.dfine.encoder import DfineEncoder
from yolofleet.families.rtdetr.network import DetrNetwork


class DfineNetwork(DetrNetwork):
    """D-FINE."""

    parts = HgNet, DfineEncoder, DfineDecoder
