"""Key `compute` of the peer file: how this peer computes its stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swarmnet.model.computing.choices import ActivationCheckpointing, OptimizerStateDevice

DeviceName = Literal["cpu", "cuda", "auto"]


class ComputeFile(BaseModel):
    """How this peer computes its stage. What settles does not depend on it: peers of one group may differ."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers that matrices are multiplied in; fp32 is the whole of it, without TF32. auto: bf16 on a GPU
    that has it, else fp32. In bf16 the weights that are computed with take 2 bytes a parameter instead of 4;
    settled weights, what was not sent yet and sums of several gradients stay as they are. Processors without
    instructions for bf16 are slower with it."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass computes once more, for a third more compute, to keep less of each
    microbatch: stage keeps its inputs while it waits for its gradient; layer keeps the inputs of each layer,
    and no more than one layer's insides are there at a time."""
    devices: (
        Annotated[int, Field(ge=1, le=64)] | Literal["all"]
        | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    ) = 1  # fmt: skip
    """On how many devices to hold the stage, each with its part of weights, gradients and optimizer and a
    process of its own: the first so many GPUs, all of them, or a list of their numbers; on a processor,
    processes. To others it stays one peer. Not with compile, sync.topology: sharded-reduce, or a
    method for whole matrices."""
    compile: bool = False
    """Have torch.compile make programs for this GPU of the run's layers, each time the peer starts, before it
    takes part. Only on a GPU, and not layers of experts."""
    optimizer_state: OptimizerStateDevice = "device"
    """Where a peer that steps by itself (sync.method: local-steps and its like) keeps its optimizer's
    moments, 2 to 4 bytes a parameter: host is the machine's memory instead of the card's. They then cross to
    the card and back with each of its steps."""
