"""Define the key `limits` of the peer file: which resources of this machine the swarm may use, and when."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from peers.config.quantities import ByteCount, BytesPerSecond, at_least_bytes, at_least_rate
from peers.config.schema import TypeLabel
from swarmnet.resources.working_hours import Hours, parse


def _require_hours(value: str) -> str:
    """Return the text unchanged. Raises ValueError if it is not in the form `22:00-08:00`."""
    parse(value)
    return value


HoursText = Annotated[str, AfterValidator(_require_hours), TypeLabel("hours such as 22:00-08:00")]


class LimitsFile(BaseModel):
    """Which resources of this machine the swarm may use, and when."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    upload: Annotated[
        BytesPerSecond | None,
        at_least_rate(10_000, "20Mbit/s"),
        Field(json_schema_extra={"default": "no limit"}),
    ] = None
    """Maximum upload rate, all connections together. Snapshots and DHT replies are slowed down first, then
    activations; coordination and gradients last. libp2p adds about 3 %."""
    traffic_per_month: Annotated[
        ByteCount | None, at_least_bytes(1 << 20, "500GB"), Field(json_schema_extra={"default": "no limit"})
    ] = None
    """Maximum bytes sent and received in a calendar month, as this peer counts its messages. After them the
    peer pauses until the month ends."""
    memory: Annotated[
        ByteCount | None, at_least_bytes(1 << 27, "8GiB"), Field(json_schema_extra={"default": "no limit"})
    ] = None
    """Maximum memory of this peer: GPU memory if it computes on a GPU. A stage that needs more is refused
    before downloading; fewer microbatches are kept if that makes it fit."""
    hours: Annotated[HoursText | None, Field(json_schema_extra={"default": "all day"})] = None
    """Local times at which to take part, separated by commas; a span may cross midnight. Outside them the
    peer pauses, frees its memory and stays in the DHT."""
    only_when_idle: bool = False
    """Pause while other programs use half a core or a tenth of the GPU for 5 s. Resumes after two quiet
    minutes."""
    share_when_busy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Instead of pausing by `only_when_idle`, compute this fraction of the time meanwhile. 0: pause."""
    only_when_plugged_in: bool = False
    """Pause on battery power, with a delay of 10 s. Machines without a battery never pause."""

    @property
    def when(self) -> Hours | None:
        """The parsed `hours`; None: always."""
        return parse(self.hours) if self.hours is not None else None
