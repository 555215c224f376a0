"""Whether reducers tell the truth: which results a peer looks into, what it has asked for, and who has lied.

A result can be made again by anybody who has the slices that it names, and each of these is signed. So a peer
draws shards of the results that come and asks their maker for the slices. It draws by a secret of its own,
over what the maker has published by then: whom it would have to answer it could not know.

Slices that are all that the table names, and do not give the sums, *prove* that the maker lied: to everybody,
and without a vote. Who has such a proof hands it on to each neighbour that does not have it. An answer that
does not come, or does not fit, proves nothing: then this peer lets somebody else reduce for a while
(reducing.py). Without IO; times in seconds on the caller's clock.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.fetch_scheduler import SLOW_BYTES_PER_SECOND
from swarmnet.rounds.result_table import Contributor, Table

AUDITS = 0.5
"""Of a result's shard, by all who could, on the mean. A line then carries half a contribution for them, up
and down, in a group of any size: a tenth of the exchange (docs/benchmarks/groups.md)."""
MOST_OF_RESULT = 4
"""Shards of one result that a peer asks for, and is given: in a group of two it would draw half of them."""
MOST_OPEN = 16
"""Questions at a time: an answer is as long as a contribution of each in the shard, by the run's shards."""
MOST_CONVICTED = 4096
"""Peers remembered, as many as membership knows."""
MOST_PROOFS = 16
"""Kept to hand on, the newest. Who comes later lets the liars before these lie once more to be proven so."""

Name = tuple[ContributionId, int]
"""A result, and one of its shards."""


@dataclass(slots=True)
class Question:
    """The slices of one shard of a result, from its maker or from somebody who says that they prove a lie."""

    name: Name
    round: int
    maker: PeerId
    asked: PeerId
    until: float
    """When it is answered no more."""
    result: bytes = b""
    """As it travels, signed. Of a proof it comes first."""
    contributors: frozenset[Contributor] = frozenset()
    slices: dict[Contributor, bytes] = field(default_factory=dict)
    """As they travel, each signed."""

    @property
    def is_proof(self) -> bool:
        """That somebody else offers."""
        return self.asked != self.maker

    @property
    def is_whole(self) -> bool:
        return bool(self.contributors) and len(self.slices) == len(self.contributors)


class Audits:
    """Of one peer in one group; outlives its rounds."""

    def __init__(self, secret: bytes, window: int) -> None:
        """`secret`: what nobody else can know, by which it is drawn; `window`: of the run's rounds."""
        self.secret, self._window = secret, window
        self._open: dict[tuple[PeerId, Name], Question] = {}
        self.outcomes: Counter[str] = Counter()
        """Of the own questions, by code (peers/telemetry/reasons.py)."""
        self.convicted: dict[PeerId, int] = {}
        """They have lied: what they make for that round and later ones does not count. The first is that of
        the lie, or later than those that were sealed when that was applied: an earlier one settles somewhere
        while the proof is on its way, and histories would part."""
        self.proofs: dict[PeerId, Question] = {}
        """Of the newest convicted: what is to be handed on."""
        self._told: dict[PeerId, set[PeerId]] = {}
        """Who has said that it knows of a convicted one."""
        self._criers: set[PeerId] = set()
        """They offered a proof that is none: nothing is asked of them again."""

    # -- which results --------------------------------------------------------------------------------

    def drawn(self, result: ContributionId, table: Table, peers: int) -> tuple[int, ...]:
        """The shards of somebody's result to look into, in a group of so many."""
        share = AUDITS / max(1, peers - 1)
        names = ((shard, result + shard.to_bytes(4, "big")) for shard in sorted(table.shards))
        chosen = (shard for shard, name in names if chance(self.secret, name) < share)
        return tuple(shard for shard, _ in zip(chosen, range(MOST_OF_RESULT), strict=False))

    # -- questions ------------------------------------------------------------------------------------

    def ask(self, question: Question) -> bool:
        """It may be sent: there is room, and not more than one proof of a liar, and from one peer, is on its
        way."""
        if len(self._open) >= MOST_OPEN or (question.asked, question.name) in self._open:
            return False
        if question.is_proof:
            if question.asked in self._criers or not self.is_news(question.maker, question.round):
                return False
            proofs = [other for other in self._open.values() if other.is_proof]
            if any(question.asked == other.asked or question.maker == other.maker for other in proofs):
                return False
        self._open[question.asked, question.name] = question
        return True

    def asked(self, peer: PeerId, name: Name) -> Question | None:
        """What that peer was asked for, and waits for yet."""
        return self._open.get((peer, name))

    def end(self, question: Question) -> None:
        """It is answered, or given up."""
        self._open.pop((question.asked, question.name), None)

    def left(self, peer: PeerId) -> None:
        """It is not linked any more: that it does not answer says nothing."""
        for question in [question for question in self._open.values() if question.asked == peer]:
            self.end(question)
        for told in self._told.values():
            told.discard(peer)

    def overdue(self, now: float) -> list[Question]:
        """They have ended without an answer."""
        late = [question for question in self._open.values() if now >= question.until]
        for question in late:
            self.end(question)
        return late

    # -- who has lied ---------------------------------------------------------------------------------

    def is_news(self, maker: PeerId, round: int) -> bool:
        """Whether a proof of a lie in that round would change what counts."""
        return self._first(round) < self.convicted.get(maker, 1 << 32)

    def _first(self, round: int) -> int:
        return round - self._window + 1

    def proves(self, question: Question) -> list[Name]:
        """Its slices do not give its result, which is news. Which proofs are kept no more."""
        if question.maker in self.convicted or len(self.convicted) < MOST_CONVICTED:
            self.convicted[question.maker] = self._first(question.round)
        self.proofs.pop(question.maker, None)
        self.proofs[question.maker] = question
        self._told[question.maker] = {question.asked} if question.is_proof else set()
        surplus = list(self.proofs)[:-MOST_PROOFS]
        for oldest in surplus:
            del self._told[oldest]
        return [self.proofs.pop(oldest).name for oldest in surplus]

    def proves_nothing(self, question: Question) -> None:
        """What somebody offered as a proof is none."""
        if len(self._criers) < MOST_CONVICTED:
            self._criers.add(question.asked)

    def knows(self, peer: PeerId, liar: PeerId, round: int) -> bool:
        """It has said itself that it has a proof, of a lie in that round. Whether that is news."""
        if liar not in self.proofs or peer in self._told[liar] or round > self.proofs[liar].round:
            return False
        self._told[liar].add(peer)
        return True

    def to_tell(self, neighbours: Iterable[PeerId]) -> Iterator[tuple[PeerId, Question]]:
        """Which of these has not said that it knows of whom."""
        peers = tuple(neighbours)
        for liar, proof in self.proofs.items():
            yield from ((peer, proof) for peer in peers if peer not in self._told[liar])


def chance(secret: bytes, name: bytes) -> float:
    """In [0, 1): what only who has the secret can know."""
    return int.from_bytes(hashlib.sha256(secret + name).digest()[:7], "big") / (1 << 56)


def answer_seconds(slices: int, each_bytes: int) -> float:
    """What so many take to come over a slow line."""
    return slices * each_bytes / SLOW_BYTES_PER_SECOND
