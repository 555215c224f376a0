"""How peers that step by themselves exchange what they moved: every such method as its authors have it.

A run names a method and may say otherwise key by key (swarmnet/run/manifest.py): `Sync.own_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

InnerName = Literal["muon", "adamw"]
"""Optimizers that a peer can step by itself with (swarmnet/optimizer/own_steps/inner_step.py)."""
SentName = Literal["bit", "four-bits", "eight-bits", "largest"]
"""How numbers are told (swarmnet/optimizer/moved/)."""
RestName = Literal["live", "feedback", "dropped"]
"""What becomes of what was moved and not told."""
THOUSAND = 1000
BITS: Mapping[SentName, int] = {"bit": 1, "four-bits": 4, "eight-bits": 8}
"""Of a number, where all of a part are told."""


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """All that tells one such method from another."""

    inner: InnerName
    parts: int
    """A round is about one of so many parts of the weights, in turn."""
    sent: SentName
    rest: RestName
    outer_rate: float = 1.0
    """What the group steps by, times the mean of what was moved."""
    outer_momentum: float = 0.0
    """Of Nesterov's kind, settled like the weights; 0: the group has none."""
    is_steady: bool = False
    """Each part has its turn at equal distances; else in an order that is drawn for each cycle."""

    @property
    def outer_thousandths(self) -> tuple[int, int]:
        """Rate and momentum as whole numbers: what is settled must be the same on all machines."""
        return round(self.outer_rate * THOUSAND), round(self.outer_momentum * THOUSAND)

    @property
    def settles_momentum(self) -> bool:
        return self.outer_thousandths[1] > 0


AUTHORS: Mapping[str, OwnSteps] = {
    "local-steps": OwnSteps("muon", 4, "bit", "live"),
    "diloco": OwnSteps("adamw", 1, "eight-bits", "dropped", 0.7, 0.9),
    "streaming-diloco": OwnSteps("adamw", 4, "four-bits", "dropped", 0.4, 0.9, is_steady=True),
    "sparse-loco": OwnSteps("adamw", 1, "largest", "feedback"),
    "partitioned": OwnSteps("adamw", 16, "eight-bits", "live"),
}
"""DiLoCo: arXiv:2311.08105 (outer rate 0.7, momentum 0.9), in eight bits a number, as INTELLECT-1 sent them.
Streaming DiLoCo: arXiv:2501.18512 (outer rate 0.4, four bits); its fragments are of three layers each, so
their number grows with the model, and the momentum is DiLoCo's, for it names none. SparseLoCo: 2508.15706.
Partitioned averaging: a twentieth at a time, as SPARTA has it; 16 is the power of two nearest to that."""
OUTER = ("diloco", "streaming-diloco")
"""Those with an optimizer outside."""
