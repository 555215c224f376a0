"""Compute how much a peer can do for a stage with its network link and its compute, for placement and plans.

A middle stage sends each microbatch on and its gradient back. A stage at an end sends only one of the two.
Traffic between two stages of one computer uses no link. The module does no IO. Sizes are bytes, times are
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Line:
    """Bandwidth of a network link in bytes per second. An unknown direction has no limit."""

    up: float = inf
    down: float = inf

    @property
    def is_known(self) -> bool:
        return self.up < inf or self.down < inf

    def without(self, taken: float) -> Line:
        """Return the bandwidth that is left if something else takes `taken` bytes per second each way."""
        return Line(self.up - taken, self.down - taken)


UNKNOWN = Line()


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes of a microbatch on the link of a peer that holds a stage."""

    sent: float = 0.0
    received: float = 0.0


def crossing(held: range, stages: int, act_bytes: float, grad_bytes: float) -> Crossing:
    """Return the traffic per microbatch of a computer that holds the adjacent stages `held`. `act_bytes` go
    down for each microbatch, and `grad_bytes` come back up."""
    above, below = held.start > 0, held.stop < stages
    return Crossing(act_bytes * below + grad_bytes * above, act_bytes * above + grad_bytes * below)


def crossings(manifest: Manifest) -> tuple[Crossing, ...]:
    """Return the traffic per microbatch at each stage, for a peer that holds no other stage."""
    stages = len(manifest.stages)
    return tuple(
        crossing(range(stage, stage + 1), stages, manifest.body_bytes, manifest.gradient_bytes)
        for stage in range(stages)
    )


def crossing_of(manifest: Manifest, held: range) -> Crossing:
    """Return the traffic per microbatch of a computer that holds these stages, without inner traffic."""
    each, last = crossings(manifest), len(manifest.stages) - 1
    inner = 0.0
    for stage in held:
        if stage < last and stage + 1 in held:
            inner += manifest.body_bytes + manifest.gradient_bytes
    sent, received = sum(each[stage].sent for stage in held), sum(each[stage].received for stage in held)
    return Crossing(float(round(sent - inner)), float(round(received - inner)))


def carried(computed: float, line: Line, each: Crossing) -> float:
    """Return the microbatches per second of a peer, limited by its compute (`computed`) and its link."""
    return min(computed, _borne(line.up, each.sent), _borne(line.down, each.received))


def _borne(line: float, each: float) -> float:
    return line / each if each else inf


def seconds_on_line(line: Line, each: Crossing) -> float:
    """Return the seconds that a microbatch occupies the slower direction of the link; 0 if unknown."""
    return 1.0 / carried(inf, line, each) if line.is_known else 0.0


def from_outside(held: range, stage: int) -> float:
    """Return by what factor link use per stage grows if a microbatch enters at `stage`, not at the first one.
    It crosses the link once in and once out wherever it enters a computer's adjacent stages."""
    return len(held) / (held.stop - stage)


def told_by_sibling(line: Line, manifest: Manifest, held: range, stage: int) -> Line:
    """Return the bandwidth that a peer reports if it shares its link with the siblings that hold `held`. With
    the traffic of its own stage, it gives the rate at which microbatches can pass all these stages."""
    apart, together = crossings(manifest)[stage], crossing_of(manifest, held)
    return Line(
        line.up * apart.sent / together.sent if together.sent else inf,
        line.down * apart.received / together.received if together.received else inf,
    )
