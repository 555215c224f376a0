"""Count how every microbatch on one peer ended, and average their losses and durations."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

REMEMBERED = 65_536
"""Number of newest microbatches to remember, over all origins. It covers minutes of the fastest stage; no
repeated ACT comes later. There is no counter per origin, because an ACT may name any key."""


MICROBATCHES_OF_LOSS = 100
"""Number of microbatches in the mean. Simultaneous losses differ by 0.1 nats, means of 100 by 0.01."""
SMOOTHING = 0.1
"""Weight of a new measurement in the moving average of a peer's service time."""


class RecentLoss:
    """The mean loss of recent microbatches, weighted by tokens. Peers of one moment agree about it."""

    def __init__(self) -> None:
        self.newest: float | None = None
        """Loss of the newest microbatch alone, in nats per token."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=MICROBATCHES_OF_LOSS)

    def add(self, loss_sum: float, tokens: int) -> None:
        """Add the loss of a microbatch, in nats summed over its tokens."""
        if tokens > 0:
            self.newest = loss_sum / tokens
            self._recent.append((loss_sum, tokens))

    @property
    def mean(self) -> float | None:
        """Mean loss in nats per token; None before the first microbatch."""
        token_count = sum(tokens for _, tokens in self._recent)
        return sum(loss for loss, _ in self._recent) / token_count if token_count else None


class ServiceTime:
    """Seconds that this peer takes for a microbatch: a moving average, 0 before the first measurement."""

    def __init__(self, line_seconds: float) -> None:
        """`line_seconds` is the least time in which a microbatch crosses this peer's link."""
        self.seconds = 0.0
        self._line_seconds = line_seconds

    def add(self, seconds: float) -> None:
        known = self.seconds
        self.seconds = seconds if not known else known + SMOOTHING * (seconds - known)

    @property
    def with_line(self) -> float:
        """The seconds in which this peer takes a microbatch, which its link may limit."""
        return max(self.seconds, self._line_seconds) if self.seconds > 0 else 0.0


class CommittedTwice(AssertionError):
    """A microbatch's gradient was added twice on one peer, which is a bug of this program."""


@dataclass(slots=True)
class MicrobatchLedger:
    """Counters of what happened to the microbatches on one peer."""

    committed: int = 0
    """Number of microbatches whose gradient was added here."""
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Maps a reason to the number of microbatches dropped here before their gradient was added."""
    rerouted: dict[str, int] = field(default_factory=dict)
    """Maps a reason to the number of times that a microbatch was sent to another peer of the next stage."""
    repeated: int = 0
    """Number of ACTs for an already committed microbatch. They are answered, and nothing is added again."""
    refused: int = 0
    """Number of ACTs answered with BUSY."""
    late_answers: int = 0
    """Number of GRADs that no microbatch needed any more."""
    _newest: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    """The newest committed microbatches, at most `REMEMBERED`, oldest first."""

    def is_committed(self, key: Hashable) -> bool:
        return key in self._newest

    def commit(self, key: Hashable, tokens: int) -> None:
        """Count a microbatch (or a request to routed experts) whose gradient over `tokens` tokens was added
        here. Raises CommittedTwice if it was counted before; only the newest `REMEMBERED` are compared."""
        if self.is_committed(key):
            raise CommittedTwice(str(key))
        self._newest[key] = None
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        self.committed += 1
        self.tokens += tokens

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
