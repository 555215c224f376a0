"""Define the key `compute` of the peer file: how this peer computes its stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from peers.config.quantities import FilePath, HostAndPort, split_host_and_port
from swarmnet.model.computing.choices import ActivationCheckpointing, OptimizerStateDevice

DeviceName = Literal["cpu", "cuda", "auto"]


class NodesFile(BaseModel):
    """Key `compute.nodes`: devices of other machines (nodes) that compute for this peer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    listen: HostAndPort = "off"
    """Address in a private network, to which other machines lend devices. Tensors between them are not
    encrypted. `off`: none."""
    devices: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of devices of all other machines."""
    key: FilePath | None = Field(default=None, json_schema_extra={"default": "none"})
    """File with the secret that all machines share."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return split_host_and_port(self.listen)

    @model_validator(mode="after")
    def _check_listen(self) -> NodesFile:
        """Refuse all addresses at once, which are public on many machines, and a missing key."""
        if self.listen == "off":
            return self
        host, error = self.address[0], ""
        if host in ("0.0.0.0", "::"):
            error = f"is {self.listen}; name the address of this machine in the private network"
        elif self.key is None:
            error = "needs compute.nodes.key, a file with the secret that the other nodes have, too"
        if error:
            raise PydanticCustomError("refused", "{error}", {"key": "listen", "error": error})
        return self


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
    nodes: NodesFile = NodesFile()
    """Devices of other machines."""

    @property
    def remote_devices(self) -> int:
        """Number of devices of other nodes."""
        return 0 if self.nodes.listen == "off" else self.nodes.devices
