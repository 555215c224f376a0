"""What a peer holds of a round, and what it knows of a neighbour's rounds."""

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
    """The first bytes of SHA-256 over the sorted ids: names a set of contributions, and after them the factor
    of the learning rate where the run's owner has ordered one: other steps follow from other factors."""
    rate = b"" if factor == WHOLE else factor.to_bytes(4, "big")
    return hashlib.sha256(b"".join(sorted(ids)) + rate).digest()[:DIGEST_BYTES]


def kept_rounds(rules: Rounds) -> int:
    """How many settled sets, with their contributions, a peer keeps: what comes after an old snapshot."""
    return 2 * rules.snapshot_rounds + 2 * rules.window


@dataclass(slots=True)
class RoundSet:
    """The contributions of one round, and where it stands here. Times: infinite until it happens."""

    held: dict[PeerId, Reference] = field(default_factory=dict)
    closed_at: float = float("inf")
    gathered: int = 0
    """What was made within so many hops, less one, is held here (agreement.Agreement.gathered)."""
    sealed: int = 0
    """Everybody within so many hops, less one, has sealed this very set (agreement.Agreement.sealed)."""
    sealed_at: float = float("inf")
    factor: int = WHOLE
    """Of its learning rate (run/rates.py); a part of the set."""
    _digest: bytes | None = None

    def add(self, reference: Reference) -> None:
        self.held[reference.peer] = reference
        self._changed()

    def remove(self, maker: PeerId) -> None:
        del self.held[maker]
        self._changed()

    def keep_only(self, settled: Container[ContributionId]) -> list[PeerId]:
        """The round is settled with these: whose contributions must go. Also one with a smaller id than
        the settled one, which a later life of its maker made."""
        gone = [maker for maker, reference in self.held.items() if reference.id not in settled]
        for maker in gone:
            self.remove(maker)
        return gone

    def rate(self, factor: int) -> None:
        self.factor = factor
        self._changed()

    def seal(self, now: float) -> None:
        """Nothing more is made for it here."""
        if not self.sealed:
            self.sealed, self.sealed_at = 1, now

    def _changed(self) -> None:
        """What others said about the set before holds no longer."""
        self._digest = None
        self.sealed = min(self.sealed, 1)

    @property
    def digest(self) -> bytes:
        """Computed when it is asked for: a round of hundreds changes as often before anybody asks."""
        if self._digest is None:
            ids = (reference.id for reference in self.held.values())
            self._digest = set_digest(ids, self.factor)
        return self._digest


def told_sets(rounds: Mapping[int, RoundSet], after: int, before: int) -> tuple[OpenSet, ...]:
    """Of the rounds between these, as Progress carries them."""
    return tuple(
        OpenSet(number, state.gathered, state.sealed, len(state.held), state.digest)
        for number, state in rounds.items()
        if after < number < before
    )


def are_told(me: PeerId, rounds: Mapping[int, RoundSet], told: Sequence[Mapping[int, OpenSet]]) -> bool:
    """Whether each set that holds something of this peer is one that some neighbour names too."""
    mine = {number: state.digest for number, state in rounds.items() if me in state.held}
    return all(any(n in sets and sets[n].digest == digest for sets in told) for n, digest in mine.items())


DIFFERENCE_SECONDS = 0.3
"""Two open sets must differ this long before ids are exchanged: announcements on their way settle most."""

PARTING_SECONDS = 3.0
"""How long a lost neighbour still holds up settling: a broken link is redialled within a second, and what
only one of the two holds by then must not become two histories."""

Relation = Literal["unknown", "same", "forked"]


@dataclass(slots=True)
class NeighbourView:
    """The newest Progress of one neighbour, and how its history relates to ours."""

    linked_at: float = float("inf")
    round: int = -1
    """-1 until the first Progress came."""
    tokens: int = 0
    tokens_before: int = 0
    """What it told last of the round before `round`: it went on, but the tokens are there."""
    contributed: frozenset[int] = frozenset()
    settled: int = -1
    in_step: bool = False
    sets: dict[int, OpenSet] = field(default_factory=dict)
    out_of_reach_since: float = float("inf")
    """Since when it tells sets only of rounds that come after the one that this peer needs next."""
    relation: Relation = "unknown"
    forked_since: float = float("inf")
    fork: Fork | None = None
    """Where its history parts from ours, once that is known."""
    links: dict[int, bytes] = field(default_factory=dict)
    """The values of its chain that it told last, by round."""
    differs_since: dict[int, float] = field(default_factory=dict)
    """Round -> since when its set there is another one than here, and both have stood still."""
    _compared: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """What differed: our digest and its, of rounds in `differs_since` that it has not settled."""

    def tokens_for(self, round: int) -> int:
        """What it has gathered for `round`, as far as it told."""
        if self.round == round:
            return self.tokens
        return self.tokens_before if self.round == round + 1 else 0

    def relate(self, chain: Chain, anchor_round: int, anchor: bytes) -> None:
        """Compare histories: the neighbour's chain has the value `anchor` after `anchor_round`, and what it
        settled later is in `sets`. Too far apart to compare leaves the relation as it was."""
        links, settled = {anchor_round: anchor}, []
        for number in range(anchor_round + 1, self.settled + 1):
            entry = self.sets.get(number)
            if entry is None:
                return
            settled.append(SettledSet(entry.count, entry.digest))
            links[number] = link(links[number - 1], settled[-1])
        before = max(self.links, default=-1)
        if self.fork is not None and links.get(before) != self.links.get(before):
            self.fork = None  # It has taken up another history since.
        self.links = links
        shared = min(chain.round, self.settled)
        mine = chain.at(shared)
        if mine is None or shared < anchor_round:
            return
        if links[shared] == mine:
            # Nobody can catch up with what is only remembered: no ally until it is as far by other ways.
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
        """Whether these two have the same history, by what they told of a round not before `since`."""
        shared = max(self.links.keys() & other.links.keys(), default=-1)
        return shared >= since and self.links[shared] == other.links[shared]

    def compare(self, rounds: Mapping[int, RoundSet], now: float) -> None:
        """Remember since when the neighbour's set of a round that is open here is another one."""
        since: dict[int, float] = {}
        compared: dict[int, tuple[bytes, bytes]] = {}
        for number, theirs in self.sets.items():
            mine = rounds.get(number)
            if mine is None or mine.digest == theirs.digest:
                continue
            if number <= self.settled:  # It will not change there: ask at once.
                since[number] = self.differs_since.get(number, now - DIFFERENCE_SECONDS)
            elif theirs.count:
                compared[number] = pair = mine.digest, theirs.digest
                since[number] = self.differs_since[number] if pair == self._compared.get(number) else now
        self.differs_since, self._compared = since, compared

    def compare_anew(self) -> None:
        """Its sets are of another history than ours: no difference counts."""
        self.differs_since, self._compared = {}, {}

    def due(self, now: float, pulling: Callable[[int], bool]) -> tuple[int, ...]:
        """The rounds whose ids are to be asked for now; they are due again after as long. Not those of which
        contributions are on their way (`pulling`)."""
        late = [number for number, since in self.differs_since.items() if now >= since + DIFFERENCE_SECONDS]
        self.differs_since.update(dict.fromkeys(late, now))
        return tuple(number for number in late if not pulling(number))

    def next_deadline(self) -> float:
        return min(self.differs_since.values(), default=float("inf")) + DIFFERENCE_SECONDS
