"""What became of every microbatch on one peer, and the loss of those that passed lately."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

REMEMBERED = 65_536
"""Microbatches, the newest of all origins: minutes of the fastest stage, and nobody asks again so late. Each
by itself, not all up to some counter: an ACT may name any, and does not speak for others of its origin."""


MICROBATCHES_OF_LOSS = 100
"""Microbatches of one moment differ by a tenth of a nat; the mean of a hundred by a hundredth."""


class RecentLoss:
    """The mean loss of the newest microbatches, each by its tokens: peers of one moment agree about it."""

    def __init__(self) -> None:
        self.newest: float | None = None
        """Of the newest microbatch by itself; nats per token."""
        self._seen: deque[tuple[float, int]] = deque(maxlen=MICROBATCHES_OF_LOSS)

    def add(self, loss_sum: float, tokens: int) -> None:
        """Of a microbatch: nats, summed over its tokens."""
        if tokens > 0:
            self.newest = loss_sum / tokens
            self._seen.append((loss_sum, tokens))

    @property
    def mean(self) -> float | None:
        """Nats per token; None: nothing has passed yet."""
        tokens = sum(tokens for _, tokens in self._seen)
        return sum(loss for loss, _ in self._seen) / tokens if tokens else None


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
    _newest: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)

    def is_committed(self, key: Hashable) -> bool:
        return key in self._newest

    def commit(self, key: Hashable, tokens: int) -> None:
        """`key`: a microbatch, or what of one routed experts were asked."""
        if self.is_committed(key):
            raise CommittedTwice(str(key))
        self._newest[key] = None
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        self.committed += 1
        self.tokens += tokens

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
