"""What a peer that holds routed experts takes on: as much as it has room for, and each gradient once.

A call is named by who asks, microbatch and layer, so that nobody can use up another's names. Its gradient is
added the first time; asked for again, because the answer was lost, it is computed again and adds nothing. No
answer is kept. No IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.ledger import Ledger
from swarmnet.pipeline.machine import granted


@dataclass(frozen=True, slots=True)
class Asked:
    peer: PeerId
    key: MicrobatchId
    layer: int
    backward: bool
    attempt: int = 0
    """Of forward calls, each of which is one of its own."""


class ExpertAnswers:
    """Of one peer. At most `slots` calls are under way here."""

    def __init__(self, slots: int, ledger: Ledger) -> None:
        self.slots, self.ledger = slots, ledger
        self._open: dict[Asked, int] = {}
        """And the newest attempt, which is answered."""

    @property
    def under_way(self) -> int:
        return len(self._open)

    def take(self, asked: Asked, attempt: int) -> Literal["compute", "busy", "wait"]:
        """`wait`: it is under way here, and its answer will be to this attempt."""
        if asked in self._open:
            self._open[asked] = max(attempt, self._open[asked])
            return "wait"
        if self.under_way >= self.slots:
            self.ledger.refused += 1
            return "busy"
        self._open[asked] = attempt
        return "compute"

    def adds(self, asked: Asked) -> bool:
        """Whether its gradient is to be added: it was not before."""
        again = self.ledger.is_committed(asked)
        self.ledger.repeated += again and asked.backward
        return asked.backward and not again

    def done(self, asked: Asked, tokens: int | None) -> int:
        """It was computed, or could not be; the attempt to answer. `tokens`: of an added gradient."""
        if tokens is not None:
            self.ledger.commit(asked, tokens)
        return self._open.pop(asked)

    def grant(self, peer: PeerId) -> int:
        """How many calls `peer` may have under way here."""
        return granted(peer, (asked.peer for asked in self._open), self.slots - self.under_way)
