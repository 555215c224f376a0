"""Options for how a peer computes its stage. They are local, because settled weights do not depend on them.

The module does not import torch, so that code that only counts bytes starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["none", "stage", "layer"]
"""What the backward pass recomputes (Chen et al., arXiv:1604.06174). `stage`: the whole forward pass, so that
an open microbatch keeps only its inputs. `layer`: each layer, so that the microbatch in progress keeps only
the inputs of its layers. Both take 4/3 of the compute."""
OptimizerStateDevice = Literal["device", "cpu"]


@dataclass(frozen=True, slots=True)
class Computing:
    """How a peer computes. float32 is full float32: TF32 stays off, as is torch's default."""

    dtype: DtypeName = "fp32"
    """With bf16 or fp16, matrices are stored and multiplied in 16 bits. Norms, hidden states between layers,
    the loss and sums of several gradients stay in float32. With fp16, gradients are scaled."""
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    """Whether layers without experts are compiled (torch.compile), for microbatches of the run's shape."""
    optimizer_state: OptimizerStateDevice = "device"
    """Place where the moments of a local optimizer are kept between its steps."""
    uses_each: bool = False
    """Whether each microbatch's gradient is used before the next is added, so that the sum may have the
    gradient's dtype. The run's manifest decides this, not the peer file."""


PLAIN = Computing()
"""The options of a peer that sets none."""
