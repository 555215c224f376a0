"""Key `limits` of the peer file: what of this machine the swarm may have, and when."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from peers.config.quantities import ByteCount, BytesPerSecond, at_least_bytes, at_least_rate
from peers.config.schema import Shown
from swarmnet.resources.working_hours import Hours, parse


def _hours(value: str) -> str:
    parse(value)
    return value


HoursText = Annotated[str, AfterValidator(_hours), Shown("hours such as 22:00-08:00")]


class LimitsFile(BaseModel):
    """What of this machine the swarm may have, and when."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    upload: Annotated[
        BytesPerSecond | None,
        at_least_rate(10_000, "20Mbit/s"),
        Field(json_schema_extra={"default": "no limit"}),
    ] = None
    """Most that this peer sends, all links together. Snapshots for newcomers are slowed down first, then
    activations; what keeps the swarm together and gradients go before both. Answers of the directory wait
    with the snapshots. What libp2p adds (about 3 %) comes on top."""
    memory: Annotated[
        ByteCount | None, at_least_bytes(1 << 27, "8GiB"), Field(json_schema_extra={"default": "no limit"})
    ] = None
    """Most memory that this peer may take; of the GPU where it computes on one. A stage that needs more is
    refused before anything is fetched, and fewer microbatches are kept at a time where that makes it fit."""
    hours: Annotated[HoursText | None, Field(json_schema_extra={"default": "all day"})] = None
    """When this peer takes part, on this machine's clock; several spans with commas between them, and a span
    may go over midnight. Outside of them it is paused: it frees its memory and stays in the directory."""
    only_when_idle: bool = False
    """Pause while other programs use this machine: half a core or a tenth of the GPU for 5 s. It goes on
    after two quiet minutes."""
    only_when_plugged_in: bool = False
    """Pause while this machine runs on its battery: from 10 s after the plug was pulled until 10 s after it
    is back. A machine without a battery is plugged in."""

    @property
    def when(self) -> Hours | None:
        """None: always."""
        return parse(self.hours) if self.hours is not None else None
