"""The contributions that a peer holds of a round, and what it knows of a neighbour's rounds.

Peers report their sets to neighbours in a message called Progress. An *open* set is one that has not settled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.lineage import DIGEST_BYTES
from swarmnet.rounds.events import OpenSet, Reference
from swarmnet.rounds.history import Chain, Fork, SettledSet, first_difference, link
from swarmnet.run.rates import WHOLE
from swarmnet.run.schema import Rounds


def set_digest(ids: Iterable[ContributionId], factor: int = WHOLE) -> bytes:
    """Return the digest of a set of contributions: the first bytes of SHA-256 over the sorted ids. If
    `factor` scales the learning rate, it is hashed too: the same set then leads to another step."""
    rate = b"" if factor == WHOLE else factor.to_bytes(4, "big")
    return hashlib.sha256(b"".join(sorted(ids)) + rate).digest()[:DIGEST_BYTES]


def kept_rounds(rules: Rounds) -> int:
    """Return for how many settled rounds a peer keeps the contributions. A peer that starts from an older
    snapshot needs them to catch up."""
    return 2 * rules.snapshot_interval + 2 * rules.window


@dataclass(slots=True)
class RoundSet:
    """The contributions of one round, and its state here. A time is infinite until its event happens.

    A peer *seals* a round when it makes no more contributions for it. A sealed set may still grow."""

    held: dict[PeerId, Reference] = field(default_factory=dict)
    """Contributor -> its contribution."""
    closed_at: float = float("inf")
    gathered: int = 0
    """All contributions made within `gathered` - 1 hops are held here; 0: the round is not closed here."""
    sealed: int = 0
    """All peers within `sealed` - 1 hops have sealed this very set; 0: it is not sealed here."""
    sealed_at: float = float("inf")
    factor: int = WHOLE
    """Factor of the learning rate (run/rates.py); a part of the set."""
    _cached_digest: bytes | None = None

    def add(self, reference: Reference) -> None:
        self.held[reference.peer] = reference
        self._reset_digest()

    def remove(self, contributor: PeerId) -> None:
        del self.held[contributor]
        self._reset_digest()

    def keep_only(self, settled: Container[ContributionId]) -> list[PeerId]:
        """Remove the contributions whose ids are not in `settled`, the settled set. Returns the contributors
        of those that were removed."""
        gone = [contributor for contributor, reference in self.held.items() if reference.id not in settled]
        for contributor in gone:
            self.remove(contributor)
        return gone

    def rate(self, factor: int) -> None:
        self.factor = factor
        self._reset_digest()

    def seal(self, now: float) -> None:
        """Seal the round unless it is sealed: this peer makes no more contributions for it."""
        if not self.sealed:
            self.sealed = 1
            self.sealed_at = now

    def _reset_digest(self) -> None:
        """Reset the digest. Other peers have sealed the previous set, so `sealed` falls to 1 at most."""
        self._cached_digest = None
        self.sealed = min(self.sealed, 1)

    @property
    def digest(self) -> bytes:
        """The digest of the set. It is computed on demand, as a large set changes often between reads."""
        if self._cached_digest is None:
            ids = (reference.id for reference in self.held.values())
            self._cached_digest = set_digest(ids, self.factor)
        return self._cached_digest


def list_open_sets(rounds: Mapping[int, RoundSet], after: int, before: int) -> tuple[OpenSet, ...]:
    """Return the sets of the rounds between `after` and `before` (both excluded), as Progress lists them."""
    return tuple(
        OpenSet(number, state.gathered, state.sealed, len(state.held), state.digest)
        for number, state in rounds.items()
        if after < number < before
    )


def are_reported(me: PeerId, rounds: Mapping[int, RoundSet], told: Sequence[Mapping[int, OpenSet]]) -> bool:
    """Return whether each set of `rounds` with a contribution of `me` is also held by some neighbour. `told`
    holds for each neighbour the sets that it reported, by round."""
    for number, state in rounds.items():
        reported = [sets[number].digest for sets in told if number in sets]
        if me in state.held and state.digest not in reported:
            return False
    return True


DIFFERENCE_SECONDS = 0.3
"""Two open sets must differ this long before ids are exchanged. Announcements often settle it."""

DEPARTURE_GRACE_SECONDS = 3.0
"""How long a lost neighbour delays settling. A broken link is redialled within a second, and contributions
that only one of the two holds must not cause a fork."""

Relation = Literal["unknown", "same", "forked"]


@dataclass(slots=True)
class NeighbourView:
    """The newest Progress of one neighbour, and how its branch relates to this peer's."""

    linked_at: float = float("inf")
    round: int = -1
    """The round for which the neighbour accumulates gradients; -1 until its first Progress came."""
    tokens: int = 0
    tokens_before: int = 0
    """Tokens that it reported last for the round before `round`. They count although it is in `round` now."""
    contributed: frozenset[int] = frozenset()
    settled: int = -1
    in_step: bool = False
    sets: dict[int, OpenSet] = field(default_factory=dict)
    out_of_reach_since: float = float("inf")
    """Since when its Progress begins after the round that this peer needs next; infinite if it does not."""
    relation: Relation = "unknown"
    forked_since: float = float("inf")
    fork: Fork | None = None
    """First round in which its branch differs from this peer's, once that is known."""
    links: dict[int, bytes] = field(default_factory=dict)
    """The chain values that it reported last, by round."""
    differs_since: dict[int, float] = field(default_factory=dict)
    """Round -> since when its set there differs from this peer's while neither changes."""
    _compared: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Both digests, own and neighbour's, of rounds in `differs_since` that it has not settled."""

    def has_sealed(self, round: int) -> bool:
        """Return whether the neighbour reports that it makes nothing more for `round`."""
        return self.settled >= round or (round in self.sets and self.sets[round].sealed > 0)

    def tokens_for(self, round: int) -> int:
        """Return the tokens that the neighbour reported for `round`: its current one or the one before."""
        if self.round == round:
            return self.tokens
        return self.tokens_before if self.round == round + 1 else 0

    def relate(self, chain: Chain, anchor_round: int, anchor: bytes) -> None:
        """Compare the neighbour's chain with `chain`, this peer's, and set `relation` and `fork`.

        The neighbour's chain has the value `anchor` after `anchor_round`; the rounds that it settled later
        are in `sets`. The chains are compared after the newest round that both peers have settled. If a value
        there is unknown, `relation` stays as it was."""
        links, settled = {anchor_round: anchor}, []
        for number in range(anchor_round + 1, self.settled + 1):
            entry = self.sets.get(number)
            if entry is None:
                return
            settled.append(SettledSet(entry.count, entry.digest))
            links[number] = link(links[number - 1], settled[-1])
        newest_reported = max(self.links, default=-1)
        has_switched = links.get(newest_reported) != self.links.get(newest_reported)
        if has_switched:  # The value that it last reported is no longer in its chain: another branch.
            self.fork = None
        self.links = links
        shared = min(chain.round, self.settled)
        mine = chain.at(shared)
        if mine is None or shared < anchor_round:
            return
        if links[shared] == mine:
            # Before `chain.start` this peer knows only digests. A neighbour that is behind this round could
            # not catch up from it, so it does not count as a same-branch peer yet.
            if shared >= chain.start:
                self.relation = "same"
                self.fork = None
            elif self.relation == "forked":
                self.relation = "unknown"
                self.fork = None
            return
        if self.relation != "forked":
            self.fork = None
        self.relation = "forked"
        if chain.at(anchor_round) == anchor:  # The branches fork after the anchor, in the listed sets.
            self.fork = first_difference(chain, anchor_round + 1, settled)

    def is_with(self, other: NeighbourView, since: int) -> bool:
        """Return whether two neighbours reported the same chain value after the last round that both
        reported, and this round is not before `since`."""
        shared = max(self.links.keys() & other.links.keys(), default=-1)
        return shared >= since and self.links[shared] == other.links[shared]

    def compare(self, rounds: Mapping[int, RoundSet], now: float) -> None:
        """Record for each open round of this peer (`rounds`) since when the neighbour's set differs from this
        peer's. The time starts again if one of the two sets changes. If the neighbour has settled its set,
        the two count as differing for `DIFFERENCE_SECONDS` at once, so that its ids are requested."""
        since: dict[int, float] = {}
        compared: dict[int, tuple[bytes, bytes]] = {}
        for number, theirs in self.sets.items():
            mine = rounds.get(number)
            if mine is None or mine.digest == theirs.digest:
                continue
            if number <= self.settled:
                since[number] = self.differs_since.get(number, now - DIFFERENCE_SECONDS)
            elif theirs.count:  # An empty set has no ids to request.
                pair = mine.digest, theirs.digest
                compared[number] = pair
                is_unchanged = pair == self._compared.get(number)
                since[number] = self.differs_since[number] if is_unchanged else now
        self.differs_since = since
        self._compared = compared

    def compare_anew(self) -> None:
        """Forget recorded differences, because the neighbour's sets belong to another branch."""
        self.differs_since = {}
        self._compared = {}

    def due(self, now: float, pulling: Callable[[int], bool]) -> tuple[int, ...]:
        """Return the rounds for which to request the ids of the neighbour's set now. Each is due again after
        `DIFFERENCE_SECONDS`. Rounds with downloads under way (`pulling`) are left out."""
        due = [number for number, since in self.differs_since.items() if now >= since + DIFFERENCE_SECONDS]
        self.differs_since.update(dict.fromkeys(due, now))
        return tuple(number for number in due if not pulling(number))

    def next_deadline(self) -> float:
        return min(self.differs_since.values(), default=float("inf")) + DIFFERENCE_SECONDS
