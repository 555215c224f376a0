"""Audits of reducers: which results a peer checks, what it has requested, and which reducers are proven
faulty.

A *reducer* is a peer that sums one shard of all contributions of a round. A *slice* is a contribution's part
for one shard. A reducer publishes its sums as a *result*, with a table of whose slices are in them. Any peer
that has these slices can compute the sums again, and each slice is signed. A peer therefore draws shards of
the results that arrive and requests the slices from the reducer. The draw depends on a secret of the auditor
and on the published result, so a reducer cannot know which peer will audit it.

If the slices are exactly those of the table and do not give the sums, they *prove* that the reducer is
faulty. Every peer can check the proof, without a vote. A peer with such a proof offers it to each neighbour
that lacks it. A missing or malformed response proves nothing: the auditor only avoids that reducer for a
while (reducing.py). Without IO; times are in seconds on the caller's clock.
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
"""Mean number of audits of each shard of a result, over all peers. Audits then load each link with half a
contribution, up and down, for any size of group: a tenth of the exchange (docs/benchmarks/groups.md)."""
MAX_OF_RESULT = 4
"""Most shards of one result that a peer requests or serves. In a group of two it would draw half of them."""
MAX_OPEN = 16
"""Audit requests at a time. A response holds one slice of each contributor."""
MAX_CONVICTED = 4096
"""Faulty peers remembered, as many as membership knows."""
MAX_PROOFS = 16
"""Newest proofs kept for other peers. For peers that join later, older faulty peers must be proven again."""

Name = tuple[ContributionId, int]
"""The id of a result, and one of its shards."""


@dataclass(slots=True)
class AuditQuery:
    """A request for a shard's slices, to the reducer or to a peer that offers them as a proof."""

    name: Name
    round: int
    contributor: PeerId
    asked: PeerId
    until: float
    """When the request expires."""
    result: bytes = b""
    """The signed result, as it travels. A proof begins with it."""
    contributors: frozenset[Contributor] = frozenset()
    """Contributors of the shard, whose slices are requested."""
    slices: dict[Contributor, bytes] = field(default_factory=dict)
    """The signed slices that have arrived, as they travel."""

    @property
    def is_proof(self) -> bool:
        """True if the request is for a proof, which another peer than the result's reducer offers."""
        return self.asked != self.contributor

    @property
    def is_whole(self) -> bool:
        """True if all slices have arrived."""
        return bool(self.contributors) and len(self.slices) == len(self.contributors)


class Audits:
    """The audits of one peer in one group. The object outlives a `GroupRounds`."""

    def __init__(self, secret: bytes, window: int) -> None:
        """`secret`: known to this peer alone, it decides the draws. `window`: the one of the run's rounds."""
        self.secret = secret
        self._window = window
        self._open: dict[tuple[PeerId, Name], AuditQuery] = {}
        self.outcomes: Counter[str] = Counter()
        """Number of own requests by outcome code (peers/telemetry/reasons.py)."""
        self.convicted: dict[PeerId, int] = {}
        """Faulty peers, and the first round from which their contributions have no weight.

        It is `window` - 1 rounds before the wrong sums. Earlier rounds were sealed when that round was
        applied. They may settle somewhere while the proof travels, so removing them would fork the group."""
        self.proofs: dict[PeerId, AuditQuery] = {}
        """Proofs against the newest faulty peers, which other peers may request."""
        self._reported_by: dict[PeerId, set[PeerId]] = {}
        """Faulty peer -> the neighbours that have reported a proof against it themselves."""
        self._false_accusers: set[PeerId] = set()
        """Peers that offered an invalid proof. No proof is requested from them again."""

    # -- choice of results ----------------------------------------------------------------------------

    def drawn(self, result: ContributionId, table: Table, peers: int) -> tuple[int, ...]:
        """Return the shards of another peer's result that this peer audits, at most `MAX_OF_RESULT` of them.

        Each shard is drawn with the probability `AUDITS` / (`peers` - 1), in a group of `peers`."""
        probability = AUDITS / max(1, peers - 1)
        drawn = [
            shard
            for shard in sorted(table.shards)
            if chance(self.secret, result + shard.to_bytes(4, "big")) < probability
        ]
        return tuple(drawn[:MAX_OF_RESULT])

    # -- requests -------------------------------------------------------------------------------------

    def ask(self, query: AuditQuery) -> bool:
        """Register a request. Returns False if it must not be sent: too many are open, or the same one is.
        Proofs have tighter limits: one at a time against a faulty peer, and one at a time from one peer."""
        if len(self._open) >= MAX_OPEN or (query.asked, query.name) in self._open:
            return False
        if query.is_proof:
            if query.asked in self._false_accusers or not self.is_news(query.contributor, query.round):
                return False
            proofs = [other for other in self._open.values() if other.is_proof]
            if any(query.asked == other.asked for other in proofs):
                return False
            if any(query.contributor == other.contributor for other in proofs):
                return False
        self._open[query.asked, query.name] = query
        return True

    def pending_query(self, peer: PeerId, name: Name) -> AuditQuery | None:
        """Return the open request to that peer; None if there is none."""
        return self._open.get((peer, name))

    def end(self, query: AuditQuery) -> None:
        """Remove a request that is answered or given up."""
        self._open.pop((query.asked, query.name), None)

    def left(self, peer: PeerId) -> None:
        """Forget a peer that is no longer linked, and the requests to it. Its silence proves nothing."""
        for query in [query for query in self._open.values() if query.asked == peer]:
            self.end(query)
        for neighbours in self._reported_by.values():
            neighbours.discard(peer)

    def overdue(self, now: float) -> list[AuditQuery]:
        """Remove and return the requests that expired without a response."""
        late = [query for query in self._open.values() if now >= query.until]
        for query in late:
            self.end(query)
        return late

    # -- faulty peers ---------------------------------------------------------------------------------

    def is_news(self, contributor: PeerId, round: int) -> bool:
        """Return whether a proof of wrong sums in that round would take weight from more contributions of the
        reducer `contributor` than known proofs do."""
        never = 1 << 32  # A round that no run reaches.
        return self._first_weightless_round(round) < self.convicted.get(contributor, never)

    def _first_weightless_round(self, round: int) -> int:
        """Return the first round whose contributions lose their weight by wrong sums in `round`."""
        return round - self._window + 1

    def proves(self, query: AuditQuery) -> list[Name]:
        """Record a proof: the slices do not give the sums of the result. Requires `is_news` for its reducer
        and round. Only the newest `MAX_PROOFS` proofs are kept. Returns the names of those dropped."""
        if query.contributor in self.convicted or len(self.convicted) < MAX_CONVICTED:
            self.convicted[query.contributor] = self._first_weightless_round(query.round)
        self.proofs.pop(query.contributor, None)  # Moves it to the end, where the newest is.
        self.proofs[query.contributor] = query
        self._reported_by[query.contributor] = set()
        if query.is_proof:  # The peer that sent the proof needs none.
            self._reported_by[query.contributor].add(query.asked)
        surplus = list(self.proofs)[:-MAX_PROOFS]
        for oldest in surplus:
            del self._reported_by[oldest]
        return [self.proofs.pop(oldest).name for oldest in surplus]

    def record_invalid_proof(self, query: AuditQuery) -> None:
        """Record that a peer offered an invalid proof."""
        if len(self._false_accusers) < MAX_CONVICTED:
            self._false_accusers.add(query.asked)

    def knows(self, peer: PeerId, faulty: PeerId, round: int) -> bool:
        """Record that `peer` has reported a proof of wrong sums by `faulty` in `round`, and needs none.

        Returns False and records nothing if that was known, if there is no proof against `faulty` here, or if
        the proof here is of an earlier round, which `peer` should still receive."""
        proof = self.proofs.get(faulty)
        if proof is None or peer in self._reported_by[faulty] or round > proof.round:
            return False
        self._reported_by[faulty].add(peer)
        return True

    def to_tell(self, neighbours: Iterable[PeerId]) -> Iterator[tuple[PeerId, AuditQuery]]:
        """Yield (neighbour, proof) for each proof that the neighbour has not reported itself."""
        peers = tuple(neighbours)
        for faulty, proof in self.proofs.items():
            for peer in peers:
                if peer not in self._reported_by[faulty]:
                    yield peer, proof


def chance(secret: bytes, name: bytes) -> float:
    """Return a number in [0, 1) that only a peer with the secret can predict."""
    return int.from_bytes(hashlib.sha256(secret + name).digest()[:7], "big") / (1 << 56)


def answer_seconds(slices: int, each_bytes: int) -> float:
    """Return the seconds that `slices` slices of `each_bytes` bytes each take over a slow link."""
    return slices * each_bytes / SLOW_BYTES_PER_SECOND
