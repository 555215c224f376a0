"""Contributions that others hold and this peer lacks: of whom each was asked, and of whom next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import Reference, Want

PULL_SECONDS = 1.0
"""A contribution asked for and not come after this long is asked of another holder."""
SLOW_BYTES_PER_SECOND = 100_000
"""A cubic connection at 50 ms and 1 % loss carries 330 KB/s, and three contributions may share it. Others
were asked meanwhile for what was on its way, and repetitions filled the lines (25M parameters, measured)."""
LONGEST_PULL_SECONDS = 30.0
MOST_ASKS = 8
"""Then it is given up; whoever really has it will offer it again (the sets will differ)."""
DETOUR_SECONDS = 0.25
"""So long a contribution waits for a holder that was asked for less: by then, over links like those of
peers/lab/bench/group.py, a second neighbour has it as a rule."""
SHARE_SLACK = 1.25
"""A neighbour gives so much more than its part of a round at first asking. Without a limit the peers with the
shortest lines gave 2.3 times as much as they took (32 peers, measured); with it, 1.3."""
MOST_PULLS = 4096
"""Under way at once. A name costs a liar nothing, so there must be an end to remembering them ..."""
MOST_OF_ONE = MOST_PULLS // 4
"""... and of what only one neighbour says it has, an earlier one: it must not take the others' room."""


@dataclass(slots=True)
class _Pull:
    reference: Reference
    holders: list[PeerId]
    asked_at: float
    """Or, while nobody was asked, since when it is known."""
    asks: int = 0
    doubted: bool = False
    """Its only holder did not give it in time: rounds wait for it no longer, nobody else may ever name it."""

    @property
    def due(self) -> float:
        """When another holder is asked."""
        if not self.asks:
            return self.asked_at + DETOUR_SECONDS
        takes = min(LONGEST_PULL_SECONDS, self.reference.size / SLOW_BYTES_PER_SECOND)
        return self.asked_at + max(PULL_SECONDS, takes)


class Pulls:
    """`fair_share`: of a round's contributions, how many a neighbour is asked for before others are waited
    for. The caller sets it as the group changes."""

    def __init__(self) -> None:
        self.fair_share = float("inf")
        self._asked: Counter[tuple[int, PeerId]] = Counter()
        """Contributions of a round that a neighbour was asked for."""
        self._pulls: dict[ContributionId, _Pull] = {}
        self._of_round: Counter[int] = Counter()
        """Those that are not doubted."""
        self._doubted: Counter[int] = Counter()
        self._due = float("inf")
        """No pull is due earlier."""

    def __len__(self) -> int:
        return len(self._pulls)

    def of_round(self, round: int) -> bool:
        """Whether something of it is on its way, as far as that is credible."""
        return self._of_round[round] > 0

    def under_way(self, round: int) -> bool:
        """Whether something of it is asked for at all."""
        return self._of_round[round] > 0 or self._doubted[round] > 0

    def offered(self, peer: PeerId, references: Iterable[Reference], now: float) -> list[Want]:
        """`peer` holds these, which we lack: ask for those that nobody was asked for yet, up to its share."""
        wanted: list[ContributionId] = []
        alone = sum(pull.holders == [peer] for pull in self._pulls.values())
        for reference in references:
            pull = self._pulls.get(reference.id)
            if pull is None:
                if len(self._pulls) >= MOST_PULLS or alone >= MOST_OF_ONE:
                    continue
                alone += 1
                pull = self._pulls[reference.id] = _Pull(reference, [], now)
                self._of_round[reference.round] += 1
            if peer not in pull.holders:
                pull.holders.append(peer)
                self._doubt(pull, doubted=False)
                if not pull.asks and self._asked[reference.round, peer] < self.fair_share:
                    self._ask(pull, peer, now)
                    wanted.append(reference.id)
                self._due = min(self._due, pull.due)
        return [Want(peer, tuple(wanted))] if wanted else []

    def arrived(self, identity: ContributionId) -> tuple[PeerId, ...]:
        """It is here: who is known to hold it."""
        pull = self._pulls.get(identity)
        if pull is None:
            return ()
        self._end(identity)
        return tuple(pull.holders)

    def left(self, peer: PeerId, now: float) -> None:
        for identity, pull in list(self._pulls.items()):
            if peer not in pull.holders:
                continue
            if pull.holders[0] == peer:
                pull.asked_at = now - LONGEST_PULL_SECONDS
                self._due = min(self._due, pull.due)
            pull.holders.remove(peer)
            if not pull.holders:
                self._end(identity)

    def forget_until(self, round: int) -> None:
        """Rounds up to this one are settled."""
        for identity, pull in list(self._pulls.items()):
            if pull.reference.round <= round:
                self._end(identity)
        for asked in [asked for asked in self._asked if asked[0] <= round]:
            del self._asked[asked]

    def again(self, now: float, wanted: Callable[[Reference], bool] = lambda reference: True) -> list[Want]:
        """What was asked for too long ago, asked of the next holder; given up after MOST_ASKS, or if it is
        not `wanted` any more."""
        if now < self._due:
            return []
        wants = []
        for identity, pull in list(self._pulls.items()):
            if now < pull.due:
                continue
            if pull.asks >= MOST_ASKS or not wanted(pull.reference):
                self._end(identity)
            else:
                if pull.asks:
                    pull.holders.append(pull.holders.pop(0))
                    self._doubt(pull, doubted=len(pull.holders) == 1)
                first = pull.holders[0] if pull.asks else self._least_asked(pull)
                self._ask(pull, first, now)
                wants.append(Want(first, (identity,)))
        self._due = min((pull.due for pull in self._pulls.values()), default=float("inf"))
        return wants

    def next_deadline(self) -> float:
        return self._due

    def _least_asked(self, pull: _Pull) -> PeerId:
        return min(pull.holders, key=lambda holder: self._asked[pull.reference.round, holder])

    def _ask(self, pull: _Pull, holder: PeerId, now: float) -> None:
        """Whom was asked last comes first among the holders."""
        pull.holders.remove(holder)
        pull.holders.insert(0, holder)
        pull.asks += 1
        pull.asked_at = now
        self._asked[pull.reference.round, holder] += 1

    def _doubt(self, pull: _Pull, doubted: bool) -> None:
        if pull.doubted != doubted:
            before, after = (self._of_round, self._doubted) if doubted else (self._doubted, self._of_round)
            _less(before, pull.reference.round)
            after[pull.reference.round] += 1
            pull.doubted = doubted

    def _end(self, identity: ContributionId) -> None:
        pull = self._pulls.pop(identity)
        _less(self._doubted if pull.doubted else self._of_round, pull.reference.round)
        if not self._pulls:
            self._due = float("inf")


def _less(counts: Counter[int], round: int) -> None:
    counts[round] -= 1
    if not counts[round]:
        del counts[round]
