"""Define the key `compute` of the peer file: how this peer computes its stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swarmnet.model.computing.choices import ActivationCheckpointing, OptimizerStateDevice

DeviceName = Literal["cpu", "cuda", "auto"]


class ComputeFile(BaseModel):
    """How this peer computes its stage. Settled weights do not depend on it, so peers of a stage may
    differ."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of matrix multiplications. `auto`: bf16 on a GPU that supports it, fp16 on an older GPU
    with fast fp16 (NVIDIA Volta and Turing), else fp32 (without TF32). bf16 and fp16 store the computing
    weights in 2 bytes instead of 4. They are slower on CPUs without such instructions. fp16 scales
    gradients."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass recomputes, which saves memory and costs a third more compute. `stage`:
    everything, so a waiting microbatch keeps only its inputs. `layer`: one layer at a time; keeps each
    layer's inputs."""
    devices: (
        Annotated[int, Field(ge=1, le=64)]
        | Literal["all"]
        | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    ) = 1
    """GPUs to split the stage over: a number, all, or a list of GPU numbers; on a CPU, processes. Other peers
    see one peer. Not with `compile`."""
    compile: bool = False
    """Compile layers with torch.compile at each start, before joining. GPU only; layers with experts are not
    compiled."""
    optimizer_state: OptimizerStateDevice = "device"
    """Memory for the moments of local-step methods, 2 to 4 bytes per parameter. `cpu` saves GPU memory and
    costs a transfer per local step."""
