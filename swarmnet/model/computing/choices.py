"""How a peer computes its stage: its own business, for what settles does not depend on it.

No torch: what only counts bytes starts without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["fp32", "bf16"]
Recompute = Literal["none", "stage", "layer"]
"""What backward computes again: nothing; the stage's forward, so that a microbatch that waits for its
gradient keeps its inputs only; or each layer's, so that one at work keeps the inputs of its layers only (Chen
et al., arXiv:1604.06174). Both take 4/3 of the compute."""
MomentsPlace = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Computing:
    """Torch's float32 is float32 here: TF32 is off, as torch has it, and stays so."""

    dtype: DtypeName = "fp32"
    """bf16: matrices are kept for computing, and multiplied, in bfloat16. Norms, hidden states between
    layers, the loss and sums of several gradients stay in float32."""
    recompute: Recompute = "none"
    compile: bool = False
    """Layers without experts are compiled (torch.compile), for microbatches of the run's own shape."""
    moments: MomentsPlace = "device"
    """Where the moments of an optimizer of the peer's own lie between its steps."""
    uses_each: bool = False
    """A microbatch's gradient is used before the next one's is added: then what is added to is as exact in
    the numbers of the gradient itself. By the run's manifest, not by the peer file."""


PLAIN = Computing()
"""Where nobody asks for anything."""
