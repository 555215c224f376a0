"""The chain of settled rounds, and the rule by which a fork of it is resolved.

A settled round is (number of contributions, digest of their set), and a hash chains it to all rounds before
it. Two peers with the same chain value at a round have the same sets up to there, and so the same weights.
Branches fork when a partition outlasts `finality_timeout_seconds`. When it heals, every peer decides by the
same rule:

1. The branch of more than half of the peers in sight (this one included) wins. If not the whole group is in
   sight, it takes more than two thirds, because the views of two peers then differ by chance.
2. Otherwise the branch wins that is ahead by more than `AHEAD_ROUNDS`: it holds more tokens.
3. Otherwise the larger set at the first differing round wins; of equally large ones the smaller digest.

The third rule looks only at settled data that is the same for all peers, so it cannot swing back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from swarmnet.lineage import DIGEST_BYTES, era_of

KEPT_LINKS = 4096
"""Newest links of the chain that are kept at least. A fork can be traced back so far (15 bytes a round)."""
REMEMBERED_ROUNDS = 1024
"""Rounds of the chain that survive a restart: 41 KB of a checkpoint. Disks rarely differ by more."""
AHEAD_ROUNDS = 16
"""A lead that two halves of a group do not gain over each other in the second that healing takes."""
START = b"\0" * DIGEST_BYTES
"""The chain value before the first round."""


@dataclass(frozen=True, slots=True)
class SettledSet:
    """One settled round: the number of contributions, and the digest of their set
    (`contribution_sets.set_digest`)."""

    count: int
    digest: bytes


def link(before: bytes, settled: SettledSet) -> bytes:
    """Return the chain value after a round: SHA-256 over the previous value, count and digest, truncated, and
    the name of the era."""
    hashed = hashlib.sha256(before + settled.count.to_bytes(4, "big") + settled.digest).digest()
    return hashed[:DIGEST_BYTES] + era_of(before)


@dataclass(frozen=True, slots=True)
class Earlier:
    """Consecutive settled sets that an earlier process of this peer knew, up to some round."""

    before: bytes
    """The chain value before the first of the sets."""
    sets: tuple[SettledSet, ...]


class Chain:
    """The known part of the chain: the settled rounds after round `base`, where its value is `values[0]`."""

    def __init__(self, round: int = -1, value: bytes = START, earlier: Earlier | None = None) -> None:
        """Start after `round`, where the chain has `value`. The sets of `earlier` rounds are kept for
        comparing branches if they lead to that value; otherwise they are ignored."""
        self.start = round
        """Only for rounds after this one does this peer know which contributions the sets contain."""
        self.base = round
        """Counts and digests are known for rounds after this one; `values[0]` is the chain value after it."""
        self.values = [value]
        self.sets: list[SettledSet] = []
        self.round = round
        """The last settled round."""
        if earlier is None:
            return
        values = list(accumulate(earlier.sets, link, initial=earlier.before))
        if values[-1] == value:
            self.base = round - len(earlier.sets)
            self.values = values
            self.sets = list(earlier.sets)

    @property
    def value(self) -> bytes:
        """Return the chain value after the last settled round."""
        return self.values[-1]

    def append(self, settled: SettledSet) -> None:
        """Add the set of the next round. The oldest links are dropped once there are 2 * `KEPT_LINKS`."""
        self.round += 1
        self.sets.append(settled)
        self.values.append(link(self.values[-1], settled))
        if len(self.sets) > 2 * KEPT_LINKS:
            del self.sets[:KEPT_LINKS], self.values[:KEPT_LINKS]
            self.base += KEPT_LINKS

    def at(self, round: int) -> bytes | None:
        """Return the chain value after `round`; None if it is not known here."""
        index = round - self.base
        return self.values[index] if 0 <= index < len(self.values) else None

    def settled(self, round: int) -> SettledSet | None:
        """Return the settled set of `round`; None if it is not known here."""
        index = round - self.base - 1
        return self.sets[index] if 0 <= index < len(self.sets) else None

    def learn(self, first: int, before: bytes, sets: Sequence[SettledSet]) -> bool:
        """Add the sets of the rounds `first`, first + 1, ..., up to `base`, in front of the known ones.

        `before` is the chain value before them. Returns whether they were added. They must lead to the oldest
        known chain value, which no other sets than the settled ones do (the chain is a hash)."""
        unknown = sets[: max(0, self.base + 1 - first)]
        count = len(unknown)
        values = list(accumulate(unknown, link, initial=before))
        if not count or first + count - 1 != self.base or values[-1] != self.values[0]:
            return False
        self.values[:1] = values
        self.sets[:0] = sets[:count]
        self.base -= count
        return True

    def earlier(self, until: int) -> Earlier | None:
        """Return the newest sets up to round `until`, at most `REMEMBERED_ROUNDS`, to store for a later
        process of this peer; None if that round is not known."""
        first = max(self.base, until - REMEMBERED_ROUNDS) + 1
        before = self.at(first - 1)
        if before is None or self.at(until) is None:
            return None
        return Earlier(before, tuple(self.part(first, until)))

    def part(self, first: int, last: int) -> list[SettledSet]:
        """Return the sets of the rounds first..last, as far as settled; none if `first` is forgotten."""
        start = first - self.base - 1
        return self.sets[start : last - self.base] if start >= 0 else []


@dataclass(frozen=True, slots=True)
class Fork:
    """The first round in which a neighbour's branch differs, and the set of each branch there."""

    round: int
    mine: SettledSet
    theirs: SettledSet
    exact: bool = True
    """False if the fork lies in rounds that one peer does not know. The sets then hold chain values."""


def first_difference(chain: Chain, first: int, theirs: Sequence[SettledSet]) -> Fork | None:
    """Return the first round in which this peer's chain has another set than `theirs`, a neighbour's sets of
    the rounds from `first` on; None if there is none. Rounds unknown here are passed over."""
    for round, settled in enumerate(theirs, start=first):
        mine = chain.settled(round)
        if mine is not None and mine != settled:
            return Fork(round, mine, settled)
    return None


def is_majority(supporters: int, in_sight: int, all_in_sight: bool) -> bool:
    """Return whether `supporters` of `in_sight` peers decide between two branches (rule 1 of this module)."""
    return supporters > (in_sight / 2 if all_in_sight else in_sight * 2 / 3)


def must_give_up_branch(
    fork: Fork,
    my_settled: int,
    their_settled: int,
    my_supporters: int,
    their_supporters: int,
    in_sight: int,
    all_in_sight: bool = True,
) -> bool:
    """Return whether this peer must give up its own branch for the other one, by the three rules at the top
    of this module.

    `my_supporters` and `their_supporters` count the peers in sight on each branch, this peer included in its
    own. `in_sight` counts all peers in sight."""
    if is_majority(my_supporters, in_sight, all_in_sight):  # Rule 1.
        return False
    if is_majority(their_supporters, in_sight, all_in_sight):
        return True
    if abs(my_settled - their_settled) > AHEAD_ROUNDS:  # Rule 2.
        return their_settled > my_settled
    if fork.theirs.count != fork.mine.count:  # Rule 3.
        return fork.theirs.count > fork.mine.count
    return fork.theirs.digest < fork.mine.digest
