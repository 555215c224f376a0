"""What a peer can do for a stage by its line as well as by its computer: for placing, routing and plans.

A stage in the middle sends each microbatch on and its gradient back, one at an end only one of the two. No
IO. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes per second. What is not known limits nothing."""

    up: float = inf
    down: float = inf

    @property
    def is_known(self) -> bool:
        return self.up < inf or self.down < inf

    def without(self, taken: float) -> Line:
        """What is left where something else takes so much of both directions."""
        return Line(self.up - taken, self.down - taken)


UNKNOWN = Line()


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes of a microbatch on the line of whoever holds a stage."""

    sent: float = 0.0
    received: float = 0.0


def crossing(stage: int, stages: int, act_bytes: float, grad_bytes: float) -> Crossing:
    """At one of so many stages. `act_bytes`: what goes down of a microbatch; `grad_bytes`: what comes back
    up."""
    above, below = stage > 0, stage < stages - 1
    return Crossing(act_bytes * below + grad_bytes * above, act_bytes * above + grad_bytes * below)


def crossings(manifest: Manifest) -> tuple[Crossing, ...]:
    """At each stage."""
    stages = len(manifest.stages)
    return tuple(
        crossing(stage, stages, manifest.body_bytes, manifest.gradient_bytes) for stage in range(stages)
    )


def carried(computed: float, line: Line, each: Crossing) -> float:
    """Microbatches per second of a peer whose computer does `computed`: as many as its line bears, too."""
    return min(computed, _borne(line.up, each.sent), _borne(line.down, each.received))


def _borne(line: float, each: float) -> float:
    return line / each if each else inf


def seconds_on_line(line: Line, each: Crossing) -> float:
    """That a microbatch keeps the line busy, in the direction that takes longer; 0: not known, or nothing."""
    return 1.0 / carried(inf, line, each) if line.is_known else 0.0
