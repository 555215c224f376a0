"""Compare the answers of several peers to one microbatch, and decide which peers to avoid.

A wrong tensor of usual size cannot be told from a right one. A second peer can compute it again. The sender
of a microbatch keeps the answer that came, and then sends a drawn share of its microbatches to a second peer
of the same stage (`Comparison`). The draw comes after the answer, so no peer knows which of its answers will
be compared. The second peer sends its hidden states to the same peer of the stage below as the first, and
gets the same gradient. Two tensors can be compared then: at the peer below the hidden states, at the sender
the gradients. Neither depends on what the stages below compute. If two tensors differ, a third peer decides.

`AnswerTrust` counts which peers differed. The module does no IO.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from random import Random
from typing import Literal

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId

SAMPLED = 4096
"""Number of hidden states that are kept of a microbatch to compare it later: 16 KiB. Their places are secret,
so a cosine over them is as good as one over all."""
PEERS_ASKED = 4
"""Maximum number of peers that are asked to compute one microbatch again. Two answers are enough."""
DIFFERED_OF, DIFFERED = 3, 2
"""A peer is avoided if it differed in two of its newest three comparisons. A fault of one, such as a flipped
bit, does not show that the next answers are wrong too."""
OTHERS, MAX_ACCUSERS = 4, 3
"""Number of newest peers that a peer was compared with, and how many of them must have differed in a group of
five or more; more than half of the others in smaller groups."""
AGREEMENTS = 16
"""Number of comparisons in a row that must agree until a peer that was avoided is trusted as before."""
MAX_PEERS = 4096
"""Number of peers that are remembered, the newest."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike two tensors are."""

    cosine: float
    ratio: float
    """Larger norm over the smaller one; at least 1."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How alike two tensors of honest peers are at least."""

    min_cosine: float
    max_ratio: float

    def at_rate(self, multiple: float) -> Limits:
        """Return the limits where weights move `multiple` times as much per round as where they were
        measured. Peers are about a round apart. Fewer steps do not make them stricter."""
        scale = min(MAX_SCALE, max(1.0, multiple))
        return Limits(1.0 - scale * (1.0 - self.min_cosine), self.max_ratio**scale)

    def agree(self, likeness: Likeness) -> bool:
        """Return whether two tensors are as alike as those of honest peers; False for NaN."""
        return likeness.cosine >= self.min_cosine and likeness.ratio <= self.max_ratio


MAX_SCALE = 100.0
"""Bound on the scale of limits, at which everything agrees."""
MEASURED_RATE = 8e-3
"""Learning rate at which the following limits were measured: twice the default."""
HIDDEN = Limits(min_cosine=0.95, max_ratio=1.25)
GRADIENT = Limits(min_cosine=0.8, max_ratio=1.5)
LOCAL_STEPS_GRADIENT = Limits(min_cosine=0.5, max_ratio=1.5)
"""The least cosines of honest peers were 0.971, 0.884 and, with local steps, 0.706. The largest ratios were
1.14, 1.17 and 1.22 (docs/benchmarks/attacks.md)."""


def likeness(first: Tensor, second: Tensor) -> Likeness:
    """Return how alike two float tensors of the same size are. A zero tensor is only like another one."""
    norms = float(torch.linalg.vector_norm(first)), float(torch.linalg.vector_norm(second))
    if max(norms) == 0.0:
        return Likeness(cosine=1.0, ratio=1.0)
    if not min(norms) > 0.0:
        return Likeness(cosine=0.0, ratio=inf)
    # Each is divided first, because a product of norms may overflow.
    cosine = float(torch.dot(first.flatten() / norms[0], second.flatten() / norms[1]))
    return Likeness(cosine, max(norms) / min(norms))


def odd_one_out(peers: Collection[PeerId], agree: Callable[[PeerId, PeerId], bool]) -> PeerId | None:
    """Return the peer that agrees with no other one, while all others agree with each other. None if there
    are fewer than three peers, or no such peer."""
    if len(peers) < 3:
        return None
    for peer in peers:
        others = [other for other in peers if other != peer]
        if not any(agree(peer, other) for other in others):
            return peer if all(agree(one, other) for one, other in combinations(others, 2)) else None
    return None


Verdict = Literal["agreed", "differed", "contradicted", "undecided", "unanswered"]
"""Outcome of a comparison. contradicted: the first peer and the peer below it report different gradients, so
one of the two is at fault. unanswered: no second peer could compute the microbatch again."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    agreed: tuple[PeerId, ...] = ()
    """Peers whose answers agreed."""
    peer: PeerId | None = None
    """The peer that is at fault (`differed`), or may be (`contradicted`)."""


@dataclass(slots=True)
class Comparison:
    """One microbatch whose answer is compared, at its sender."""

    first: PeerId
    """The peer whose answer counts."""
    via: PeerId | None
    """The peer of the stage below from which `first` has the gradient; None if `first` is on the last
    stage."""
    digests: dict[PeerId, bytes]
    """Maps each peer that answered to the digest of the gradient that it got from `via`."""
    limits: Limits
    """How alike honest gradients are."""
    deadline: float = inf
    asked: PeerId | None = None
    """Peer whose answer is awaited now."""
    tried: list[PeerId] = field(default_factory=list)
    unknown: int = 0
    """Number of peers to which `via` said that it never had the microbatch."""
    hidden_differ: bool = False
    """Whether `via` has found that hidden states differ."""
    likenesses: dict[frozenset[PeerId], Likeness] = field(default_factory=dict)

    def ask(self, candidates: Collection[PeerId], chance: Random, deadline: float) -> PeerId | None:
        """Return the next peer to ask, drawn from the candidates that were not asked; None if there is
        none."""
        left = [peer for peer in candidates if peer != self.first and peer not in self.tried]
        self.asked = None
        if left and len(self.tried) < PEERS_ASKED:
            self.asked = chance.choice(left)
            self.tried.append(self.asked)
            self.deadline = deadline
        return self.asked

    def agree(self, one: PeerId, other: PeerId) -> bool:
        """Return whether the gradients of two peers agree."""
        return self.limits.agree(self.likenesses[frozenset((one, other))])

    def judge(self, is_last: bool = False) -> Judgement | None:
        """Return the outcome; None if one more peer must answer. `is_last` says that no more peers can."""
        peers = tuple(self.digests)
        if len(peers) == 1:
            if self.unknown >= 2:
                return Judgement("contradicted", peer=self.first)
            return Judgement("unanswered") if is_last else None
        if all(self.agree(one, other) for one, other in combinations(peers, 2)):
            if self.hidden_differ and len(peers) < 3 and not is_last:
                return None  # `via` needs a third one to decide.
            return Judgement("agreed", peers)
        if len(peers) < 3:
            return Judgement("undecided") if is_last else None
        odd = odd_one_out(peers, self.agree)
        if odd is None:
            return Judgement("undecided")
        others = tuple(peer for peer in peers if peer != odd)
        if {self.digests[odd]} == {self.digests[peer] for peer in others}:
            return Judgement("differed", others, odd)
        # They had different gradients to begin with. Only one of them, or `via`, may be at fault.
        return Judgement("contradicted", peer=odd) if odd == self.first else Judgement("undecided")


@dataclass(slots=True)
class _Record:
    """What is known about one peer's answers."""

    differed: deque[bool] = field(default_factory=lambda: deque(maxlen=DIFFERED_OF))
    """Whether it differed in its newest comparisons."""
    others: OrderedDict[PeerId, bool] = field(default_factory=OrderedDict)
    """The newest peers that it was compared with, and whether it differed from them the last time."""
    contradicted: deque[PeerId | None] = field(default_factory=lambda: deque(maxlen=DIFFERED_OF))
    """The peers below that contradicted it in its newest comparisons."""
    on_probation: bool = False
    """Whether it was avoided, and has not earned its trust back."""
    agreements: int = 0
    """Number of comparisons in a row that agreed."""

    def compared(self, others: Iterable[PeerId], differed: bool) -> None:
        self.differed.append(differed)
        for other in others:
            self.others[other] = differed
            self.others.move_to_end(other)
        while len(self.others) > OTHERS:
            self.others.popitem(last=False)


class AnswerTrust:
    """Which peers' answers agree with those of others."""

    def __init__(self) -> None:
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def agreed(self, peer: PeerId, others: Iterable[PeerId]) -> bool:
        """Record that a peer's tensor agreed with those of `others`. Returns whether it has earned its trust
        back now."""
        record = self._record(peer)
        record.compared((other for other in others if other != peer), False)
        record.contradicted.append(None)
        record.agreements += 1
        if not record.on_probation or record.agreements < AGREEMENTS:
            return False
        record.on_probation = False
        return True

    def differed(self, peer: PeerId, others: Iterable[PeerId], group: int) -> bool:
        """Record that a peer's tensor differed from those of `others`, which agree. Returns whether the peer
        must be avoided now. `group` is the number of peers of its stage. So many of them must have differed
        that two that conspire cannot accuse it alone, unless they are half of the stage."""
        record = self._record(peer)
        record.compared(others, True)
        enough = record.on_probation or sum(record.differed) >= DIFFERED
        accusers = sum(record.others.values())
        return self._must_avoid(record, enough and accusers >= min(MAX_ACCUSERS, 1 + (group - 1) // 2))

    def contradicted(self, peer: PeerId, via: PeerId) -> bool:
        """Record that a peer and the peer below it report different gradients. Returns whether the peer must
        be avoided now: three times in a row, by at least two peers below. One peer below may itself lie."""
        record = self._record(peer)
        record.contradicted.append(via)
        below = record.contradicted
        return self._must_avoid(
            record, len(below) == DIFFERED_OF and None not in below and len(set(below)) > 1
        )

    def _must_avoid(self, record: _Record, must_avoid: bool) -> bool:
        record.agreements = 0
        if must_avoid:
            record.on_probation = True
            record.differed.clear()
            record.contradicted.clear()
        return must_avoid

    def _record(self, peer: PeerId) -> _Record:
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        return record


def sampled_places(size: int, chance: Random) -> tuple[int, ...]:
    """Return the sorted places of `SAMPLED` of `size` numbers, or of all if there are fewer."""
    return tuple(sorted(chance.sample(range(size), min(SAMPLED, size))))
