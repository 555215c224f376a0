"""The contributions that a peer holds of a round, and what it knows of a neighbour's rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import OpenSet, Reference
from swarmnet.rounds.history import DIGEST_BYTES, Chain, Fork, SettledSet, first_difference, link
from swarmnet.run.manifest import Rounds
from swarmnet.run.rates import WHOLE


def set_digest(ids: Iterable[ContributionId], factor: int = WHOLE) -> bytes:
    """Return the digest that names a set of contributions: the first bytes of SHA-256 over the sorted ids. A
    learning-rate factor other than 1 is hashed too, because the same set then leads to another step."""
    rate = b"" if factor == WHOLE else factor.to_bytes(4, "big")
    return hashlib.sha256(b"".join(sorted(ids)) + rate).digest()[:DIGEST_BYTES]


def kept_rounds(rules: Rounds) -> int:
    """Return how many settled sets a peer keeps with their contributions, to follow an old snapshot."""
    return 2 * rules.snapshot_interval + 2 * rules.window


@dataclass(slots=True)
class RoundSet:
    """The contributions of one round, and its state here. A time is infinite until its event happens."""

    held: dict[PeerId, Reference] = field(default_factory=dict)
    closed_at: float = float("inf")
    gathered: int = 0
    """Level: all contributions made within `gathered` - 1 hops are held here
    (`settlement.Agreement.gathered`)."""
    sealed: int = 0
    """Level: all peers within `sealed` - 1 hops have sealed this very set (`settlement.Agreement.sealed`)."""
    sealed_at: float = float("inf")
    factor: int = WHOLE
    """Factor of the learning rate (run/rates.py); a part of the set."""
    _digest: bytes | None = None

    def add(self, reference: Reference) -> None:
        self.held[reference.peer] = reference
        self._changed()

    def remove(self, contributor: PeerId) -> None:
        del self.held[contributor]
        self._changed()

    def keep_only(self, settled: Container[ContributionId]) -> list[PeerId]:
        """Remove the contributions that are not in the settled set, and return their contributors. This
        includes an id smaller than the settled one, which a later process of the contributor made."""
        gone = [contributor for contributor, reference in self.held.items() if reference.id not in settled]
        for contributor in gone:
            self.remove(contributor)
        return gone

    def rate(self, factor: int) -> None:
        self.factor = factor
        self._changed()

    def seal(self, now: float) -> None:
        """Seal the round: this peer makes no more contributions for it."""
        if not self.sealed:
            self.sealed, self.sealed_at = 1, now

    def _changed(self) -> None:
        """Reset the digest, and the level that other peers reported for the previous set."""
        self._digest = None
        self.sealed = min(self.sealed, 1)

    @property
    def digest(self) -> bytes:
        """The digest of the set. It is computed on demand, as a large set changes often between reads."""
        if self._digest is None:
            ids = (reference.id for reference in self.held.values())
            self._digest = set_digest(ids, self.factor)
        return self._digest


def told_sets(rounds: Mapping[int, RoundSet], after: int, before: int) -> tuple[OpenSet, ...]:
    """Return the sets of rounds between `after` and `before` (both excluded), as in Progress."""
    return tuple(
        OpenSet(number, state.gathered, state.sealed, len(state.held), state.digest)
        for number, state in rounds.items()
        if after < number < before
    )


def are_told(me: PeerId, rounds: Mapping[int, RoundSet], told: Sequence[Mapping[int, OpenSet]]) -> bool:
    """Return whether each set with a contribution of `me` is also held by one of the neighbours."""
    mine = {number: state.digest for number, state in rounds.items() if me in state.held}
    return all(any(n in sets and sets[n].digest == digest for sets in told) for n, digest in mine.items())


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
    """The neighbour's current round; -1 until its first Progress came."""
    tokens: int = 0
    tokens_before: int = 0
    """Tokens that it reported last for the round before `round`. It has moved on, but those tokens exist."""
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

    def tokens_for(self, round: int) -> int:
        """Return the tokens that the neighbour reported for `round`."""
        if self.round == round:
            return self.tokens
        return self.tokens_before if self.round == round + 1 else 0

    def relate(self, chain: Chain, anchor_round: int, anchor: bytes) -> None:
        """Compare chains, and set `relation` and `fork`.

        The neighbour's chain has the value `anchor` after `anchor_round`; the rounds that it settled later
        are in `sets`. If the chains are too far apart to compare, the relation stays as it was."""
        links, settled = {anchor_round: anchor}, []
        for number in range(anchor_round + 1, self.settled + 1):
            entry = self.sets.get(number)
            if entry is None:
                return
            settled.append(SettledSet(entry.count, entry.digest))
            links[number] = link(links[number - 1], settled[-1])
        before = max(self.links, default=-1)
        if self.fork is not None and links.get(before) != self.links.get(before):
            self.fork = None  # It has switched to another branch since.
        self.links = links
        shared = min(chain.round, self.settled)
        mine = chain.at(shared)
        if mine is None or shared < anchor_round:
            return
        if links[shared] == mine:
            # This peer cannot help it catch up from remembered digests alone: not on one branch until it has.
            if shared >= chain.start:
                self.relation, self.fork = "same", None
            elif self.relation == "forked":
                self.relation, self.fork = "unknown", None
            return
        if self.relation != "forked":
            self.fork = None
        self.relation = "forked"
        if chain.at(anchor_round) == anchor:
            self.fork = first_difference(chain, anchor_round + 1, settled)

    def is_with(self, other: NeighbourView, since: int) -> bool:
        """Return whether two neighbours reported the same chain value for a round from `since` on."""
        shared = max(self.links.keys() & other.links.keys(), default=-1)
        return shared >= since and self.links[shared] == other.links[shared]

    def compare(self, rounds: Mapping[int, RoundSet], now: float) -> None:
        """Record since when the neighbour's sets of open rounds differ from this peer's."""
        since: dict[int, float] = {}
        compared: dict[int, tuple[bytes, bytes]] = {}
        for number, theirs in self.sets.items():
            mine = rounds.get(number)
            if mine is None or mine.digest == theirs.digest:
                continue
            if number <= self.settled:  # It is final there: ask at once.
                since[number] = self.differs_since.get(number, now - DIFFERENCE_SECONDS)
            elif theirs.count:
                compared[number] = pair = mine.digest, theirs.digest
                since[number] = self.differs_since[number] if pair == self._compared.get(number) else now
        self.differs_since, self._compared = since, compared

    def compare_anew(self) -> None:
        """Forget recorded differences, because the neighbour's sets belong to another branch."""
        self.differs_since, self._compared = {}, {}

    def due(self, now: float, pulling: Callable[[int], bool]) -> tuple[int, ...]:
        """Return the rounds whose ids must be requested now; each is due again after `DIFFERENCE_SECONDS`.
        Rounds with downloads under way (`pulling`) are left out."""
        late = [number for number, since in self.differs_since.items() if now >= since + DIFFERENCE_SECONDS]
        self.differs_since.update(dict.fromkeys(late, now))
        return tuple(number for number in late if not pulling(number))

    def next_deadline(self) -> float:
        return min(self.differs_since.values(), default=float("inf")) + DIFFERENCE_SECONDS
