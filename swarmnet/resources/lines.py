"""What a peer can do for a stage by its line as well as by its computer: for placing, routing and plans.

A stage in the middle sends each microbatch on and its gradient back, one at an end only one of the two, and
what goes between two stages of one computer crosses no line. No IO. Sizes in bytes, times in seconds.
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


def crossing(held: range, stages: int, act_bytes: float, grad_bytes: float) -> Crossing:
    """Of a computer that holds these adjacent ones of so many stages. `act_bytes`: what goes down of a
    microbatch; `grad_bytes`: what comes back up."""
    above, below = held.start > 0, held.stop < stages
    return Crossing(act_bytes * below + grad_bytes * above, act_bytes * above + grad_bytes * below)


def crossings(manifest: Manifest) -> tuple[Crossing, ...]:
    """At each stage, of a peer that holds no other."""
    stages = len(manifest.stages)
    return tuple(
        crossing(range(stage, stage + 1), stages, manifest.body_bytes, manifest.gradient_bytes)
        for stage in range(stages)
    )


def crossing_of(manifest: Manifest, held: range) -> Crossing:
    """Of a microbatch at a computer that holds these stages: what they send one another crosses no line."""
    each, last = crossings(manifest), len(manifest.stages) - 1
    inner = 0.0
    for stage in held:
        if stage < last and stage + 1 in held:
            inner += manifest.body_bytes + manifest.gradient_bytes
    sent, received = sum(each[stage].sent for stage in held), sum(each[stage].received for stage in held)
    return Crossing(float(round(sent - inner)), float(round(received - inner)))


def carried(computed: float, line: Line, each: Crossing) -> float:
    """Microbatches per second of a peer whose computer does `computed`: as many as its line bears, too."""
    return min(computed, _borne(line.up, each.sent), _borne(line.down, each.received))


def _borne(line: float, each: float) -> float:
    return line / each if each else inf


def seconds_on_line(line: Line, each: Crossing) -> float:
    """That a microbatch keeps the line busy, in the direction that takes longer; 0: not known, or nothing."""
    return 1.0 / carried(inf, line, each) if line.is_known else 0.0


def from_outside(held: range, stage: int) -> float:
    """How many times as much of its line a computer spends for each stage done, if another sends a microbatch
    into this one of the adjacent stages that it holds: it crosses once in and once out wherever it enters."""
    return len(held) / (held.stop - stage)


def told_by_sibling(line: Line, manifest: Manifest, held: range, stage: int) -> Line:
    """What a peer says of the line that it shares with siblings of its process, which hold `held` together:
    by its own crossing it then comes to what the line bears of microbatches that pass all of them."""
    apart, together = crossings(manifest)[stage], crossing_of(manifest, held)
    return Line(
        line.up * apart.sent / together.sent if together.sent else inf,
        line.down * apart.received / together.received if together.received else inf,
    )
