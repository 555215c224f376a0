"""Contributions that others hold and this peer lacks: of whom each was asked, and of whom next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.round_events import Reference, Want

PULL_SECONDS = 1.0
"""A contribution asked for and not come after this long is asked of another holder."""
SLOW_BYTES_PER_SECOND = 100_000
"""A cubic connection at 50 ms and 1 % loss carries 330 KB/s, and three contributions may share it. Others
were asked meanwhile for what was on its way, and repetitions filled the lines (25M parameters, measured)."""
LONGEST_PULL_SECONDS = 30.0
MOST_ASKS = 8
"""Then it is given up; whoever really has it will offer it again (the sets will differ)."""
MOST_PULLS = 4096
"""Under way at once. A name costs a liar nothing, so there must be an end to remembering them."""


@dataclass(slots=True)
class _Pull:
    reference: Reference
    holders: list[PeerId]
    asked_at: float
    asks: int = 1

    @property
    def due(self) -> float:
        """When another holder is asked."""
        takes = min(LONGEST_PULL_SECONDS, self.reference.size / SLOW_BYTES_PER_SECOND)
        return self.asked_at + max(PULL_SECONDS, takes)


class Pulls:
    def __init__(self) -> None:
        self._pulls: dict[ContributionId, _Pull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def of_round(self, round: int) -> bool:
        return any(pull.reference.round == round for pull in self._pulls.values())

    def offered(self, peer: PeerId, references: Iterable[Reference], now: float) -> list[Want]:
        """`peer` holds these, which we lack: ask for those that nobody was asked for yet."""
        wanted = []
        for reference in references:
            pull = self._pulls.get(reference.id)
            if pull is None:
                if len(self._pulls) >= MOST_PULLS:
                    continue
                self._pulls[reference.id] = _Pull(reference, [peer], now)
                wanted.append(reference.id)
            elif peer not in pull.holders:
                pull.holders.append(peer)
        return [Want(peer, tuple(wanted))] if wanted else []

    def arrived(self, identity: ContributionId) -> None:
        self._pulls.pop(identity, None)

    def left(self, peer: PeerId, now: float) -> None:
        for identity, pull in list(self._pulls.items()):
            if peer not in pull.holders:
                continue
            if pull.holders[0] == peer:
                pull.asked_at = now - LONGEST_PULL_SECONDS
            pull.holders.remove(peer)
            if not pull.holders:
                del self._pulls[identity]

    def forget_until(self, round: int) -> None:
        """Rounds up to this one are settled."""
        for identity, pull in list(self._pulls.items()):
            if pull.reference.round <= round:
                del self._pulls[identity]

    def again(self, now: float) -> list[Want]:
        """What was asked for too long ago, asked of the next holder; given up after MOST_ASKS."""
        wants = []
        for identity, pull in list(self._pulls.items()):
            if now < pull.due:
                continue
            if pull.asks >= MOST_ASKS:
                del self._pulls[identity]
            else:
                pull.asks += 1
                pull.holders.append(pull.holders.pop(0))
                pull.asked_at = now
                wants.append(Want(pull.holders[0], (identity,)))
        return wants

    def next_deadline(self) -> float:
        return min((pull.due for pull in self._pulls.values()), default=float("inf"))
