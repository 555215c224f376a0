"""Settled histories: whether two peers have the same one, and which of two different ones stands.

A settled round is (how many contributions, digest of their set), chained by a hash to all before it: the same
chain value at a round means the same sets up to there, and so the same weights. Histories part when a
partition outlasts the patience of `settle_seconds`; when it heals, every peer decides by the same rule:

1. the branch that more than half of the peers in sight (itself included) are on; where not the whole
   group is in sight, more than two thirds, for the sight of two peers then differs by chance;
2. else the one that is ahead by more than AHEAD_ROUNDS: it holds more tokens;
3. else, at the first round in which they differ, the larger set; of equally large ones the smaller digest.

The third only looks at what is settled and the same for everybody, so it cannot swing back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

KEPT_LINKS = 4096
"""So far back a fork can be traced to its first round; 15 bytes each in a message."""
REMEMBERED_ROUNDS = 1024
"""Of the own history, over a restart: 41 KB of a checkpoint. Disks of one group are hardly so far apart."""
AHEAD_ROUNDS = 16
"""Well above what two halves of a group differ by in speed within the second that healing takes."""
DIGEST_BYTES = 12
"""Of a set and of a chain. 8 would not do: who makes contributions at will finds two sets of one digest after
2^32 tries, within a round; 2^48 are hours of a GPU. 16 would not fit KEPT_LINKS into one message."""
START = b"\0" * DIGEST_BYTES
"""Chain value before the first round."""


@dataclass(frozen=True, slots=True)
class SettledSet:
    """One settled round: how many contributions, and its digest (contribution_sets.set_digest)."""

    count: int
    digest: bytes


def link(before: bytes, settled: SettledSet) -> bytes:
    """The chain value after a round: of SHA-256 over the value before, count and digest, the first bytes."""
    return hashlib.sha256(before + settled.count.to_bytes(4, "big") + settled.digest).digest()[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Earlier:
    """Settled sets one after another up to some round, as an earlier life of a peer knew them."""

    before: bytes
    """The chain's value before the first of them."""
    sets: tuple[SettledSet, ...]


class Chain:
    """A history from some round on (a newcomer does not know what was before its snapshot)."""

    def __init__(self, round: int = -1, value: bytes = START, earlier: Earlier | None = None) -> None:
        """Starts after `round`, where the chain has `value`. What is remembered of `earlier` rounds serves to
        compare histories, if it leads to that value."""
        self.start = round
        """Of later rounds alone it is known what their sets hold."""
        self.base = round
        self.values = [value]
        self.sets: list[SettledSet] = []
        values = [] if earlier is None else list(accumulate(earlier.sets, link, initial=earlier.before))
        self.round = round
        """The last settled round."""
        if earlier is not None and values[-1] == value:
            self.base, self.values, self.sets = round - len(earlier.sets), values, list(earlier.sets)

    @property
    def value(self) -> bytes:
        return self.values[-1]

    def append(self, settled: SettledSet) -> None:
        self.round += 1
        self.sets.append(settled)
        self.values.append(link(self.values[-1], settled))
        if len(self.sets) > 2 * KEPT_LINKS:
            del self.sets[:KEPT_LINKS], self.values[:KEPT_LINKS]
            self.base += KEPT_LINKS

    def at(self, round: int) -> bytes | None:
        """The chain value after `round`; None if it is not known here."""
        index = round - self.base
        return self.values[index] if 0 <= index < len(self.values) else None

    def settled(self, round: int) -> SettledSet | None:
        index = round - self.base - 1
        return self.sets[index] if 0 <= index < len(self.sets) else None

    def learn(self, first: int, before: bytes, sets: Sequence[SettledSet]) -> bool:
        """Take in sets of the rounds `first`, first + 1, ... that lie before what is known here. `before`:
        the chain's value before them. Returns whether they are true and news: they must lead to a value that
        is known, which only the sets that were settled do."""
        values = list(accumulate(sets[: max(0, self.base + 1 - first)], link, initial=before))
        count = len(values) - 1
        if not count or first + count - 1 != self.base or values[-1] != self.values[0]:
            return False
        self.values[:1] = values
        self.sets[:0] = sets[:count]
        self.base -= count
        return True

    def earlier(self, until: int) -> Earlier | None:
        """The newest sets up to `until`, for a later life; None if that round is not known."""
        first = max(self.base, until - REMEMBERED_ROUNDS) + 1
        before = self.at(first - 1)
        if before is None or self.at(until) is None:
            return None
        return Earlier(before, tuple(self.part(first, until)))

    def part(self, first: int, last: int) -> list[SettledSet]:
        """The sets of the rounds first..last, as far as they are known without a gap from `first`."""
        start = first - self.base - 1
        return self.sets[start : last - self.base] if start >= 0 else []


@dataclass(frozen=True, slots=True)
class Fork:
    """The first round in which a neighbour's history differs, and what each has there."""

    round: int
    mine: SettledSet
    theirs: SettledSet
    exact: bool = True
    """False: they parted somewhere before, where one of them knows nothing; chain values stand there."""


def first_difference(chain: Chain, first: int, theirs: Sequence[SettledSet]) -> Fork | None:
    """Compare with the neighbour's sets of the rounds first, first + 1, ...; None: no difference found."""
    for round, settled in enumerate(theirs, start=first):
        mine = chain.settled(round)
        if mine is not None and mine != settled:
            return Fork(round, mine, settled)
    return None


def is_majority(supporters: int, in_sight: int, all_in_sight: bool) -> bool:
    """Whether so many decide where two histories are weighed (the first of the rules above)."""
    return supporters > (in_sight / 2 if all_in_sight else in_sight * 2 / 3)


def theirs_stands(
    fork: Fork, my_settled: int, their_settled: int, my_supporters: int, their_supporters: int, in_sight: int,
    all_in_sight: bool = True,
) -> bool:  # fmt: skip
    """Whether this peer must give up its own branch (the rule at the top of this file).

    `supporters` count the peers in sight on each branch, this one included in its own; `in_sight` all."""
    if is_majority(my_supporters, in_sight, all_in_sight):
        return False
    if is_majority(their_supporters, in_sight, all_in_sight):
        return True
    if abs(my_settled - their_settled) > AHEAD_ROUNDS:
        return their_settled > my_settled
    return (-fork.theirs.count, fork.theirs.digest) < (-fork.mine.count, fork.mine.digest)
