"""Compute how much a peer can do for a stage with its network link and its compute, for placement and plans.

A middle stage sends each microbatch on and its gradient back. A stage at an end sends only one of the two.
The module does no IO. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class LinkBandwidth:
    """Bandwidth of a network link in bytes per second. An unknown direction has no limit."""

    up: float = inf
    down: float = inf

    @property
    def is_known(self) -> bool:
        return self.up < inf or self.down < inf

    def without(self, taken: float) -> LinkBandwidth:
        """Return the bandwidth that is left if something else takes `taken` bytes per second each way."""
        return LinkBandwidth(self.up - taken, self.down - taken)


UNKNOWN = LinkBandwidth()


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes of a microbatch on the link of a peer that holds a stage."""

    sent: float = 0.0
    received: float = 0.0


def crossing(stage: int, stages: int, act_bytes: float, grad_bytes: float) -> Crossing:
    """Return the traffic per microbatch of a peer in stage number `stage` of `stages`. Hidden states of
    `act_bytes` go to the next stage, and a gradient of `grad_bytes` comes back from it."""
    sent: float = 0
    received: float = 0
    if stage < stages - 1:
        sent += act_bytes
        received += grad_bytes
    if stage > 0:
        sent += grad_bytes
        received += act_bytes
    return Crossing(sent, received)


def crossings(manifest: Manifest) -> tuple[Crossing, ...]:
    """Return the traffic per microbatch at each stage. In a U-shaped run every stage sends and receives
    both."""
    stages = len(manifest.stages)
    if manifest.is_u_shaped:
        both = crossing(1, 3, manifest.body_bytes, manifest.gradient_bytes)  # A middle stage.
        return (both,) * stages
    return tuple(
        crossing(stage, stages, manifest.body_bytes, manifest.gradient_bytes) for stage in range(stages)
    )


def carried(computed: float, line: LinkBandwidth, each: Crossing) -> float:
    """Return the microbatches per second of a peer, limited by its compute (`computed`) and its link."""
    by_upload = _microbatches_per_second(line.up, each.sent)
    by_download = _microbatches_per_second(line.down, each.received)
    return min(computed, by_upload, by_download)


def _microbatches_per_second(bandwidth: float, bytes_per_microbatch: float) -> float:
    return bandwidth / bytes_per_microbatch if bytes_per_microbatch else inf


def seconds_on_line(line: LinkBandwidth, each: Crossing) -> float:
    """Return the seconds that a microbatch occupies the slower direction of the link; 0 if unknown."""
    return 1.0 / carried(inf, line, each) if line.is_known else 0.0
