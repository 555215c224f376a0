"""Presets of the methods with local steps: how peers exchange their weight deltas.

Each preset has the values of the method's paper. A run names a method and may override single keys
(`swarmnet/run/manifest.py`); the result is `Sync.local_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

InnerOptimizerName = Literal["muon", "adamw"]
"""Local optimizers (`swarmnet/optimizer/local_steps/inner_optimizer.py`)."""
DeltaCodecName = Literal["sign", "e3m0", "int8", "topk-2bit"]
"""Codecs of the deltas (`swarmnet/optimizer/delta_codecs/`)."""
ResidualName = Literal["local", "error-feedback", "drop"]
"""What happens to the part of a delta that was not sent."""
THOUSAND = 1000
BITS: Mapping[DeltaCodecName, int] = {"sign": 1, "e3m0": 4, "int8": 8}
"""Bits per number of codecs that send all numbers of a fragment."""


@dataclass(frozen=True, slots=True)
class LocalStepConfig:
    """The configuration of one method with local steps."""

    inner_optimizer: InnerOptimizerName
    fragments: int
    """Number of fragments of the weights. Each round covers one of them, in turn."""
    delta_codec: DeltaCodecName
    residual: ResidualName
    outer_lr: float = 1.0
    """Factor on the mean delta in the group's step."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the group, settled like the weights; 0 if there is none."""
    is_steady: bool = False
    """Whether fragments have their turns at equal distances; otherwise in an order drawn for each cycle."""

    @property
    def outer_thousandths(self) -> tuple[int, int]:
        """Rate and momentum as integers, because settled values must be equal on all machines."""
        return round(self.outer_lr * THOUSAND), round(self.outer_momentum * THOUSAND)

    @property
    def settles_momentum(self) -> bool:
        return self.outer_thousandths[1] > 0


PRESETS: Mapping[str, LocalStepConfig] = {
    "local-steps": LocalStepConfig("muon", 4, "sign", "local"),
    "diloco": LocalStepConfig("adamw", 1, "int8", "drop", 0.7, 0.9),
    "streaming-diloco": LocalStepConfig("adamw", 4, "e3m0", "drop", 0.4, 0.9, is_steady=True),
    "sparse-loco": LocalStepConfig("adamw", 1, "topk-2bit", "error-feedback"),
    "sparta": LocalStepConfig("adamw", 16, "int8", "local"),
}
"""Sources of the presets. DiLoCo: arXiv:2311.08105 (outer rate 0.7, momentum 0.9), with eight bits per
number, as INTELLECT-1 sent them. Streaming DiLoCo: arXiv:2501.18512 (outer rate 0.4, four bits). It has
fragments of three layers, so their number grows with the model. It names no momentum, so DiLoCo's is used.
SparseLoCo: 2508.15706. Partitioned averaging: SPARTA averages a twentieth at a time; 16 is a near power of
two."""
MOMENTUM_PRESETS = ("diloco", "streaming-diloco")
"""Methods with an outer optimizer."""
