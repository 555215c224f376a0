"""How the loss of a sync method depends on its peers and on the bits that it sends for each weight."""

from __future__ import annotations

from dataclasses import dataclass
from math import pow

MOST_BITS = 600.0
"""Bits of a weight up to which the laws were fitted. More are taken for as many."""


@dataclass(frozen=True, slots=True)
class LossLaw:
    """Loss, divided by that of AdamW on the mean gradient of the same peers, at equal tokens.

    loss / AdamW's = scale * peers ** peers_exponent / bits ** bits_exponent

    The constants are least squares over the trials of docs/learning.md
    (tests/swarmnet/run/test_loss_laws.py).
    """

    scale: float
    peers_exponent: float = 0.0
    bits_exponent: float = 0.0
    error: float = 0.03
    """Root mean square of the error on a trial to which the law was not fitted, as a share of the loss."""
    fitted_peers: int = 32
    """Largest number of peers to which the law was fitted."""

    def ratio(self, peers: float, bits: float) -> float:
        """Return the loss of `peers` peers that send `bits` bits per weight in the run, over AdamW's."""
        sent = min(max(bits, 1.0), MOST_BITS)
        return self.scale * pow(max(peers, 1.0), self.peers_exponent) / pow(sent, self.bits_exponent)
