"""D-FINE networks (arXiv:2410.13842): HGNetV2, hybrid encoder, decoder that refines distributions.

tests/parity/test_detr_parity.py compares outputs, parameter counts and names with transformers.
"""

from __future__ import annotations

from yolofleet.families.dfine.backbone import HgNet
from yolofleet.families.dfine.decoder import DfineDecoder
from yolofleet.families.dfine.encoder import DfineEncoder
from yolofleet.families.rtdetr.network import DetrNetwork


class DfineNetwork(DetrNetwork):
    """D-FINE. Its raw predictions are those of :class:`DetrNetwork`, with these differences in training:

    3, 4, 7, 8  have a first entry more, [N, L + 1, .]: the box before the refinement, and its class logits
    9, 10  logits of the distributions [N, L, Q, 4 (R + 1)] with R + 1 = 33 bins, and the boxes [N, L, Q, 4] whose edges
        they move
    11, 12  the same two of the denoising queries
    """

    parts = HgNet, DfineEncoder, DfineDecoder
