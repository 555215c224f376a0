"""Key `compute` of the peer file: how this peer computes its stage."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from swarmnet.model.computing.choices import MomentsPlace, Recompute


class ComputeFile(BaseModel):
    """How this peer computes its stage. What settles does not depend on it: peers of one group may differ."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers that matrices are multiplied in; fp32 is the whole of it, without TF32. auto: bf16 on a GPU
    that has it, else fp32. In bf16 the weights that are computed with take 2 bytes a parameter instead of 4;
    settled weights, what was not sent yet and sums of several gradients stay as they are. Processors without
    instructions for bf16 are slower with it."""
    recompute: Recompute = "none"
    """What the backward pass computes once more, for a third more compute, to keep less of each
    microbatch: stage keeps its inputs while it waits for its gradient; layer keeps the inputs of each layer,
    and no more than one layer's insides are there at a time."""
    compile: bool = False
    """Have torch.compile make programs for this GPU of the run's layers, each time the peer starts, before it
    takes part. Only on a GPU, and not layers of experts."""
    moments: MomentsPlace = "device"
    """Where a peer that steps by itself (sync.method: local-steps and its like) keeps its optimizer's
    moments, 2 to 4 bytes a parameter: host is the machine's memory instead of the card's. They then cross to
    the card and back with each of its steps."""
