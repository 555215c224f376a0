"""The count of what became of every microbatch on one peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.identifiers import MicrobatchId, PeerId

REMEMBERED = 4096
"""Counters kept per origin; older ones count as committed: nobody asks for them so late in honesty."""


REMEMBERED_ORIGINS = 1024
"""An ACT may name any origin: beyond so many, the one that was new longest ago is forgotten."""


class CommittedTwice(AssertionError):
    """A microbatch's gradient was added a second time on one peer: a fault of this program."""


@dataclass(slots=True)
class Ledger:
    committed: int = 0
    """Microbatches whose gradient was added here."""
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> microbatches given up here before their gradient was added."""
    rerouted: dict[str, int] = field(default_factory=dict)
    """Reason -> times a microbatch went to another peer of the next stage."""
    repeated: int = 0
    """ACTs for a microbatch that was already committed here: answered, not added again."""
    refused: int = 0
    """ACTs answered with BUSY."""
    late_answers: int = 0
    """GRADs for a microbatch that needed none any more."""
    _counters: dict[PeerId, set[int]] = field(default_factory=dict)
    _floors: dict[PeerId, int] = field(default_factory=dict)

    def is_committed(self, key: MicrobatchId) -> bool:
        floor, counters = self._floors.get(key.origin, 0), self._counters.get(key.origin, ())
        return key.counter < floor or key.counter in counters

    def commit(self, key: MicrobatchId, tokens: int) -> None:
        if self.is_committed(key):
            raise CommittedTwice(f"microbatch {key.counter} of {key.origin}")
        if key.origin not in self._counters and len(self._counters) >= REMEMBERED_ORIGINS:
            oldest = next(iter(self._counters))
            del self._counters[oldest]
            self._floors.pop(oldest, None)
        counters = self._counters.setdefault(key.origin, set())
        counters.add(key.counter)
        if len(counters) > 2 * REMEMBERED:
            floor = sorted(counters)[-REMEMBERED]
            self._floors[key.origin] = floor
            self._counters[key.origin] = {counter for counter in counters if counter >= floor}
        self.committed += 1
        self.tokens += tokens

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
